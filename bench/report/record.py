#!/usr/bin/env python3
"""Keeps the measurements of `make bench` or `make bench-gpu` in results/ (see results/SCHEMA.md).

usage, after python -m bench.report.record:

       FOLDER          the CPU's measurements in FOLDER, and the GPU's if there are any
       --gpu FOLDER    the GPU's measurements alone
       --models FILE   what bench.gpu.models wrote, and FILE's picture with .png
       --beside FILE   what gated_norm, conv1d or layer_step of bench.gpu wrote; FILE has its name
       --serving FILE  what bench.gpu.decode wrote, in place of the record's rows of its kinds
       --soak FILE     what `make soak` or `make soak-gpu` wrote into build/soak
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from bench.lib import ratios, serving
from bench.lib.rows import ERRORS, KINDS
from bench.report import history
from tools import records
from tools.repo_files import ROOT, stamp

CPU = ROOT / "results" / "cpu"
H200 = ROOT / "results" / "h200"


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|cpu|@.*", " ", text.lower())).strip("-")


def stamp_or_exit() -> dict:
    found = stamp()
    if not found["commit"]:
        sys.exit("record_results: a record names its commit, and there is no git here to name it")
    return found


def keep(path: Path, result: dict) -> None:
    records.write(path, result)
    print(f"recorded {path.name} in {path.parent.name}")


def stem_of(machine: dict) -> str:
    parts = (machine["architecture"], machine["cpu"], machine["best_isa"])
    return f"{'-'.join(map(slug, parts))}-{machine['cpus']}cpu"


def record_cpu(folder: Path) -> None:
    recorded = stamp_or_exit()
    results = {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in ("transformers", "isas")}
    stem = stem_of(results["transformers"]["machine"])
    for kind, result in results.items():
        keep(CPU / f"{stem}.{kind}.json", {**result, "recorded": recorded})
    shutil.copyfile(folder / "transformers.png", CPU / f"{stem}.png")


def problem_of(result: dict) -> str | None:
    """Why the output of bench.gpu.chunked cannot be the record of the H200; None if it can."""
    header, rows = result["header"], ratios.with_peers(result)
    if "H200" not in header["gpu"]:
        return f"it is from one {header['gpu']}, not from an H200"
    if {ratios.key(row) for row in rows} != {ratios.key(row) for every in KINDS.values() for row in every()}:
        return "it does not hold every row: --kinds, --only and --seq are not for records"
    if not all({*ERRORS[row["kind"]], "speedup"} <= row.keys() for row in rows):
        return "there are rows without errors or without peers' times"
    if not header.get("kernels"):
        return "it does not say which kernels were measured: --kernels"
    return serving.problem_of([row for row in result["rows"] if row["kind"] in serving.KINDS])


BESIDE = ("layer_step.json", "gated_norm.json", "conv1d.json")
SERVING_HEADER = ("copy_bytes_per_s", "decode_call_us", "verified_sequences", "peers")


def with_serving(folder: Path, result: dict) -> dict:
    """The output of bench.gpu.chunked with the rows of bench.gpu.decode and bench.gpu.packs, where there are any."""
    header, rows = dict(result["header"]), list(result["rows"])
    for name in ("decode", "packs"):
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        more = json.loads(path.read_text())
        if more["header"]["gpu"] == header["gpu"]:
            rows += more["rows"]
        if name == "decode":
            header["serving"] = {key: more["header"][key] for key in SERVING_HEADER}
    return {**result, "header": header, "rows": rows}


def record_gpu(folder: Path) -> None:
    source, pictures = folder / "h200.json", sorted((folder / "h200").glob("*.png"))
    result = with_serving(folder, json.loads(source.read_text()))
    problem = problem_of(result) or (None if pictures else "there are no pictures: bench.plots.chunked draws them")
    if problem:
        sys.exit(f"record_results: {source} was not recorded: {problem}")
    header = result["header"]
    if not header["commit"]:  # measured on a copy of the tree without git
        header |= stamp_or_exit() | {"date": header["date"]}
    keep(H200 / "record.json", result)
    history.append(H200 / "history.csv", history.line_of(result))
    for path in pictures:
        shutil.copyfile(path, H200 / path.name)
    for name in (*BESIDE, "segments.json"):
        if (path := folder / name).exists():
            keep_beside(path, path.name, header)
    if (folder / "segments.json").exists():
        shutil.copyfile(folder / "segments.png", H200 / "segments.png")


def keep_beside(path: Path, name: str, header: dict) -> None:
    """A file that is no part of the record, with the commit of `header` if it was measured without git."""
    result = json.loads(path.read_text())
    if not result["header"]["commit"]:
        result["header"] |= {key: header[key] for key in ("commit", "modified")}
    keep(H200 / name, result)


def record_models(path: Path) -> None:
    """What bench.gpu.models wrote, and its picture."""
    result = json.loads(path.read_text())
    if "H200" not in (result["header"]["gpu"] or ""):
        sys.exit(f"record_results: {path} was not recorded: it is not from an H200")
    if not any("ms" in row for row in result["rows"] if row["path"] == "gatedelta"):
        sys.exit(f"record_results: {path} was not recorded: it has no time of GateDelta's path")
    keep_beside(path, "models.json", result["header"] if result["header"]["commit"] else stamp_or_exit())
    if (picture := path.with_suffix(".png")).exists():
        shutil.copyfile(picture, H200 / "models.png")


def record_beside(path: Path) -> None:
    if path.name not in BESIDE:
        sys.exit(f"record_results: {path} was not recorded: its name is none of {', '.join(BESIDE)}")
    header = json.loads(path.read_text())["header"]
    if "H200" not in header["gpu"]:
        sys.exit(f"record_results: {path} was not recorded: it is not from an H200")
    keep_beside(path, path.name, header if header["commit"] else stamp_or_exit())


def record_serving(path: Path) -> None:
    """The commit and date of these rows are in the header's `serving`; the other rows stay those of the record."""
    more, record = json.loads(path.read_text()), json.loads((H200 / "record.json").read_text())
    header, kinds = more["header"], {row["kind"] for row in more["rows"]}
    rows = [row for row in record["rows"] if row["kind"] not in kinds] + more["rows"]
    problem = serving.problem_of([row for row in rows if row["kind"] in serving.KINDS])
    if "H200" not in header["gpu"] or problem:
        sys.exit(f"record_results: {path} was not recorded: {problem or 'it is not from an H200'}")
    if not header["commit"]:
        header |= stamp_or_exit() | {"date": header["date"]}
    record["header"]["serving"] = {key: header[key] for key in (*SERVING_HEADER, "commit", "date")}
    result = {**record, "rows": rows}
    keep(H200 / "record.json", result)
    history.append(H200 / "history.csv", history.line_of(result))


