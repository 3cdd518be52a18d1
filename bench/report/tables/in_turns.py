"""Runs of bench.gpu.in_turns, in which the library and its peers took turns, replay by replay."""

import json

from bench.lib.ratios import geomean
from bench.lib.rows import name_of, of_kind
from bench.report.tables import files
from bench.report.tables.text import LIBRARIES, NOTHING, OPS, h200_heading, microseconds, table

FLASHINFER, PORTABLE, SERVE = "in_turns.json", "portable.json", "serve.json"
PORTABLE_ROWS = {
    "fwd": (
        "8/32 8192x4", "16/64 8192x4", "16/16 8192x4", "32/32 8192x4", "8/32 4096x8", "16/64 1x32768", "8/32 1x32768",
        "2/8 1x32768", "2/8 1x8192", "2/8 1x4096", "2/8 1x2048",
    ),
    "bwd": (
        "16/32 32k_8seq", "16/32 32k_1seq", "8/16 32k_4seq", "8/16 8k_4seq", "4/8 8k_8seq", "2/4 32k_1seq",
        "2/4 8k_1seq", "2/4 8k_4seq",
    ),
}  # fmt: skip


def load(name: str) -> dict | None:
    path = files.H200 / name
    return json.loads(path.read_text()) if path.exists() else None


def fastest_peer(row: dict) -> float:
    return min(ms for name, ms in row["ms"].items() if name.split()[0] in LIBRARIES)


def over_peers(rows: list[dict], build: str) -> list[tuple[float, dict]]:
    """How many times as long the fastest peer of each row takes, worst row first."""
    return sorted(((fastest_peer(row) / row["ms"][build], row) for row in rows), key=lambda found: found[0])


def figures(rows: list[dict], build: str) -> tuple[str, str, str]:
    """Geometric mean, worst row, and how many rows there are."""
    found = over_peers(rows, build)
    worst, row = found[0]
    return f"{geomean([ratio for ratio, _ in found]):.2f}×", f"{worst:.2f}× ({name_of(row)})", str(len(found))


def headline_cells() -> list[list[str]]:
    """Rows of the summary. None of them rests on a time of another run."""
    groups = []
    if flashinfer := load(FLASHINFER):
        for kind, name in (("fwd", OPS["fwd"]), ("ragged", "ragged packs")):
            rows = of_kind(flashinfer["rows"], kind)
            groups.append((f"H200, {name}, over FlashInfer in the same run", rows, flashinfer["header"]["base"]))
    if portable := load(PORTABLE):
        for kind in ("fwd", "bwd"):
            rows = of_kind(portable["rows"], kind)
            groups.append((f"H200, portable kernels, {OPS[kind]}, over FLA in the same run", rows, "portable"))
    if engines := load(SERVE):
        groups.append(("H200, packs as engines send them, over FlashInfer in the same run", engines["rows"],
                       engines["header"]["base"]))  # fmt: skip
    cells = []
    for label, rows, build in groups:
        if rows:
            mean, worst, count = figures(rows, build)
            cells.append([label, f"**{mean}**", worst, count, "0"])
    return cells


def flashinfer() -> str:
    result = load(FLASHINFER)
    if not result:
        return NOTHING
    build = result["header"]["base"]
    forward = of_kind(result["rows"], "fwd")
    classes = {
        "all rows": lambda row: True,
        "one sequence": lambda row: row["seq"].startswith("1x"),
        "two sequences": lambda row: "+" in row["seq"],
    } | {seq: lambda row, seq=seq: row["seq"] == seq for seq in ("8192x4", "4096x8", "2048x4", "1024x8")}
    groups = {name: [row for row in forward if of(row)] for name, of in classes.items()}
    groups["40 to 60 sequences of 1 to 1500 tokens"] = of_kind(result["rows"], "ragged")
    cells = []
    for name, rows in groups.items():
        if rows:
            found = [ratio for ratio, _ in over_peers(rows, build)]
            below = [str(sum(ratio < bound for ratio in found)) for bound in (1, 1.25)]
            cells.append([name, *figures(rows, build), *below])
    what = "forward, over the faster of FlashInfer's two paths"
    columns = [what, "geometric mean", "worst row", "rows", "below 1", "below 1.25"]
    return f"{h200_heading(result['header'])}\n\n" + table(columns, cells)


def serve() -> str:
    """Packs as engines send them, by their lengths."""
    result = load(SERVE)
    if not result:
        return NOTHING
    build = result["header"]["base"]
    by_lengths: dict[str, list[dict]] = {}
    for row in result["rows"]:
        by_lengths.setdefault(row["seq"], []).append(row)
    cells = []
    for seq, rows in [("all", result["rows"]), *by_lengths.items()]:
        found = [ratio for ratio, _ in over_peers(rows, build)]
        cells.append([seq, *figures(rows, build), str(sum(ratio < 1 for ratio in found))])
    columns = ["lengths, over the faster of FlashInfer's two paths", "typical", "slowest row", "rows", "below 1"]
    return "\n\n".join([h200_heading(result["header"]), table(columns, cells)])


def portable() -> str:
    result = load(PORTABLE)
    if not result:
        return NOTHING
    cells, sums = [], []
    for kind, names in PORTABLE_ROWS.items():
        rows = of_kind(result["rows"], kind)
        by_name = {name_of(row): row for row in rows}
        for name in names:
            ms = by_name[name]["ms"]
            ours, fla = ms["portable"], fastest_peer(by_name[name])
            cells.append([
                f"{OPS[kind]} {name}", microseconds(ms["hopper"]), microseconds(ours), f"{ours / ms['hopper']:.2f}",
                microseconds(fla), f"{fla / ours:.2f}",
            ])  # fmt: skip
        below_2, below_1_3 = (sum(ratio < bound for ratio, _ in over_peers(rows, "portable")) for bound in (2, 1.3))
        mean, worst, count = figures(rows, "portable")
        sums.append(
            f"{OPS[kind].capitalize()}: FLA takes {mean} the time in the geometric mean of {count} rows, {worst} in "
            f"the worst; in {below_2} less than 2×, in {below_1_3} less than 1.3×."
        )
    columns = ["µs", "Hopper's", "portable", "over Hopper's", "FLA", "FLA over portable"]
    return "\n\n".join([h200_heading(result["header"]), table(columns, cells), *sums])


TABLES = {"flashinfer-same-run": flashinfer, "portable": portable, "serve": serve}
