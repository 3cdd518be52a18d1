"""The context of a pack: the tokens that this rank holds, and index tensors made from them."""

from __future__ import annotations

import functools
import reprlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import layout as layouts
from . import schemes
from .agreement import Agreement
from .layout import Layout, Piece

if TYPE_CHECKING:
    from collections.abc import Sequence


class Context:
    """The tokens of a pack that this rank holds, and the scheme of the exchange between ranks.

    cu_seqlens: offsets of this rank's own sequences, as the functions take them; on the CPU, see ``offsets_on``.
    """

    def __init__(self, layout: Layout, group: Any, rank: int, size: int, scheme: str = "auto", exact: bool = False):
        if scheme not in schemes.SCHEMES:
            raise ValueError(f"scheme is {scheme!r}, must be one of {', '.join(map(repr, schemes.SCHEMES))}")
        self.layout, self.group, self.rank, self.size = layout, group, rank, size
        self.scheme, self.exact = scheme, exact
        self.mine: tuple[Piece, ...] = layout.pieces[rank]
        self.offsets = layouts.local_offsets(self.mine)
        self.first_sequences, self.last_sequences = layouts.border_sequences(self.mine)
        self.agreement = Agreement(group, size)
        self._on_device: dict[Any, Tensor] = {}

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.size} has {self.tokens}"
        if self.layout.complete:
            ranges = self.layout.ranges
            tokens = sum(piece.length for row in self.layout.pieces for piece in row)
            where += f" of {tokens} tokens, {ranges[self.rank]}, all ranks {reprlib.repr(ranges)}"
        else:
            where += " tokens, what others have is unknown"
        return f"<{type(self).__name__}: {where}, scheme={self.scheme!r}, exact={self.exact}>"

    @property
    def tokens(self) -> int:
        """How many tokens this rank holds."""
        return self.offsets[-1]

    @functools.cached_property
    def identity(self) -> str:
        """The same on every rank of the group, and another for another pack."""
        known = self.layout.pieces if self.layout.complete else [[p.number for p in row] for row in self.layout.pieces]
        tokens = sum(p.length for row in self.layout.pieces for p in row) if self.layout.complete else self.tokens
        return f"{tokens} tokens, scheme={self.scheme!r}, exact={self.exact}, {known}"

    def device_indices(self, name: Any, values: Sequence[int], device: torch.device) -> Tensor:
        """Integers as a tensor on a device, copied there once."""
        key = (name, device)
        if key not in self._on_device:
            self._on_device[key] = torch.tensor(values, dtype=torch.int32, device=device)
        return self._on_device[key]

    def offsets_on(self, device: torch.device) -> Tensor:
        return self.device_indices("offsets", self.offsets, device)

    def entering_rows(self, device: torch.device) -> Tensor:
        """For each own sequence the piece whose entering state it begins with, or -1."""
        rows = [-1] * (len(self.offsets) - 1)
        for i, (n, piece) in enumerate(zip(self.first_sequences, self.mine)):
            rows[n] = i if piece.before else -1
        return self.device_indices("entering", rows, device)

    def leaving_rows(self, device: torch.device) -> Tensor:
        rows = [-1] * (len(self.offsets) - 1)
        for i, (n, piece) in enumerate(zip(self.last_sequences, self.mine)):
            rows[n] = i if piece.after else -1
        return self.device_indices("leaving", rows, device)

    @staticmethod
    def _merge_of(piece: Piece, back: bool) -> tuple[int, int]:
        return (piece.number + 1, piece.after) if back else (piece.number - piece.before, piece.before)

    def merges(self, device: torch.device, back: bool) -> tuple[Tensor, Tensor]:
        """First segment and count of segments for each own piece."""
        merges = [self._merge_of(piece, back) for piece in self.mine]
        return tuple(self.device_indices(("merge", back, i), [m[i] for m in merges], device) for i in range(2))

    def all_merges(self, device: torch.device, back: bool) -> tuple[Tensor, Tensor]:
        """The same for every place of every rank."""
        slots = self.layout.slots
        merges = [(0, 0)] * (slots * self.size)
        for r, row in enumerate(self.layout.pieces):
            for i, piece in enumerate(row):
                merges[r * slots + i] = self._merge_of(piece, back)
        return tuple(self.device_indices(("all", back, i), [m[i] for m in merges], device) for i in range(2))

    def scheme_for(self, heads: int, K: int, V: int) -> str:
        """The scheme for this many heads."""
        scheme = schemes.choose(self.scheme, self.size, self.layout.slots, heads, K, V)
        return scheme if self.layout.complete else "gather"


def _offsets_of(cu_seqlens: Tensor | Sequence[int]) -> list[int]:
    if not isinstance(cu_seqlens, Tensor):
        return [int(x) for x in cu_seqlens]
    if cu_seqlens.dim() != 1 or cu_seqlens.layout is not torch.strided or cu_seqlens.is_meta:
        raise ValueError(
            f"cu_seqlens is {list(cu_seqlens.shape)}, {cu_seqlens.layout}, on {cu_seqlens.device}; it must be dense, "
            "[N + 1], with offsets that can be read"
        )
    return [int(x) for x in cu_seqlens.tolist()]


def build_context(
    cu_seqlens: Tensor | Sequence[int],
    group: Any = None,
    layout: str | Sequence[Sequence[tuple[int, int]]] = "contiguous",
    *,
    scheme: str = "auto",
    exact: bool = False,
) -> Context:
    """The context of a pack. Every rank of the group calls it, with the same arguments: ranks compare them, and where
    they differ, or one rank refuses its own, all of them raise.

    cu_seqlens: offsets of the whole pack (all ranks' tokens), on the host. One sequence: ``[0, tokens]``.
    group: of torch.distributed; None means its default group, that is, all ranks.
    layout: "contiguous" (rank r of W holds the r-th of W equal pieces), "zigzag" (of 2 W equal pieces it holds r and
        2 W - 1 - r, in this order), or for each rank the ranges ``(start, stop)`` of tokens it holds, in its order.
    scheme: of the exchange of summaries. "gather": every rank gets all of them; "scatter": each rank merges a share of
        the heads for all ranks; "auto": one of these two, by bytes; "neighbour": from one piece to the next alone where
        all heads of all ranks fade, otherwise as "auto"; ranks agree on it at each call, which costs a wait.
    exact: the transition of every head is computed and used. Otherwise those of heads that have faded are 0, which
        leaves out less than fp32 resolves (docs/context_parallel.md).
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError("group does not hold this rank")
    with Agreement(group, size).call("build_context") as call:
        offsets = _offsets_of(cu_seqlens)
        if not offsets:
            raise ValueError("cu_seqlens is empty, must hold N + 1 offsets")
        if isinstance(layout, str):
            ranges = layouts.token_ranges(layout, offsets[-1], size)
        else:
            ranges = [[(int(a), int(b)) for a, b in row] for row in layout]
            if len(ranges) != size:
                raise ValueError(f"layout has ranges of {len(ranges)} ranks, but the group has {size}")
        context = Context(layouts.make_layout(offsets, ranges), group, rank, size, scheme, exact)
        call.fields = {
            "the number of tokens": offsets[-1], "cu_seqlens": offsets, "layout": ranges,
            "scheme": scheme, "exact": bool(exact),
        }  # fmt: skip
    return context
