"""Tables of the chunked forward and backward on a GPU."""

import json

from bench.lib import ratios, regret
from bench.lib.rows import BACKWARD_LANDMARKS, ERRORS, LANDMARKS, name_of, of_kind
from bench.report.tables import files
from bench.report.tables.files import load_backward, load_h200
from bench.report.tables.text import (
    NO_BACKWARD,
    NOTHING,
    errors_of,
    h200_heading,
    mebibytes,
    milliseconds,
    picture,
    speedup,
    table,
    three_digits,
)

PROFILE = {
    "duration_us": "duration", "tensor_pct": "tensor pipe", "issue_pct": "issue slots", "shared_pct": "shared memory",
    "l1_pct": "L1", "l2_pct": "L2", "dram_pct": "DRAM",
}  # fmt: skip


def sum_up(rows: list[dict]) -> str:
    found = ratios.summary(rows)
    worst = found["worst"]
    return f"geometric mean {found['geomean']:.2f}×, worst {speedup(worst)} ({name_of(worst)})"


def published(rows: list[dict]) -> list[str]:
    """A sentence on rows for which FlashQLA published a shorter time than any that we measured."""
    shorter = {name_of(row): ms / row["ms"] for row in rows if (ms := ratios.shorter_published(row))}
    if not shorter:
        return []
    every = [ratio if (ratio := shorter.get(name_of(row))) else row["speedup"] for row in rows]
    return [
        f"For {len(shorter)} of the {len(rows)} rows FlashQLA published a shorter time than we measured for any peer. "
        f"With these the mean would be {ratios.geomean(every):.2f}× and the worst row {min(every):.2f}×."
    ]


def best_peer(row: dict) -> str:
    return f"{three_digits(row['best_peer_ms'])} ({ratios.best_peer(row)})"


def h200_forward() -> str:
    result = load_h200()
    if not result:
        return NOTHING
    header, rows = result["header"], of_kind(result["rows"], "fwd")
    by_name = {name_of(row): row for row in rows}
    cells = [
        [name, three_digits(row["ms"]), best_peer(row), speedup(row), *errors_of(row)]
        for name, row in ((name, by_name[name]) for name in LANDMARKS)
    ]
    full = [row for row in rows if ratios.is_full(row)]
    return "\n\n".join([
        h200_heading(header),
        f"All {len(rows)} rows: {sum_up(rows)}.",
        f"The {len(full)} rows with sequences × value heads ≥ {ratios.FULL}, which fill the GPU: {sum_up(full)}.",
        f"Six of the rows, as medians of {header['repeats']} graph replays:",
        table(["", "GateDelta, ms", "best peer, ms", "speedup", "error of o", "error of the state"], cells),
        *published(rows),
        *picture("overview", "Speedup over the fastest peer"),
    ])  # fmt: skip


def h200_backward() -> str:
    found = load_backward()
    if not found:
        return NO_BACKWARD
    header, rows = found
    by_name = {name_of(row): row for row in rows}
    cells = [
        [
            name,
            three_digits(row["ms"]),
            best_peer(row),
            speedup(row),
            three_digits(row["train_ms"]),
            f"{max(row[error] for error in ERRORS['bwd']):.1e}",
            mebibytes(row["workspace_bytes"] + row["saved_bytes"]),
        ]
        for name, row in ((name, by_name[name]) for name in BACKWARD_LANDMARKS)
    ]
    columns = ["", "GateDelta, ms", "best peer, ms", "speedup", "with the forward, ms", "largest error", "memory, MiB"]
    return "\n\n".join([
        h200_heading(header),
        f"All {len(rows)} rows: {sum_up(rows)}.",
        "Six of the rows, with the largest error of the six gradients, and workspace and saved memory together:",
        table(columns, cells),
        *published(rows),
        *picture("backward-overview", "Speedup of the backward over the fastest peer"),
    ])  # fmt: skip


