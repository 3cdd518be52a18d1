"""The layer's step: convolution, rule and gated norm of a decode step in one call."""

from __future__ import annotations

from torch import Tensor

from .._operators import arguments, layer_step

_TENSORS = (
    "mixed_qkv", "a", "b", "conv_weight", "conv_state", "A_log", "state", "z", "conv_bias", "dt_bias", "norm_weight",
    "state_indices", "final_state_indices", "cu_seqlens", "previous_accept_lengths", "step_states", "step_indices",
    "out",
)  # fmt: skip


def gated_delta_layer_step(
    mixed_qkv: Tensor,
    z: Tensor | None,
    a: Tensor,
    b: Tensor,
    *,
    key_heads: int,
    conv_weight: Tensor,
    conv_state: Tensor,
    A_log: Tensor,
    state: Tensor,
    norm_weight: Tensor | None,
    conv_bias: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    null_index: int = -1,
    cu_seqlens: Tensor | None = None,
    previous_accept_lengths: Tensor | None = None,
    step_states: Tensor | None = None,
    step_indices: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    conv_activation: str | None = "silu",
    norm_activation: str = "silu",
    norm_eps: float = 1e-6,
    round_before_gate: bool = False,
    key_head_order: str = "grouped",
    out: Tensor | None = None,
) -> Tensor:
    """What lies between a layer's two projections in decode and draft verification. Returns out ``[B, T, Hv, V]``.

    The results are those of the causal convolution, ``fused_recurrent_gated_delta_rule`` and ``rms_norm_gated``, one
    after the other; what lies between them is rounded to mixed_qkv's dtype. Both states are updated in place.

    mixed_qkv: ``[B, T, 2 * key_heads * K + Hv * V]``, the channels of q, k and v side by side, before the convolution;
        an engine's ``[N, D]`` is ``mixed_qkv.unsqueeze(1)``, or with cu_seqlens ``mixed_qkv.unsqueeze(0)``.
    z: ``[B, T, Hv, V]``, the norm's gate, or None. It says Hv and V; without it ``out`` does.
    a, b: ``[B, T, Hv]``, raw: the decay is ``-exp(A_log) * softplus(a + dt_bias)``, beta is ``sigmoid(b)``, twice that
        with allow_neg_eigval.
    conv_weight, conv_bias: ``[D, W]``, W from 2 to 4, and ``[D]``. conv_activation: "silu" ("swish"), or None.
    conv_state: ``[N, D, S]``, of any strides, the last S >= W - 1 inputs, the newest one last.
    state: ``[N, Hv, K, V]``, or ``[N, Hv, V, K]`` with state_v_first.
    norm_weight ``[V]``, norm_activation, norm_eps, round_before_gate: as in ``rms_norm_gated``.
    state_indices ``[N]``: both states are pools ``[slots, ...]``, and these are the sequences' slots; one up to
        null_index is a null slot. A sequence in a null slot is a padded row: its inputs are not read but for z, and no
        state of it is written. final_state_indices ``[N]``: the slots that are written, where they are others.
    step_indices: the state after each token goes to its slot of ``state`` (or of step_states), ``[B, T]`` or, of packed
        sequences, ``[N, S]`` also; ``step_states [B, T, Hv, ...]`` takes them without indices. There is then no final
        state.
    previous_accept_lengths ``[N]``, with state_indices ``[N, S]``: how many tokens of its last draft a sequence has
        kept. Its state is in column ``previous_accept_lengths - 1``. Its conv state is in the slot of column 0, and
        holds, from the left, the W - 2 inputs before the draft and then the draft's.
    key_head_order: as in ``chunk_gated_delta_rule``.
    out: buffer for the result; otherwise it has mixed_qkv's dtype.
    There is no gradient: no argument may require one.
    """
    arguments.check_tensors(
        _TENSORS, mixed_qkv, a, b, conv_weight, conv_state, A_log, state, z, conv_bias, dt_bias, norm_weight,
        state_indices, final_state_indices, cu_seqlens, previous_accept_lengths, step_states, step_indices, out,
        required=7,
    )  # fmt: skip
    arguments.refuse_gradient("scale", scale)
    arguments.refuse_gradient("norm_eps", norm_eps)
    options = arguments.pack_options(
        False, True, allow_neg_eigval, state_v_first, use_qk_l2norm_in_kernel, key_head_order=key_head_order
    )
    if conv_activation is not None:
        if conv_activation not in ("silu", "swish"):
            raise ValueError(f"conv_activation is {conv_activation!r}, must be 'silu', 'swish' or None")
        options |= layer_step.CONV_SILU
    if norm_activation not in ("silu", "swish"):
        if norm_activation != "sigmoid":
            raise ValueError(f"norm_activation is {norm_activation!r}, must be 'silu', 'swish' or 'sigmoid'")
        if z is None:
            raise ValueError("norm_activation is 'sigmoid', but z is None: there is nothing it would act on")
        options |= layer_step.NORM_SIGMOID
    if round_before_gate:
        options |= layer_step.NORM_ROUND_BEFORE_GATE
    if step_indices is not None and step_states is None:
        options |= layer_step.STEPS_IN_STATE
    if (step_states is not None or step_indices is not None) and final_state_indices is not None:
        raise ValueError("final_state_indices is given, but with step_states or step_indices there is no final state")
    options |= arguments.first_slot_option(null_index, state_indices, final_state_indices, step_indices)
    if arguments.needs_graph(
        mixed_qkv, z, a, b, conv_weight, conv_bias, conv_state, A_log, dt_bias, state, norm_weight
    ):
        raise ValueError(_NO_GRADIENT)
    arguments.check_written(("conv_state", "state", "step_states", "out"), conv_state, state, step_states, out)
    if out is None:
        if z is None:
            raise ValueError("give out= where z is None: one of them says Hv and V")
        out = mixed_qkv.new_empty(z.shape)
    layer_step.step(
        mixed_qkv, z, a, b, conv_weight, conv_bias, conv_state, A_log, dt_bias, state, norm_weight, key_heads, options,
        state_indices, final_state_indices, cu_seqlens, previous_accept_lengths, step_states, step_indices, scale,
        norm_eps, out,
    )  # fmt: skip
    arguments.mark_written(conv_state, state, step_states, out)
    return out


_NO_GRADIENT = (
    "gated_delta_layer_step updates states in place and has no gradient, but an input requires one: call it under "
    "torch.no_grad()"
)
