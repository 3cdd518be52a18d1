"""The gated RMSNorm on numpy arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import _lib
from . import arrays

_ACTIVATIONS = {"silu": _lib.NORM_SILU, "swish": _lib.NORM_SILU, "sigmoid": _lib.NORM_SIGMOID}
_RANK = 4  # of rows in the C ABI


class NormGradients(NamedTuple):
    """Each is None where the input is."""

    dx: np.ndarray
    dgate: np.ndarray | None
    dweight: np.ndarray | None


def rms_norm_gated(
    x: np.ndarray,
    gate: np.ndarray | None,
    weight: np.ndarray | None,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    round_before_gate: bool = False,
    out: np.ndarray | None = None,
    num_threads: int | None = None,
) -> np.ndarray:
    """``weight * x / sqrt(mean(x ** 2) + eps) * act(gate)`` over the last dimension, for up to four dimensions."""
    arrays.check_given(x=x)
    args = _lib.GatedNormArgs()
    _set_inputs(args, x, gate, weight, eps, activation, round_before_gate)
    if out is None:
        out = np.empty(x.shape, x.dtype)
    args.out = _rows(out, "out", x, written=True)
    arrays.set_threads(args, num_threads)
    arrays.run("gd_gated_norm", args)
    return out


def rms_norm_gated_backward(
    x: np.ndarray,
    gate: np.ndarray | None,
    weight: np.ndarray | None,
    dy: np.ndarray,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    round_before_gate: bool = False,
    num_threads: int | None = None,
) -> NormGradients:
    """Gradients of ``rms_norm_gated`` from that of its result. Each has the dtype of what it is the gradient of."""
    arrays.check_given(x=x, dy=dy)
    args = _lib.GatedNormBackwardArgs()
    _set_inputs(args, x, gate, weight, eps, activation, round_before_gate)
    args.dy = _rows(dy, "dy", x)
    gradients = NormGradients(*(None if t is None else np.empty(t.shape, t.dtype) for t in (x, gate, weight)))
    args.dx = _rows(gradients.dx, "dx", x, written=True)
    args.dgate = _rows(gradients.dgate, "dgate", x, written=True)
    args.dweight = arrays.tensor(gradients.dweight, "dweight", written=True)
    arrays.set_threads(args, num_threads)
    arrays.run("gd_gated_norm_backward", args)
    return gradients


def _set_inputs(args, x, gate, weight, eps, activation, round_before_gate) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, must be 'silu', 'swish' or 'sigmoid'")
    if gate is None and _ACTIVATIONS[activation] != _lib.NORM_SILU:
        raise ValueError(f"activation is {activation!r}, but gate is None: there is nothing it would act on")
    args.x = _rows(x, "x", x)
    args.gate = _rows(gate, "gate", x)
    args.weight = arrays.tensor(weight, "weight")
    args.activation = _ACTIVATIONS[activation]
    args.round_before_gate = bool(round_before_gate)
    args.has_eps = 1
    args.eps = eps


def _rows(array: np.ndarray | None, name: str, x: np.ndarray, written: bool = False) -> _lib.Tensor:
    """The array as [B, T, H, D], with missing dimensions in front."""
    result = arrays.tensor(array, name, written)
    if array is None:
        return result
    if not 1 <= array.ndim <= _RANK:
        raise ValueError(f"{name} has rank {array.ndim}, must be from 1 to {_RANK}")
    if array.shape != x.shape:
        raise ValueError(f"{name} has shape {list(array.shape)}, must have that of x, {list(x.shape)}")
    missing = _RANK - array.ndim
    result.shape[:_RANK] = [1] * missing + list(result.shape[: array.ndim])
    result.stride[:_RANK] = [0] * missing + list(result.stride[: array.ndim])
    result.rank = _RANK
    return result
