"""Calls on meta and fake tensors: accepted and refused as on real ones, with the same words."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gatedelta import torch as gd  # noqa: E402
from gatedelta._operators import conv1d, norm, ops  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

B, T, HK, HV, K, V = 2, 5, 2, 4, 32, 16
D, W = 2 * HK * K + HV * V, 4
ZEROS = torch.zeros


def rule(batch=B):
    return {
        "q": ZEROS(batch, T, HK, K), "k": ZEROS(batch, T, HK, K), "v": ZEROS(batch, T, HV, V),
        "g": ZEROS(batch, T, HV), "beta": ZEROS(batch, T, HV),
    }  # fmt: skip


def conv():
    return {"x": ZEROS(B, T, 24), "weight": ZEROS(24, W), "bias": ZEROS(24), "initial_state": ZEROS(B, 24, W - 1)}


def rows():
    return {"x": ZEROS(B, T, HV, V), "gate": ZEROS(B, T, HV, V), "weight": ZEROS(V)}


def step():
    return {
        "mixed_qkv": ZEROS(B, T, D), "z": ZEROS(B, T, HV, V), "a": ZEROS(B, T, HV), "b": ZEROS(B, T, HV),
        "conv_weight": ZEROS(D, W), "norm_weight": ZEROS(V), "A_log": ZEROS(HV), "dt_bias": ZEROS(HV),
        "conv_state": ZEROS(5, D, W - 1), "state": ZEROS(5, HV, K, V), "key_heads": HK,
        "state_indices": torch.tensor([1, 2]),
    }  # fmt: skip


def backward():
    return rule() | {"do": ZEROS(B, T, HV, V), "saved": None}


def conv_backward(x, weight, bias, initial_state, dy=None, **more):
    return conv1d.backward(x, weight, bias, 0, None, initial_state, ZEROS(B, T, 24).to(x.device) if dy is None else dy,
                           more.get("dht"), 15)  # fmt: skip


def norm_backward(x, gate, weight, dy=None, eps=None):
    return norm.backward(x, gate, weight, eps, 0, torch.zeros_like(x) if dy is None else dy, 7)


def saving(**inputs):
    return ops.chunk_fwd_save(*(inputs.pop(name) for name in ("q", "k", "v", "g", "beta")), ops.FINAL_STATE, **inputs)


POOL, SLOTS = ZEROS(4, HV, K, V), torch.tensor([1, 2])
RULE = {
    "q of another length": {"q": ZEROS(B, 70, HK, K)},
    "k of another length": {"k": ZEROS(B, T + 1, HK, K)},
    "K": {"q": ZEROS(B, T, HK, 7), "k": ZEROS(B, T, HK, 7)},
    "V": {"v": ZEROS(B, T, HV, 20)},
    "heads": {"v": ZEROS(B, T, 3, V), "g": ZEROS(B, T, 3), "beta": ZEROS(B, T, 3)},
    "rank of v": {"v": ZEROS(B, T, V)},
    "rank 6": {"g": ZEROS(1, 1, 1, 1, 1, 1)},
    "dtype of v": {"v": ZEROS(B, T, HV, V).bfloat16()},
    "float64": {"beta": ZEROS(B, T, HV).double()},
    "g": {"g": ZEROS(B, T, HV, 1)},
    "shape of the state": {"initial_state": ZEROS(B, HV, V, K)},
    "packed batch": {"cu_seqlens": torch.tensor([0, 5])},
    "no offsets": {"cu_seqlens": torch.tensor([], dtype=torch.int64)},
    "dtype of the offsets": {"cu_seqlens": torch.tensor([0.0, 5.0])},
    "scale": {"scale": float("inf")},
}
POOLS = {
    "slots without a pool": {"initial_state_indices": SLOTS},
    "length of slots": {"initial_state": POOL, "initial_state_indices": torch.tensor([1])},
    "A_log without the gate": {"A_log": ZEROS(HV)},
    "a raw gate without A_log": {"use_gate_in_kernel": True},
}
BUFFERS = {
    "shape of out": {"out": ZEROS(B, T, HV, K)},
    "expanded out": {"out": ZEROS(1, 1, 1, V).expand(B, T, HV, V)},
    "a pool of transposed states": {"initial_state": ZEROS(4, HV, V, K).mT, "initial_state_indices": SLOTS},
    "shape of the final state": {"final_state": ZEROS(B, HV, V, K)},
    "expanded slots": {"final_state": POOL, "final_state_indices": torch.tensor([1, 2, 3])},
}
CHECKPOINTS = {
    "checkpoint_every": {"checkpoints": POOL, "checkpoint_every": 63},
    "no room for checkpoints": {"checkpoints": ZEROS(0, HV, K, V), "checkpoint_every": 64, "v": ZEROS(B, T, HV, 24)},
    "checkpoint_offsets": {"checkpoints": POOL, "checkpoint_offsets": torch.tensor([1])},
}
STEPS = {
    "accept_lengths": {"accept_lengths": torch.tensor([1, 2])},
    "step_states": {"step_states": ZEROS(B, T, HV, V, K)},
    "step_indices": {"step_states": POOL, "step_indices": torch.tensor([[1, 2]])},
    "previous_accept_lengths": {"previous_accept_lengths": torch.tensor([1, 2])},
}
TABLE = {
    "chunk": (gd.chunk_gated_delta_rule, rule, RULE | POOLS | BUFFERS | CHECKPOINTS),
    "chunk with a final state": (lambda **x: gd.chunk_gated_delta_rule(**x, output_final_state=True), rule, RULE),
    "saving": (saving, rule, {name: x for name, x in RULE.items() if name != "packed batch"}),
    "recurrent": (gd.fused_recurrent_gated_delta_rule, rule, RULE | POOLS | BUFFERS | STEPS),
    "backward": (gd.chunk_gated_delta_rule_bwd, backward, RULE | {"do": {"do": ZEROS(B, T, HV, K)},
                                                                  "dht": {"dht": ZEROS(B, HV, V, K)}}),
    "convolution": (gd.causal_conv1d, conv, {
        "rank": {"x": ZEROS(T, 24)}, "weight": {"weight": ZEROS(23, W)}, "width": {"weight": ZEROS(24, 5)},
        "bias": {"bias": ZEROS(23)}, "state": {"initial_state": ZEROS(B, 24, 1)}, "dtype": {"bias": ZEROS(24).double()},
        "out": {"out": ZEROS(B, T, 23)}, "slots": {"initial_state_indices": torch.tensor([1])},
        "offsets": {"cu_seqlens": torch.tensor([0, 5])}, "final state": {"final_state": ZEROS(B, 23, W - 1)},
    }),
    "convolution with a final state": (lambda **x: gd.causal_conv1d(**x, output_final_state=True), conv, {
        "no offsets": {"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "state": {"initial_state": ZEROS(1, 24, 3)},
    }),
    "convolution's backward": (conv_backward, conv, {
        "dy": {"dy": ZEROS(B, T, 23)}, "dht": {"dht": ZEROS(B, 23, W - 1)}, "weight": {"weight": ZEROS(24, 5)},
    }),
    "norm": (gd.rms_norm_gated, rows, {
        "D": {"x": ZEROS(B, 7), "gate": None}, "weight": {"weight": ZEROS(V + 1)}, "eps": {"eps": -1.0},
        "rank": {"x": ZEROS(()), "gate": None}, "out": {"out": ZEROS(1, 1, 1, V).expand(B, T, HV, V)},
        "dtype": {"weight": ZEROS(V).double()},
    }),
    "norm's backward": (norm_backward, rows, {"dy": {"dy": ZEROS(B, T, HV, 32)}, "eps": {"eps": -1.0}}),
    "layer step": (gd.gated_delta_layer_step, step, {
        "channels": {"mixed_qkv": ZEROS(B, T, D + 1)}, "key_heads": {"key_heads": 0}, "a": {"a": ZEROS(B, T, 3)},
        "conv_weight": {"conv_weight": ZEROS(D, 5)}, "conv_state": {"conv_state": ZEROS(5, D, 1)},
        "state": {"state": ZEROS(5, HV, V, K)}, "norm_weight": {"norm_weight": ZEROS(V + 1)},
        "slots": {"state_indices": torch.tensor([1])}, "eps": {"norm_eps": -1.0},
        "step_states": {"step_states": ZEROS(B, T, HV, V, K)}, "out": {"out": ZEROS(B, T, HV, K)},
        "steps": {"step_indices": torch.tensor([[1]])}, "offsets": {"cu_seqlens": torch.tensor([0, 5])},
    }),
}  # fmt: skip


def refusal(function, arguments) -> str:
    with pytest.raises(ValueError, match=r"^gatedelta: ") as caught:
        function(**arguments)
    return str(caught.value)


def to_meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def converted(arguments, convert):
    return {name: convert(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("table", TABLE)
def test_refused_alike(table):
    function, make, cases = TABLE[table]
    for name, case in cases.items():
        wanted = refusal(function, make() | case)
        assert refusal(function, converted(make() | case, to_meta)) == wanted, name
        with FakeTensorMode() as mode:
            assert refusal(function, converted(make() | case, mode.from_tensor)) == wanted, name


@pytest.mark.parametrize("table", TABLE)
def test_accepted_alike(table):
    function, make, _ = TABLE[table]
    real = function(**make())
    fake = function(**converted(make(), to_meta))
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (real, fake)), strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x.shape, x.dtype) == (y.shape, y.dtype)


def test_symbolic_sizes_are_not_asked_about():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        tokens = mode.shape_env.create_unbacked_symint()
        q, g = torch.empty(B, tokens, HK, K), torch.empty(B, tokens, HK)
        o, _ = gd.chunk_gated_delta_rule(q, q, q, g, g)
    assert o.shape[0] == B


def test_a_compiled_call_says_why():
    compiled = torch.compile(gd.chunk_gated_delta_rule, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"k: shape is \[2, 6, 2, 32\], must be"):
        compiled(**rule() | RULE["k of another length"])
