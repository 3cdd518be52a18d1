"""gatedelta.fla: which calls of FLA's functions are taken and why others are not, zeros around odd sizes, registration.

The tests here need no FLA: a stand-in has the shape of its registry. test_plugin_fla_real.py has those that need it.
"""

from __future__ import annotations

import logging
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import gatedelta.fla  # noqa: E402
from gatedelta._plugins import limits  # noqa: E402
from gatedelta.fla import modules, rule  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402


def inputs(K=16, V=16, T=20, Hk=2, Hv=4, B=2, dtype=torch.float32, device="cpu"):
    shape = {"q": (B, T, Hk, K), "k": (B, T, Hk, K), "v": (B, T, Hv, V)}
    tensors = {name: torch.randn(size, dtype=torch.float32, device=device).to(dtype) for name, size in shape.items()}
    g = -torch.rand(B, T, Hv, device=device)
    return {**tensors, "g": g, "beta": torch.rand(B, T, Hv, device=device)}


def recurrence(q, k, v, g, beta, scale, initial_state):
    """In float64, differentiable; states [K, V]."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, initial_state))
    group = v.shape[2] // q.shape[2]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        write = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + k[:, t, :, :, None] * write[:, :, None]
        rows.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(rows, 1), state


def close(a, b, bound=2e-6):
    assert a.shape == b.shape
    error = ((a.double() - b.double()).norm() / b.double().norm()).item()
    assert error < bound, error


# What is taken


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cp_context": object()}, "cp_context"),
        ({"chunk_size": 128}, "chunk_size is 128"),
        ({"head_first": True}, "unknown arguments: head_first"),
        ({"use_gate_in_kernel": True}, "needs g and A_log"),
        ({"v": torch.zeros(2, 20, 4, 16, dtype=torch.float16)}, "differ in dtype"),
        ({"g": torch.zeros(2, 20, 4, dtype=torch.float64)}, "g: dtype is torch.float64"),
        ({"v": torch.zeros(2, 20, 3, 16)}, "heads of q, k and v are 2, 2 and 3"),
        ({"v": torch.zeros(2, 20, 4, 260)}, "V is 260, at most 256"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "B is 2"),
        ({"beta": torch.zeros(2, 20, 4, device="meta")}, "beta is on meta"),
    ],
)
def test_chunk_refusals(change, reason):
    assert rule.chunk_refusal(**inputs()) is None
    assert reason in rule.chunk_refusal(**{**inputs(), **change})


@pytest.mark.parametrize("function", [rule.chunk, rule.recurrent])
def test_contradictions_are_errors_as_they_are_in_fla(function):
    with pytest.raises(ValueError, match="both given"):
        function(**inputs(), state_v_first=True, transpose_state_layout=True)
    with pytest.raises(ValueError, match="use_beta_sigmoid_in_kernel"):
        function(**inputs(), allow_neg_eigval=True)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_chunk_size_is_a_hint(size):
    call = inputs()
    for a, b in zip(rule.chunk(**call, chunk_size=size)[:1], rule.chunk(**call)[:1]):
        assert torch.equal(a, b)


def test_other_devices_are_refused():
    assert rule.chunk_refusal(**inputs(device="meta")) == "device is meta; cpu and cuda are taken"


def cuda_inputs(**changes):
    """As on a GPU, without one; inside a FakeTensorMode."""
    return inputs(**{"dtype": torch.bfloat16, "device": "cuda", **changes})


def test_cuda_refusals(monkeypatch):
    with FakeTensorMode():
        call = cuda_inputs(K=64, V=128)
        monkeypatch.setattr(limits, "_gpu_refusal", lambda index: "why not")
        assert rule.chunk_refusal(**call) == rule._plan_recurrent(**call) == "why not"
        x = torch.zeros(2, 8, 32, device="cuda")
        assert modules.conv_refusal(x, torch.zeros(32, 4, device="cuda"), None, None) == "why not"
        assert modules.norm_refusal(x, x, None, None, is_rms_norm=True) == "why not"

        monkeypatch.setattr(limits, "_gpu_refusal", lambda index: None)
        for sizes in ({"K": 64, "V": 128}, {"K": 256, "V": 144}, {"K": 50, "V": 100}, {"Hk": 1, "Hv": 257}):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                call = cuda_inputs(**sizes, dtype=dtype)
                assert rule.chunk_refusal(**call) is None
                assert isinstance(rule._plan_recurrent(**call), dict)
        for plan in (rule.chunk_refusal, rule._plan_recurrent):
            assert plan(**cuda_inputs(V=272)) == "V is 272, at most 256 is taken"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"K": 50, "V": 128}, None),
        ({"K": 144}, None),
        ({"Hk": 1, "Hv": 257}, None),
        ({"dtype": torch.float32}, "q, k and v are float32; bfloat16 and float16 are taken"),
    ],
)
def test_contexts_on_cuda(monkeypatch, change, reason):
    monkeypatch.setattr(limits, "_gpu_refusal", lambda index: None)
    context = types.SimpleNamespace(pre_num_ranks=0)
    with FakeTensorMode():
        call = cuda_inputs(**change)
        assert rule.chunk_refusal(**call, cp_context=context) == (reason and f"cp_context on cuda: {reason}")
        assert rule.chunk_refusal(**call) is None


def test_sizes_of_the_kernels():
    assert rule._kernel_sizes(64, 256) == (64, 256)
    assert rule._kernel_sizes(50, 100) == (64, 112)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gk": torch.zeros(1)}, "gk and gv"),
        ({"beta": torch.zeros(2, 20, 4, 16)}, "one for each value channel"),
        ({"some": 1}, "unknown arguments: some"),
        ({"k": torch.zeros(2, 20, 1, 16)}, "heads of q, k and v are 2, 1 and 4"),
    ],
)
def test_recurrent_refusals(change, reason):
    assert reason in rule.recurrent(**{**inputs(), **change})


def test_module_refusals():
    x, weight = torch.zeros(2, 8, 32), torch.zeros(32, 4)
    assert modules.conv_refusal(x, weight, None, None) is None
    assert "residual: dtype is torch.float64" in modules.conv_refusal(x, weight, None, x.double())
    assert "[32, 5]" in modules.conv_refusal(x, torch.zeros(32, 5), None, None)
    assert "weight is None" in modules.conv_refusal(x, None, None, None)
    assert "'relu'" in modules.conv_refusal(x, weight, None, None, activation="relu")
    assert "x: dtype is torch.float64" in modules.conv_refusal(x.double(), weight, None, None)
    rows, gate = torch.zeros(6, 32), torch.zeros(6, 32)
    norm = {"weight": None, "bias": None, "is_rms_norm": True}
    assert modules.norm_refusal(rows, gate, **norm) is None
    assert "mean or a bias" in modules.norm_refusal(rows, gate, **{**norm, "is_rms_norm": False})
    assert "mean or a bias" in modules.norm_refusal(rows, gate, **{**norm, "bias": torch.zeros(32)})
    assert "residual" in modules.norm_refusal(rows, gate, **norm, residual=rows)
    assert "residual" in modules.norm_refusal(rows, gate, **norm, residual_dtype=torch.float16)
    assert "D is 40" in modules.norm_refusal(torch.zeros(6, 40), gate, **norm)
    assert "out_dtype" in modules.norm_refusal(rows, gate, **norm, out_dtype=torch.float64)
    assert "'tanh'" in modules.norm_refusal(rows, gate, **norm, activation="tanh")
    assert "residual" in modules.norm_bwd_refusal(rows, rows, gate, **norm, has_residual=True)


# Zeros around K and V


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(60, 44), (64, 50), (100, 128), (17, 1)])
def test_padded_sizes_have_the_true_results_and_gradients(K, V, v_first):
    torch.manual_seed(1)
    call = inputs(K, V)
    state = torch.randn(2, 4, K, V)
    leaves = [x.clone().requires_grad_() for x in (*call.values(), state)]
    truth = [x.clone().requires_grad_() for x in (*call.values(), state)]
    o, final = rule.chunk(
        *leaves[:5], initial_state=leaves[5].mT if v_first else leaves[5], output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=v_first,
    )  # fmt: skip
    assert o.is_contiguous() and final.is_contiguous() and final.dtype == torch.float32
    final = final.mT if v_first else final
    expected, end = recurrence(*truth[:5], K**-0.5, truth[5])
    close(o, expected)
    close(final, end)
    do, dstate = torch.randn_like(o), torch.randn_like(final)
    gradients = torch.autograd.grad([o, final], leaves, [do, dstate])
    for a, b in zip(gradients, torch.autograd.grad([expected, end], truth, [do.double(), dstate.double()])):
        close(a, b, 1e-5)


def test_recurrent_takes_tensors_of_several_dtypes():
    """FLA reads q and k in float32 beside v in float16: nothing may be rounded on the way."""
    torch.manual_seed(2)
    call = inputs(K=60, V=60)
    call["v"] = call["v"].half()
    state = torch.randn(2, 4, 60, 60)
    o, final = rule.recurrent(**call, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert o.dtype == torch.float16
    expected, end = recurrence(*call.values(), 60**-0.5, state)
    close(o, expected, 1e-3)  # o alone is rounded
    close(final, end)


def test_rows_and_states_of_any_strides():
    torch.manual_seed(3)
    call = inputs(K=32, V=48)
    state = torch.randn(2, 4, 32, 48)
    expected, end = rule.chunk(**call, initial_state=state, output_final_state=True)
    strided = {name: call[name].permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for name in ("q", "k", "v")}
    o, final = rule.chunk(**{**call, **strided}, initial_state=state.mT.contiguous().mT, output_final_state=True)
    assert torch.equal(o, expected) and torch.equal(final, end)


def test_alignment():
    wide = torch.zeros(2, 5, 4, 132, dtype=torch.bfloat16)
    for x in (wide[..., :128], wide[..., 1:129], wide.flatten()[1 : 1 + 2 * 5 * 128].view(2, 5, 128)):
        y = rule._aligned(x)
        assert torch.equal(x, y) and y.data_ptr() % 16 == 0 and all(s * 2 % 16 == 0 for s in y.stride()[:-1])
    x = torch.zeros(2, 5, 3, 128, dtype=torch.bfloat16)
    assert rule._aligned(x) is x


# Registration, with a stand-in for FLA


@pytest.fixture
def stand_in(monkeypatch):
    """A package `fla` with the registry's functions, each of whose own implementations returns its name."""
    registries = {}

    class BaseBackend:
        env_var, default_enable, priority, implementation, verifier = None, True, 5, None, None

        @classmethod
        def is_available(cls):
            return True

        def is_enabled(self):
            import os

            return os.environ.get(self.env_var, "1") != "0"

    def register(entry, *, backend=None, verifier=None):
        def decorate(implementation):
            made = implementation() if isinstance(implementation, type) else backend()
            if not isinstance(implementation, type):
                made.implementation, made.verifier = implementation, verifier
            registries.setdefault(getattr(entry, "__name__", entry), {})[made.backend_type] = made
            return implementation

        return decorate

    def dispatched(name, operation=None):
        def function(*args, **kwargs):
            for backend in registries.get(operation or name, {}).values():
                verifier = backend.verifier or getattr(backend, f"{name}_verifier")
                if backend.is_available() and backend.is_enabled() and verifier(*args, **kwargs)[0]:
                    return (backend.implementation or getattr(backend, name))(*args, **kwargs)
            return name

        function.__name__ = name
        return function

    def module(name, **names):
        made = types.ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, made)
        return made

    def fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, **kwargs):
        return "fused_recurrent"

    module("fla", __version__="0.6.9")
    module("fla.backends", BaseBackend=BaseBackend, register=register)
    module("fla.modules")
    module("fla.modules.causal_conv1d")
    module("fla.modules.causal_conv1d.ops", **{
        name: dispatched(name) for name in ("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update")
    })  # fmt: skip
    module("fla.modules.norm")
    module("fla.modules.norm.fused_norm_gate", **{
        name: dispatched(name) for name in ("layer_norm_gated_fwd", "layer_norm_gated_bwd")
    })  # fmt: skip
    module("fla.ops")
    rules = module(
        "fla.ops.gated_delta_rule",
        chunk_gated_delta_rule=dispatched("chunk_gated_delta_rule", "gated_delta_rule"),
        fused_recurrent_gated_delta_rule=fused_recurrent_gated_delta_rule,
        fused_recurrent_gdn=fused_recurrent_gated_delta_rule,
    )
    monkeypatch.setattr(gatedelta.fla, "_registered", False)
    yield rules, module
    gatedelta.fla.unregister()


