#!/usr/bin/env python3
"""Writes the tables of README and docs from results/ (see results/SCHEMA.md).

A table stands between `<!-- results: NAME -->` and `<!-- /results -->`.

usage: render_results.py            rewrite the tables
       render_results.py --check    exit 1 if a table is not what results/ says
       render_results.py --record FOLDER    keep FOLDER's {transformers,isas}.json and transformers.png, then rewrite
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from repo_files import ROOT, repo_files

RESULTS = ROOT / "results" / "cpu"
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->\n.*?<!-- /results -->", re.DOTALL)
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
    return "\n\n".join(parts) or "No measurement is recorded yet."


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
    return "\n\n".join(parts) or "No measurement is recorded yet."


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
    return "\n\n".join(parts) or "No measurement is recorded yet."


TABLES = {"cpu-speed": cpu_speed, "cpu-isas": cpu_isas, "accuracy": accuracy}


def rendered(text: str) -> str:
    def block(match: re.Match) -> str:
        name = match[1]
        if name not in TABLES:
            sys.exit(f"render_results: unknown table '{name}'; known are {', '.join(TABLES)}")
        return f"<!-- results: {name} -->\n\n{TABLES[name]()}\n\n<!-- /results -->"

    return BLOCK.sub(block, text)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|cpu|@.*", " ", text.lower())).strip("-")


def record(folder: Path) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    stamp = {
        "date": datetime.date.today().isoformat(),
        "commit": git("rev-parse", "HEAD"),
        # What a record itself writes does not make the measured code another one.
        "modified": bool(git("status", "--porcelain", "--", ".", ":!results", ":!*.md", ":!tools")),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in ("transformers", "isas")}
    machine = results["transformers"]["machine"]  # the Python driver knows more CPUs by name
    stem = f"{slug(machine['architecture'])}-{slug(machine['cpu'])}-{machine['cpus']}cpu"
    for kind, result in results.items():
        target = RESULTS / f"{stem}.{kind}.json"
        target.write_text(json.dumps({**result, "machine": machine, "recorded": stamp}, indent=2) + "\n")
        print(f"recorded {target.relative_to(ROOT)}")
    shutil.copyfile(folder / "transformers.png", RESULTS / f"{stem}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--record", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record)
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
