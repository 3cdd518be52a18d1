"""The recurrent step past torch's dispatcher: the same results as the operator's, or no part in the call at all."""

from __future__ import annotations

import inspect
import sys

import pytest

torch = pytest.importorskip("torch")

from gatedelta import torch as gd  # noqa: E402
from gatedelta.torch import _direct, _functional  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

DEFAULTS = {name: p.default for name, p in inspect.signature(gd.fused_recurrent_gated_delta_rule).parameters.items()}


def direct(**arguments):
    assert arguments.keys() <= DEFAULTS.keys()
    return _direct.recurrent(*(DEFAULTS | arguments).values())


def through_the_operator(monkeypatch, **arguments):
    with monkeypatch.context() as patch:
        patch.setattr(_functional._direct, "recurrent", None)
        return gd.fused_recurrent_gated_delta_rule(**arguments)


def make_inputs(batch=2, tokens=1, key_heads=2, value_heads=4, key_dim=32, value_dim=48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "q": randn(batch, tokens, key_heads, key_dim).to(dtype),
        "k": torch.nn.functional.normalize(randn(batch, tokens, key_heads, key_dim), dim=-1).to(dtype),
        "v": randn(batch, tokens, value_heads, value_dim).to(dtype),
        "g": -randn(batch, tokens, value_heads).abs(),
        "beta": randn(batch, tokens, value_heads).sigmoid(),
        "initial_state": randn(batch, value_heads, key_dim, value_dim),
    }


