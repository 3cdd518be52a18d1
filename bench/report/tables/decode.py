"""Tables of serving on a GPU: decode, draft verification, packs, the layer's step."""

import json

from bench.lib import serving
from bench.report.tables import files
from bench.report.tables.files import load_serving
from bench.report.tables.text import (
    EARLIER_LEGEND,
    NO_SERVING,
    h200_heading,
    microseconds,
    picture,
    serving_speedup,
    table,
)

FORMATS = {("float32", "VK"): "fp32", ("bfloat16", "VK"): "bf16", ("float32", "KV"): "fp32 [K, V]"}
STORES = {"final": "last state", "accept": "accepted state", "none": "outputs only", "steps": "every state"}


def serving_sums(rows: list[dict], names: tuple[str, ...]) -> list[str]:
    """A line for each group of rows that has peers."""
    lines = []
    for name in names:
        if found := serving.summary(serving.groups_of(rows)[name]):
            worst = found["worst"]
            lines.append(
                f"{name[0].upper()}{name[1:]}, {found['rows']} rows with a peer: geometric mean "
                f"{found['geomean']:.2f}×, worst {serving_speedup(worst)} ({serving.name_of(worst)}); "
                f"{found['recorded']} of the ratios are to a time of an earlier run."
            )
    return lines


def main_heads(rows: list[dict]) -> list[dict]:
    return [row for row in rows if (row["hk"], row["hv"]) == serving.MAIN]


def h200_decode() -> str:
    found = load_serving("decode")
    if not found:
        return NO_SERVING
    header, rows = found
    copy, calls = header["serving"]["copy_bytes_per_s"], header["serving"]["decode_call_us"]
    by_key = {(row["batch"], (row["state_dtype"], row["layout"])): row for row in main_heads(rows)}
    cells = []
    for batch in serving.BATCHES:
        line = [str(batch)]
        for kind in FORMATS:
            row = by_key[batch, kind]
            line += [microseconds(row["ms"]), serving_speedup(row), f"{serving.copy_share(row, copy):.0%}"]
        cells.append(line)
    columns = [f"{serving.MAIN[0]}/{serving.MAIN[1]} heads, batch"]
    for name in FORMATS.values():
        columns += [f"{name}, µs", "speedup", "of copy"]
    hot = [f"{FORMATS[kind]} {microseconds(by_key[1, kind]['hot_ms'])}" for kind in FORMATS]
    others = ", ".join(f"{name} {us:.0f}" for name, us in calls.items() if name != "gatedelta")
    return "\n\n".join([
        h200_heading(header),
        *serving_sums(rows, ("decode",)),
        f"A copy of 2 GiB moves {copy / 1e12:.2f} TB/s, read and written. At batch 1 with slot indices in the L2, µs: "
        f"{', '.join(hot)}. Host time of an eager call, µs: {calls['gatedelta']:.1f}"
        + (f" ({others})." if others else "."),
        table(columns, cells),
        EARLIER_LEGEND,
        *picture("decode-16x32", "Decode: the peers' times over ours"),
    ])  # fmt: skip


def h200_verify() -> str:
    found = load_serving("verify")
    if not found:
        return NO_SERVING
    header, rows = found
    groups: dict[tuple, dict[int, dict]] = {}
    for row in main_heads(rows):
        kind = (row["T"], STORES[row["store"]], FORMATS[row["state_dtype"], row["layout"]])
        groups.setdefault(kind, {})[row["batch"]] = row
    cells = []
    for (tokens, store, name), by_batch in groups.items():
        line = [f"{tokens} drafts, {store}, {name}"]
        for batch in serving.VERIFY_BATCHES:
            line += [microseconds(by_batch[batch]["ms"]), serving_speedup(by_batch[batch])]
        cells.append(line)
    columns = [f"{serving.MAIN[0]}/{serving.MAIN[1]} heads"]
    for batch in serving.VERIFY_BATCHES:
        columns += [f"batch {batch}, µs", "speedup"]
    return "\n\n".join([
        h200_heading(header),
        *serving_sums(rows, ("verify, one state or none", "verify, every state")),
        table(columns, cells),
        EARLIER_LEGEND,
        *picture("verify-16x32", "Verification: the peers' times over ours"),
    ])  # fmt: skip


def h200_packs() -> str:
    found = load_serving("pack")
    if not found:
        return NO_SERVING
    header, rows = found
    cells = [
        [
            serving.name_of(row),
            microseconds(row["ms"]),
            f"{microseconds(row['best_peer_ms'])} ({serving.best_peer(row)})" if "speedup" in row else "",
            serving_speedup(row),
            *(f"{row[error]:.1e}" for error in serving.ERRORS),
        ]
        for row in rows
    ]
    columns = ["heads, sequences x tokens", "GateDelta, µs", "best peer, µs", "speedup", "error of o"]
    return "\n\n".join([h200_heading(header), table([*columns, "error of the state"], cells)])


def h200_layer_step() -> str:
    path = files.H200 / "layer_step.json"
    if not path.exists():
        return "*No layer step was timed.*"
    result = json.loads(path.read_text())
    cells = []
    for row in result["rows"]:
        best = {part: min(times, key=times.get) for part, times in row["peers_ms"].items()}
        names = ", ".join(f"{part} {microseconds(row['peers_ms'][part][name])} ({name})" for part, name in best.items())
        cells.append([f"{row['batch']} {row['state_dtype']}", microseconds(row["ms"]),
                      microseconds(row["separate_ms"]), microseconds(row["best_peer_ms"]), f"{row['speedup']:.2f}×",
                      names, *(f"{row[error]:.1e}" for error in serving.ERRORS)])  # fmt: skip
    columns = ["batch, states", "`gd_layer_step`, µs", "our three calls", "peers' fastest three", "speedup",
               "of these", "error of o", "error of the state"]  # fmt: skip
    return "\n\n".join([h200_heading(result["header"]), table(columns, cells)])


def h200_gated_norm() -> str:
    """Empty while nothing is recorded."""
    path = files.H200 / "gated_norm.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    cells = []
    for row in result["rows"]:
        line = [f"{row['tokens']} × {row['heads']}"]
        for what in ("forward", "backward"):
            us = row["us"]
            theirs = us.get(f"FLA {what}")
            line += [f"{us[what]:.2f}", f"{us[f'copy, as {what}'] / us[what]:.2f}", f"{theirs:.2f}" if theirs else ""]
        cells.append(line)
    columns = [f"tokens × heads of {result['rows'][0]['dim']}"]
    for what in ("forward", "backward"):
        columns += [f"{what}, µs", "of copy", "FLA, µs"]
    return "\n\n".join([h200_heading(result["header"]), table(columns, cells)])


TABLES = {
    "h200-decode": h200_decode,
    "h200-verify": h200_verify,
    "h200-packs": h200_packs,
    "h200-layer-step": h200_layer_step,
    "h200-gated-norm": h200_gated_norm,
}
