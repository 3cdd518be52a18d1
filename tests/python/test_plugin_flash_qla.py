"""gatedelta.flash_qla: FlashQLA's signatures, results against the fp64 recurrence, refusals, registration."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import gatedelta.flash_qla as shim  # noqa: E402
import plugin_signatures  # noqa: E402

from testing.truth import Case  # noqa: E402

NAMES = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")
CASES = [
    "B=2 T=200 Hk=2 Hv=4 K=64 V=32 dtype=fp32",
    "B=3 T=128 Hk=1 Hv=2 K=32 V=64 dtype=bf16 layout=vk h0=0",
    "lengths=64+130+0+1+70+192 pad=9 Hk=1 Hv=2 K=64 V=32 dtype=fp32 layout=vk",
    "lengths=30+0+5 Hk=1 Hv=2 K=32 V=32 dtype=fp32",
]


@pytest.fixture
def unregistered():
    yield
    shim.unregister()


def arguments_of(case: Case) -> dict:
    options = case.options
    return {
        **{name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "initial_state")},
        **{name: options[name] for name in ("scale", "cu_seqlens", "state_v_first")},
    }


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_flash_qlas(name):
    kept = plugin_signatures.kept("flash_qla")["functions"]
    assert plugin_signatures.of(getattr(shim, name)) == kept[f"ops/gated_delta_rule/chunk/__init__.py:{name}"]


def test_kept_signatures_are_the_installed_ones():
    plugin_signatures.compare_with_installed("flash_qla")


@pytest.mark.parametrize("spec", CASES)
def test_forward(spec):
    case = Case(spec)
    truth = case.forward_truth()
    o, final_state = shim.chunk_gated_delta_rule(**arguments_of(case), output_final_state=True, auto_cp=False)
    case.check("o", o, truth["o"])
    case.check("final_state", final_state, truth["final_state"])
    assert case.damage() == ""


@pytest.mark.parametrize("output_h", [False, True])
@pytest.mark.parametrize("spec", CASES)
def test_parts(spec, output_h):
    """The forward's first two results go back to the backward; h has the state before every chunk."""
    case = Case(spec)
    truth, gradients = case.forward_truth(), case.backward_truth()
    arguments = arguments_of(case)
    g, A, o, h, final_state, cache = shim.chunk_gated_delta_rule_fwd(**arguments, output_h=output_h)
    case.check("o", o, truth["o"])
    case.check("final_state", final_state, truth["final_state"])
    assert (cache is None) == (A is None) == output_h and (h is not None) == output_h

    q, k, v, beta, h0 = (arguments[name] for name in ("q", "k", "v", "beta", "initial_state"))
    results = shim.chunk_gated_delta_rule_bwd(
        q, k, v, g, beta, A, case.do, case.dht, arguments["scale"], h0, arguments["cu_seqlens"],
        arguments["state_v_first"], cp_cache=cache,
    )  # fmt: skip
    for name, result in zip(("dq", "dk", "dv", "dbeta", "dg", "d_initial_state"), results):
        assert (result is None) == (name not in gradients)
        if result is not None:
            case.check(name, result, gradients[name])
    assert case.damage() == ""


