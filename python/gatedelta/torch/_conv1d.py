"""The causal convolution: its function, its gradients, and the shapes of its operators' results."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _lib
from . import _arguments, _autograd, _ops  # _ops loads the binding

_fwd = torch.ops.gatedelta.conv1d.default
_fwd_out = torch.ops.gatedelta.conv1d_out.default
_bwd = torch.ops.gatedelta.conv1d_bwd.default
_gradients = _autograd.once(_bwd, "causal_conv1d")

# The bits of the operators' `options`, as in bindings/torch/conv1d.cpp (a test compares them).
SILU = 1 << 0
FINAL_STATE = 1 << 1  # the operator returns it
_ACTIVATIONS = {None: 0, "silu": SILU, "swish": SILU}

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
            starts from one slot and leaves its state in another. Indices up to null_index are nobody (vLLM's slot 0:
            ``null_index=0``): such a sequence starts from 0, or is not stored; with both it is a padded row, whose
            outputs are 0.
        previous_accept_lengths: ``[N]``, for pools of draft windows as vLLM keeps them. A slot holds, from column 0
            on, the W - 2 inputs before a window and the window's tokens, of which so many were accepted (at least 1).
        step_states: ``[B, T, D, W - 1]``, the last W - 1 inputs after each token, as SGLang keeps them.

    Gradients reach x, weight, bias and initial_state, from y and from the final state.
    """
    _arguments.check_tensors(
        _TENSORS, x, weight, bias, cu_seqlens, initial_state, out, initial_state_indices, final_state,
        final_state_indices, previous_accept_lengths, step_states,
    )  # fmt: skip
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be None, 'silu' or 'swish'")
    options = _ACTIVATIONS[activation]
    if weight.dim() == 3:
        if weight.shape[1] != 1:
            raise ValueError(
                f"weight has shape {list(weight.shape)}, must be [D, W] or [D, 1, W]: one filter a channel"
            )
        weight = weight.squeeze(1)
    if state_size is not None and not output_final_state:
        raise ValueError("state_size is given, but no final state is asked for: output_final_state is False")
    needs_grad = _arguments.needs_graph(x, weight, bias, initial_state)

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
            raise RuntimeError(_NO_GRADIENT)
        _arguments.check_written(("out", "final_state", "step_states"), out, final_state, step_states)
        _lib.check_null_index(null_index, initial_state_indices, final_state_indices)
        if not output_y:
            if out is not None:
                raise ValueError("out= is given, but output_y=False computes no y")
        elif out is None:
            out = _empty_rows(x)
        if output_final_state and final_state is None:
            if final_state_indices is not None:
                raise ValueError("final_state_indices needs final_state=, the pool to write to")
            final_state = _empty_states(x, weight, cu_seqlens, _state_size(weight, initial_state, state_size))
        in_place = final_state is not None and final_state is initial_state
        _fwd_out(
            x, weight, bias, options, cu_seqlens, None if in_place else initial_state, initial_state_indices,
            null_index + 1, out, final_state, final_state_indices, in_place, previous_accept_lengths, step_states,
        )  # fmt: skip
        _arguments.mark_written(out, final_state, step_states)
        return out, final_state

    size = 0
    if output_final_state:
        options |= FINAL_STATE
        size = _state_size(weight, initial_state, state_size)
    call = CausalConv1d.apply if needs_grad else _fwd
    y, states = call(x, weight, bias, options, cu_seqlens, initial_state, size)
    return y, states if output_final_state else None


_NO_GRADIENT = (
    "a call with buffers, indices, null_index, previous_accept_lengths or output_y=False has no gradient, but an input "
    "requires one: call it under torch.no_grad(), or without these"
)


def _state_size(weight: Tensor, initial_state: Tensor | None, state_size: int | None) -> int:
    if state_size is not None:
        return state_size
    return initial_state.shape[-1] if initial_state is not None else weight.shape[-1] - 1


class CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias, options, cu_seqlens, initial_state, state_size):
        return _fwd(x, weight, bias, options, cu_seqlens, initial_state, state_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, options, cu_seqlens, initial_state, _ = inputs
        ctx.has_final_state, ctx.options = bool(options & FINAL_STATE), options & ~FINAL_STATE
        ctx.save_for_backward(x, weight, bias, cu_seqlens, initial_state)
        if not ctx.has_final_state:
            ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dy, d_final_state):
        x, weight, bias, cu_seqlens, initial_state = ctx.saved_tensors
        _arguments.refuse_tangents(dy, d_final_state)
        if dy is None:
            dy = torch.zeros_like(x)
        if not ctx.has_final_state:
            d_final_state = None  # compiled graphs pass one of the empty tensor
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5)]
        wanted = sum(1 << bit for bit, needed in enumerate(needs) if needed)
        results = _gradients(x, weight, bias, ctx.options, cu_seqlens, initial_state, dy, d_final_state, wanted)
        dx, dweight, dbias, d_initial = (result if needed else None for result, needed in zip(results, needs))
        return dx, dweight, dbias, None, None, d_initial, None

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError(_arguments.NO_VMAP)


def _empty_rows(x: Tensor) -> Tensor:
    """As x, with its order of tokens and channels in memory."""
    if x.dim() != 3:
        raise RuntimeError(f"gatedelta: x must have rank 3, not {x.dim()}")
    batch, tokens, channels = x.shape
    if x.stride(1) == 1 and x.stride(2) != 1 and tokens > 1 and channels > 1:
        return x.new_empty((batch, channels, tokens)).transpose(1, 2)
    return x.new_empty(x.shape)


def _empty_states(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, size: int) -> Tensor:
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((count, x.shape[2], size))


@torch.library.register_fake("gatedelta::conv1d")
def _(x, weight, bias, options, cu_seqlens, initial_state, state_size):
    _ops.check_devices("x", x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens, initial_state=initial_state)
    states = _empty_states(x, weight, cu_seqlens, state_size) if options & FINAL_STATE else _ops._nothing(x)
    return _empty_rows(x), states


@torch.library.register_fake("gatedelta::conv1d_out")
def _(
    x, weight, bias, options, cu_seqlens, initial_state, initial_indices, first_slot, out, final_state, final_indices,
    in_place, previous_accept_lengths, step_states,
):  # fmt: skip
    _ops.check_devices(
        "x", x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens, initial_state=initial_state,
        initial_state_indices=initial_indices, out=out, final_state=final_state, final_state_indices=final_indices,
        previous_accept_lengths=previous_accept_lengths, step_states=step_states,
    )  # fmt: skip


@torch.library.register_fake("gatedelta::conv1d_bwd")
def _(x, weight, bias, options, cu_seqlens, initial_state, dy, d_final_state, wanted):
    _ops.check_devices(
        "x", x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens, initial_state=initial_state, dy=dy, dht=d_final_state
    )
    results = [_ops._nothing(x)] * 4
    if wanted & 1:
        results[0] = _empty_rows(x)
    for i, tensor in ((1, weight), (2, bias), (3, initial_state)):
        if wanted >> i & 1:
            results[i] = tensor.new_empty(tensor.shape)
    return tuple(results)
