"""The convolution over a group: each piece gets the inputs before it from the ranks that hold them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._operators import arguments, conv1d
from .agreement import tensor_fields
from .collectives import all_gather
from .context import Context
from .foreign import as_context
from .layout import Layout, Piece, halo_sources

FUNCTION = "causal_conv1d"


class _Halo(torch.autograd.Function):
    """The inputs before each of this rank's pieces, [pieces, taps, D], from whoever holds them."""

    @staticmethod
    def forward(ctx, context, taps, x):
        ctx.context, ctx.taps, ctx.shape = context, taps, x.shape
        tails = x.new_zeros(context.layout.slots, taps, x.shape[2])
        for i, (begin, end) in enumerate(_spans(context)):
            size = min(taps, end - begin)
            tails[i, taps - size :] = x[0, end - size : end]
        rows = all_gather(tails, context.group).flatten(0, 1)
        sources = [source for row in _sources(context, taps)[context.rank] for source in row]
        index = context.device_indices(("halo", taps), [max(0, s) for s in sources], x.device)
        mask = context.device_indices(("halo mask", taps), [int(s >= 0) for s in sources], x.device)
        halo = rows.index_select(0, index) * mask.to(rows.dtype).unsqueeze(1)
        return halo.unflatten(0, (len(context.mine), taps))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_halo):
        context, taps = ctx.context, ctx.taps
        with context.agreement.call(f"the backward of {FUNCTION}") as call:
            if call.is_first:
                call.fields = {"cp_context": context.identity, "W": taps + 1, "D": d_halo.shape[2]}
        padded = d_halo.new_zeros(context.layout.slots, *d_halo.shape[1:])
        mine = _sources(context, taps)[context.rank]
        for i, sources in enumerate(mine):
            reached = sum(source >= 0 for source in sources)
            padded[i, taps - reached :] = d_halo[i, taps - reached :]
        rows = all_gather(padded, context.group).flatten(0, 1)
        dx = d_halo.new_zeros(ctx.shape)
        # The ranks that used each of this rank's tails, always in the same order.
        users: dict[int, list[int]] = {}
        slots = context.layout.slots
        for r, row in enumerate(_sources(context, taps)):
            for i, sources in enumerate(row):
                for j, source in enumerate(sources):
                    users.setdefault(source, []).append((r * slots + i) * taps + j)
        for i, (begin, end) in enumerate(_spans(context)):
            for age in range(min(taps, end - begin)):
                for user in users.get((context.rank * slots + i) * taps + taps - 1 - age, ()):
                    dx[0, end - 1 - age] += rows[user]
        return None, None, dx


def _spans(context: Context) -> list[tuple[int, int]]:
    """The range of each piece among a rank's own tokens."""
    spans, begin = [], 0
    for piece in context.mine:
        spans.append((begin, begin + piece.length))
        begin += piece.length
    return spans


def _sources(context: Context, taps: int) -> list[list[list[int]]]:
    if context.layout.complete:
        return halo_sources(context.layout, taps)
    # FLA's contexts describe their own rank alone, but all pieces are as long as its own, and others send 0 back for
    # what they have not used.
    length = context.mine[0].length
    if length < taps:
        raise ValueError(f"pieces of {length} tokens are shorter than the convolution reaches back, {taps}")
    pieces = [
        [
            piece if r == context.rank else Piece(piece.number, (0, length), 0, 0, taps if piece.number else 0)
            for piece in row
        ]
        for r, row in enumerate(context.layout.pieces)
    ]
    return halo_sources(Layout(tuple(map(tuple, pieces)), True), taps)


@torch.compiler.disable
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    cp_context: Any,
) -> tuple[Tensor, None]:
    """``gatedelta.causal_conv1d`` of this rank's tokens, x ``[1, T of this rank, D]``: the W - 1 inputs before each
    piece come from the ranks that hold them, and their gradients go back. Returns (y, None)."""
    context = as_context(cp_context)
    with context.agreement.call(FUNCTION) as call:
        tensors = {"x": x, "weight": weight, "bias": bias}
        arguments.check_tensors(tuple(tensors), *tensors.values(), required=2)
        if arguments.in_transform():
            raise NotImplementedError(arguments.NO_TRANSFORM)
        options, weight = conv1d.activation_option(activation), conv1d.as_matrix(weight)
        if x.dim() != 3 or x.shape[0] != 1 or x.shape[1] != context.tokens:
            raise ValueError(
                f"x is {list(x.shape)}, but with this cp_context rank {context.rank} holds {context.tokens} tokens"
            )
        if call.is_first:
            with torch.no_grad():  # one token, for the operator's refusals
                conv1d.forward(x[:, :1], weight, bias, options, None, None, 0)
            _sources(context, weight.shape[-1] - 1)
            call.fields = {
                "cp_context": context.identity, "D": weight.shape[0], "W": weight.shape[1],
                "activation": "silu" if options else None, **tensor_fields(x.device, **tensors),
            }  # fmt: skip
    halo = _Halo.apply(context, weight.shape[-1] - 1, x)
    rows = context.entering_rows(x.device)
    # One more row, of zeros, for the sequences that begin here.
    states = torch.cat([halo.mT, halo.new_zeros(1, x.shape[2], halo.shape[1])])
    states = states[torch.where(rows < 0, halo.shape[0], rows)]
    call = conv1d.CausalConv1d.apply if arguments.needs_graph(x, weight, bias, states) else conv1d.forward
    y, _ = call(x, weight, bias, options, context.offsets_on(x.device), states, 0)
    return y, None
