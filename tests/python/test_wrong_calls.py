"""A None, a fraction or a misspelt keyword: the message names the argument, and the function that was called."""

from __future__ import annotations

import re

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

import test_views as calls  # noqa: E402
from gatedelta import context_parallel as cp  # noqa: E402
from gatedelta import flashinfer  # noqa: E402
from gatedelta import numpy as gn  # noqa: E402
from gatedelta import torch as gd  # noqa: E402

RULE = calls.rule()
PACK = calls.pack() | {"do": torch.zeros(1, 12, calls.HV, calls.V)}
SUMMARY = {name: x for name, x in PACK.items() if name not in ("q", "do")}
STEP = calls.layer_step() | {"key_heads": calls.HK}
MATRICES = {name: torch.zeros(1, 1, 16, 16) for name in ("values", "transitions")}
MERGE = MATRICES | {name: torch.zeros(1, dtype=torch.int32) for name in ("first", "count")}
POOL = {"initial_state": torch.zeros(4, calls.HV, calls.K, calls.V), "initial_state_indices": calls.SLOTS}
DECODE = {name: RULE[name][:, :1] for name in ("q", "k", "v")} | {
    "state": torch.zeros(calls.B, calls.HV, calls.V, calls.K), **calls.GATE,
    "a": torch.zeros(calls.B, 1, calls.HV), "b": torch.zeros(calls.B, 1, calls.HV),
}  # fmt: skip
X = {"x": torch.zeros(1, 4, 16)}