def test_parts_of_another_call():
    """The last result says which call A is of. A caller who leaves it out has A taken by its size."""
    case, other = Case(CASES[0]), Case(CASES[-1])
    arguments = arguments_of(case)
    g, A, _, _, _, cache = shim.chunk_gated_delta_rule_fwd(**arguments)
    *_, other_cache = shim.chunk_gated_delta_rule_fwd(**arguments_of(other))
    *_, stateless = shim.chunk_gated_delta_rule_fwd(**arguments | {"initial_state": None})
    call = {**arguments, "g": g, "do": case.do}
    expected = shim.chunk_gated_delta_rule_bwd(**call, A=A, cp_cache=cache)
    for x, y in zip(shim.chunk_gated_delta_rule_bwd(**call, A=A), expected, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(ValueError, match=r"gatedelta: saved is of a call with "):
        shim.chunk_gated_delta_rule_bwd(**call, A=A, cp_cache=other_cache)
    with pytest.raises(ValueError, match=r"gatedelta: saved is of a call without initial_state, but"):
        shim.chunk_gated_delta_rule_bwd(**call, A=A, cp_cache=stateless)
    for wrong in ({"A": None, "cp_cache": cache}, {"A": A, "cp_cache": ()}):
        with pytest.raises(ValueError, match=r"^cp_cache is not what chunk_gated_delta_rule_fwd returned beside A"):
            shim.chunk_gated_delta_rule_bwd(**call, **wrong)


@pytest.mark.parametrize("spec", CASES)
def test_h(spec):
    """Each is the state that a forward over the tokens before it ends with."""
    case = Case(spec)
    arguments = arguments_of(case)
    *_, h, _, _ = shim.chunk_gated_delta_rule_fwd(**arguments, output_h=True)
    assert h.dtype == case.k.dtype and h.is_contiguous()
    offsets = case.cu_seqlens.tolist() if case.cu_seqlens is not None else None
    spans = list(itertools.pairwise(offsets)) if offsets else [(0, case.q.shape[1])] * case.q.shape[0]
    states = []
    for n, (start, end) in enumerate(spans):
        row = 0 if offsets else n
        first = None if case.initial_state is None else case.initial_state[n : n + 1]
        for stop in range(start, end, 64):
            if stop == start:
                states.append(torch.zeros_like(h[0, 0]) if first is None else first[0].to(h.dtype))
                continue
            inputs = {x: arguments[x][row : row + 1, start:stop] for x in ("q", "k", "v", "g", "beta")}
            rest = {"scale": arguments["scale"], "state_v_first": arguments["state_v_first"]}
            _, state = shim.chunk_gated_delta_rule(**inputs, **rest, initial_state=first, output_final_state=True)
            states.append(state[0].to(h.dtype))
    assert torch.equal(h.flatten(0, 1), torch.stack(states))


def test_gradients():
    case = Case(CASES[0])
    arguments = arguments_of(case)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    leaves = [arguments[name].clone().requires_grad_() for name in names]
    o, final_state = shim.chunk_gated_delta_rule(**arguments | dict(zip(names, leaves)), output_final_state=True)
    results = torch.autograd.grad([o, final_state], leaves, [case.do, case.dht])
    truth = case.backward_truth()
    for name, result in zip(("dq", "dk", "dv", "dg", "dbeta", "d_initial_state"), results):
        case.check(name, result, truth[name])


def test_compiles_without_a_graph_break():
    case = Case(CASES[0])
    arguments = arguments_of(case)
    compiled = torch.compile(shim.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**arguments)[0], shim.chunk_gated_delta_rule(**arguments)[0])


def test_scale_of_zero_is_the_default():
    case = Case(CASES[0])
    arguments = arguments_of(case) | {"scale": None}
    expected, _ = shim.chunk_gated_delta_rule(**arguments)
    assert torch.equal(shim.chunk_gated_delta_rule(**arguments | {"scale": 0.0})[0], expected)
    _, _, o, *_ = shim.chunk_gated_delta_rule_fwd(**arguments | {"scale": 0.0})
    assert torch.equal(o, expected) and expected.any()


def test_strides_are_free():
    case = Case(CASES[0])
    arguments = arguments_of(case)
    expected, _ = shim.chunk_gated_delta_rule(**arguments)
    strided = {name: arguments[name].mT.contiguous().mT for name in ("q", "k", "v", "initial_state")}
    assert strided["q"].stride(-1) != 1
    assert torch.equal(shim.chunk_gated_delta_rule(**arguments | strided)[0], expected)


REFUSED = [
    ("chunk_gated_delta_rule", {"cp_context": object()}, "initial_state is given with cp_context"),
    ("chunk_gated_delta_rule", {"head_first": True}, r"head_first=True is not supported.*\[B, T, H, D\]"),
    ("chunk_gated_delta_rule", {"force_intra_cp": True}, "force_intra_cp=True is not supported: auto_cp lets"),
    ("chunk_gated_delta_rule_fwd", {"cp_context": object()}, "cp_context: chunk_gated_delta_rule takes it"),
    ("chunk_gated_delta_rule_bwd", {"cp_context": object()}, "cp_context: chunk_gated_delta_rule takes it"),
]


