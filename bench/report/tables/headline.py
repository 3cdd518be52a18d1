"""The figures of README's first screen, and their long form in docs/performance.md."""

import json

from bench.lib import model_rows, ratios, serving
from bench.lib.rows import lengths_of, name_of, of_kind
from bench.report.tables import files, in_turns
from bench.report.tables.cpu import cpu_rows
from bench.report.tables.files import load, load_h200
from bench.report.tables.text import NOTHING, OPS, libraries_of, speedup, table

MODEL, MODEL_ROWS = "4B", ("prefill, 32k tokens", "training step, 8192 tokens in 5 sequences")


def times(value: float) -> str:
    return f"{value:.2f}×"


def gpu_groups(result: dict) -> list[tuple[str, list[dict]]]:
    return [(OPS[kind], of_kind(result["rows"], kind)) for kind in ("fwd", "bwd")]


def cpu_figures() -> tuple[list[dict], float, dict, dict, str, int] | None:
    """Machines, geometric mean, the worst row with its machine and name, and the number of rows."""
    machines = [result for _, result in load("transformers")]
    rows = [(machine, name, row) for machine in machines for name, row in cpu_rows(machine)]
    if not rows:
        return None
    machine, name, worst = min(rows, key=lambda row: row[2]["speedup"])
    return machines, ratios.geomean([row["speedup"] for _, _, row in rows]), machine, worst, name, len(rows)


def model_cells() -> list[str] | None:
    """A whole model: prefill and a training step over FLA's kernels."""
    path = files.H200 / "models.json"
    if not path.exists():
        return None
    found = {}
    for group in model_rows.by_path(json.loads(path.read_text())["rows"]).values():
        ours = group.get("gatedelta", {})
        if ours.get("model") == MODEL:
            found[model_rows.name_of(ours)] = model_rows.speedup(ours, group.get("fla"), "ms")
    prefill, step = (found.get(name) for name in MODEL_ROWS)
    if prefill is None or step is None:
        return None
    return [f"Qwen3.5-{MODEL} prefill; training", "transformers with FLA",
            f"**{times(prefill)}**, **{times(step)}**".replace(" ", "\u00a0"), "", ""]  # fmt: skip


def portable_cells() -> list[str] | None:
    result = in_turns.load(in_turns.PORTABLE)
    if not result:
        return None
    found = in_turns.over_peers(result["rows"], "portable")
    mean = ratios.geomean([ratio for ratio, _ in found])
    return ["kernels for other GPUs", "FLA in the same run", f"**{times(mean)}**",
            times(found[0][0]), str(len(found))]  # fmt: skip


def over_fla() -> list[str]:
    """Hopper's kernels over FLA alone, from the runs in which all took turns."""
    result = in_turns.load(in_turns.PORTABLE)
    if not result:
        return []
    means = [
        ratios.geomean([ratio for ratio, _ in in_turns.over_peers(of_kind(result["rows"], kind), "hopper")])
        for kind in ("fwd", "bwd")
    ]
    return [
        "FlashQLA claims 2 to 3× the speed of FLA in the forward and 2× in the backward. On the same rows, with FLA in "
        f"the same run, we measure {means[0]:.1f}× and {means[1]:.1f}×."
    ]


def headline() -> str:
    """README's first table. Its last column is the number of rows."""
    result = load_h200()
    if not result:
        return NOTHING
    what = {"forward": "prefill kernels", "backward": "training, backward kernels"}
    cells = []
    for name, rows in gpu_groups(result):
        if found := ratios.summary(rows):
            cells.append([
                what[name], libraries_of(rows).removeprefix("the ").replace(" and ", ", "),
                f"**{times(found['geomean'])}**", speedup(found["worst"]), str(found["rows"]),
            ])  # fmt: skip
    cells += [line for line in (model_cells(), portable_cells()) if line]
    if found := cpu_figures():
        machines, mean, _, worst, _, count = found
        cells.append([
            f"the same on {len(machines)} CPUs", "transformers' torch code",
            f"**{mean:.1f}×**", f"{worst['speedup']:.1f}×", str(count),
        ])  # fmt: skip
    columns = ["on an H200", "compared with", "typical", "slowest", "rows"]
    faster = (
        [
            "**Where a peer is faster** ([these rows](docs/performance.md#where-a-peer-is-faster), [how all were "
            "measured](docs/performance.md); *typical* is the geometric mean):",
            bulleted(faster_lines()),
        ]
        if faster_lines()
        else []
    )
    return "\n\n".join([table(columns, cells, left=2), *over_fla(), *faster])


