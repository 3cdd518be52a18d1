"""Requests of an engine, and what their outputs and states must be, in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Shape:
    key_heads: int = 2
    value_heads: int = 4
    K: int = 32
    V: int = 32
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.K + self.value_heads * self.V


def shape_for(device: str, dtype: torch.dtype) -> Shape:
    """On a GPU heads of 128 in bfloat16, for which Hopper has kernels of its own, and others in other dtypes."""
    if device == "cpu":
        return Shape()
    return Shape(K=128, V=128) if dtype == torch.bfloat16 else Shape(K=48, V=64)


class Weights:
    def __init__(self, shape: Shape, dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
        def randn(*size):
            return torch.randn(*size, generator=generator).to(device)

        self.shape, self.dtype = shape, dtype
        self.conv = (randn(shape.channels, shape.taps) * 0.5).to(dtype)
        self.A_log = randn(shape.value_heads)
        self.dt_bias = randn(shape.value_heads).to(dtype)
        self.norm = randn(shape.V).to(dtype)


@dataclass
class Request:
    slots: list[int]
    state: torch.Tensor | None = None  # [Hv, V, K] after the tokens it has kept; None: it has none yet
    tail: torch.Tensor | None = None  # the convolution's inputs before the next token, [W - 1, D]
    accepted: int = 1  # of its last window: the column of its state

    def keep(self, x: torch.Tensor, states: torch.Tensor, count: int) -> None:
        """The first tokens of a step."""
        self.tail = torch.cat([self.tail, x[:count].double()])[-self.tail.shape[0] :]
        self.state, self.accepted = states[count - 1], count


def outputs(weights: Weights, request: Request, x, a, b, z, eps: float = 1e-6, activation: str = "silu"):
    """o, normed o [T, Hv, V] and the state after each token [T, Hv, V, K] of the next tokens of a request."""
    shape, double = weights.shape, torch.float64
    if request.state is None:
        request.state = x.new_zeros(shape.value_heads, shape.V, shape.K, dtype=double)
        request.tail = x.new_zeros(shape.taps - 1, shape.channels, dtype=double)
    a, b = a.to(double), b.to(double)
    padded = torch.cat([request.tail, x.to(double)]).T[None]
    y = F.silu(F.conv1d(padded, weights.conv.to(double)[:, None], groups=shape.channels))[0].T
    y = y.to(weights.dtype).to(double)  # it is stored between convolution and rule
    width = shape.key_heads * shape.K
    q, k, v = y.split([width, width, shape.value_heads * shape.V], 1)
    group = shape.value_heads // shape.key_heads

    def heads(t):
        t = t.unflatten(1, (shape.key_heads, shape.K))
        return (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1)

    q, k, v = heads(q) * shape.K**-0.5, heads(k), v.unflatten(1, (shape.value_heads, shape.V))
    decay = torch.exp(-weights.A_log.to(double).exp() * F.softplus(a + weights.dt_bias.to(double)))
    beta = b.sigmoid()
    state, o, states = request.state, [], []
    for t in range(x.shape[0]):
        state = state * decay[t, :, None, None]
        delta = (v[t] - (state @ k[t, :, :, None]).squeeze(-1)) * beta[t, :, None]
        state = state + delta[:, :, None] * k[t, :, None, :]
        o.append((state @ q[t, :, :, None]).squeeze(-1))
        states.append(state)
    o = torch.stack(o)
    if z is None:
        return o, None, torch.stack(states)
    rounded = o.to(weights.dtype).to(double)
    normed = rounded * torch.rsqrt(rounded.square().mean(-1, keepdim=True) + eps) * weights.norm.to(double)
    gate = z.to(double)
    return o, normed * (gate.sigmoid() if activation == "sigmoid" else F.silu(gate)), torch.stack(states)


BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def hardness(o: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """By how much more than a state's relative error that of the normed output may be, head by head.

    A query finds about |S| / K in a state where nothing cancels. Where it finds less, the error is still that of
    |S| / K, and the norm brings the little it found, and its error, back to size. Of several tokens the median counts.
    """
    usual = states.flatten(2).norm(dim=-1) / states.shape[-1]
    return (usual / o.norm(dim=-1)).clamp(min=1).median(0).values


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, hardness: float | torch.Tensor = 1) -> None:
    """By norm, head by head (dimension 1)."""
    assert got.shape == expected.shape and got.isfinite().all()
    dims = tuple(d for d in range(got.dim()) if d != 1)
    error = (got.to(torch.float64) - expected).square().sum(dims).sqrt() / expected.square().sum(dims).sqrt()
    assert (error / hardness).max().item() <= BOUNDS[dtype], (error, hardness)
