"""Where the results are, and what is loaded of them."""

import json

from bench.lib import ratios, serving
from bench.lib.rows import of_kind
from tools.repo_files import ROOT

RESULTS = ROOT / "results" / "cpu"
H200 = ROOT / "results" / "h200"


def load(kind: str) -> list[tuple[str, dict]]:
    """(stem, contents) of every machine that has this kind of file."""
    paths = sorted(RESULTS.glob(f"*.{kind}.json"))
    return [(path.name.removesuffix(f".{kind}.json"), json.loads(path.read_text())) for path in paths]


def load_h200() -> dict | None:
    """The record, with the peers' times in its rows: those of the forward and the backward, and those of serving."""
    record = H200 / "record.json"
    if not record.exists():
        return None
    result = json.loads(record.read_text())
    return result | {"rows": ratios.with_peers(result), "serving": serving.with_peers(result)}


def load_backward() -> tuple[dict, list[dict]] | None:
    """Header and rows of the backward; None if the record has no such rows."""
    result = load_h200()
    rows = of_kind(result["rows"], "bwd") if result else []
    return (result["header"], rows) if rows else None


def load_serving(*kinds: str) -> tuple[dict, list[dict]] | None:
    """Header and rows of these kinds; None if the record has none."""
    result = load_h200()
    rows = [row for row in result["serving"] if row["kind"] in kinds] if result else []
    return (result["header"], rows) if rows else None
