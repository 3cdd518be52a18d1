"""Times whole language models: transformers' Qwen3.5 text models with random weights, with GateDelta, with FLA's
kernels, and with transformers' own torch code.

Two sizes with the shapes of Qwen3.5's 0.8B and 4B, three of four layers Gated Delta Networks, in bf16, but with a
vocabulary of 32768, so that logits do not hide the rest. Rows are prefills of one sequence, decode steps after a
prefill of 512 tokens (as a loop, and as a CUDA graph of a step), and training steps (forward, backward, AdamW, no
checkpointing) on a pack of sequences. A row has the time of it all, that inside the Gated Delta Network layers with
their projections, and the peak of allocated memory.

Each path has a process of its own, because transformers picks FLA up when it is imported:

    gatedelta   gatedelta.transformers.patch()
    fla         FLA installed, as transformers uses it: the rule is FLA's, convolution and norm are transformers'
    fla-all     FLA's convolution and gated norm as well, put in by hand
    torch       neither

The torch path cannot keep packed sequences apart and trains on one sequence after the other. FLA's kernels are compiled
first, by several processes, and tuned at a prefill of 4096 tokens. Full attention is torch's, but not cuDNN's in decode.
Rows are written one by one as they are measured; with --append, beside the other paths' rows of an earlier run.
results/SCHEMA.md describes the output.

Usage: python bench/models.py --output FILE [--paths gatedelta fla] [--sizes 0.8B] [--kinds prefill decode]
                              [--limit SECONDS] [--jobs 12] [--append] [--smoke]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "python")]

import model_rows  # noqa: E402
import records  # noqa: E402

SLOW_MS = 20e3  # rows that would take longer are left out
REPEATS = 3


def describe(smoke: bool) -> dict:
    """The header."""
    import tree  # noqa: F401, I001  (finds the package, as for the tests)
    import torch
    import transformers

    versions = {"transformers": transformers.__version__, "vocabulary": model_rows.VOCABULARY}
    if smoke and not torch.cuda.is_available():
        return {"gpu": None, "torch": torch.__version__} | versions
    import gpu

    return gpu.machine() | versions


def add_row(output: Path, row: dict) -> None:
    result = json.loads(output.read_text())
    result["rows"].append(row)
    records.write(output, result)


def expected_ms(row: dict, measured: dict) -> float:
    """At least, from a row of the same kind."""
    return measured["ms"] * row["tokens"] * row["batch"] / (measured["tokens"] * measured["batch"])


def run_path(options: argparse.Namespace) -> None:
    """All rows of one path, in a process of its own."""
    import model_calls
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.smoke:
        sys.exit("bench/models.py needs a GPU that torch sees; --smoke runs tiny models on the CPU")
    versions = model_calls.choose_path(options.path)
    result = json.loads(options.output.read_text())
    result["header"].setdefault("paths", {})[options.path] = versions
    records.write(options.output, result)
    sizes = model_rows.SMOKE_SIZES if options.smoke else model_rows.SIZES
    for size in options.sizes:
        vocabulary = model_rows.SMOKE_VOCABULARY if options.smoke else model_rows.VOCABULARY
        model = model_calls.Model(sizes[size], vocabulary, device)
        first = model_rows.rows_of(options.smoke, [size], ("prefill",))[0]
        model_calls.measure(model, first, options.path, 1)  # kernels that are tuned when first called see this size
        torch.save(model.logits(), options.logits / f"{size}.{options.path}.pt")
        last: dict[tuple, dict] = {}  # measured, of each kind
        for row in model_rows.rows_of(options.smoke, [size], tuple(options.kinds)):
            kind = row["kind"], row["mode"]
            expected = expected_ms(row, last[kind]) if kind in last else 0
            if expected > SLOW_MS:
                found = {"skipped": f"it would take about {expected / 1e3:.0f} s"}
            else:
                try:
                    found = model_calls.measure(model, row, options.path, 1 if options.smoke else REPEATS)
                except Exception as error:  # one path's failure must not end the run
                    found = {"skipped": f"{type(error).__name__}: {error}"[:200].partition("\n")[0]}
            if "ms" in found:
                last[kind] = row | found
            found = row | {"path": options.path, "parameters": model.parameters} | found
            add_row(options.output, found)
            times = f"{found['ms']:.2f} ms, {found['gdn_ms']:.2f} in the layers" if "ms" in found else found["skipped"]
            print(f"{size} {options.path:9} {model_rows.name_of(row):44} {times}", flush=True)
        del model


def compile_fla(options: argparse.Namespace) -> None:
    """Fills Triton's cache. What fails is compiled again, and judged, when it is timed."""
    begin = time.perf_counter()
    command = [sys.executable, __file__, "--output", os.devnull, "--path", "fla-all", "--sizes", *options.sizes]
    command += ["--jobs", str(options.jobs), *(["--smoke"] if options.smoke else [])]
    shares = [[*command, "--compile-share", str(index)] for index in range(options.jobs)]
    running = [subprocess.Popen(share, stderr=subprocess.DEVNULL) for share in shares]
    failed = 0
    for process in running:
        try:
            failed += process.wait(max(1.0, options.limit - (time.perf_counter() - begin))) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            failed += 1
    print(f"FLA's kernels compiled in {time.perf_counter() - begin:.0f} s by {options.jobs} processes, {failed} failed")


