"""Every row of a table as a CSV file, for who wants to sort, filter or draw it."""

import csv
import io
from collections.abc import Callable

from bench.lib import serving
from bench.lib.rows import ERRORS, of_kind
from bench.report.tables.files import load, load_h200
from bench.report.tables.text import peer_names


def text_of(columns: list[str], lines: list[dict]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def rounded(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def chunked(kind: str, *more: str) -> str:
    """Rows of the forward or the backward. Times are in ms; a peer's column has its name."""
    result = load_h200()
    rows = of_kind(result["rows"], kind) if result else []
    if not rows:
        return ""
    peers = peer_names(rows)
    columns = ["hk", "hv", "seq", "ms", "speedup", *more, *ERRORS[kind], *peers]
    lines = [
        {"hk": row["hk"], "hv": row["hv"], "seq": row["seq"], "speedup": rounded(row.get("speedup"))}
        | {name: rounded(row.get(name)) for name in ("ms", *ERRORS[kind])}
        | {name: rounded(row.get(name), 12) for name in more if name.endswith("bytes")}
        | {name: rounded(row.get(name)) for name in more if name.endswith("ms")}
        | {name: rounded(time) for name, time in row.get("peers", {}).items()}
        for row in rows
    ]
    return text_of(columns, lines)


def forward() -> str:
    return chunked("fwd")


def backward() -> str:
    return chunked("bwd", "train_ms", "workspace_bytes", "saved_bytes", "small_ms", "small_workspace_bytes")


def serving_rows() -> str:
    result = load_h200()
    rows = result["serving"] if result else []
    if not rows:
        return ""
    peers = peer_names([row for row in rows if "peers" in row])
    columns = [*serving.KEY, "seq", "ms", "speedup", *serving.ERRORS, *peers]
    lines = [
        {name: row.get(name, "") for name in (*serving.KEY, "seq")}
        | {name: rounded(row.get(name)) for name in ("ms", "speedup", *serving.ERRORS)}
        | {name: rounded(time) for name, time in row.get("peers", {}).items()}
        for row in rows
    ]
    return text_of(columns, lines)


def isas() -> str:
    lines = [
        {"machine": stem, "best_ms": rounded(entry["best_ms"]), "case": entry["case"]}
        | {name: entry[name] for name in ("name", "op", "isa", "threads")}
        for stem, result in load("isas")
        for entry in result["results"]
    ]
    columns = ["machine", "name", "op", "isa", "threads", "best_ms", "case"]
    return text_of(columns, lines) if lines else ""


FILES: dict[str, Callable[[], str]] = {  # empty while nothing is recorded
    "results/h200/rows/forward.csv": forward,
    "results/h200/rows/backward.csv": backward,
    "results/h200/rows/serving.csv": serving_rows,
    "results/cpu/isas.csv": isas,
}