def bulleted(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def in_words(row: dict) -> str:
    lengths = lengths_of(row)
    tokens = ", ".join(map(str, dict.fromkeys(lengths)))
    sequences = "one sequence" if len(lengths) == 1 else f"{len(lengths)} sequences"
    return f"{row['hk']} key and {row['hv']} value heads, {sequences} of {tokens} tokens"


def losses(found: list[tuple[float, dict]]) -> list[tuple[float, dict]]:
    return sorted(((ratio, row) for ratio, row in found if ratio < 1), key=lambda pair: pair[0])


def faster_lines() -> list[str]:
    """Three sentences: packs as engines send them, the forward, serving."""
    lines = []
    if serve := in_turns.load(in_turns.SERVE):
        found = in_turns.over_peers(serve["rows"], serve["header"]["base"])
        mean = ratios.geomean([ratio for ratio, _ in found])
        lines.append(
            f"Prefill of 1 to 64 mostly short sequences: FlashInfer in {len(losses(found))} of {len(found)} packs; "
            f"typical {times(mean)}, slowest {times(found[0][0])}."
        )
    result = load_h200()
    if not result:
        return lines
    forward = [(row["speedup"], row) for row in of_kind(result["rows"], "fwd") if "speedup" in row]
    if below := losses(forward):
        ratio, worst = below[0]
        lines.append(
            f"Longer prefill: {len(below)} of {len(forward)} rows, down to {times(ratio)} ({in_words(worst)})."
        )
    groups = serving.groups_of(result["serving"])
    parts = []
    for name, what in (("decode", "decode"), ("verify, every state", "draft verification with all states")):
        found = [(row["speedup"], row) for row in groups[name] if "speedup" in row]
        if below := losses(found):
            parts.append(f"{what}, {len(below)} of {len(found)} rows, down to {times(below[0][0])}")
    return lines + ([f"Serving: {'; '.join(parts)}."] if parts else [])


def peers_faster() -> str:
    """The same with every row in which a peer is faster."""
    lines = faster_lines()
    result = load_h200()
    if not lines or not result:
        return NOTHING
    cells = []
    for ratio, row in losses([(row["speedup"], row) for row in result["rows"] if "speedup" in row]):
        cells.append([f"{OPS[row['kind']]} {name_of(row)}", times(ratio), ratios.best_peer(row)])
    for ratio, row in losses([(row["speedup"], row) for row in result["serving"] if "speedup" in row]):
        cells.append([f"{row['kind']} {serving.name_of(row)}", times(ratio), serving.best_peer(row)])
    return "\n\n".join(
        [
            bulleted(lines),
            "Every row but [packs](#packs-as-engines-send-them). *Recorded*: the peer's time is from an earlier run.",
            table(["row", "GateDelta", "the faster peer"], cells),
        ]
    )


def summary() -> str:
    """All groups of rows, for docs/performance.md."""
    result = load_h200()
    if not result:
        return NOTHING
    cells = []
    for name, rows in gpu_groups(result):
        if found := ratios.summary(rows):
            cells.append([
                f"H200, {name}, over {libraries_of(rows)}", f"**{times(found['geomean'])}**",
                f"{speedup(found['worst'])} ({name_of(found['worst'])})", str(found["rows"]), str(found["rows"]),
            ])  # fmt: skip
    cells += in_turns.headline_cells()
    for name, members in serving.groups_of(result["serving"]).items():
        if found := serving.summary(members):
            cells.append([
                f"H200, {name}, over {libraries_of([row for row in members if 'peers' in row])}",
                f"**{times(found['geomean'])}**",
                f"{speedup(found['worst'])} ({serving.name_of(found['worst'])})",
                str(found["rows"]),
                str(found["recorded"]),
            ])  # fmt: skip
    if found := cpu_figures():
        machines, mean, machine, worst, name, count = found
        isas = ", ".join(dict.fromkeys(result["machine"]["best_isa"] for result in machines))
        cells.append([
            f"CPU, {len(machines)} machines ({isas}), over transformers' torch code", f"**{mean:.1f}×**",
            f"{worst['speedup']:.1f}× ({name}, {machine['threads']} threads)", str(count), "0",
        ])  # fmt: skip
    columns = ["speedup", "typical", "slowest row", "rows", "of these over a time of an earlier run"]
    return "\n\n".join([table(columns, cells), *over_fla()])


TABLES = {"headline": headline, "peers-faster": peers_faster, "summary": summary}
