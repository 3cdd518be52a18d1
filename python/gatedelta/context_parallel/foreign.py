"""Contexts of other libraries as ours."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch.distributed as dist

from .context import Context
from .layout import Layout, Piece

# The fields of FLA's contexts that describe a rank's pieces, besides the offsets.
_CACHE_KEYS = (
    "group", "layout", "pre_num_ranks", "post_num_ranks", "pre_num_conv_tokens", "front_num_seqs",
    "pre_num_ranks_by_part", "post_num_ranks_by_part", "pre_num_conv_tokens_by_part",
)  # fmt: skip


def as_context(context: Any) -> Context:
    """A context of ours as it is; FLA's (``fla.ops.cp.build_cp_context``, contiguous or zigzag) and FlashQLA's by their
    fields. They describe their own rank alone, so their summaries are gathered."""
    if isinstance(context, Context):
        return context
    group = getattr(context, "group", None)
    offsets = getattr(context, "cu_seqlens_cpu", None)
    if offsets is None:
        offsets = getattr(context, "cu_seqlens", None)
    if offsets is None or not hasattr(context, "pre_num_ranks"):
        raise TypeError(
            f"cp_context is {type(context).__module__}.{type(context).__qualname__}, which is neither of "
            "gatedelta.context_parallel.build_context nor has the fields of FLA's build_cp_context"
        )
    # Cached on the context for the next layer, and made again where one of its fields has changed.
    key = tuple(getattr(context, name, None) for name in _CACHE_KEYS)
    cached = getattr(context, "_gatedelta_context", None)
    if cached is not None and cached[0] is offsets and cached[1] == key:
        return cached[2]
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    layout = _layout_of(context, [int(x) for x in offsets.tolist()], rank, size)
    result = Context(layout, group, rank, size, "gather")
    with contextlib.suppress(AttributeError):
        context._gatedelta_context = offsets, key, result
    return result


def _layout_of(context: Any, offsets: list[int], rank: int, size: int) -> Layout:
    """The pieces of this rank; those of other ranks are unknown but for their numbers."""
    if getattr(context, "layout", None) in (None, "contiguous"):
        numbers = [[r] for r in range(size)]
        mine = [
            _piece(rank, offsets, context.pre_num_ranks, context.post_num_ranks,
                   getattr(context, "pre_num_conv_tokens", 0))
        ]  # fmt: skip
    elif context.layout == "zigzag":
        numbers = [[r, 2 * size - 1 - r] for r in range(size)]
        count = context.front_num_seqs
        mine = [
            _piece(*fields)
            for fields in zip(
                numbers[rank],
                (offsets[: count + 1], offsets[count:]),
                context.pre_num_ranks_by_part,
                context.post_num_ranks_by_part,
                getattr(context, "pre_num_conv_tokens_by_part", (0, 0)),
            )
        ]
    else:
        raise ValueError(f"cp_context.layout is {context.layout!r}, must be 'contiguous' or 'zigzag'")
    unknown = [[Piece(n, (0, 0), 0, 0, 0) for n in row] for row in numbers]
    return Layout(tuple(tuple(mine if r == rank else row) for r, row in enumerate(unknown)), False)


def _piece(number: int, offsets: list[int], before: Any, after: Any, position: Any) -> Piece:
    """offsets: of the sequences in it, which need not start from 0, and may hold empty ones."""
    distinct = [offsets[0], *(b for a, b in itertools.pairwise(offsets) if b > a)]
    return Piece(number, tuple(x - offsets[0] for x in distinct), int(before or 0), int(after or 0), int(position or 0))
