"""The gated RMSNorm: its function, its gradients, and the shapes of its operators' results."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _arguments, _autograd, _ops  # _ops loads the binding

_fwd = torch.ops.gatedelta.rms_norm_gated.default
_fwd_out = torch.ops.gatedelta.rms_norm_gated_out.default
_bwd = torch.ops.gatedelta.rms_norm_gated_bwd.default
_gradients = _autograd.once(_bwd, "rms_norm_gated")

# The bits of the operators' `options`, as in bindings/torch/gated_norm.cpp (a test compares them).
SIGMOID = 1 << 0
ROUND_BEFORE_GATE = 1 << 1
_ACTIVATIONS = {"silu": 0, "swish": 0, "sigmoid": SIGMOID}
_MAX_RANK = 4  # of the operators

_TENSORS = ("x", "gate", "weight", "out")


def rms_norm_gated(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-6,
    activation: str = "silu",
    round_before_gate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``weight * x / sqrt(mean(x ** 2) + eps) * act(gate)`` over the last dimension, computed in float32.

    x: ``[..., D]``, any rank, for instance the rule's output ``[B, T, Hv, V]``; D a multiple of 16 up to 512. The
        result has its dtype and shape. Each tensor is float32, bfloat16 or float16, whatever the others are.
    gate: of x's shape, or None: then there is no gate.
    weight: ``[D]``, or None: then it is 1.
    activation: of the gate, "silu" (or its other name, "swish") or "sigmoid".
    round_before_gate: the normalised row is rounded to x's dtype before the weight is applied, and the product with
        a weight of the same dtype once more before the gate is. transformers' RMSNormGated does that; FLA's rounds the
        result alone, as this function does by default.
    out: a buffer for the result, of any of these dtypes. It has no gradient, and neither may the inputs require one.

    Gradients reach x, gate and weight; they pass the roundings unchanged. Nothing but the inputs is kept for them.
    """
    _arguments.check_tensors(_TENSORS, x, gate, weight, out)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be 'silu', 'swish' or 'sigmoid'")
    options = _ACTIVATIONS[activation]
    if gate is None and options:
        raise ValueError(f"activation is {activation!r}, but gate is None: there is nothing it would act on")
    for name, tensor in (("gate", gate), ("out", out)):
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, must have that of x, {list(x.shape)}")
    if round_before_gate:
        options |= ROUND_BEFORE_GATE
    needs_grad = _arguments.needs_graph(x, gate, weight)
    shape = x.shape
    if len(shape) > _MAX_RANK:
        x, gate = (None if t is None else t.flatten(0, -3) for t in (x, gate))
    if out is not None:
        if needs_grad:
            raise ValueError(_arguments.NO_GRADIENT)
        _arguments.check_written(("out",), out)
        _fwd_out(x, gate, weight, eps, options, out.view(x.shape) if len(shape) > _MAX_RANK else out)
        _arguments.mark_written(out)
        return out
    y = (RmsNormGated.apply if needs_grad else _fwd)(x, gate, weight, eps, options)
    return y.view(shape) if len(shape) > _MAX_RANK else y


class RmsNormGated(torch.autograd.Function):
    @staticmethod
    def forward(x, gate, weight, eps, options):
        return _fwd(x, gate, weight, eps, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, gate, weight, ctx.eps, ctx.options = inputs
        ctx.save_for_backward(x, gate, weight)

    @staticmethod
    def backward(ctx, dy):
        x, gate, weight = ctx.saved_tensors
        _arguments.refuse_tangents(dy)
        needs = ctx.needs_input_grad[:3]
        wanted = sum(1 << bit for bit, needed in enumerate(needs) if needed)
        results = _gradients(x, gate, weight, ctx.eps, ctx.options, dy, wanted)
        return (*(result if needed else None for result, needed in zip(results, needs)), None, None)

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError(_arguments.NO_VMAP)


@torch.library.register_fake("gatedelta::rms_norm_gated")
def _(x, gate, weight, eps, options):
    _ops.check_devices("x", x=x, gate=gate, weight=weight)
    return x.new_empty(x.shape)


@torch.library.register_fake("gatedelta::rms_norm_gated_out")
def _(x, gate, weight, eps, options, out):
    _ops.check_devices("x", x=x, gate=gate, weight=weight, out=out)


@torch.library.register_fake("gatedelta::rms_norm_gated_bwd")
def _(x, gate, weight, eps, options, dy, wanted):
    _ops.check_devices("x", x=x, gate=gate, weight=weight, dy=dy)
    return tuple(t.new_empty(t.shape) if wanted >> i & 1 else _ops._nothing(x) for i, t in enumerate((x, gate, weight)))
