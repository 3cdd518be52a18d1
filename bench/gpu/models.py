"""Times whole language models: transformers' Qwen3.5 text models with random weights, with GateDelta, with FLA's
kernels, and with transformers' own torch code.

Two sizes with the shapes of Qwen3.5's 0.8B and 4B, three of four layers Gated Delta Networks, in bf16, but with a
vocabulary of 32768, so that logits do not hide the rest. Rows are prefills of one sequence, decode steps after a
prefill of 512 tokens (as a loop, and as a CUDA graph of a step), and training steps (forward, backward, AdamW, no
checkpointing) on a pack of sequences. A row has the time of it all, that inside the Gated Delta Network layers with
their projections, and the peak of allocated memory.

Each path has a process of its own, because transformers picks FLA up when it is imported:

    gatedelta           gatedelta.transformers.patch()
    gatedelta-fused     and gatedelta.transformers.fuse_projections(): decode alone, the rest has the same products
    fla                 FLA installed, as transformers uses it: the rule is FLA's, convolution and norm transformers'
    fla-all             FLA's convolution and gated norm as well, put in by hand
    torch               neither

The torch path cannot keep packed sequences apart and trains on one sequence after the other; it has no prefill of 128k
tokens, which would take too long. FLA's kernels are compiled and tuned first, at a prefill of 4096 tokens: --warm-up
does only that, and a later run with --jobs 0 finds the results in Triton's cache. Full attention is torch's, but not
cuDNN's in decode. Rows are written one by one as they are measured; with --append, beside an earlier run's rows of
other paths, sizes and kinds. results/SCHEMA.md describes the output.

Usage: python -m bench.gpu.models --output FILE [--paths gatedelta fla] [--sizes 0.8B] [--kinds prefill decode]
                              [--limit SECONDS] [--jobs 12] [--append] [--smoke]
       python -m bench.gpu.models --warm-up [--sizes 0.8B] [--jobs 12]
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

from bench.lib import model_rows
from tools import records

SLOW_MS = 20e3  # rows that would take longer are left out
TORCH_TOKENS = 32768  # the torch path's longest prefill
REPEATS = 3
# Results of tuning stay on disk for the next process.
os.environ["TRITON_CACHE_AUTOTUNING"] = "1"


def describe(smoke: bool) -> dict:
    """The header."""
    import torch
    import transformers

    versions = {"transformers": transformers.__version__, "vocabulary": model_rows.VOCABULARY}
    if smoke and not torch.cuda.is_available():
        return {"gpu": None, "torch": torch.__version__} | versions
    from bench.gpu import chunked as gpu

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
    import torch

    from bench.lib import model_calls

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.smoke:
        sys.exit("bench/gpu/models.py needs a GPU that torch sees; --smoke runs tiny models on the CPU")
    versions = model_calls.choose_path(options.path)
    result = json.loads(options.output.read_text())
    result["header"].setdefault("paths", {})[options.path] = versions
    records.write(options.output, result)
    sizes = model_rows.SMOKE_SIZES if options.smoke else model_rows.SIZES
    for size in options.sizes:
        vocabulary = model_rows.SMOKE_VOCABULARY if options.smoke else model_rows.VOCABULARY
        model = model_calls.Model(sizes[size], vocabulary, device)
        if options.path == "gatedelta-fused":
            model.fuse_projections()
        first = model_rows.rows_of(options.smoke, [size], ("prefill",))[0]
        model_calls.measure(model, first, options.path, 1)  # kernels that are tuned when first called see this size
        torch.save(model.logits(), options.logits / f"{size}.{options.path}.pt")
        last: dict[tuple, dict] = {}  # measured, of each kind
        kinds = [kind for kind in options.kinds if kind in model_rows.KINDS_OF.get(options.path, model_rows.KINDS)]
        for row in model_rows.rows_of(options.smoke, [size], tuple(kinds)):
            kind = row["kind"], row["mode"]
            expected = expected_ms(row, last[kind]) if kind in last else 0
            if options.path == "torch" and row["kind"] == "prefill" and row["tokens"] > TORCH_TOKENS:
                found = {"skipped": "left out to save time"}
            elif expected > SLOW_MS:
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
            print(f"{size} {options.path:15} {model_rows.name_of(row):44} {times}", flush=True)
        del model


def warm_up(options: argparse.Namespace) -> None:
    """Fills Triton's cache: many processes compile FLA's kernels, then one tunes them. What fails is done again, and
    judged, when it is timed."""
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--path",
        "fla-all",
        "--sizes",
        *options.sizes,
        "--jobs",
        str(options.jobs),
    ]
    command += ["--smoke"] if options.smoke else []
    begin = time.perf_counter()

    def run(shares: list[str]) -> int:
        running = [subprocess.Popen([*command, "--share", share], stderr=subprocess.DEVNULL) for share in shares]
        failed = 0
        for process in running:
            try:
                failed += process.wait(options.limit) != 0
            except subprocess.TimeoutExpired:
                process.kill()
                failed += 1
        return failed

    failed = run([str(index) for index in range(options.jobs)])
    compiled = time.perf_counter() - begin
    print(f"FLA's kernels compiled in {compiled:.0f} s by {options.jobs} processes, {failed} failed", flush=True)
    failed = run(["all"])
    tuned = time.perf_counter() - begin - compiled
    print(f"FLA's kernels tuned in {tuned:.0f} s{', with a failure' if failed else ''}", flush=True)


def run_share(options: argparse.Namespace) -> None:
    """A process of the warm-up: compiles its share of the configurations at few tokens, or tunes with all of them."""
    from bench.lib import model_calls

    if options.share != "all":
        model_calls.compile_share(int(options.share), options.jobs)
    model_calls.choose_path(options.path)
    sizes = model_rows.SMOKE_SIZES if options.smoke else model_rows.SIZES
    vocabulary = model_rows.SMOKE_VOCABULARY if options.smoke else model_rows.VOCABULARY
    for size in options.sizes:
        every = model_rows.rows_of(options.smoke, [size], model_rows.KINDS)
        rows = [row for row in every if row["mode"] == "eager" and row["tokens"] <= model_rows.PREFILLS[1]]
        if options.share != "all":
            rows = model_rows.COMPILED
        model_calls.call_everything(sizes[size], vocabulary, rows)


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


def is_measured_again(row: dict, options: argparse.Namespace) -> bool:
    return row["path"] in options.paths and row["model"] in options.sizes and row["kind"] in options.kinds


def run_all(options: argparse.Namespace) -> None:
    header = describe(options.smoke)
    result = {"header": header, "rows": []}
    if options.append and options.output.exists():
        before = json.loads(options.output.read_text())
        result["header"] = before["header"]
        added = {key: header.get(key) for key in ("date", "commit")}
        added |= {key: list(getattr(options, key)) for key in ("paths", "sizes", "kinds")}
        result["header"]["added"] = [*before["header"].get("added", []), added]
        result["rows"] = [row for row in before["rows"] if not is_measured_again(row, options)]
    records.write(options.output, result)
    if options.jobs and header["gpu"] and {"fla", "fla-all"} & set(options.paths):
        warm_up(options)
    with tempfile.TemporaryDirectory() as folder:
        for path in options.paths:
            command = [sys.executable, "-m", __spec__.name, "--output", str(options.output), "--path", path,
                       "--logits", folder, "--sizes", *options.sizes, "--kinds", *options.kinds]  # fmt: skip
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
    parser.add_argument("--output", type=Path)
    parser.add_argument("--warm-up", action="store_true", help="only compile and tune FLA's kernels")
    parser.add_argument("--paths", nargs="+", choices=model_rows.PATHS, default=list(model_rows.PATHS))
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--kinds", nargs="+", choices=model_rows.KINDS, default=list(model_rows.KINDS))
    parser.add_argument("--limit", type=float, default=150, help="seconds for a path (150)")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile FLA's kernels first (12); 0: none")
    parser.add_argument("--append", action="store_true", help="keep the other rows of the file")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # of the warm-up
    parser.add_argument("--smoke", action="store_true", help="tiny models, on a CPU if there is no GPU")
    parser.add_argument("--path", choices=model_rows.PATHS, help=argparse.SUPPRESS)  # of this process
    parser.add_argument("--logits", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = model_rows.SMOKE_SIZES if options.smoke else model_rows.SIZES
    options.sizes = options.sizes or list(sizes)
    if unknown := set(options.sizes) - set(sizes):
        parser.error(f"there is no size {', '.join(sorted(unknown))}; there are {', '.join(sizes)}")
    if options.share:
        run_share(options)
    elif options.warm_up:
        warm_up(options)
    elif not options.output:
        parser.error("there is no --output")
    elif options.path:
        run_path(options)
    else:
        run_all(options)


if __name__ == "__main__":
    main()
