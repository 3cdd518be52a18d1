#!/usr/bin/env python3
"""Writes the tables of README and docs from results/ and bench/peers (see results/SCHEMA.md).

A table is between `<!-- results: NAME -->` and `<!-- /results -->`.

usage: render_results.py            rewrite the tables
       render_results.py --check    exit 1 if a table differs from the results
"""

import argparse
import json
import re
import sys

from repo_files import ROOT, repo_files

sys.path.insert(0, str(ROOT / "bench"))
import ratios
import regret
import serving
from rows import BACKWARD_LANDMARKS, ERRORS, LANDMARKS, name_of, of_kind

RESULTS = ROOT / "results" / "cpu"
H200 = ROOT / "results" / "h200"
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->\n.*?<!-- /results -->", re.DOTALL)
NOTHING = "No measurement is recorded yet."
NO_BACKWARD = "No measurement of the backward is recorded yet."
NO_SERVING = "No measurement of serving is recorded yet."
PUBLISHED_MARK = "†"  # after a ratio to a published time
EARLIER_MARK = "‡"  # after a ratio to a time of another run
PROFILE = {
    "duration_us": "duration", "tensor_pct": "tensor pipe", "issue_pct": "issue slots", "shared_pct": "shared memory",
    "l1_pct": "L1", "l2_pct": "L2", "dram_pct": "DRAM",
}  # fmt: skip
LIBRARIES = {  # by the first word of a peer's name
    "flashinfer": "FlashInfer", "flash_qla": "FlashQLA", "fla": "FLA", "sglang": "SGLang", "vllm": "vLLM",
    "transformers": "transformers",
}  # fmt: skip
OPS = {"fwd": "forward", "bwd": "backward", "train": "forward+backward", "rec": "recurrent"}


def load(kind: str) -> list[tuple[str, dict]]:
    """(stem, contents) of every machine that has this kind of file."""
    paths = sorted(RESULTS.glob(f"*.{kind}.json"))
    return [(path.name.removesuffix(f".{kind}.json"), json.loads(path.read_text())) for path in paths]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f} µs" if value < 0.5 else f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"


def heading(result: dict) -> str:
    machine, recorded = result["machine"], result["recorded"]
    commit = recorded["commit"][:10] + (" with changes" if recorded["modified"] else "")
    cpus = f"{machine['cpus']} CPU{'s' if machine['cpus'] != 1 else ''}"
    return f"**{machine['cpu']}** ({machine['architecture']}, {cpus}), {recorded['date']}, {commit}"


def cpu_rows(result: dict) -> list[tuple[str, dict]]:
    """Name and times of every comparison with transformers."""
    rows = [
        (f"{kind}, 1 × {shape['tokens']} tokens, {shape['heads']} heads", shape[kind])
        for shape in result["shapes"]
        for kind in ("forward", "forward+backward")
    ]
    return [*rows, (f"decode, {result['decode']['heads']} heads, per token", result["decode"])]


def cpu_speed() -> str:
    parts = []
    for stem, result in load("transformers"):
        cells = [
            [name, *(milliseconds(row[side]["best_ms"]) for side in ("ours", "theirs")), f"{row['speedup']:.1f}×"]
            for name, row in cpu_rows(result)
        ]
        peers = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "gatedelta")
        rates = "; ".join(
            f"{shape['forward']['gflops']:.0f} of {shape['forward']['matmul_gflops']:.0f} GFLOP/s "
            f"({shape['forward']['share_of_matmul']:.0%}) with {shape['tokens']} tokens and {shape['heads']} heads"
            for shape in result["shapes"]
        )
        isa = result["machine"]["best_isa"]
        picture = f"![Speed and scaling](../results/cpu/{stem}.png)" if (RESULTS / f"{stem}.png").exists() else ""
        parts += [
            heading(result),
            f"bf16, K = V = 128, {isa}, {result['threads']} threads; transformers' code in the same run ({peers}):",
            table(["", "GateDelta", "transformers", "speedup"], cells),
            f"Rate of the forward and of torch's bf16 matmul: {rates}.",
            *([picture] if picture else []),
        ]
    return "\n\n".join(parts) or NOTHING