def test_register_and_unregister(stand_in):
    rules, module = stand_in
    original = rules.fused_recurrent_gated_delta_rule
    user = module("a_user", step=original, other=1)
    call = inputs()
    for _ in range(2):
        assert rules.chunk_gated_delta_rule(**call) == "chunk_gated_delta_rule"
        gatedelta.fla.register()
        gatedelta.fla.register()
        assert torch.equal(rules.chunk_gated_delta_rule(**call)[0], rule.chunk(**call)[0])
        assert rules.fused_recurrent_gdn is rules.fused_recurrent_gated_delta_rule is user.step is not original
        assert torch.equal(user.step(**call)[0], rule.recurrent(**call)[0])
        gatedelta.fla.unregister()
        gatedelta.fla.unregister()
        assert rules.fused_recurrent_gdn is rules.fused_recurrent_gated_delta_rule is user.step is original


def test_what_is_refused_stays_with_fla(stand_in, caplog):
    rules, _ = stand_in
    gatedelta.fla.register()
    assert rules.chunk_gated_delta_rule(**inputs(), cp_context=object()) == "chunk_gated_delta_rule"
    with caplog.at_level(logging.INFO, "gatedelta.fla"):
        assert rules.fused_recurrent_gdn(**inputs(), gk=torch.zeros(1)) == "fused_recurrent"
    assert "stays with FLA: gk and gv" in caplog.text


