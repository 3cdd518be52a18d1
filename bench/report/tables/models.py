"""Whole models on a GPU."""

import json

from bench.lib import model_rows
from bench.report.tables import files
from bench.report.tables.text import h200_heading, picture, table, three_digits

FLA = ("fla", "fla-all")


def gibibytes(size: int) -> str:
    return f"{size / 2**30:.1f}"


def digits(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 1000 else three_digits(ms).removesuffix(".")


def times(group: dict[str, dict], path: str) -> str:
    """Of the model, and of its layers in brackets; empty if there is no row, a dash if it could not be measured."""
    row = group.get(path)
    if row is None:
        return ""
    return f"{digits(row['ms'])} ({digits(row['gdn_ms'])})" if "ms" in row else "—"


def ratio(ours: dict, others: list[dict], time: str) -> str:
    """Over the fastest of the others."""
    found = [model_rows.speedup(ours, row, time) for row in others]
    measured = [x for x in found if x is not None]
    return f"{min(measured):.2f}×" if measured else ""


def line_of(group: dict[str, dict], paths: list[str]) -> list[str]:
    ours = group["gatedelta"]
    fla = [group[path] for path in FLA if path in group]
    reference = [group["torch"]] if "torch" in group else []
    memory = [gibibytes(group[path]["peak_bytes"]) if "peak_bytes" in group.get(path, {}) else "—" for path in paths]
    return [
        f"{ours['model']}, {model_rows.name_of(ours)}",
        *(times(group, path) for path in paths),
        ratio(ours, fla, "ms"),
        ratio(ours, fla, "gdn_ms"),
        ratio(ours, reference, "ms"),
        " / ".join(memory),
    ]


def later_runs(header: dict) -> list[str]:
    """A sentence for each run that replaced rows of the first."""

    def names(run: dict, key: str) -> str:
        return ", ".join(model_rows.PATHS[path] for path in run["paths"]) if key == "paths" else ", ".join(run[key])

    rows: dict[str, dict[str, None]] = {}  # by run; a run that was stopped and done again counts once
    for run in header.get("added", []):
        when = f"{run['date']}, {(run['commit'] or 'no commit')[:10]}"
        what = f"{names(run, 'kinds')} rows of {names(run, 'paths')} at {names(run, 'sizes')}"
        rows.setdefault(when, {})[what] = None
    return [f"Measured later ({when}): {'; '.join(found)}." for when, found in rows.items()]


def models() -> str:
    """Empty while nothing is recorded."""
    path = files.H200 / "models.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    header = result["header"]
    found = model_rows.by_path(result["rows"])
    order = [model_rows.key(row) for row in model_rows.rows_of(False, list(model_rows.SIZES), model_rows.KINDS)]
    groups = [found[key] for key in sorted(found, key=order.index) if "ms" in found[key].get("gatedelta", {})]
    paths = [path for path in model_rows.PATHS if any(path in group for group in groups)]
    missed = sorted({
        f"{model_rows.PATHS[row['path']]}, {row['model']}, {model_rows.name_of(row)}: {row['skipped']}"
        for row in result["rows"]
        if "skipped" in row
    })  # fmt: skip
    versions = ", ".join(f"FLA {found['fla']}" for found in header["paths"].values() if "fla" in found).split(", ")[0]
    text = (
        f"Qwen3.5's text models with random weights, bf16, a vocabulary of {header['vocabulary']}, in transformers "
        f"{header['transformers']}{f' with {versions}' if versions else ''}. Times in ms: of the whole model, and in "
        "brackets inside its Gated Delta Network layers with their projections. A decode row is one step. FLA is what "
        "transformers takes from it where it is installed: the rule, while convolution and norm stay transformers' own."
    )
    if "gatedelta-fused" in paths:
        text += " Projections fused: decode after `gatedelta.transformers.fuse_projections`."
    columns = ["", *(model_rows.PATHS[path] for path in paths), "over the faster FLA", "in the GDN layers"]
    columns += ["over the torch code", "peak memory, GiB"]
    return "\n\n".join([
        h200_heading(header),
        text,
        table(columns, [line_of(group, paths) for group in groups]),
        *([" ".join(later)] if (later := later_runs(header)) else []),
        *([f"Not measured: {'; '.join(missed)}."] if missed else []),
        *picture("models", "Whole models: the other paths' times over GateDelta's"),
    ])  # fmt: skip


TABLES = {"models": models}