def cpu_isas() -> str:
    parts = []
    for _, result in load("isas"):
        entries = result["results"]
        columns = sorted({(entry["isa"], entry["threads"]) for entry in entries}, key=lambda c: (isa_order(c[0]), c[1]))
        by_row = {}
        for entry in entries:
            by_row.setdefault((entry["name"], entry["op"]), {})[entry["isa"], entry["threads"]] = entry["best_ms"]
        cells = [
            [f"{name}, {OPS[op]}", *(milliseconds(times[column]) if column in times else "" for column in columns)]
            for (name, op), times in by_row.items()
        ]
        header = ["", *(f"{isa}, {threads} thread{'s' if threads > 1 else ''}" for isa, threads in columns)]
        parts += [heading(result), table(header, cells)]
    return "\n\n".join(parts) or NOTHING


def isa_order(isa: str) -> int:
    return ["generic", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"].index(isa)


def accuracy() -> str:
    parts = []
    for _, result in load("transformers"):
        shapes = [(shape["tokens"], shape["heads"]) for shape in result["shapes"]]
        by_quantity = {}
        for error in result["errors"]:
            by_quantity.setdefault(error["quantity"], {})[error["tokens"], error["heads"]] = error
        cells = [
            [quantity, *(f"{errors[shape][side]:.1e}" for shape in shapes for side in ("ours", "theirs"))]
            for quantity, errors in by_quantity.items()
        ]
        header = [""]
        for tokens, heads in shapes:
            header += [f"1 × {tokens}, {heads} heads", "transformers"]
        parts += [
            heading(result),
            f"bf16, {result['machine']['best_isa']}, worst of {result['verified_heads']} heads:",
            table(header, cells),
        ]
    return "\n\n".join(parts) or NOTHING


def load_h200() -> dict | None:
    """The record, with the peers' times in its rows: those of the forward and the backward, and those of serving."""
    record = H200 / "record.json"
    if not record.exists():
        return None
    result = json.loads(record.read_text())
    return result | {"rows": ratios.with_peers(result), "serving": serving.with_peers(result)}


def three_digits(ms: float) -> str:
    return f"{ms:#.3g}"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def h200_heading(header: dict) -> str:
    commit = header["commit"][:10] + (" with changes" if header["modified"] else "")
    driver = f"driver {header['driver']}, " if "driver" in header else ""
    return f"**{header['gpu']}**, {driver}torch {header['torch']}, {header['date']}, {commit}"


def picture(name: str, alt: str, root: str = "../") -> list[str]:
    """Markdown for it, if it exists; `root` is the path from the text to the top of the tree."""
    return [f"![{alt}]({root}results/h200/{name}.png)"] if (H200 / f"{name}.png").exists() else []


def speedup(row: dict) -> str:
    return f"{row['speedup']:.2f}×{PUBLISHED_MARK if ratios.rests_on_published(row) else ''}"


def sum_up(rows: list[dict]) -> str:
    found = ratios.summary(rows)
    worst = found["worst"]
    count = found["published"]
    return (
        f"geometric mean {found['geomean']:.2f}×, worst {speedup(worst)} ({name_of(worst)}); for {count} of the "
        f"{found['rows']} rows the fastest peer time is published, not measured"
    )


def best_peer(row: dict) -> str:
    return f"{three_digits(row['best_peer_ms'])} ({ratios.best_peer(row)})"


def errors_of(row: dict) -> list[str]:
    return [f"{row[error]:.1e}" for error in ERRORS[row["kind"]]]


def peers_of(row: dict, peers: list[str]) -> list[str]:
    """A cell for each peer, empty if the peer has no time for this row."""
    return [three_digits(row["peers"][name]) if name in row["peers"] else "" for name in peers]


def by_heads(rows: list[dict]) -> dict[tuple[int, int], list[dict]]:
    groups = {}
    for row in rows:
        groups.setdefault((row["hk"], row["hv"]), []).append(row)
    return groups


def peer_names(rows: list[dict]) -> list[str]:
    return sorted({name for row in rows for name in row["peers"]})


LEGEND = f"{PUBLISHED_MARK}: over a time that FlashQLA published. We measured all other peer times."
EARLIER_LEGEND = f"{EARLIER_MARK}: over a time that we measured in an earlier run, all others in the same run."


def libraries_of(rows: list[dict]) -> str:
    *others, last = dict.fromkeys(LIBRARIES[peer.split()[0]] for peer in peer_names(rows))
    return f"the fastest of {', '.join(others)} and {last}" if others else last


def serving_headline(rows: list[dict]) -> list[list[str]]:
    cells = []
    for name, members in serving.groups_of(rows).items():
        if found := serving.summary(members):
            worst = found["worst"]
            cells.append([
                f"H200, {name}, over {libraries_of([row for row in members if 'peers' in row])}",
                f"**{found['geomean']:.2f}×**",
                f"{serving_speedup(worst)} ({serving.name_of(worst)})",
                str(found["rows"]),
                str(found["recorded"]),
            ])  # fmt: skip
    return cells


def headline() -> str:
    """The figures of README's first screen."""
    result = load_h200()
    if not result:
        return NOTHING
    cells = []
    for kind in ("fwd", "bwd"):
        rows = of_kind(result["rows"], kind)
        if found := ratios.summary(rows):
            cells.append([
                f"H200, {OPS[kind]}, over {libraries_of(rows)}",
                f"**{found['geomean']:.2f}×**",
                f"{speedup(found['worst'])} ({name_of(found['worst'])})",
                str(found["rows"]),
                str(found["published"]),
            ])  # fmt: skip
    cells += serving_headline(result["serving"])
    machines = [result for _, result in load("transformers")]
    rows = [(machine, name, row) for machine in machines for name, row in cpu_rows(machine)]
    if rows:
        machine, name, worst = min(rows, key=lambda row: row[2]["speedup"])
        isas = ", ".join(dict.fromkeys(result["machine"]["best_isa"] for result in machines))
        cells.append([
            f"CPU, {len(machines)} machines ({isas}), over transformers' torch code",
            f"**{ratios.geomean([row['speedup'] for _, _, row in rows]):.1f}×**",
            f"{worst['speedup']:.1f}× ({name}, {machine['threads']} threads)",
            str(len(rows)),
            "0",
        ])  # fmt: skip
    marks = f"of these over a published time ({PUBLISHED_MARK})"
    legends = [LEGEND]
    if result["serving"]:
        marks = f"of these over a published time ({PUBLISHED_MARK}) or one of an earlier run ({EARLIER_MARK})"
        legends.append(EARLIER_LEGEND)
    columns = ["speedup", "geometric mean", "worst row", "rows", marks]
    return "\n\n".join([table(columns, cells), *legends])


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
        LEGEND,
        *picture("overview", "Speedup over the fastest peer"),
    ])  # fmt: skip