@pytest.mark.parametrize(("name", "more", "message"), REFUSED)
def test_refusals(name, more, message):
    case = Case(CASES[0])
    arguments = arguments_of(case) | more
    if name.endswith("bwd"):
        arguments |= {"A": None, "do": case.do}
    with pytest.raises(NotImplementedError, match=message):
        getattr(shim, name)(**arguments)


def test_force_intra_cp_is_ignored_without_auto_cp():
    case = Case(CASES[0])
    expected, _ = shim.chunk_gated_delta_rule(**arguments_of(case))
    o, _ = shim.chunk_gated_delta_rule(**arguments_of(case), auto_cp=False, force_intra_cp=True)
    assert torch.equal(o, expected)


@pytest.fixture
def fake_package(monkeypatch, unregistered):
    """flash_qla, as far as registration looks at it: its modules hold the same three functions."""
    functions = {}
    for name in NAMES:
        names = [f"{x}={default}" if default else x for x, default in plugin_signatures.of(getattr(shim, name))]
        exec(f"def {name}({', '.join(names)}): return 'theirs'", functions)
    for path in ("", ".ops", ".ops.gated_delta_rule", ".ops.gated_delta_rule.chunk"):
        module = ModuleType("flash_qla" + path)
        module.__path__ = []
        vars(module).update({name: functions[name] for name in NAMES})
        monkeypatch.setitem(sys.modules, "flash_qla" + path, module)
    return sys.modules["flash_qla"]


def test_register(fake_package):
    theirs = {name: getattr(fake_package, name) for name in NAMES}
    shim.register()
    shim.register()
    for module in (fake_package, sys.modules["flash_qla.ops.gated_delta_rule.chunk"]):
        assert all(getattr(module, name) is getattr(shim, name) for name in NAMES)
    late = ModuleType("flash_qla.late")  # imported by flash_qla while ours are in place
    late.rule = shim.chunk_gated_delta_rule
    sys.modules["flash_qla.late"] = late
    try:
        shim.unregister()
        shim.unregister()
        assert late.rule is theirs["chunk_gated_delta_rule"]
    finally:
        del sys.modules["flash_qla.late"]
    assert all(getattr(fake_package, name) is theirs[name] for name in NAMES)


def test_register_refuses_other_arguments(fake_package):
    def chunk_gated_delta_rule_bwd(q, k, v, beta, g):
        """g and beta have changed places."""

    sys.modules["flash_qla.ops.gated_delta_rule.chunk"].chunk_gated_delta_rule_bwd = chunk_gated_delta_rule_bwd
    with pytest.raises(ImportError, match=r"chunk_gated_delta_rule_bwd has argument 'beta' at place 4.*0\.1\.3.*'g'"):
        shim.register()
    assert fake_package.chunk_gated_delta_rule is not shim.chunk_gated_delta_rule  # none was replaced
    del sys.modules["flash_qla.ops.gated_delta_rule.chunk"].chunk_gated_delta_rule_bwd
    with pytest.raises(ImportError, match=r"chunk has no chunk_gated_delta_rule_bwd: .* made for flash_qla 0\.1\.3"):
        shim.register()


def test_register_without_the_package(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "flash_qla", raising=False)
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ImportError, match="flash_qla is not installed, so there is nothing to replace"):
        shim.register()


def test_register_where_the_package_cannot_be_imported(monkeypatch, tmp_path):
    """As FlashQLA's own does without a GPU it knows."""
    (tmp_path / "flash_qla").mkdir()
    (tmp_path / "flash_qla" / "__init__.py").write_text("raise ValueError('no GPU of a kind I know')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_qla", raising=False)
    with pytest.raises(ImportError, match=r"flash_qla.* cannot be imported here: no GPU of a kind I know"):
        shim.register()


def test_import_needs_no_flash_qla(run_python):
    code = "import sys, gatedelta.flash_qla; print('flash_qla' in sys.modules)"
    assert run_python("-c", code).stdout.strip() == "False"


def test_empty_batch():
    x = torch.zeros(0, 70, 1, 32)
    gates = torch.zeros(0, 70, 1)
    _, _, o, h, final_state, _ = shim.chunk_gated_delta_rule_fwd(x, x, x, gates, gates, output_h=True)
    assert o.shape == x.shape and h.shape[0] == 0 and np.prod(final_state.shape) == 0
