"""The operator of the layer's step: its options, and that it returns nothing."""

from __future__ import annotations

import torch

from . import ops  # loads the binding

step = torch.ops.gatedelta.layer_step.default

# The bits of the operator's `options` beyond those of ops, as in bindings/torch/layer_step.cpp (a test compares them).
CONV_SILU = 1 << 9
NORM_SIGMOID = 1 << 10
NORM_ROUND_BEFORE_GATE = 1 << 11
STEPS_IN_STATE = 1 << 12


@torch.library.register_fake("gatedelta::layer_step")
def _(
    mixed_qkv, z, a, b, conv_weight, conv_bias, conv_state, A_log, dt_bias, state, norm_weight, key_heads, options,
    state_indices, final_state_indices, cu_seqlens, previous_accept_lengths, step_states, step_indices, scale, eps, out,
):  # fmt: skip
    ops.check_devices("mixed_qkv", **locals())
