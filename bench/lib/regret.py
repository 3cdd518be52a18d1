"""How much slower the automatic cut is than the best forced one, and the search for that one. Needs neither torch nor a
GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from bench.lib.targets import TARGETS

CHUNK = 64
SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # chunks
BAR = TARGETS["segments"]["regret"]["at_most"]
AUTO, OFF = "auto", "off"  # choices besides the forced cuts
FINALISTS, ROUNDS = 3, 3
STEPS = 4  # to neighbours


class Cut(NamedTuple):
    """Chunks of a segment in decaying and in persistent heads, 0: not cut; whether two CTAs share a head."""

    decaying: int
    persistent: int
    halves: bool = False

    def __str__(self) -> str:
        return f"{self.decaying}/{self.persistent}{' halves' if self.halves else ''}"

    @staticmethod
    def named(name: str) -> Cut:
        lengths, _, halves = name.partition(" ")
        decaying, persistent = map(int, lengths.split("/"))
        return Cut(decaying, persistent, halves == "halves")


def equal_cuts(lengths: list[int]) -> list[Cut]:
    """One length for all heads: those that cut at least one sequence of the pack."""
    longest = -(-max(lengths) // CHUNK)
    return [Cut(chunks, chunks) for chunks in SEGMENTS if chunks < longest]


def neighbours(cut: Cut, longest: int) -> list[Cut]:
    """Cuts with one segment more or less of the longest sequence in one kind of heads, and the other kind of items."""

    def beside(length: int) -> list[int]:
        segments = -(-longest // length) if length else 1
        step = max(1, segments // 8)
        return [0 if n <= 1 else -(-longest // n) for n in (segments - step, segments + step) if 1 <= n <= longest // 2]

    found = [Cut(n, cut.persistent, cut.halves) for n in beside(cut.decaying)]
    found += [Cut(cut.decaying, n, cut.halves) for n in beside(cut.persistent)]
    found.append(Cut(cut.decaying, cut.persistent, not cut.halves))
    return [other for other in found if other != cut and (other.decaying or other.persistent)]


def searched(measure: Callable[[str | Cut], float | None], cuts: list[Cut], longest: int) -> dict[str | Cut, float]:
    """The time of every choice; refused cuts are left out. First the given cuts, then the neighbours of the fastest, as
    long as one of them is faster. A busy GPU's clock drifts, and the fastest of many choices is partly luck. So the
    automatic cut and the fastest others are measured again in turns, and the medians of those turns replace their first
    times."""
    first = {choice: measure(choice) for choice in (AUTO, OFF, *cuts)}
    for _ in range(STEPS if cuts else 0):
        forced = {choice: ms for choice, ms in first.items() if choice not in (AUTO, OFF) and ms is not None}
        best = min(forced, key=forced.__getitem__, default=None)
        new = [cut for cut in neighbours(best, longest) if cut not in first] if best else []
        first |= {cut: measure(cut) for cut in new}
        if all(first[cut] is None or first[cut] >= forced[best] for cut in new):
            break
    times = {choice: ms for choice, ms in first.items() if ms is not None}
    finalists = sorted((choice for choice in times if choice != AUTO), key=times.__getitem__)[:FINALISTS]
    again = [{choice: measure(choice) for choice in (AUTO, *finalists)} for _ in range(ROUNDS)]
    return times | {choice: statistics.median(turn[choice] for turn in again) for choice in again[0]}


def judged(row: dict, auto_ms: float, off_ms: float, forced: dict[Cut, float]) -> dict:
    """No cut is a choice like the others. A regret below 0 means that no forced cut is as fast as the automatic one."""
    best = min(off_ms, *forced.values()) if forced else off_ms
    return {key: row[key] for key in ("hk", "hv", "seq", "lengths")} | {
        "auto_ms": auto_ms, "off_ms": off_ms, "forced": {str(cut): ms for cut, ms in forced.items()},
        "best_ms": best, "regret": auto_ms / best - 1,
    }  # fmt: skip


def summary(rows: list[dict]) -> dict:
    regrets = [row["regret"] for row in rows]
    return {
        "rows": len(rows), "worst": max(rows, key=lambda row: row["regret"]), "median": statistics.median(regrets),
        "mean": statistics.mean(regrets), "above": sum(regret > BAR for regret in regrets),
    }  # fmt: skip
