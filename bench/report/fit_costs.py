"""Fits the constants of the cost model (src/cuda/schedule/costs.hpp) to measured cuts, such as those of another GPU.

Reads what bench.gpu.segments has measured: shapes, each uncut and with many forced cuts. Makes the work list of every
such cut as the scheduler does for the benchmark's gates, runs it on a timeline of CTAs, and searches constants that
choose well: how much longer the chosen cut of a shape takes than its fastest one counts most. Beside that, the times of
a shape's cuts should differ from each other as the measured ones do; what all of them share, prepare and the launches,
does not count. Prints the constants as costs.hpp has them. Needs neither torch nor a GPU.

Usage: python -m bench.report.fit_costs [results/h200/segments.json] [--blocks 132] [--shapes N] [--rounds N]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from bench.lib import regret
from bench.lib.regret import CHUNK

WARM_UP = 6  # chunks that a decaying head of the benchmark needs
PERSISTENT_EVERY = 4  # heads
PER_MICROSECOND = 1700  # cycles in costs.hpp
MOST_ITEMS, MOST_BOUNDARIES = 2500, 250  # larger cuts are slow and say little
MERGE_HALVES = 2
SEGMENTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40)  # of the longest sequence, in a search
LEAST = 3  # chunks of a segment
WORTH_CUTTING, CUT_US = 1.03, 3.5  # kWorthCutting and kCut: by how much a cut has to win
ERROR_WEIGHT = 0.2  # of errors, beside the regret


@dataclass(frozen=True)
class Costs:
    """In us, as measured first on an H200. The names are those of costs.hpp."""

    chunk: float = 1.91
    half_chunk: float = 1.47
    warmup: float = 1.15
    half_warmup: float = 0.88
    transition: float = 1.10
    merge: float = 1.7
    item: float = 5.0
    transition_item: float = 3.5


@dataclass
class Cut:
    """The items of a cut by their place in the list (EntryCounts of work_list.hpp). An item is (kind, chunks with
    outputs, other chunks or steps, boundary it waits for or -1, boundary it leaves a state or transition at or -1)."""

    first: list = field(default_factory=list)
    free: list = field(default_factory=list)
    merges: list = field(default_factory=list)
    waiting: list = field(default_factory=list)
    boundaries: int = 0

    def items(self) -> int:
        return len(self.first) + len(self.free) + len(self.merges) + len(self.waiting)


def borders(chunks: int, segments: int, first: int = 0) -> list[int]:
    """Where segments begin (Borders of cut.hpp), and the end."""
    rest = segments - 1 if first else segments
    each, longer = divmod(chunks - first, rest)
    begins = [first + each * i + min(i, longer) for i in range(rest + 1)]
    return [0, *begins] if first else begins


def add_head(cut: Cut, chunks: int, length: int, persists: bool, ratio: float, per_head: int = 1) -> None:
    """per_head: 2 if two CTAs share a head."""
    segments = -(-chunks // length) if 0 < length < chunks else 1
    if not persists or segments == 1:
        at = borders(chunks, segments)
        for begin, end in itertools.pairwise(at):
            cut.free += [("output", end - begin, min(WARM_UP, begin), -1, -1)] * per_head
    elif segments == 2:
        at = borders(chunks, 2, int(chunks * ratio))
        cut.free += [("output", at[1], 0, -1, -1), ("output", chunks - at[1], at[1], -1, -1)] * per_head
    else:
        at = borders(chunks, segments, max(1, int(chunks * 0.56 / (segments - 0.44))))
        base = cut.boundaries
        cut.boundaries += segments - 1
        cut.first += [("output", at[1], 0, -1, base)] * per_head
        for i in range(1, segments - 1):
            cut.first += [("transition", 0, at[i + 1] - at[i], -1, base + i)] * 2
        cut.merges += [("merge", 0, segments - 2, base, base + 1)] * MERGE_HALVES
        for i in range(1, segments):
            cut.waiting += [("output", at[i + 1] - at[i], 0, base + i - 1, -1)] * per_head


def forced_cut(row: dict, lengths: regret.Cut, ratio: float = 0.715) -> Cut:
    cut = Cut()
    for tokens in sorted(row["lengths"], reverse=True):
        for head in range(row["hv"]):
            persists = head % PERSISTENT_EVERY == 0
            length = lengths.persistent if persists else lengths.decaying
            if tokens > 0:
                add_head(cut, -(-tokens // CHUNK), length, persists, ratio, 2 if lengths.halves else 1)
    return cut


def candidates(row: dict, blocks: int, count: int) -> list[regret.Cut]:
    """The cuts of a shape that should be the fastest by the constants above."""
    longest = -(-max(row["lengths"]) // CHUNK)
    lengths = [0, *sorted({-(-longest // n) for n in SEGMENTS if longest >= LEAST * n})]
    found = {}
    for decaying, persistent, halves in itertools.product(lengths, lengths, (False, True)):
        cut = regret.Cut(decaying, persistent, halves)
        if decaying or persistent:
            made = forced_cut(row, cut)
            if made.items() <= 6 * blocks and made.boundaries <= MOST_BOUNDARIES:
                found[cut] = time_of(made, Costs(), blocks, halves)
    return sorted(found, key=found.__getitem__)[:count]


def uncut(row: dict, blocks: int) -> tuple[Cut, bool]:
    """Whole heads, or halves where all of them run at once."""
    cut = forced_cut(row, regret.Cut(0, 0))
    halves = 2 * len(cut.free) <= blocks
    if halves:
        cut.free = [item for item in cut.free for _ in range(2)]
    return cut, halves


def time_of(cut: Cut, costs: Costs, blocks: int, halves: bool = False) -> float:
    """Runs the list in order: a CTA that becomes free takes the next item, and waits if the item has to."""
    chunk, warmup = (costs.half_chunk, costs.half_warmup) if halves else (costs.chunk, costs.warmup)
    early = max(0, blocks - len(cut.first))
    order = cut.first + cut.free[:early] + cut.merges + cut.free[early:] + cut.waiting
    free = [0.0] * blocks
    ready, transitions = [0.0] * (cut.boundaries + 1), [0.0] * (cut.boundaries + 1)
    for kind, outputs, others, begins_at, ends_at in order:
        begin = free[0]
        if kind == "merge":
            begin = max(begin, ready[begins_at])
            for i in range(ends_at, ends_at + others):
                begin = max(begin, transitions[i]) + costs.merge
                ready[i] = max(ready[i], begin)
            end = begin
        elif kind == "transition":
            end = begin + costs.transition_item + others * costs.transition
            transitions[ends_at] = max(transitions[ends_at], end)
        else:
            begin = max(begin, ready[begins_at]) if begins_at >= 0 else begin
            end = begin + costs.item + outputs * chunk + others * warmup
            if ends_at >= 0:
                ready[ends_at] = max(ready[ends_at], end)
        heapq.heapreplace(free, end)
    return max(free)


def samples_of(rows: list[dict], blocks: int) -> list[list[tuple[Cut, bool, float]]]:
    """For every shape: its cuts, whether in halves, and the measured us."""
    samples = []
    for row in rows:
        here = [(*uncut(row, blocks), row["off_ms"] * 1e3)]
        for name, ms in row["forced"].items():
            lengths = regret.Cut.named(name)
            cut = forced_cut(row, lengths)
            if cut.items() <= MOST_ITEMS and cut.boundaries <= MOST_BOUNDARIES:
                here.append((cut, lengths.halves, ms * 1e3))
        best = min(us for *_, us in here)
        here = [sample for sample in here if sample[2] < 2 * best]  # how slow the slow ones are does not matter
        if len(here) > 2:
            samples.append(here)
    return samples


def judge(costs: Costs, samples: list, blocks: int) -> tuple[float, float]:
    """The mean regret of what these constants choose, and the root mean square over all cuts of the relative error of
    their time, less the shape's mean error."""
    total, count, regret = 0.0, 0, 0.0
    for here in samples:
        times = [time_of(cut, costs, blocks, halves) for cut, halves, _ in here]
        estimates = [times[0], *(time * WORTH_CUTTING + CUT_US for time in times[1:])]
        measured = [us for *_, us in here]
        regret += measured[estimates.index(min(estimates))] / min(measured) - 1
        mean = sum(time - us for time, us in zip(times, measured)) / len(here)
        total += sum(((time - us - mean) / us) ** 2 for time, us in zip(times, measured))
        count += len(here)
    return regret / len(samples), math.sqrt(total / count)