def h200_rows() -> str:
    result = load_h200()
    if not result:
        return NOTHING
    forward = of_kind(result["rows"], "fwd")
    peers = peer_names(forward)
    parts = [h200_heading(result["header"]), LEGEND]
    for (hk, hv), rows in by_heads(forward).items():
        cells = [
            [row["seq"], three_digits(row["ms"]), speedup(row), *errors_of(row), *peers_of(row, peers)] for row in rows
        ]
        header = [f"{hk}/{hv} heads, ms", "GateDelta", "speedup", "error of o", "error of the state", *peers]
        parts += [table(header, cells), *picture(f"{hk}x{hv}", f"{hk}/{hv} heads")]
    return "\n\n".join(parts)


def load_backward() -> tuple[dict, list[dict]] | None:
    """Header and rows of the backward; None if the record has no such rows."""
    result = load_h200()
    rows = of_kind(result["rows"], "bwd") if result else []
    return (result["header"], rows) if rows else None


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
        LEGEND,
        *picture("backward-overview", "Speedup of the backward over the fastest peer"),
    ])  # fmt: skip


def h200_backward_rows() -> str:
    found = load_backward()
    if not found:
        return NO_BACKWARD
    header, backward = found
    peers = peer_names(backward)
    names = [f"error of {error.removeprefix('err_')}" for error in ERRORS["bwd"]]
    parts = [h200_heading(header), LEGEND]
    for (hk, hv), rows in by_heads(backward).items():
        cells = [
            [
                row["seq"],
                three_digits(row["ms"]),
                speedup(row),
                three_digits(row["train_ms"]),
                mebibytes(row["workspace_bytes"]),
                mebibytes(row["saved_bytes"]),
                three_digits(row["small_ms"]),
                mebibytes(row["small_workspace_bytes"]),
                *errors_of(row),
                *peers_of(row, peers),
            ]
            for row in rows
        ]
        columns = ["GateDelta", "speedup", "with the forward", "workspace, MiB", "saved, MiB"]
        columns += ["with `small_workspace`", "its workspace, MiB", *names, *peers]
        parts += [
            table([f"{hk}/{hv} heads, ms", *columns], cells),
            *picture(f"backward-{hk}x{hv}", f"Backward, {hk}/{hv} heads"),
        ]
    return "\n\n".join(parts)


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
    path = H200 / "gradients.json"
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
    path = H200 / "segments.json"
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
        f"{found['rows']} shapes. The automatic cut is slower than the fastest forced length (or no cut) by "
        f"{found['median']:.1%} in the median, and by more than {regret.BAR:.0%} for {above} shapes. The worst:"
    )
    columns = ["heads, sequences; ms", "automatic", "uncut", "fastest", "slower by"]
    shown = picture("segments", "Time against segment length", "../../")
    return "\n\n".join([h200_heading(result["header"]), text, table(columns, cells), *shown])


