"""Joins measured rows with the peers' times and sums the ratios up. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

from bench.lib.rows import KINDS, lengths_of

PEERS = Path(__file__).resolve().parents[1] / "peers" / "h200.json"
FULL = 64  # sequences x value heads: with a CTA per half of V, enough for all but 4 of an H200's 132 SMs
PUBLISHED = " published"  # ends the names of peers whose times FlashQLA published: they are shown, no ratio is to them


def key(row: dict) -> tuple:
    return row["kind"], row["hk"], row["hv"], row["seq"]


def load_peers(path: Path = PEERS) -> tuple[str, dict[tuple, dict[str, float]]]:
    """The GPU the peers ran on, and every peer's time in ms by row."""
    table = json.loads(path.read_text())
    return table["gpu"], {key(row): row["peers"] for row in table["rows"]}


def measured(times: dict[str, float]) -> dict[str, float]:
    return {name: ms for name, ms in times.items() if not name.endswith(PUBLISHED)}


def compared(row: dict, peers: dict[tuple, dict[str, float]]) -> dict:
    """The row with the peers' times and its ratio to the fastest of those that we measured, if there are any."""
    times = peers.get(key(row), {})
    if not measured(times):
        return row
    best = min(measured(times).values())
    return row | {"peers": times, "best_peer_ms": best, "speedup": best / row["ms"]}


def with_peers(result: dict, path: Path = PEERS) -> list[dict]:
    """The forward's and backward's rows of a result, with the peers' times if those are from the same model of GPU.
    bench.lib.serving has the others."""
    gpu, peers = load_peers(path)
    rows = [row for row in result["rows"] if row["kind"] in KINDS]
    return [compared(row, peers) if result["header"]["gpu"] == gpu else row for row in rows]


def best_peer(row: dict) -> str:
    times = measured(row["peers"])
    return min(times, key=times.get)


def shorter_published(row: dict) -> float | None:
    """The shortest published time of a row, where it is below all measured ones."""
    times = [ms for name, ms in row["peers"].items() if name.endswith(PUBLISHED)]
    return min(times) if times and min(times) < row["best_peer_ms"] else None


def is_full(row: dict) -> bool:
    return len(lengths_of(row)) * row["hv"] >= FULL


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: list[dict]) -> dict | None:
    """Number of rows, geometric mean and worst of their ratios. None without a ratio."""
    rows = [row for row in rows if "speedup" in row]
    if not rows:
        return None
    worst = min(rows, key=lambda row: row["speedup"])
    return {"rows": len(rows), "geomean": geomean([row["speedup"] for row in rows]), "worst": worst}
