"""The operators of the causal convolution: their options, their gradients, and the shapes of their results."""

from __future__ import annotations

import torch
from torch import Tensor

from . import arguments, autograd, ops  # ops loads the binding

forward = torch.ops.gatedelta.conv1d.default
forward_out = torch.ops.gatedelta.conv1d_out.default
backward = torch.ops.gatedelta.conv1d_bwd.default
_gradients = autograd.once(backward, "causal_conv1d")

# The bits of the operators' `options`, as in bindings/torch/conv1d.cpp (a test compares them).
SILU = 1 << 0
FINAL_STATE = 1 << 1  # the operator returns it
_ACTIVATIONS = {None: 0, "silu": SILU, "swish": SILU}


def activation_option(activation: str | None) -> int:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be None, 'silu' or 'swish'")
    return _ACTIVATIONS[activation]


def as_matrix(weight: Tensor) -> Tensor:
    """``[D, W]`` of ``[D, W]`` or, as torch.nn.Conv1d has it, ``[D, 1, W]``."""
    if weight.dim() != 3:
        return weight
    if weight.shape[1] != 1:
        raise ValueError(f"weight has shape {list(weight.shape)}, must be [D, W] or [D, 1, W]: one filter a channel")
    return weight.squeeze(1)


class CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias, options, cu_seqlens, initial_state, state_size):
        return forward(x, weight, bias, options, cu_seqlens, initial_state, state_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, options, cu_seqlens, initial_state, _ = inputs
        ctx.has_final_state, ctx.options = bool(options & FINAL_STATE), options & ~FINAL_STATE
        ctx.save_for_backward(x, weight, bias, cu_seqlens, initial_state)
        if not ctx.has_final_state:
            ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dy, dht):
        x, weight, bias, cu_seqlens, initial_state = ctx.saved_tensors
        arguments.refuse_tangents(dy, dht)
        if dy is None:
            dy = torch.zeros_like(x)
        if not ctx.has_final_state:
            dht = None  # compiled graphs pass one of the empty tensor
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 5)]
        wanted = sum(1 << bit for bit, needed in enumerate(needs) if needed)
        results = _gradients(x, weight, bias, ctx.options, cu_seqlens, initial_state, dy, dht, wanted)
        dx, dweight, dbias, d_initial = (result if needed else None for result, needed in zip(results, needs))
        return dx, dweight, dbias, None, None, d_initial, None

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError(arguments.NO_VMAP)


def empty_rows(x: Tensor) -> Tensor:
    """An empty tensor like x, with its order of tokens and channels in memory."""
    if x.dim() != 3:
        raise RuntimeError(f"gatedelta: x must have rank 3, not {x.dim()}")
    batch, tokens, channels = x.shape
    if x.stride(1) == 1 and x.stride(2) != 1 and tokens > 1 and channels > 1:
        return x.new_empty((batch, channels, tokens)).transpose(1, 2)
    return x.new_empty(x.shape)


def empty_states(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, size: int) -> Tensor:
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((count, x.shape[2], size))


@torch.library.register_fake("gatedelta::conv1d")
def _(x, weight, bias, options, cu_seqlens, initial_state, state_size):
    ops.check_devices("x", x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens, initial_state=initial_state)
    states = empty_states(x, weight, cu_seqlens, state_size) if options & FINAL_STATE else ops.nothing(x)
    return empty_rows(x), states


@torch.library.register_fake("gatedelta::conv1d_out")
def _(
    x, weight, bias, options, cu_seqlens, initial_state, initial_state_indices, first_slot, out, final_state,
    final_state_indices, in_place, previous_accept_lengths, step_states,
):  # fmt: skip
    ops.check_devices("x", **locals())


@torch.library.register_fake("gatedelta::conv1d_bwd")
def _(x, weight, bias, options, cu_seqlens, initial_state, dy, dht, wanted):
    ops.check_devices("x", **locals())
    results = [ops.nothing(x)] * 4
    if wanted & 1:
        results[0] = empty_rows(x)
    for i, tensor in ((1, weight), (2, bias), (3, initial_state)):
        if wanted >> i & 1:
            results[i] = tensor.new_empty(tensor.shape)
    return tuple(results)