def microseconds(ms: float) -> str:
    return f"{ms * 1e3:#.3g}" if ms < 0.0995 else f"{ms * 1e3:.0f}"


def serving_speedup(row: dict) -> str:
    """Empty without a peer."""
    if "speedup" not in row:
        return ""
    return f"{row['speedup']:.2f}×{EARLIER_MARK if serving.rests_on_recorded(row) else ''}"


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


def load_serving(*kinds: str) -> tuple[dict, list[dict]] | None:
    """Header and rows of these kinds; None if the record has none."""
    result = load_h200()
    rows = [row for row in result["serving"] if row["kind"] in kinds] if result else []
    return (result["header"], rows) if rows else None


FORMATS = {("float32", "VK"): "fp32", ("bfloat16", "VK"): "bf16", ("float32", "KV"): "fp32 [K, V]"}
STORES = {"final": "last state", "accept": "accepted state", "none": "outputs only", "steps": "every state"}


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


def h200_serving_rows() -> str:
    found = load_serving("decode", "verify")
    if not found:
        return NO_SERVING
    header, every = found
    parts = [h200_heading(header), EARLIER_LEGEND]
    for (hk, hv), rows in by_heads(every).items():
        peers = sorted({name.removesuffix(serving.RECORDED_MARK) for row in rows for name in row.get("peers", ())})
        cells = []
        for row in rows:
            times = {
                name.removesuffix(serving.RECORDED_MARK): microseconds(ms)
                + (EARLIER_MARK if name.endswith(serving.RECORDED_MARK) else "")
                for name, ms in row.get("peers", {}).items()
            }
            errors = [f"{row[error]:.1e}" if error in row else "" for error in serving.ERRORS]
            name = serving.name_of(row).partition(" ")[2]
            cells.append([name, microseconds(row["ms"]), serving_speedup(row), *errors,
                          *(times.get(peer, "") for peer in peers)])  # fmt: skip
        columns = [f"{hk}/{hv} heads, µs", "GateDelta", "speedup", "error of o", "error of the state", *peers]
        parts += [table(columns, cells)]
        for kind, what in (("decode", "Decode"), ("verify", "Verification")):
            parts += picture(f"{kind}-{hk}x{hv}", f"{what}, {hk}/{hv} heads")
    return "\n\n".join(parts)


def h200_layer_step() -> str:
    path = H200 / "layer_step.json"
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


TABLES = {
    "cpu-speed": cpu_speed, "cpu-isas": cpu_isas, "accuracy": accuracy,
    "headline": headline, "h200-forward": h200_forward, "h200-rows": h200_rows, "h200-profile": h200_profile,
    "h200-backward": h200_backward, "h200-backward-rows": h200_backward_rows, "h200-segments": h200_segments,
    "h200-accuracy": h200_accuracy, "h200-gradients": h200_gradients, "h200-long": h200_long,
    "h200-decode": h200_decode, "h200-verify": h200_verify, "h200-packs": h200_packs,
    "h200-serving-rows": h200_serving_rows, "h200-layer-step": h200_layer_step,
}  # fmt: skip


def rendered(text: str) -> str:
    def block(match: re.Match) -> str:
        name = match[1]
        if name not in TABLES:
            sys.exit(f"render_results: unknown table '{name}'; known are {', '.join(TABLES)}")
        return f"<!-- results: {name} -->\n\n{TABLES[name]()}\n\n<!-- /results -->"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale, blocks = [], 0
    for path in repo_files(".md"):
        text = (ROOT / path).read_text()
        blocks += len(BLOCK.findall(text))
        new = rendered(text)
        if new == text:
            continue
        stale.append(str(path))
        if not arguments.check:
            (ROOT / path).write_text(new)
    verb = "different from the results" if arguments.check else "rewritten"
    print(f"render_results: {blocks} tables" + (f"; {verb}: {', '.join(stale)}" if stale else ", all current"))
    return 1 if not blocks or (arguments.check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