def compile_one_share(options: argparse.Namespace) -> None:
    import model_calls

    model_calls.compile_share(options.compile_share, options.jobs)
    model_calls.choose_path(options.path)
    sizes = model_rows.SMOKE_SIZES if options.smoke else model_rows.SIZES
    for size in options.sizes:
        model_calls.call_everything(
            sizes[size], model_rows.SMOKE_VOCABULARY if options.smoke else model_rows.VOCABULARY
        )


def compare_logits(folder: Path, sizes: list[str]) -> dict[str, dict[str, float]]:
    """Relative L2 distance of each path's logits from the torch path's, all in bf16."""
    import torch

    found: dict[str, dict[str, float]] = {}
    for size in sizes:
        logits = {path: folder / f"{size}.{path}.pt" for path in model_rows.PATHS}
        loaded = {path: torch.load(file) for path, file in logits.items() if file.exists()}
        if (torch_logits := loaded.pop("torch", None)) is not None:
            found[size] = {
                path: ((x - torch_logits).norm() / torch_logits.norm()).item() for path, x in loaded.items()
            }  # fmt: skip
    return found


def run_all(options: argparse.Namespace) -> None:
    header = describe(options.smoke)
    result = {"header": header, "rows": []}
    if options.append and options.output.exists():
        before = json.loads(options.output.read_text())
        again = {(path, size) for path in options.paths for size in options.sizes}
        result["header"] = before["header"]
        result["rows"] = [row for row in before["rows"] if (row["path"], row["model"]) not in again]
    records.write(options.output, result)
    if options.jobs and header["gpu"] and {"fla", "fla-all"} & set(options.paths):
        compile_fla(options)
    with tempfile.TemporaryDirectory() as folder:
        for path in options.paths:
            command = [sys.executable, __file__, "--output", str(options.output), "--path", path, "--logits", folder,
                       "--sizes", *options.sizes, "--kinds", *options.kinds]  # fmt: skip
            command += ["--smoke"] if options.smoke else []
            try:
                code = subprocess.run(command, timeout=options.limit).returncode
                reason = f"its process ended with {code}" if code else None
            except subprocess.TimeoutExpired:
                reason = f"its process was stopped after {options.limit} s"
            if reason:
                print(f"{path} is incomplete: {reason}", flush=True)
                result = json.loads(options.output.read_text())
                result["header"].setdefault("incomplete", {})[path] = reason
                records.write(options.output, result)
        result = json.loads(options.output.read_text())
        result["header"].setdefault("logits_distance", {}).update(compare_logits(Path(folder), options.sizes))
        records.write(options.output, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--paths", nargs="+", choices=model_rows.PATHS, default=list(model_rows.PATHS))
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--kinds", nargs="+", choices=model_rows.KINDS, default=list(model_rows.KINDS))
    parser.add_argument("--limit", type=float, default=150, help="seconds for a path (150)")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile FLA's kernels first (12); 0: none")
    parser.add_argument("--append", action="store_true", help="keep the rows of other paths and sizes in the file")
    parser.add_argument("--compile-share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="tiny models, on a CPU if there is no GPU")
    parser.add_argument("--path", choices=model_rows.PATHS, help=argparse.SUPPRESS)  # of this process
    parser.add_argument("--logits", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = model_rows.SMOKE_SIZES if options.smoke else model_rows.SIZES
    options.sizes = options.sizes or list(sizes)
    if unknown := set(options.sizes) - set(sizes):
        parser.error(f"there is no size {', '.join(sorted(unknown))}; there are {', '.join(sizes)}")
    if options.compile_share is not None:
        compile_one_share(options)
    elif options.path:
        run_path(options)
    else:
        run_all(options)


if __name__ == "__main__":
    main()
