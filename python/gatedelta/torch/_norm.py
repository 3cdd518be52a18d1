"""The gated RMSNorm: what the arguments mean, and which operator a call takes."""

from __future__ import annotations

from torch import Tensor

from .._operators import arguments, norm

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

    Gradients reach x, gate and weight; they pass the roundings unchanged. Nothing but the inputs is saved for them.
    """
    arguments.check_tensors(_TENSORS, x, gate, weight, out, required=1)
    arguments.refuse_gradient("eps", eps)
    options = norm.activation_option(activation)
    if gate is None and options:
        raise ValueError(f"activation is {activation!r}, but gate is None: there is nothing it would act on")
    for name, tensor in (("gate", gate), ("out", out)):
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, must have that of x, {list(x.shape)}")
    if round_before_gate:
        options |= norm.ROUND_BEFORE_GATE
    needs_grad = arguments.needs_graph(x, gate, weight)
    shape = x.shape
    if len(shape) > _MAX_RANK:
        x, gate = (None if t is None else t.flatten(0, -3) for t in (x, gate))
    if out is not None:
        if needs_grad:
            raise ValueError(arguments.NO_GRADIENT)
        arguments.check_written(("out",), out)
        norm.forward_out(x, gate, weight, eps, options, out.view(x.shape) if len(shape) > _MAX_RANK else out)
        arguments.mark_written(out)
        return out
    y = (norm.RmsNormGated.apply if needs_grad else norm.forward)(x, gate, weight, eps, options)
    return y.view(shape) if len(shape) > _MAX_RANK else y
