"""The causal convolution: what the arguments mean, and which operator a call takes."""

from __future__ import annotations

from torch import Tensor

from .. import _lib
from .._operators import arguments, conv1d

_TENSORS = (
    "x", "weight", "bias", "cu_seqlens", "initial_state", "out", "initial_state_indices", "final_state",
    "final_state_indices", "previous_accept_lengths", "step_states",
)  # fmt: skip


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    state_size: int | None = None,
    out: Tensor | None = None,
    output_y: bool = True,
    initial_state_indices: Tensor | None = None,
    final_state: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    null_index: int = -1,
    previous_accept_lengths: Tensor | None = None,
    step_states: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Causal depthwise convolution, ``y[t] = act(bias + sum(weight[i] * x[t - W + 1 + i]))`` per channel, in float32.

    Returns (y, final_state or None). Prefill, decode and draft windows alike: any number of tokens.

    x: ``[B, T, D]``. Its memory may have channels or tokens contiguous (``hidden.transpose(1, 2)`` of ``[B, D, T]``);
        y has x's dtype, and lies as x does. Tensors are float32, bfloat16 or float16, whatever the others are.
    weight: ``[D, W]`` or, as torch.nn.Conv1d has it, ``[D, 1, W]``; W from 2 to 4.
    activation: None, "silu" or its other name, "swish".
    cu_seqlens: offsets of packed sequences, ``[N + 1]``; then B is 1. Nothing leaks from one into the next.
    initial_state: ``[N, D, S]``, the last S >= W - 1 inputs before each sequence, the newest last. None means 0.
    output_final_state: return the states at the ends, too, ``[N, D, state_size]`` in x's dtype. state_size is that of
        initial_state, or W - 1, unless given.

    Serving, without gradients:
        out, final_state, step_states: buffers to write to. final_state may be initial_state itself: in place.
        output_y: False computes states alone.
        initial_state_indices, final_state_indices: the states are pools ``[slots, D, S]``, of any strides; a sequence
            starts from one slot and leaves its state in another. Indices up to null_index are null (vLLM's slot 0:
            ``null_index=0``): such a sequence starts from 0, or is not stored; with both it is a padded row, whose
            outputs are 0.
        previous_accept_lengths: ``[N]``, for pools of draft windows as vLLM keeps them. A slot holds, from column 0
            on, the W - 2 inputs before a window and the window's tokens, of which so many were accepted (at least 1).
        step_states: ``[B, T, D, W - 1]``, the last W - 1 inputs after each token, as SGLang keeps them.

    Gradients reach x, weight, bias and initial_state, from y and from the final state.
    """
    arguments.check_tensors(
        _TENSORS, x, weight, bias, cu_seqlens, initial_state, out, initial_state_indices, final_state,
        final_state_indices, previous_accept_lengths, step_states, required=2,
    )  # fmt: skip
    options = conv1d.activation_option(activation)
    weight = conv1d.as_matrix(weight)
    if state_size is not None and not output_final_state:
        raise ValueError("state_size is given, but no final state is asked for: output_final_state is False")
    needs_grad = arguments.needs_graph(x, weight, bias, initial_state)

    if (
        out is not None
        or final_state is not None
        or not output_y
        or initial_state_indices is not None
        or final_state_indices is not None
        or null_index != -1
        or previous_accept_lengths is not None
        or step_states is not None
    ):
        if needs_grad:
            raise ValueError(_NO_GRADIENT)
        arguments.check_written(("out", "final_state", "step_states"), out, final_state, step_states)
        _lib.check_null_index(null_index, initial_state_indices, final_state_indices)
        if not output_y:
            if out is not None:
                raise ValueError("out= is given, but output_y=False computes no y")
        elif out is None:
            out = conv1d.empty_rows(x)
        if output_final_state and final_state is None:
            if final_state_indices is not None:
                raise ValueError("final_state_indices needs final_state=, the pool to write to")
            final_state = conv1d.empty_states(x, weight, cu_seqlens, _state_size(weight, initial_state, state_size))
        in_place = final_state is not None and final_state is initial_state
        conv1d.forward_out(
            x, weight, bias, options, cu_seqlens, None if in_place else initial_state, initial_state_indices,
            null_index + 1, out, final_state, final_state_indices, in_place, previous_accept_lengths, step_states,
        )  # fmt: skip
        arguments.mark_written(out, final_state, step_states)
        return out, final_state

    size = 0
    if output_final_state:
        options |= conv1d.FINAL_STATE
        size = _state_size(weight, initial_state, state_size)
    call = conv1d.CausalConv1d.apply if needs_grad else conv1d.forward
    y, states = call(x, weight, bias, options, cu_seqlens, initial_state, size)
    return y, states if output_final_state else None


_NO_GRADIENT = (
    "a call with buffers, indices, null_index, previous_accept_lengths or output_y=False has no gradient, but an input "
    "requires one: call it under torch.no_grad(), or without these"
)


def _state_size(weight: Tensor, initial_state: Tensor | None, state_size: int | None) -> int:
    if state_size is not None:
        _lib.check_integer("state_size", state_size)
        if state_size < 0:
            raise ValueError(f"state_size is {state_size}, must not be negative")
        return state_size
    if initial_state is not None:
        return initial_state.shape[-1] if initial_state.dim() else 0  # the operator refuses other ranks
    return max(0, weight.shape[-1] - 1) if weight.dim() else 0
