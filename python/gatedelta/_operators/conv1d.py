"""The operators of the causal convolution: their options, their gradients, and the shapes of their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _lib
from . import arguments, autograd, ops, queries, refusals  # ops loads the binding

forward = refusals.raising(torch.ops.gatedelta.conv1d.default)
forward_out = refusals.raising(torch.ops.gatedelta.conv1d_out.default)
backward = refusals.raising(torch.ops.gatedelta.conv1d_bwd.default)
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


def _check_rank(x: Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"gatedelta: x must have rank 3, not {x.dim()}")


def empty_rows(x: Tensor) -> Tensor:
    """An empty tensor like x, with its order of tokens and channels in memory."""
    _check_rank(x)
    batch, tokens, channels = x.shape
    if x.stride(1) == 1 and x.stride(2) != 1 and tokens > 1 and channels > 1:
        return x.new_empty((batch, channels, tokens)).transpose(1, 2)
    return x.new_empty(x.shape)


def empty_states(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, size: int) -> Tensor:
    _check_rank(x)
    return x.new_empty((queries.sequence_count(x.shape[0], cu_seqlens), x.shape[2], size))


def _describe_inputs(args: _lib.Conv1dArgs | _lib.Conv1dBackwardArgs, given: dict[str, Any]) -> None:
    """As bindings/torch/conv1d.cpp describes them."""
    for name in ("x", "weight", "bias"):
        setattr(args.inputs, name, queries.describe(given[name], name))
    args.inputs.cu_seqlens = queries.describe(given["cu_seqlens"], "cu_seqlens", 1)
    start = given["final_state" if given.get("in_place") else "initial_state"]
    args.inputs.initial_state = queries.describe(start, "initial_state")
    args.inputs.activation = _lib.CONV1D_SILU if given["options"] & SILU else _lib.CONV1D_LINEAR


@torch.library.register_fake("gatedelta::conv1d")
def _(x, weight, bias, options, cu_seqlens, initial_state, state_size):
    given = locals()
    ops.check_devices("x", **given)
    y = empty_rows(x)
    states = empty_states(x, weight, cu_seqlens, state_size) if options & FINAL_STATE else ops.nothing(x)
    if queries.is_concrete(given):
        args = _lib.Conv1dArgs()
        _describe_inputs(args, given)
        args.out = queries.describe(y, "out")
        if options & FINAL_STATE:
            args.final_state = queries.describe(states, "final_state")
        queries.ask("gd_conv1d_workspace", args, x)
    return y, states


@torch.library.register_fake("gatedelta::conv1d_out")
def _(
    x, weight, bias, options, cu_seqlens, initial_state, initial_state_indices, first_slot, out, final_state,
    final_state_indices, in_place, previous_accept_lengths, step_states,
):  # fmt: skip
    given = locals()
    ops.check_devices("x", **given)
    if not queries.is_concrete(given):
        return
    args = _lib.Conv1dArgs()
    _describe_inputs(args, given)
    args.inputs.initial_state_indices = queries.describe_indices(initial_state_indices, "initial_state_indices")
    args.inputs.first_slot = first_slot
    for name in ("out", "final_state", "step_states"):
        setattr(args, name, queries.describe(given[name], name))
    for name in ("final_state_indices", "previous_accept_lengths"):
        setattr(args, name, queries.describe_indices(given[name], name))
    queries.ask("gd_conv1d_workspace", args, x)


@torch.library.register_fake("gatedelta::conv1d_bwd")
def _(x, weight, bias, options, cu_seqlens, initial_state, dy, dht, wanted):
    given = locals()
    ops.check_devices("x", **given)
    results = [ops.nothing(x)] * 4
    if wanted & 1:
        results[0] = empty_rows(x)
    for i, tensor in ((1, weight), (2, bias), (3, initial_state)):
        if wanted >> i & 1:
            results[i] = tensor.new_empty(tensor.shape)
    if queries.is_concrete(given):
        args = _lib.Conv1dBackwardArgs()
        _describe_inputs(args, given)
        args.dy, args.dht = queries.describe(dy, "dy"), queries.describe(dht, "dht")
        for i, name in enumerate(("dx", "dweight", "dbias", "d_initial_state")):
            if wanted >> i & 1:
                setattr(args, name, queries.describe(results[i], name))
        queries.ask("gd_conv1d_backward_workspace", args, x)
    return tuple(results)
