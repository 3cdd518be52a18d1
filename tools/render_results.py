#!/usr/bin/env python3
"""Writes the tables of README and docs from results/ (see results/SCHEMA.md).

A table stands between `<!-- results: NAME -->` and `<!-- /results -->`.

usage: render_results.py            rewrite the tables
       render_results.py --check    exit 1 if a table is not what results/ says
       render_results.py --record FOLDER        keep what `make bench` left in FOLDER, then rewrite
       render_results.py --record-gpu FOLDER    the same of the GPU's part alone
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from repo_files import ROOT, repo_files, stamp

sys.path.insert(0, str(ROOT / "bench"))
import ratios
import regret
from rows import KINDS, of_kind

RESULTS = ROOT / "results" / "cpu"
H200 = ROOT / "results" / "h200"
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->\n.*?<!-- /results -->", re.DOTALL)
NOTHING = "No measurement is recorded yet."
NO_BACKWARD = "No measurement of the backward is recorded yet."
LANDMARKS = ("16/64 8192x4", "16/64 1x32768", "8/32 4096x8", "16/48 4096x8", "32/32 8192x4", "16/64 1x2048")
BACKWARD_LANDMARKS = (
    "16/32 32k_1seq", "16/32 32k_8seq", "16/32 8k_1seq", "8/16 32k_4seq", "4/8 32k_1seq", "2/4 8k_1seq",
)  # fmt: skip
ERRORS = {"fwd": ("err_o", "err_state"), "bwd": ("err_dq", "err_dk", "err_dv", "err_dg", "err_dbeta", "err_dh0")}
PROFILE = {
    "duration_us": "duration", "tensor_pct": "tensor pipe", "issue_pct": "issue slots", "shared_pct": "shared memory",
    "l1_pct": "L1", "l2_pct": "L2", "dram_pct": "DRAM",
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


def cpu_speed() -> str:
    parts = []
    for stem, result in load("transformers"):
        rows = []
        for shape in result["shapes"]:
            for kind in ("forward", "forward+backward"):
                rows.append((f"{kind}, 1 × {shape['tokens']} tokens, {shape['heads']} heads", shape[kind]))
        rows.append((f"decode, {result['decode']['heads']} heads, per token", result["decode"]))
        cells = [
            [name, *(milliseconds(row[side]["best_ms"]) for side in ("ours", "theirs")), f"{row['speedup']:.1f}×"]
            for name, row in rows
        ]
        peers = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "gatedelta")
        rates = "; ".join(
            f"{shape['forward']['gflops']:.0f} of {shape['forward']['matmul_gflops']:.0f} GFLOP/s "
            f"({shape['forward']['share_of_matmul']:.0%}) with {shape['tokens']} tokens and {shape['heads']} heads"
            for shape in result["shapes"]
        )
        isa = result["machine"]["best_isa"]
        picture = f"![Speed and scaling](results/cpu/{stem}.png)" if (RESULTS / f"{stem}.png").exists() else ""
        parts += [
            heading(result),
            f"bf16, K = V = 128, {isa}, {result['threads']} threads; transformers' torch code, same run ({peers}):",
            table(["", "GateDelta", "transformers", "speedup"], cells),
            f"The forward's rate against torch's bf16 matmul: {rates}.",
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
    latest = H200 / "latest.json"
    return json.loads(latest.read_text()) if latest.exists() else None


def three_digits(ms: float) -> str:
    return f"{ms:#.3g}"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def h200_heading(header: dict) -> str:
    commit = header["commit"][:10] + (" with changes" if header["modified"] else "")
    driver = f"driver {header['driver']}, " if "driver" in header else ""
    return f"**{header['gpu']}**, {driver}torch {header['torch']}, {header['date']}, {commit}"


def name_of(row: dict) -> str:
    return f"{row['hk']}/{row['hv']} {row['seq']}"


def picture(name: str, alt: str, root: str = "") -> list[str]:
    """In Markdown, where there is one; `root` leads from the text to the top of the tree."""
    return [f"![{alt}]({root}results/h200/{name}.png)"] if (H200 / f"{name}.png").exists() else []


def sum_up(rows: list[dict]) -> str:
    found = ratios.summary(rows)
    worst = found["worst"]
    return f"geometric mean {found['geomean']:.2f}×, worst {worst['speedup']:.2f}× ({name_of(worst)})"


def best_peer(row: dict) -> str:
    return f"{three_digits(row['best_peer_ms'])} ({ratios.best_peer(row)})"


def errors_of(row: dict) -> list[str]:
    return [f"{row[error]:.1e}" for error in ERRORS[row["kind"]]]


def peers_of(row: dict, peers: list[str]) -> list[str]:
    """A cell for each, empty where there is no time of this one."""
    return [three_digits(row["peers"][name]) if name in row["peers"] else "" for name in peers]


def by_heads(rows: list[dict]) -> dict[tuple[int, int], list[dict]]:
    groups = {}
    for row in rows:
        groups.setdefault((row["hk"], row["hv"]), []).append(row)
    return groups


def peer_names(rows: list[dict]) -> list[str]:
    return sorted({name for row in rows for name in row["peers"]})


def h200_forward() -> str:
    result = load_h200()
    if not result:
        return NOTHING
    header, rows = result["header"], of_kind(result["rows"], "fwd")
    by_name = {name_of(row): row for row in rows}
    cells = [
        [
            name,
            three_digits(row["ms"]),
            best_peer(row),
            f"{row['speedup']:.2f}×",
            *errors_of(row),
        ]
        for name, row in ((name, by_name[name]) for name in LANDMARKS)
    ]
    full = [row for row in rows if ratios.is_full(row)]
    return "\n\n".join([
        h200_heading(header),
        f"Forward, bf16, K = V = 128, fp32 states, median of {header['repeats']} graph replays, against the fastest of "
        "[these peers](bench/peers/README.md). Rows are key heads/value heads and lengths (8192x4: four sequences of "
        "8192 tokens, 1x2048: one of 2048); errors are relative L2 distances from the fp64 recurrence:",
        table(["", "GateDelta, ms", "best peer, ms", "speedup", "error of o", "of the state"], cells),
        f"The {len(full)} rows with at least {ratios.FULL} sequences × value heads, which fill the GPU: "
        f"{sum_up(full)}. All {len(rows)} rows: {sum_up(rows)}.",
        *picture("overview", "Speedup over the fastest peer"),
    ])  # fmt: skip


def h200_rows() -> str:
    result = load_h200()
    if not result:
        return NOTHING
    forward = of_kind(result["rows"], "fwd")
    peers = peer_names(forward)
    parts = [h200_heading(result["header"])]
    for (hk, hv), rows in by_heads(forward).items():
        cells = [
            [row["seq"], three_digits(row["ms"]), f"{row['speedup']:.2f}×", *errors_of(row), *peers_of(row, peers)]
            for row in rows
        ]
        header = [f"{hk}/{hv} heads, ms", "GateDelta", "speedup", "error of o", "of the state", *peers]
        parts += [table(header, cells), *picture(f"{hk}x{hv}", f"{hk}/{hv} heads", "../")]
    return "\n\n".join(parts)


def load_backward() -> tuple[dict, list[dict]] | None:
    """Header and rows, where a record has any."""
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
            f"{row['speedup']:.2f}×",
            three_digits(row["train_ms"]),
            f"{max(row[error] for error in ERRORS['bwd']):.1e}",
            mebibytes(row["workspace_bytes"] + row["saved_bytes"]),
        ]
        for name, row in ((name, by_name[name]) for name in BACKWARD_LANDMARKS)
    ]
    return "\n\n".join([
        h200_heading(header),
        "Backward alone, all gradients, against the fastest of the same peers; rows are key heads/value heads, tokens "
        "in all and sequences, which are of different lengths. Then forward and backward by autograd, the largest of "
        "the relative L2 errors of the six gradients, and the memory a backward takes beyond inputs and gradients:",
        table(["", "GateDelta, ms", "best peer, ms", "speedup", "with the forward, ms", "error", "memory, MiB"], cells),
        f"All {len(rows)} rows: {sum_up(rows)}.",
        *picture("backward-overview", "Speedup of the backward over the fastest peer"),
    ])  # fmt: skip


def h200_backward_rows() -> str:
    found = load_backward()
    if not found:
        return NO_BACKWARD
    header, backward = found
    peers = peer_names(backward)
    names = [f"error of {error.removeprefix('err_')}" for error in ERRORS["bwd"]]
    parts = [h200_heading(header), f"All {len(backward)} rows: {sum_up(backward)}."]
    for (hk, hv), rows in by_heads(backward).items():
        cells = [
            [
                row["seq"],
                three_digits(row["ms"]),
                f"{row['speedup']:.2f}×",
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
        columns = ["GateDelta", "speedup", "with the forward", "workspace, MiB", "saved, MiB", "in a small workspace"]
        columns += ["of MiB", *names, *peers]
        parts += [
            table([f"{hk}/{hv} heads, ms", *columns], cells),
            *picture(f"backward-{hk}x{hv}", f"Backward, {hk}/{hv} heads", "../"),
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
    return "\n\n".join([h200_heading(result["header"]), table(["gates", "error of o", "of the state"], cells)])


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
        for what, name in (("kept by the forward", "saved_bytes"), ("taken by the backward", "backward_bytes"))
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
        f"{found['rows']} shapes; the automatic cut takes longer than the fastest of all forced ones and of none by "
        f"{found['median']:.1%} in the median, and by more than {regret.BAR:.0%} for {above} shapes. The worst:"
    )
    columns = ["heads, sequences; ms", "automatic", "uncut", "fastest", "longer by"]
    shown = picture("segments", "Time against segment length", "../../")
    return "\n\n".join([h200_heading(result["header"]), text, table(columns, cells), *shown])


TABLES = {
    "cpu-speed": cpu_speed, "cpu-isas": cpu_isas, "accuracy": accuracy,
    "h200-forward": h200_forward, "h200-rows": h200_rows, "h200-profile": h200_profile,
    "h200-backward": h200_backward, "h200-backward-rows": h200_backward_rows, "h200-segments": h200_segments,
    "h200-accuracy": h200_accuracy, "h200-gradients": h200_gradients, "h200-long": h200_long,
}  # fmt: skip


def rendered(text: str) -> str:
    def block(match: re.Match) -> str:
        name = match[1]
        if name not in TABLES:
            sys.exit(f"render_results: unknown table '{name}'; known are {', '.join(TABLES)}")
        return f"<!-- results: {name} -->\n\n{TABLES[name]()}\n\n<!-- /results -->"

    return BLOCK.sub(block, text)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|cpu|@.*", " ", text.lower())).strip("-")


def stamp_or_exit() -> dict:
    found = stamp()
    if not found["commit"]:
        sys.exit("render_results: a record names its commit, and git knows none here")
    return found


def record_cpu(folder: Path) -> None:
    recorded = stamp_or_exit()
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in ("transformers", "isas")}
    machine = results["transformers"]["machine"]  # the Python driver knows more CPUs by name
    stem = f"{slug(machine['architecture'])}-{slug(machine['cpu'])}-{machine['cpus']}cpu"
    for kind, result in results.items():
        target = RESULTS / f"{stem}.{kind}.json"
        target.write_text(json.dumps({**result, "machine": machine, "recorded": recorded}, indent=2) + "\n")
        print(f"recorded {target.relative_to(ROOT)}")
    shutil.copyfile(folder / "transformers.png", RESULTS / f"{stem}.png")


def problem_of(result: dict) -> str | None:
    """Why what bench/gpu.py wrote is no record for results/h200."""
    header, rows = result["header"], result["rows"]
    if "H200" not in header["gpu"]:
        return f"it is of one {header['gpu']}, not of an H200"
    if {ratios.key(row) for row in rows} != {ratios.key(row) for every in KINDS.values() for row in every()}:
        return "it does not hold every row: --kinds, --only and --seq are not for records"
    if not all({*ERRORS[row["kind"]], "speedup"} <= row.keys() for row in rows):
        return "there are rows without errors or without peers' times"
    if not header.get("kernels"):
        return "it does not say of which kernels it is: --kernels"
    return None


def record_gpu(folder: Path) -> None:
    source, pictures = folder / "h200.json", sorted((folder / "h200").glob("*.png"))
    result = json.loads(source.read_text())
    problem = problem_of(result) or (None if pictures else "there are no pictures: bench/plot_gpu.py draws them")
    if problem:
        sys.exit(f"render_results: {source} was not recorded: {problem}")
    header = result["header"]
    if not header["commit"]:  # measured on a copy of the tree without git
        header |= stamp_or_exit() | {"date": header["date"]}
    H200.mkdir(parents=True, exist_ok=True)
    for name in (f"{header['date']}-{header['commit'][:10]}", "latest"):
        (H200 / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"recorded {name}.json in {H200.name}")
    for path in pictures:
        shutil.copyfile(path, H200 / path.name)
    segments = folder / "segments.json"
    if not segments.exists():
        return
    result = json.loads(segments.read_text())
    if not result["header"]["commit"]:
        result["header"] |= {key: header[key] for key in ("commit", "modified")}
    (H200 / segments.name).write_text(json.dumps(result, indent=1) + "\n")
    shutil.copyfile(folder / "segments.png", H200 / "segments.png")
    print(f"recorded {segments.name} in {H200.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--record", type=Path, metavar="FOLDER")
    choice.add_argument("--record-gpu", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.record:
        record_cpu(arguments.record)
    gpu = arguments.record_gpu or arguments.record
    if gpu and (arguments.record_gpu or (gpu / "h200.json").exists()):  # `make bench` has none without a GPU
        record_gpu(gpu)
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
    verb = "not what results/ says" if arguments.check else "rewritten"
    print(f"render_results: {blocks} tables" + (f"; {verb}: {', '.join(stale)}" if stale else ", all current"))
    return 1 if not blocks or (arguments.check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
