"""FLA's calls of its short convolution and its gated norm as calls of ours. FLA's autograd functions call these, so
nothing here records a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from .._operators import conv1d, norm
from .._plugins import limits
from ..torch import causal_conv1d, rms_norm_gated

_TAPS = (2, 3, 4)
_MAX_NORM_DIM = 512


def conv_refusal(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False,
) -> str | None:  # fmt: skip
    if weight is None or weight.dim() != 2 or weight.shape[1] not in _TAPS:
        return f"weight is {None if weight is None else list(weight.shape)}, [D, 2] to [D, 4] is taken"
    if activation not in (None, "silu", "swish"):
        return f"activation is {activation!r}"
    tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "initial_state": initial_state}
    return limits.tensors_refusal(x.device, tensors)


def conv_fwd(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None, cu_seqlens=None, **hints
) -> tuple[Tensor, Tensor | None]:
    """FLA's states have W columns, one more than are needed."""
    flat = _channels(x, weight)
    with torch.no_grad():
        y, state = causal_conv1d(
            flat, weight, bias, activation, cu_seqlens, initial_state, output_final_state,
            state_size=weight.shape[1] if output_final_state else None, out=_buffer(flat, residual),
        )  # fmt: skip
    return _with_residual(y.reshape(x.shape).contiguous(), residual, x.dtype), state


def _buffer(x: Tensor, residual: Tensor | None) -> Tensor | None:
    """A float32 buffer: FLA rounds the result after it has added the residual."""
    return None if residual is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _with_residual(y: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    return y if residual is None else (y + residual.reshape(y.shape)).to(dtype)


def conv_bwd_refusal(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None, **hints
) -> str | None:
    return conv_refusal(x, weight, bias, residual, initial_state, False, activation, cu_seqlens, **hints)


def conv_bwd(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None, **hints
) -> tuple[Tensor | None, ...]:
    options = conv1d.activation_option(activation)
    wanted = 0b11 | (bias is not None) << 2 | (initial_state is not None) << 3
    flat = _channels(x, weight)
    dx, dw, db, dh = conv1d.backward(
        flat, weight, bias, options, cu_seqlens, initial_state, dy.reshape(flat.shape), dht, wanted
    )
    return (
        dx.reshape(x.shape), dw, None if bias is None else db, None if residual is None else dy,
        None if initial_state is None else dh,
    )  # fmt: skip


def conv_update_refusal(x, cache, residual=None, weight=None, bias=None, activation=None) -> str | None:
    return conv_refusal(x, weight, bias, residual, cache, True, activation)


def conv_update(x, cache, residual=None, weight=None, bias=None, activation=None) -> tuple[Tensor, Tensor]:
    """One token of each sequence: x is [N, D], [N, 1, D] or [1, N, D], the cache is updated in place."""
    tokens = x.reshape(-1, 1, weight.shape[0])
    with torch.no_grad():
        y, _ = causal_conv1d(
            tokens, weight, bias, activation, None, cache, out=_buffer(tokens, residual), final_state=cache
        )
    return _with_residual(y.reshape(x.shape), residual, x.dtype), cache


def _channels(x: Tensor, weight: Tensor) -> Tensor:
    """[B, T, D] of [B, T, D] or [B, T, H, D / H]."""
    return x if x.dim() == 3 and x.shape[-1] == weight.shape[0] else x.flatten(2)


def norm_refusal(
    x, g, weight, bias, activation="swish", eps=1e-5, residual=None, out_dtype=None, residual_dtype=None,
    is_rms_norm=False,
) -> str | None:  # fmt: skip
    if not is_rms_norm or bias is not None:
        return "a norm with a mean or a bias: RMSNorm alone is taken"
    if residual is not None or residual_dtype not in (None, x.dtype):
        return "residual: the sum with it is not part of the norm"
    if activation not in ("silu", "swish", "sigmoid"):
        return f"activation is {activation!r}"
    if x.shape[-1] % 16 or x.shape[-1] > _MAX_NORM_DIM:
        return f"D is {x.shape[-1]}, multiples of 16 up to {_MAX_NORM_DIM} are taken"
    if out_dtype not in (None, *limits.DTYPES):
        return f"out_dtype is {out_dtype}"
    return limits.tensors_refusal(x.device, {"x": x, "g": g, "weight": weight})


def norm_fwd(
    x, g, weight, bias, activation="swish", eps=1e-5, residual=None, out_dtype=None, residual_dtype=None,
    is_rms_norm=False,
) -> tuple[Tensor, None, None, Tensor]:  # fmt: skip
    """Returns (y, mean, rstd, x). FLA hands mean and rstd to the backward, which computes its own."""
    with torch.no_grad():
        out = None if out_dtype in (None, x.dtype) else x.new_empty(x.shape, dtype=out_dtype)
        return rms_norm_gated(x, g, weight, eps, activation, out=out), None, None, x


def norm_bwd_refusal(
    dy, x, g, weight, bias, activation="swish", eps=1e-5, mean=None, rstd=None, dresidual=None, has_residual=False,
    is_rms_norm=False, x_dtype=None, recompute_output=False,
) -> str | None:  # fmt: skip
    if has_residual:
        return "residual: the sum with it is not part of the norm"
    return norm_refusal(x, g, weight, bias, activation, eps, is_rms_norm=is_rms_norm)


def norm_bwd(
    dy, x, g, weight, bias, activation="swish", eps=1e-5, mean=None, rstd=None, dresidual=None, has_residual=False,
    is_rms_norm=False, x_dtype=None, recompute_output=False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns (dx, dg, dweight, dbias, dresidual) and, if requested, y. dresidual comes of a call with prenorm, whose
    second result is x itself."""
    wanted = 0b11 | (weight is not None) << 2
    dx, dg, dw = norm.backward(x, g, weight, eps, norm.activation_option(activation), dy, wanted)
    if dresidual is not None:
        dx = dx + dresidual
    dtype = x_dtype or x.dtype
    results = dx.to(dtype), dg.to(x_dtype or g.dtype), dw if weight is not None else None, None, None
    if not recompute_output:
        return results
    y = norm_fwd(x, g, weight, None, activation, eps, out_dtype=dy.dtype, is_rms_norm=True)[0]
    return *results, y
