"""How much slower the automatic cut is than the best forced one. Needs neither torch nor a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable

CHUNK = 64
SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # chunks
BAR = 0.07
AUTO, OFF = "auto", "off"  # choices besides the forced lengths
FINALISTS, ROUNDS = 3, 3


def segments_of(lengths: list[int]) -> list[int]:
    """The forced lengths that cut at least one sequence of the pack."""
    longest = -(-max(lengths) // CHUNK)
    return [chunks for chunks in SEGMENTS if chunks < longest]


def swept(measure: Callable[[str | int], float | None], segments: list[int]) -> dict[str | int, float]:
    """The time of every choice; refused forced lengths are left out. A busy GPU's clock drifts, and the fastest of many
    choices is partly luck. So the automatic cut and the fastest others are measured again in turns, and the medians of
    those turns replace their first times."""
    first = {choice: measure(choice) for choice in (AUTO, OFF, *segments)}
    times = {choice: ms for choice, ms in first.items() if ms is not None}
    finalists = sorted((choice for choice in times if choice != AUTO), key=times.__getitem__)[:FINALISTS]
    again = [{choice: measure(choice) for choice in (AUTO, *finalists)} for _ in range(ROUNDS)]
    return times | {choice: statistics.median(turn[choice] for turn in again) for choice in again[0]}


def judged(row: dict, auto_ms: float, off_ms: float, forced: dict[int, float]) -> dict:
    """No cut is a choice like the others. A regret below 0 means that no forced length is as fast as the automatic cut,
    which may choose a different length for each head."""
    best = min(off_ms, *forced.values()) if forced else off_ms
    return {key: row[key] for key in ("hk", "hv", "seq", "lengths")} | {
        "auto_ms": auto_ms, "off_ms": off_ms, "forced": {str(chunks): ms for chunks, ms in forced.items()},
        "best_ms": best, "regret": auto_ms / best - 1,
    }  # fmt: skip


def summary(rows: list[dict]) -> dict:
    regrets = [row["regret"] for row in rows]
    return {
        "rows": len(rows), "worst": max(rows, key=lambda row: row["regret"]), "median": statistics.median(regrets),
        "above": sum(regret > BAR for regret in regrets),
    }  # fmt: skip