def numpy_of(arguments):
    return {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def without(arguments, *names):
    return {name: x for name, x in arguments.items() if name not in names}


REQUIRED = {
    gd.chunk_gated_delta_rule: (RULE, "q k v"),
    gd.fused_recurrent_gated_delta_rule: (RULE, "q k v"),
    gd.chunk_gated_delta_rule_fwd: (RULE, "q k v"),
    gd.chunk_gated_delta_rule_bwd: (RULE | {"saved": None, "do": RULE["v"]}, "q k v do"),
    gd.causal_conv1d: (X | {"weight": torch.zeros(16, 4)}, "x weight"),
    gd.rms_norm_gated: (X | {"gate": None, "weight": None}, "x"),
    gd.gated_delta_layer_step: (STEP, "mixed_qkv a b conv_weight conv_state A_log state"),
    gd.cu_seqlens_from_positions: ({}, "position_ids"),
    cp.forward_prepare: (SUMMARY, "k v g beta"),
    cp.empty_saved: (without(PACK, "do"), "q k v g beta"),
    cp.forward_apply: (without(PACK, "do") | {"entering": None}, "q k v g beta"),
    cp.backward_prepare: (without(PACK, "v"), "q k g beta do"),
    cp.backward_apply: (PACK | {"entering": None}, "q k v g beta do"),
    cp.merge: (MERGE, "values transitions first count"),
    flashinfer.gated_delta_rule_decode_pretranspose: (DECODE, "q k v a b A_log"),
}
REQUIRED_ARRAYS = {
    gn.forward: (RULE, "q k v"),
    gn.backward: (RULE | {"do": RULE["v"]}, "q k v do"),
    gn.recurrent: (RULE, "q k v"),
    gn.causal_conv1d: (X | {"weight": torch.zeros(16, 4)}, "x weight"),
    gn.causal_conv1d_backward: (X | {"weight": torch.zeros(16, 4), "bias": None, "dy": X["x"]}, "x weight dy"),
    gn.rms_norm_gated: (X | {"gate": None, "weight": None}, "x"),
    gn.rms_norm_gated_backward: (X | {"gate": None, "weight": None, "dy": X["x"]}, "x dy"),
    gn.layer_step: (STEP, "mixed_qkv a b conv_weight conv_state A_log state"),
}  # fmt: skip


@pytest.mark.parametrize("function", [*REQUIRED, *REQUIRED_ARRAYS], ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_none_where_a_tensor_is_required(function):
    arrays = function in REQUIRED_ARRAYS
    arguments, names = (REQUIRED_ARRAYS if arrays else REQUIRED)[function]
    kind = "numpy array" if arrays else "torch.Tensor"
    for name in names.split():
        with pytest.raises(TypeError, match=f"^{name} must be a {kind}, not None$"):
            function(**(numpy_of(arguments) if arrays else arguments) | {name: None})


WRONG = {
    "null_index": (
        gd.chunk_gated_delta_rule, RULE | POOL | {"null_index": 0.5}, "null_index is 0.5, must be an integer",
    ),
    "null_index of a step": (
        gd.fused_recurrent_gated_delta_rule, RULE | POOL | {"null_index": 0.5}, "null_index is 0.5, must be an integer",
    ),
    "null_index, numpy": (
        gn.forward, numpy_of(RULE | POOL) | {"null_index": 0.5}, "null_index is 0.5, must be an integer",
    ),
    "num_threads": (gn.forward, numpy_of(RULE) | {"num_threads": 1.5}, "num_threads is 1.5, must be an integer"),
    "checkpoint_every": (
        gn.forward, numpy_of(RULE) | {"checkpoint_every": 64.0}, "checkpoint_every is 64.0, must be an integer",
    ),
    "key_heads": (gn.layer_step, numpy_of(STEP) | {"key_heads": 2.0}, "key_heads is 2.0, must be an integer"),
    "a keyword of forward": (
        gn.forward, numpy_of(RULE) | {"foo": 1}, "forward() got an unexpected keyword argument 'foo'",
    ),
    "a keyword of backward": (
        gn.backward, numpy_of(RULE) | {"do": RULE["v"].numpy(), "foo": 1},
        "backward() got an unexpected keyword argument 'foo'",
    ),
    "a keyword of recurrent": (
        gn.recurrent, numpy_of(RULE) | {"args": 1}, "recurrent() got an unexpected keyword argument 'args'",
    ),
    "a keyword of a stage": (
        cp.forward_prepare, SUMMARY | {"foo": 1}, "forward_prepare() got an unexpected keyword argument 'foo'",
    ),
    "entering": (
        cp.forward_apply, without(PACK, "do") | {"entering": 5}, "entering must be a torch.Tensor, not builtins.int",
    ),
    "A_log of a stage": (
        cp.forward_prepare, SUMMARY | {"A_log": [1.0], "use_gate_in_kernel": True},
        "A_log must be a torch.Tensor, not builtins.list",
    ),
    "first_sequence": (
        cp.forward_prepare, SUMMARY | {"first_sequence": 3}, "first_sequence is 3, but there are 2 sequences",
    ),
    "first_sequence of gradients": (
        cp.backward_prepare, without(PACK, "v") | {"first_sequence": -1},
        "first_sequence is -1, but there are 2 sequences",
    ),
    "sequence_count": (
        cp.forward_prepare, SUMMARY | {"first_sequence": 1, "sequence_count": 2},
        "sequence_count is 2, but 1 sequences follow first_sequence = 1",
    ),
    "a fraction of sequences": (
        cp.forward_prepare, SUMMARY | {"sequence_count": 0.5}, "sequence_count is 0.5, must be an integer",
    ),
    "saved": (
        cp.forward_apply, without(PACK, "do") | {"entering": None, "saved": torch.zeros(4)},
        "saved is not what empty_saved or a forward returned",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_says_what_is_wrong(name):
    function, arguments, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        function(**arguments)


def test_numpys_integers_are_integers():
    arguments = numpy_of(RULE | POOL) | {"null_index": np.int32(0), "num_threads": np.int64(1)}
    assert gn.forward(**arguments).o.shape == (calls.B, calls.T, calls.HV, calls.V)


def test_no_sequence_is_summarised_at_the_end():
    assert cp.forward_prepare(**SUMMARY, first_sequence=2).transition.shape == (0, calls.HV, calls.K, calls.K)


def test_stages_refuse_transforms():
    with pytest.raises(NotImplementedError, match=r"cannot run in a transform of torch.func"):
        torch.func.grad(lambda g: cp.forward_prepare(**SUMMARY | {"g": g}).transition.sum())(SUMMARY["g"])
