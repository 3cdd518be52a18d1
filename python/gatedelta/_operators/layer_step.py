"""The operator of the layer's step: its options, and that it returns nothing."""

from __future__ import annotations

from typing import Any

import torch

from .. import _lib
from . import ops, queries, refusals  # ops loads the binding

step = refusals.raising(torch.ops.gatedelta.layer_step.default)

# The bits of the operator's `options` beyond those of ops, as in bindings/torch/layer_step.cpp (a test compares them).
CONV_SILU = 1 << 9
NORM_SIGMOID = 1 << 10
NORM_ROUND_BEFORE_GATE = 1 << 11
STEPS_IN_STATE = 1 << 12


def _describe_call(given: dict[str, Any]) -> _lib.LayerStepArgs:
    """As bindings/torch/layer_step.cpp describes it."""
    options = given["options"]
    args = _lib.LayerStepArgs()
    args.key_heads = given["key_heads"]
    conv, rule, norm = args.conv, args.rule, args.norm
    conv.inputs.x = queries.describe(given["mixed_qkv"], "mixed_qkv")
    conv.inputs.weight = queries.describe(given["conv_weight"], "conv_weight")
    conv.inputs.bias = queries.describe(given["conv_bias"], "conv_bias")
    conv.inputs.initial_state = conv.final_state = queries.describe(given["conv_state"], "conv_state")
    conv.inputs.activation = _lib.CONV1D_SILU if options & CONV_SILU else _lib.CONV1D_LINEAR

    inputs = rule.inputs
    inputs.g, inputs.beta = queries.describe(given["a"], "a"), queries.describe(given["b"], "b")
    inputs.A_log = queries.describe(given["A_log"], "A_log")
    inputs.dt_bias = queries.describe(given["dt_bias"], "dt_bias")
    inputs.cu_seqlens = queries.describe(given["cu_seqlens"], "cu_seqlens", 1)
    inputs.initial_state = queries.describe(given["state"], "state")
    inputs.initial_state_indices = queries.describe_indices(given["state_indices"], "state_indices")
    inputs.gate = _lib.GATE_RAW
    inputs.beta_kind = _lib.BETA_LOGIT_DOUBLED if options & ops.BETA_LOGIT_DOUBLED else _lib.BETA_LOGIT
    inputs.state_layout = _lib.STATE_VK if options & ops.STATE_V_FIRST else _lib.STATE_KV
    inputs.l2norm = bool(options & ops.L2NORM)
    inputs.key_head_order = _lib.KEY_HEAD_ORDERS["tiled" if options & ops.TILED_KEY_HEADS else "grouped"]
    inputs.has_scale = given["scale"] is not None
    inputs.scale = given["scale"] if inputs.has_scale else 0.0
    inputs.first_slot = options >> ops.FIRST_SLOT_SHIFT
    steps = queries.describe(given["step_states"], "step_states")
    rule.step_states = inputs.initial_state if options & STEPS_IN_STATE else steps
    rule.step_indices = queries.describe_indices(given["step_indices"], "step_indices")
    written = given["final_state_indices"]
    if not options & STEPS_IN_STATE and given["step_states"] is None:
        rule.final_state = inputs.initial_state
        written = given["state_indices"] if written is None else written
    rule.final_state_indices = queries.describe_indices(written, "final_state_indices")
    rule.previous_accept_lengths = queries.describe_indices(given["previous_accept_lengths"], "previous_accept_lengths")

    norm.gate = queries.describe(given["z"], "z", 1)
    norm.weight = queries.describe(given["norm_weight"], "norm_weight", 1)
    norm.activation = _lib.NORM_SIGMOID if options & NORM_SIGMOID else _lib.NORM_SILU
    norm.round_before_gate = bool(options & NORM_ROUND_BEFORE_GATE)
    norm.has_eps = given["eps"] is not None
    norm.eps = given["eps"] if norm.has_eps else 0.0
    norm.out = queries.describe(given["out"], "out")
    return args


@torch.library.register_fake("gatedelta::layer_step")
def _(
    mixed_qkv, z, a, b, conv_weight, conv_bias, conv_state, A_log, dt_bias, state, norm_weight, key_heads, options,
    state_indices, final_state_indices, cu_seqlens, previous_accept_lengths, step_states, step_indices, scale, eps, out,
):  # fmt: skip
    given = locals()
    ops.check_devices("mixed_qkv", **given)
    if queries.is_concrete(given):
        queries.ask("gd_layer_step_workspace", _describe_call(given), mixed_qkv)
