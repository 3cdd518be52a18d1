"""One line per H200 record, so that the trend can be seen: results/SCHEMA.md describes the columns.

Usage: python -m bench.report.history

computes every line of results/h200/history.csv again, from the records that git keeps. Needed after a change of
bench/peers/h200.json.
"""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from bench.lib import ratios, serving
from bench.lib.rows import LANDMARKS, name_of, of_kind

ROOT = Path(__file__).resolve().parents[2]
HISTORY = ROOT / "results" / "h200" / "history.csv"
RECORDS = ("results/h200/record.json", "results/h200/20??-??-??-*.json")  # now, and when each record had its own file
COLUMNS = [
    "date", "commit", "modified", "sm_clock_mhz", "sm_clock_max_mhz", "peers", "forward", "forward_full", "backward",
    "forward_worst", "forward_worst_row", "backward_worst", "backward_worst_row", *LANDMARKS, "decode", "verify_every",
    "verify", "packs", "serving_worst", "serving_worst_row",
]  # fmt: skip


def peers_digest(path: Path = ratios.PEERS) -> str:
    """Ratios of two lines are comparable if this is equal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def line_of(result: dict, peers: Path = ratios.PEERS) -> dict[str, str]:
    header, rows = result["header"], ratios.with_peers(result, peers)
    forward = of_kind(rows, "fwd")
    full = [row for row in forward if ratios.is_full(row)]
    groups = {"forward": forward, "forward_full": full, "backward": of_kind(rows, "bwd")}
    found = {name: summary for name, members in groups.items() if (summary := ratios.summary(members))}
    line = {name: f"{summary['geomean']:.4f}" for name, summary in found.items()}
    for name in {"forward", "backward"} & found.keys():
        worst = found[name]["worst"]
        line |= {f"{name}_worst": f"{worst['speedup']:.4f}", f"{name}_worst_row": name_of(worst)}
    line |= {name_of(row): f"{row['ms']:.4f}" for row in forward if name_of(row) in LANDMARKS}
    line |= serving_columns(serving.with_peers(result))
    line |= {name: header[name] for name in ("date", "modified", "sm_clock_mhz", "sm_clock_max_mhz")}
    return line | {"commit": commit_of(header), "peers": peers_digest(peers)}


def commit_of(header: dict) -> str:
    """Of the rows that were measured last."""
    later = header.get("serving", {})
    is_later = later.get("commit") and later.get("date", header["date"]) >= header["date"]
    return ((later["commit"] if is_later else header["commit"]) or "")[:10]


def serving_columns(rows: list[dict]) -> dict[str, str]:
    sums = [serving.summary(members) for members in (*serving.groups_of(rows).values(), rows)]
    names = ("decode", "verify_every", "verify", "packs")
    line = {name: f"{found['geomean']:.4f}" for name, found in zip(names, sums) if found}
    if sums[-1]:
        worst = sums[-1]["worst"]
        line |= {"serving_worst": f"{worst['speedup']:.4f}", "serving_worst_row": serving.name_of(worst)}
    return line


def append(path: Path, *lines: dict) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(lines)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


def computed_again(lines: list[dict[str, str]]) -> list[dict]:
    """Raises LookupError if git does not have the record of a line, as in a shallow clone."""
    versions = git("log", "--format=:%H", "--diff-filter=AM", "--name-only", "--", *RECORDS)
    records, commit = {}, ""
    for word in versions.split():
        if word.startswith(":"):
            commit = word[1:]
            continue
        result = json.loads(git("show", f"{commit}:{word}"))
        records.setdefault(commit_of(result["header"]), result)
    missing = [line["commit"] for line in lines if line["commit"] not in records]
    if missing:
        raise LookupError(f"git has no record of {', '.join(missing)}")
    return [line_of(records[line["commit"]]) for line in lines]


def main() -> None:
    try:
        lines = computed_again(read(HISTORY))
    except (LookupError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"history: nothing was written: {error}")
    HISTORY.unlink()
    append(HISTORY, *lines)


if __name__ == "__main__":
    main()