def fit(samples: list, blocks: int, rounds: int) -> Costs:
    """Changes one constant at a time, by ever smaller steps."""

    def badness(costs: Costs) -> float:
        regret, error = judge(costs, samples, blocks)
        return regret + ERROR_WEIGHT * error

    costs = Costs()
    least, step = badness(costs), 0.16
    for _ in range(rounds):
        before = least
        for name in (f.name for f in fields(Costs)):
            for factor in (1 + step, 1 / (1 + step)):
                other = replace(costs, **{name: getattr(costs, name) * factor})
                if (found := badness(other)) < least:
                    costs, least = other, found
                    break
        if before - least < 1e-4:
            step /= 2
        if step < 0.01:
            break
    return costs


def text_of(costs: Costs) -> str:
    def cycles(us: float) -> int:
        return round(us * PER_MICROSECOND / 10) * 10

    return "\n".join(
        f"  static constexpr float {line};"
        for line in (
            f"kPerMicrosecond = {PER_MICROSECOND}",
            f"kChunk = {cycles(costs.chunk)}, kHalfChunk = {cycles(costs.half_chunk)}",
            f"kWarmup = {cycles(costs.warmup)}, kHalfWarmup = {cycles(costs.half_warmup)}",
            f"kTransition = {cycles(costs.transition)}",
            f"kMerge = {cycles(costs.merge)}",
            f"kItem = {cycles(costs.item)}, kTransitionItem = {cycles(costs.transition_item)}",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("measured", type=Path, nargs="?", default=Path("results/h200/segments.json"))
    parser.add_argument("--blocks", type=int, default=132, help="CTAs, one per SM")
    parser.add_argument("--shapes", type=int, help="use only so many, spread over the file")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rows = json.loads(options.measured.read_text())["rows"]
    if options.shapes:
        rows = rows[:: max(1, len(rows) // options.shapes)]
    samples = samples_of(rows, options.blocks)
    print(f"{len(samples)} shapes, {sum(map(len, samples))} cuts")
    for name, costs in (("start", Costs()), ("fit", fit(samples, options.blocks, options.rounds))):
        regret, error = judge(costs, samples, options.blocks)
        print(f"{name}: regret {regret:.2%}, relative error {error:.1%}, {costs}")
    print(text_of(costs))


if __name__ == "__main__":
    main()
