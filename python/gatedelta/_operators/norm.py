"""The operators of the gated RMSNorm: their options, their gradients, and the shapes of their results."""

from __future__ import annotations

import torch

from . import arguments, autograd, ops  # ops loads the binding

forward = torch.ops.gatedelta.rms_norm_gated.default
forward_out = torch.ops.gatedelta.rms_norm_gated_out.default
backward = torch.ops.gatedelta.rms_norm_gated_bwd.default
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


@torch.library.register_fake("gatedelta::rms_norm_gated")
def _(x, gate, weight, eps, options):
    ops.check_devices("x", x=x, gate=gate, weight=weight)
    return x.new_empty(x.shape)


@torch.library.register_fake("gatedelta::rms_norm_gated_out")
def _(x, gate, weight, eps, options, out):
    ops.check_devices("x", x=x, gate=gate, weight=weight, out=out)


@torch.library.register_fake("gatedelta::rms_norm_gated_bwd")
def _(x, gate, weight, eps, options, dy, wanted):
    ops.check_devices("x", x=x, gate=gate, weight=weight, dy=dy)
    return tuple(t.new_empty(t.shape) if wanted >> i & 1 else ops.nothing(x) for i, t in enumerate((x, gate, weight)))
