"""The operators of the gated RMSNorm: their options, their gradients, and the shapes of their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _lib
from . import arguments, autograd, ops, queries, refusals  # ops loads the binding

forward = refusals.raising(torch.ops.gatedelta.rms_norm_gated.default)
forward_out = refusals.raising(torch.ops.gatedelta.rms_norm_gated_out.default)
backward = refusals.raising(torch.ops.gatedelta.rms_norm_gated_bwd.default)
_gradients = autograd.once(backward, "rms_norm_gated")

# The bits of the operators' `options`, as in bindings/torch/gated_norm.cpp (a test compares them).
SIGMOID = 1 << 0
ROUND_BEFORE_GATE = 1 << 1
_ACTIVATIONS = {"silu": 0, "swish": 0, "sigmoid": SIGMOID}


def activation_option(activation: str) -> int:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be 'silu', 'swish' or 'sigmoid'")
    return _ACTIVATIONS[activation]


class RmsNormGated(torch.autograd.Function):
    @staticmethod
    def forward(x, gate, weight, eps, options):
        return forward(x, gate, weight, eps, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, gate, weight, ctx.eps, ctx.options = inputs
        ctx.save_for_backward(x, gate, weight)

    @staticmethod
    def backward(ctx, dy):
        x, gate, weight = ctx.saved_tensors
        arguments.refuse_tangents(dy)
        needs = ctx.needs_input_grad[:3]
        wanted = sum(1 << bit for bit, needed in enumerate(needs) if needed)
        results = _gradients(x, gate, weight, ctx.eps, ctx.options, dy, wanted)
        return (*(result if needed else None for result, needed in zip(results, needs)), None, None)

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError(arguments.NO_VMAP)


def _describe_inputs(args: _lib.GatedNormArgs | _lib.GatedNormBackwardArgs, given: dict[str, Any]) -> None:
    """As bindings/torch/gated_norm.cpp describes them."""
    args.x = queries.describe_rows(given["x"], "x", 1)
    args.gate = queries.describe_rows(given["gate"], "gate", 1)
    args.weight = queries.describe(given["weight"], "weight", 1)
    args.activation = _lib.NORM_SIGMOID if given["options"] & SIGMOID else _lib.NORM_SILU
    args.round_before_gate = bool(given["options"] & ROUND_BEFORE_GATE)
    args.has_eps, args.eps = given["eps"] is not None, 0.0 if given["eps"] is None else given["eps"]


def _ask(given: dict[str, Any], out: Tensor) -> None:
    if queries.is_concrete(given):
        args = _lib.GatedNormArgs()
        _describe_inputs(args, given)
        args.out = queries.describe_rows(out, "out")
        queries.ask("gd_gated_norm_workspace", args, out)


@torch.library.register_fake("gatedelta::rms_norm_gated")
def _(x, gate, weight, eps, options):
    given = locals()
    ops.check_devices("x", **given)
    y = x.new_empty(x.shape)
    _ask(given, y)
    return y


@torch.library.register_fake("gatedelta::rms_norm_gated_out")
def _(x, gate, weight, eps, options, out):
    given = locals()
    ops.check_devices("x", **given)
    _ask(given, out)


@torch.library.register_fake("gatedelta::rms_norm_gated_bwd")
def _(x, gate, weight, eps, options, dy, wanted):
    given = locals()
    ops.check_devices("x", **given)
    inputs = (x, gate, weight)
    results = tuple(t.new_empty(t.shape) if wanted >> i & 1 else ops.nothing(x) for i, t in enumerate(inputs))
    if queries.is_concrete(given):
        args = _lib.GatedNormBackwardArgs()
        _describe_inputs(args, given)
        args.dy = queries.describe_rows(dy, "dy", 1)
        for i, (name, describe) in enumerate(
            (("dx", queries.describe_rows), ("dgate", queries.describe_rows), ("dweight", queries.describe))
        ):
            if wanted >> i & 1:
                setattr(args, name, describe(results[i], name))
        queries.ask("gd_gated_norm_backward_workspace", args, x)
    return results