def h200_profile() -> str:
    result = load_h200()
    profile = result and result["header"].get("profile")
    if not profile:
        return NOTHING

    def cell(name: str, value: float | None) -> str:
        if value is None:
            return ""
        return milliseconds(value / 1e3) if name == "duration_us" else f"{value:.0f}%"

    cells = [
        [f"{row}, {kernel.removesuffix('_kernel')}", *(cell(name, values.get(name)) for name in PROFILE)]
        for row, kernels in profile.items()
        for kernel, values in kernels.items()
    ]
    return "\n\n".join([h200_heading(result["header"]), table(["", *PROFILE.values()], cells)])


def h200_accuracy() -> str:
    result = load_h200()
    found = result and result["header"].get("accuracy")
    if not found:
        return NOTHING
    cells = [[gates, *(f"{errors[name]:.2e}" for name in ERRORS["fwd"])] for gates, errors in found.items()]
    return "\n\n".join([h200_heading(result["header"]), table(["gates", "error of o", "error of the state"], cells)])


def h200_gradients() -> str:
    path = files.H200 / "gradients.json"
    if not path.exists():
        return NOTHING
    result = json.loads(path.read_text())
    libraries = result["libraries"]
    columns = [f"{name} {library['version']}" for name, library in libraries.items()]
    errors = [
        [f"{kind}, {name}", *(f"{library['errors'][kind][name]:.1e}" for library in libraries.values())]
        for kind, gradients in libraries["gatedelta"]["errors"].items()
        for name in gradients
    ]
    memory = [
        [what, *(mebibytes(library["memory"][name]) for library in libraries.values())]
        for what, name in (("saved by the forward", "saved_bytes"), ("taken by the backward", "backward_bytes"))
    ]
    small = [library["memory"].get("small_backward_bytes") for library in libraries.values()]
    memory += [["with `small_workspace`", *(mebibytes(x) if x else "" for x in small)]]
    return "\n\n".join([
        h200_heading(result["header"]), table(["error of the worst head", *columns], errors),
        table(["MiB", *columns], memory),
    ])  # fmt: skip


def h200_long() -> str:
    result = load_h200()
    found = result and result["header"].get("long")
    if not found:
        return NOTHING
    first = {}
    cells = []
    for row in found:
        each = row["ms"] / row["tokens"]
        cells.append([
            f"{row['hk']}/{row['hv']}, {row['tokens']:,}",
            three_digits(row["ms"]),
            f"{each * 1e6:.2f}",
            f"{each / first.setdefault((row['hk'], row['hv']), each):.2f}",
            mebibytes(row["workspace_bytes"]),
        ])  # fmt: skip
    columns = ["heads, tokens", "ms", "ns a token", "against the first", "workspace, MiB"]
    return "\n\n".join([h200_heading(result["header"]), table(columns, cells)])


def h200_segments() -> str:
    path = files.H200 / "segments.json"
    if not path.exists():
        return NOTHING
    result = json.loads(path.read_text())
    found = regret.summary(result["rows"])
    worst = sorted(result["rows"], key=lambda row: -row["regret"])
    above = sum(row["regret"] > regret.BAR for row in worst)
    cells = [
        [
            name_of(row),
            *(three_digits(row[name]) for name in ("auto_ms", "off_ms", "best_ms")),
            f"{row['regret']:.1%}",
        ]
        for row in worst[: max(above, 10)]
    ]
    text = (
        f"{found['rows']} shapes. The automatic cut is slower than the fastest cut of the search (or no cut) by "
        f"{found['median']:.1%} in the median, and by more than {regret.BAR:.0%} for {above} shapes. The worst:"
    )
    columns = ["heads, sequences; ms", "automatic", "uncut", "fastest", "slower by"]
    shown = picture("segments", "Time against segment length", "../../")
    return "\n\n".join([h200_heading(result["header"]), text, table(columns, cells), *shown])


TABLES = {
    "h200-forward": h200_forward,
    "h200-profile": h200_profile,
    "h200-backward": h200_backward,
    "h200-segments": h200_segments,
    "h200-accuracy": h200_accuracy,
    "h200-gradients": h200_gradients,
    "h200-long": h200_long,
}