def test_the_switch(stand_in, monkeypatch):
    rules, _ = stand_in
    gatedelta.fla.register()
    monkeypatch.setenv("FLA_GATEDELTA", "0")
    assert rules.chunk_gated_delta_rule(**inputs()) == "chunk_gated_delta_rule"
    assert rules.fused_recurrent_gdn(**inputs()) == "fused_recurrent"
    monkeypatch.setenv("FLA_GATEDELTA", "1")
    assert rules.fused_recurrent_gdn(**inputs()) != "fused_recurrent"


def test_missing_and_unknown_versions_of_fla(stand_in, monkeypatch):
    from fla import backends

    monkeypatch.setattr(backends, "_DISPATCH_DISABLED", True, raising=False)
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH=1"):
        gatedelta.fla.register()
    monkeypatch.delattr(sys.modules["fla.modules.norm.fused_norm_gate"], "layer_norm_gated_bwd")
    with pytest.raises(ImportError, match=r"this is 0\.6\.9.*layer_norm_gated_bwd"):
        gatedelta.fla.register()
    monkeypatch.setitem(sys.modules, "fla.backends", None)
    monkeypatch.delattr(sys.modules["fla"], "backends")
    with pytest.raises(ImportError, match=r"needs flash-linear-attention 0\.6.*this is 0\.6\.9"):
        gatedelta.fla.register()
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        gatedelta.fla.register()
    assert not gatedelta.fla._registered


def test_importing_the_plugin_imports_no_framework(run_python):
    code = "import sys, gatedelta.fla; print([name for name in ('fla', 'torch', 'triton') if name in sys.modules])"
    assert run_python("-c", code).stdout.strip() == "[]"
