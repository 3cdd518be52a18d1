"""Joins measured rows with the peers' times and sums the ratios up. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rows import KINDS, lengths_of

PEERS = Path(__file__).resolve().parent / "peers" / "h200.json"
FULL = 64  # sequences x value heads: with a CTA per half of V, enough for all but 4 of an H200's 132 SMs
PUBLISHED = " published"  # ends the names of peers whose times FlashQLA published; we measured all others


def key(row: dict) -> tuple:
    return row["kind"], row["hk"], row["hv"], row["seq"]


def load_peers(path: Path = PEERS) -> tuple[str, dict[tuple, dict[str, float]]]:
    """The GPU the peers ran on, and every peer's time in ms by row."""
    table = json.loads(path.read_text())
    return table["gpu"], {key(row): row["peers"] for row in table["rows"]}


def compared(row: dict, peers: dict[tuple, dict[str, float]]) -> dict:
    """The row with the peers' times and its ratio to the fastest of them, if there are any."""
    times = peers.get(key(row))
    if not times:
        return row
    best = min(times.values())
    return row | {"peers": times, "best_peer_ms": best, "speedup": best / row["ms"]}


def with_peers(result: dict, path: Path = PEERS) -> list[dict]:
    """The forward's and backward's rows of a result, with the peers' times if those are from the same model of GPU.
    bench/serving.py has the others."""
    gpu, peers = load_peers(path)
    rows = [row for row in result["rows"] if row["kind"] in KINDS]
    return [compared(row, peers) if result["header"]["gpu"] == gpu else row for row in rows]


def best_peer(row: dict) -> str:
    return min(row["peers"], key=row["peers"].get)


def rests_on_published(row: dict) -> bool:
    """Whether the row's ratio is to a published time."""
    return best_peer(row).endswith(PUBLISHED)


def is_full(row: dict) -> bool:
    return len(lengths_of(row)) * row["hv"] >= FULL


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: list[dict]) -> dict | None:
    """Number of rows, geometric mean and worst of their ratios, and how many of these are to a published time. None
    without a ratio."""
    rows = [row for row in rows if "speedup" in row]
    if not rows:
        return None
    worst = min(rows, key=lambda row: row["speedup"])
    return {
        "rows": len(rows), "geomean": geomean([row["speedup"] for row in rows]), "worst": worst,
        "published": sum(map(rests_on_published, rows)),
    }  # fmt: skip
