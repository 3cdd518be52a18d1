"""The tokens of a pack that each rank holds. Plain arithmetic on the host: neither torch nor a group.

A *piece* is a run of consecutive tokens of the pack that one rank holds; pieces are numbered in the order of their
tokens. A rank's own tokens are its pieces one after the other.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Piece:
    number: int  # in the order of tokens
    offsets: tuple[int, ...]  # of the sequences in it, from 0 to its length; none of them is empty
    before: int  # pieces before it that hold a part of its first sequence
    after: int  # pieces behind it that hold a part of its last sequence
    position: int  # of its first token in that token's sequence

    @property
    def length(self) -> int:
        return self.offsets[-1]


class Layout(NamedTuple):
    """The pieces of all ranks, in each rank's own order. Pieces of an unknown rank have nothing but a number."""

    pieces: tuple[tuple[Piece, ...], ...]
    complete: bool  # all ranks are known

    @property
    def slots(self) -> int:
        """The largest number of pieces of a rank: every rank exchanges this many."""
        return max(1, max((len(row) for row in self.pieces), default=1))

    @property
    def ranges(self) -> list[list[tuple[int, int]]]:
        """The tokens of the pack that each rank holds, of a complete layout."""
        pieces = sorted((piece for row in self.pieces for piece in row), key=lambda piece: piece.number)
        ends = list(itertools.accumulate(piece.length for piece in pieces))
        return [[(ends[p.number] - p.length, ends[p.number]) for p in row] for row in self.pieces]

    @property
    def order(self) -> list[int]:
        """The place rank * slots + i of each piece among the gathered rows, in the order of tokens."""
        places = {p.number: r * self.slots + i for r, row in enumerate(self.pieces) for i, p in enumerate(row)}
        return [places[number] for number in sorted(places)]


def token_ranges(layout: str, tokens: int, ranks: int) -> list[list[tuple[int, int]]]:
    """Ranges of the pack that each rank holds."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, must be one of {', '.join(map(repr, LAYOUTS))}, or ranges of tokens")
    count = ranks if layout == "contiguous" else 2 * ranks
    if tokens % count:
        raise ValueError(f"{tokens} tokens cannot be shared out evenly to {count} pieces: pad the pack, or give ranges")
    length = tokens // count
    numbers = [[r] if layout == "contiguous" else [r, 2 * ranks - 1 - r] for r in range(ranks)]
    return [[(n * length, (n + 1) * length) for n in row] for row in numbers]


def make_layout(offsets: list[int], ranges: list[list[tuple[int, int]]]) -> Layout:
    """offsets: cu_seqlens of the whole pack. Ranges of all ranks cover its tokens once."""
    if not offsets or offsets[0] != 0 or any(b < a for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"cu_seqlens must begin with 0 and never decrease: {offsets[:8]}")
    flat = sorted((start, stop) for row in ranges for start, stop in row if start != stop)
    end = 0
    for start, stop in flat:
        if stop < start or start != end:
            raise ValueError(
                f"the ranges of all ranks must cover tokens 0 to {offsets[-1]} once: there is [{start}, {stop}) after "
                f"token {end}"
            )
        end = stop
    if end != offsets[-1]:
        raise ValueError(f"the ranges of all ranks end at token {end}, but cu_seqlens ends at {offsets[-1]}")
    borders = sorted(set(offsets))
    starts = [start for start, _ in flat]

    def piece(start: int, stop: int) -> Piece:
        first = borders[bisect_right(borders, start) - 1]  # of its first sequence
        last = borders[bisect_left(borders, stop)]  # end of its last sequence
        number = bisect_left(starts, start)
        return Piece(
            number,
            (0, *(b - start for b in borders[bisect_right(borders, start) : bisect_left(borders, stop)]), stop - start),
            number - (bisect_right(starts, first) - 1),
            bisect_left(starts, last) - 1 - number,
            start - first,
        )

    return Layout(tuple(tuple(piece(a, b) for a, b in row if a != b) for row in ranges), True)


def local_offsets(mine: tuple[Piece, ...]) -> list[int]:
    """cu_seqlens of a rank's own tokens."""
    result = [0]
    for piece in mine:
        begin = result[-1]
        result += [begin + offset for offset in piece.offsets[1:]]
    return result


def border_sequences(mine: tuple[Piece, ...]) -> tuple[list[int], list[int]]:
    """Own numbers of the first and of the last sequence of each piece."""
    first, last, count = [], [], 0
    for piece in mine:
        first.append(count)
        count += len(piece.offsets) - 1
        last.append(count - 1)
    return first, last


def halo_sources(layout: Layout, taps: int) -> list[list[list[int]]]:
    """For each rank and piece, where the `taps` tokens before it are, the newest last: index into the last `taps`
    tokens of every piece as they are gathered, [ranks * slots * taps]; -1 where the sequence has none."""
    by_number = {p.number: (r * layout.slots + i, p) for r, row in enumerate(layout.pieces) for i, p in enumerate(row)}

    def sources(piece: Piece) -> list[int]:
        result: list[int] = []
        number, left = piece.number - 1, min(taps, piece.position)
        while len(result) < left:
            place, source = by_number[number]
            for age in range(min(source.length, left - len(result))):
                result.append(place * taps + taps - 1 - age)
            number -= 1
        return (result + [-1] * (taps - len(result)))[::-1]

    return [[sources(piece) for piece in row] for row in layout.pieces]