def record_soak(path: Path) -> None:
    result = json.loads(path.read_text())
    if result["mismatches"] or result["failures"]:
        sys.exit(f"record_results: {path} was not recorded: something failed in it")
    result["recorded"] = stamp_or_exit()
    if result["device"] == "cpu":
        keep(CPU / f"{stem_of(result['machine'])}.soak.json", result)
    elif "H200" in result["machine"]["gpu"]:
        keep(H200 / f"soak_{result['kernels']}.json", result)
    else:
        sys.exit(f"record_results: {path} was not recorded: it is not from an H200")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--beside", type=Path, nargs="+", default=[])
    parser.add_argument("--serving", type=Path)
    parser.add_argument("--soak", type=Path, nargs="+", default=[])
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    if not any((options.models, options.beside, options.serving, options.soak, options.folder)):
        parser.error("there is nothing to record")
    if options.models:
        record_models(options.models)
    for path in options.beside:
        record_beside(path)
    if options.serving:
        record_serving(options.serving)
    for path in options.soak:
        record_soak(path)
    if not options.folder:
        return
    if not options.gpu:
        record_cpu(options.folder)
    if options.gpu or (options.folder / "h200.json").exists():  # `make bench` leaves none without a GPU
        record_gpu(options.folder)


if __name__ == "__main__":
    main()
