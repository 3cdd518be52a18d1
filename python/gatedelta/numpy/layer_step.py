"""The layer's step on numpy arrays."""

from __future__ import annotations

import numpy as np

from .. import _lib
from . import arrays

_CONV_ACTIVATIONS = {None: _lib.CONV1D_LINEAR, "silu": _lib.CONV1D_SILU, "swish": _lib.CONV1D_SILU}
_NORM_ACTIVATIONS = {"silu": _lib.NORM_SILU, "swish": _lib.NORM_SILU, "sigmoid": _lib.NORM_SIGMOID}


def layer_step(
    mixed_qkv: np.ndarray,
    z: np.ndarray | None,
    a: np.ndarray,
    b: np.ndarray,
    *,
    key_heads: int,
    conv_weight: np.ndarray,
    conv_state: np.ndarray,
    A_log: np.ndarray,
    state: np.ndarray,
    norm_weight: np.ndarray | None,
    conv_bias: np.ndarray | None = None,
    dt_bias: np.ndarray | None = None,
    state_indices: np.ndarray | None = None,
    final_state_indices: np.ndarray | None = None,
    null_index: int = -1,
    cu_seqlens: np.ndarray | None = None,
    previous_accept_lengths: np.ndarray | None = None,
    step_states: np.ndarray | None = None,
    step_indices: np.ndarray | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    conv_activation: str | None = "silu",
    norm_activation: str = "silu",
    norm_eps: float = 1e-6,
    round_before_gate: bool = False,
    key_head_order: str = "grouped",
    out: np.ndarray | None = None,
    num_threads: int | None = None,
) -> np.ndarray:
    """As ``gatedelta.torch.gated_delta_layer_step``: both states are updated in place, out is returned."""
    arrays.check_given(
        mixed_qkv=mixed_qkv, a=a, b=b, conv_weight=conv_weight, conv_state=conv_state, A_log=A_log, state=state
    )
    _lib.check_integer("key_heads", key_heads)
    if conv_activation not in _CONV_ACTIVATIONS:
        raise ValueError(f"conv_activation is {conv_activation!r}, must be 'silu', 'swish' or None")
    if norm_activation not in _NORM_ACTIVATIONS:
        raise ValueError(f"norm_activation is {norm_activation!r}, must be 'silu', 'swish' or 'sigmoid'")
    if (step_states is not None or step_indices is not None) and final_state_indices is not None:
        raise ValueError("final_state_indices is given, but with step_states or step_indices there is no final state")
    if out is None:
        if z is None:
            raise ValueError("give out= where z is None: one of them says Hv and V")
        out = np.empty(z.shape, mixed_qkv.dtype)
    options = _lib.RuleOptions(
        scale, use_qk_l2norm_in_kernel, True, True, allow_neg_eigval, state_v_first, key_head_order
    )
    tensor = arrays.tensor
    args = _lib.LayerStepArgs()
    args.key_heads = key_heads

    conv = args.conv.inputs
    conv.x = tensor(mixed_qkv, "mixed_qkv")
    conv.weight = tensor(conv_weight, "conv_weight")
    conv.bias = tensor(conv_bias, "conv_bias")
    conv.initial_state = args.conv.final_state = tensor(conv_state, "conv_state", written=True)
    conv.activation = _CONV_ACTIVATIONS[conv_activation]

    rule = args.rule
    rule.inputs.g = tensor(a, "a")
    rule.inputs.beta = tensor(b, "b")
    rule.inputs.A_log = tensor(A_log, "A_log")
    rule.inputs.dt_bias = tensor(dt_bias, "dt_bias")
    rule.inputs.cu_seqlens = tensor(cu_seqlens, "cu_seqlens")
    rule.inputs.initial_state = tensor(state, "state", written=True)
    rule.inputs.initial_state_indices = tensor(state_indices, "state_indices")
    _lib.set_options(rule.inputs, options)
    arrays.set_null_index(rule, null_index, state_indices, final_state_indices, step_indices)
    rule.previous_accept_lengths = tensor(previous_accept_lengths, "previous_accept_lengths")
    if step_states is None and step_indices is None:
        rule.final_state = rule.inputs.initial_state
        written = state_indices if final_state_indices is None else final_state_indices
        rule.final_state_indices = tensor(written, "final_state_indices")
    else:
        rule.step_states = tensor(state if step_states is None else step_states, "step_states", written=True)
        rule.step_indices = tensor(step_indices, "step_indices")

    norm = args.norm
    norm.gate = tensor(z, "z")
    norm.weight = tensor(norm_weight, "norm_weight")
    norm.activation = _NORM_ACTIVATIONS[norm_activation]
    norm.round_before_gate = bool(round_before_gate)
    norm.has_eps = 1
    norm.eps = norm_eps
    norm.out = tensor(out, "out", written=True)
    arrays.set_threads(args, num_threads)
    arrays.run("gd_layer_step", args)
    return out