def raw_gates(heads=4):
    return {
        "use_gate_in_kernel": True, "A_log": torch.linspace(-1, 1, heads), "dt_bias": torch.linspace(1, 2, heads),
        "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def pool_call(state_dtype=torch.float32, **sizes):
    inputs = make_inputs(**sizes)
    pool = torch.randn(5, *inputs["initial_state"].shape[1:], generator=torch.Generator().manual_seed(8))
    pool = pool.to(state_dtype)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    return inputs | {
        "initial_state": pool, "initial_state_indices": slots, "final_state": pool, "final_state_indices": slots,
    }  # fmt: skip


def packed_call():
    inputs = make_inputs(batch=1, tokens=5)
    state = make_inputs(batch=3)["initial_state"]
    return inputs | {"initial_state": state, "cu_seqlens": torch.tensor([0, 2, 2, 4]), "output_final_state": True}


def sliced_call():
    inputs = make_inputs()
    mixed = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v")], -1)
    q, k, v = mixed.split([64, 64, 192], -1)
    return inputs | {"q": q.view(2, 1, 2, 32), "k": k.view(2, 1, 2, 32), "v": v.view(2, 1, 4, 48)}


def in_place_call(padded=False):
    call = pool_call() | {"out": torch.full((2, 1, 4, 48), torch.nan)} | raw_gates()
    if padded:
        slots = torch.tensor([-1, 2])
        call |= {"initial_state_indices": slots, "final_state_indices": slots}
    return call


CALLS = {
    "o alone": make_inputs,
    "no initial state": lambda: {n: x for n, x in make_inputs().items() if n != "initial_state"},
    "final state": lambda: make_inputs() | {"output_final_state": True},
    "16 bits": lambda: make_inputs(dtype=torch.bfloat16) | {"output_final_state": True},
    "float16 and scale": lambda: make_inputs(dtype=torch.float16) | {"scale": 0.25},
    "raw gates": lambda: make_inputs() | raw_gates(),
    "batch invariant": lambda: make_inputs(tokens=3) | {"batch_invariant": True, "output_final_state": True},
    "doubled beta": lambda: make_inputs() | raw_gates() | {"allow_neg_eigval": True},
    "one head": lambda: make_inputs(key_heads=1, value_heads=1),
    "state of values first": lambda: make_inputs(key_dim=48) | {"state_v_first": True, "output_final_state": True},
    "a parameter": lambda: make_inputs() | {"initial_state": torch.nn.Parameter(make_inputs()["initial_state"], False)},
    "slices": sliced_call,
    "packed": packed_call,
    "pool": pool_call,
    "bf16 pool": lambda: pool_call(torch.bfloat16),
    "in place": in_place_call,
    "in place, padded": lambda: in_place_call(padded=True),
    "steps": lambda: make_inputs(tokens=3) | {"step_states": torch.full((2, 3, 4, 32, 48), torch.nan)},
    "pool of steps": lambda: make_inputs(tokens=3) | {
        "step_states": torch.zeros(9, 4, 32, 48), "step_indices": torch.tensor([[0, 2, 8], [5, -1, 1]]),
    },
    "pool with a null slot": lambda: pool_call() | {"null_index": 1},
    "columns of a table": lambda: pool_call() | {
        name: torch.tensor([[3, 9], [1, 9]])[:, 0] for name in ("initial_state_indices", "final_state_indices")
    },
    "slots picked from rows": lambda: pool_call() | {
        "initial_state_indices": torch.tensor([[0, 3], [1, 2]]), "previous_accept_lengths": torch.tensor([2, 0]),
    },
    "accepted": lambda: make_inputs(tokens=3) | {
        "final_state": torch.zeros(2, 4, 32, 48), "accept_lengths": torch.tensor([3, 1]), "output_o": False,
    },
    "a workspace from the heap": lambda: make_inputs(key_dim=256, value_dim=256),
    "no rows": lambda: make_inputs(batch=0) | {"output_final_state": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_agrees_with_the_operator(name, monkeypatch):
    ours, theirs = CALLS[name](), CALLS[name]()
    assert direct(**CALLS[name]()) is not None
    found = gd.fused_recurrent_gated_delta_rule(**ours)
    wanted = through_the_operator(monkeypatch, **theirs)
    for x, y in zip((*found, *ours.values()), (*wanted, *theirs.values())):
        if not isinstance(y, torch.Tensor):
            assert x == y
            continue
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert torch.equal(x.nan_to_num(9), y.nan_to_num(9))
    assert (found[1] is ours.get("final_state")) == (wanted[1] is theirs.get("final_state"))


class _Counts(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen += function.namespace == "gatedelta"
        return function(*arguments, **(options or {}))


class _Subclass(torch.Tensor):
    pass


def permuted(x, *order):
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(*order).contiguous().permute(*inverse)


NOT_PLAIN = {
    "an integer for a flag": lambda c: {"output_final_state": 1},
    "an integer scale": lambda c: {"scale": 1},
    "no g": lambda c: {"g": None},
    "gk": lambda c: {"gk": c["g"]},
    "the older name of the layout": lambda c: {"transpose_state_layout": False},
    "doubled beta without logits": lambda c: {"allow_neg_eigval": True},
    "out without o": lambda c: {"out": torch.empty_like(c["v"]), "output_o": False},
    "indices without a pool": lambda c: {"final_state_indices": torch.arange(2)},
    "a final state of a new shape": lambda c: {"initial_state": None, "output_final_state": True},
    "a final state of a new dtype": lambda c: {
        "initial_state": c["initial_state"].bfloat16(), "output_final_state": True,
    },
    "float64": lambda c: {"g": c["g"].double()},
    "not a tensor": lambda c: {"q": c["q"].tolist()},
    "a subclass": lambda c: {"q": c["q"].as_subclass(_Subclass)},
    "meta": lambda c: {"beta": c["beta"].to("meta")},
    "sparse": lambda c: {"g": c["g"].to_sparse()},
    "rows with gaps": lambda c: {"q": c["q"].repeat_interleave(2, -1)[..., ::2]},
    "permuted v": lambda c: {"v": permuted(c["v"], 0, 1, 3, 2)},
    "an index that is no int": lambda c: {"null_index": torch.tensor(0)},
    "a null_index without indices": lambda c: {"null_index": 0},
    "an imaginary part": lambda c: {"g": torch.complex(c["g"], -c["g"]).conj().imag},
    "rank 6": lambda c: {"g": c["g"].reshape(2, 1, 4, 1, 1, 1)},
    "a wrong shape": lambda c: {"beta": c["beta"][:, :, :3]},
    "a written parameter": lambda c: {"final_state": torch.nn.Parameter(c["initial_state"].clone())},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_PLAIN)
@torch.no_grad()
def test_leaves_the_call_to_the_operator(name):
    inputs = make_inputs()
    arguments = inputs | NOT_PLAIN[name](inputs)
    assert direct(**arguments) is None
    for tensor in (arguments.get("final_state"), arguments.get("out")):
        assert tensor is None or tensor._version == 0


def test_negated_inputs_act():
    inputs = make_inputs()
    negated = torch.complex(inputs["g"], -inputs["g"]).conj().imag
    assert negated.is_neg()
    want, _ = gd.fused_recurrent_gated_delta_rule(**inputs)
    assert torch.equal(gd.fused_recurrent_gated_delta_rule(**inputs | {"g": negated})[0], want)


def test_gradients_need_the_operator():
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        inputs = make_inputs() | raw_gates()
        inputs[name].requires_grad_()
        assert direct(**inputs) is None
        with torch.no_grad():
            assert direct(**inputs) is not None
    assert direct(**make_inputs()) is not None


def test_modes_and_transforms_need_the_operator():
    inputs = make_inputs()
    with _Counts() as mode:
        assert direct(**inputs) is None
        gd.fused_recurrent_gated_delta_rule(**inputs)
    assert mode.seen == 1
    with torch.device("cpu"):
        assert direct(**inputs) is None
    with forward_ad.dual_level():
        assert direct(**inputs) is None
    with torch.profiler.profile() as profile:
        gd.fused_recurrent_gated_delta_rule(**inputs)
    assert "gatedelta::recurrent" in {event.name for event in profile.events()}
    answers = []
    torch.func.grad(lambda x: answers.append(direct(**inputs)) or x.sum())(torch.ones(1))
    torch.vmap(lambda x: answers.append(direct(**inputs)) or x)(torch.ones(2))
    torch.jit.trace(lambda x: answers.append(direct(**inputs)) or x + 1, torch.ones(1), check_trace=False)
    assert answers == [None] * 3
    assert direct(**inputs) is not None


def test_marks_what_it_writes():
    call = in_place_call()
    saved = (call["out"].requires_grad_(False) * torch.ones((), requires_grad=True)).sum()
    versions = call["out"]._version, call["final_state"]._version
    assert direct(**call) is not None
    assert (call["out"]._version, call["final_state"]._version) == (versions[0] + 1, versions[1] + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    with torch.inference_mode():
        call = in_place_call()
        assert direct(**call) is not None
    assert direct(**call) is not None


def test_keeps_no_references():
    call = in_place_call() | {"step_states": torch.zeros(2, 1, 4, 32, 48)}
    wrong = call | {"beta": call["beta"][:, :, :3]}

    def references():
        return [sys.getrefcount(x) for x in (*call.values(), *wrong.values(), torch.empty_like, "requires_grad", 1.0)]

    before = references()
    for _ in range(100):
        assert direct(**call) is not None
        assert direct(**wrong) is None
        direct(**make_inputs() | {"output_final_state": True})
    # None, True and False may be held by others, but not by hundreds of them.
    assert all(abs(x - y) < 50 for x, y in zip(references(), before))


def test_takes_as_many_arguments_as_the_function():
    assert _direct.recurrent(*list(DEFAULTS.values())[:-1]) is None
    assert _direct.recurrent(*DEFAULTS.values()) is None  # no q
