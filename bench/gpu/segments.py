"""Compares the automatic cut of the CUDA forward with uncut sequences and with the fastest cut of a free search, shape
by shape.

The search measures one length for all heads, from 2 chunks on; the cuts that should be the fastest by the constants of
bench.report.fit_costs, with lengths of their own for decaying and for persistent heads, in whole heads and in halves;
then the neighbours of the fastest. The portable kernels have one length for all heads. Inputs and timing are those of
bench.gpu.chunked. The script calls the C ABI because the torch functions cannot force a cut. results/SCHEMA.md
describes the output.

Usage: python -m bench.gpu.segments [--only 2/8] [--seq 1x32768] [--more] [--portable] [--candidates 24]
                                [--plot PICTURE.png] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from ctypes import byref, pointer
from itertools import repeat
from pathlib import Path

import torch
from gatedelta import _lib
from gatedelta._operators import queries as _queries

from bench.gpu import chunked as gpu
from bench.lib import regret
from bench.lib.rows import forward_rows, other_rows, selected
from bench.report import fit_costs
from tools import records

CUDA = 1  # GD_CUDA of gatedelta.h


def describe(tensor: torch.Tensor, name: str) -> _lib.Tensor:
    result = _queries.describe(tensor, name)
    result.data = tensor.data_ptr()
    result.stride[: tensor.dim()] = tensor.stride()
    return result


def arguments(inputs: dict[str, torch.Tensor], out: torch.Tensor, final: torch.Tensor) -> _lib.ForwardArgs:
    """The arguments hold addresses only: the tensors must outlive them."""
    args = _lib.ForwardArgs()
    for name, tensor in inputs.items():
        setattr(args.inputs, name, describe(tensor, name))
    args.out, args.final_state = describe(out, "out"), describe(final, "final_state")
    return args


def measure(args: _lib.ForwardArgs, repeats: int, context_parallel: int = _lib.CP_AUTO) -> float:
    args.context_parallel = context_parallel
    args.exec.device, args.exec.device_index = CUDA, torch.cuda.current_device()
    args.exec.workspace_bytes = _lib.size_query("gd_forward_workspace", args)
    workspace = torch.empty(args.exec.workspace_bytes, dtype=torch.uint8, device="cuda")
    args.exec.workspace = workspace.data_ptr()

    def call() -> None:
        args.exec.stream = torch.cuda.current_stream().cuda_stream
        _lib.check(_lib.library().gd_forward(byref(args)))

    return gpu.replay_ms(call, repeats)


def measure_all(row: dict, repeats: int, kernels: int, proposed: list[regret.Cut]) -> dict:
    inputs = gpu.make_inputs(row)
    out, final = torch.empty_like(inputs["v"]), torch.empty_like(inputs["initial_state"])
    args = arguments(inputs, out, final)
    args.exec.kernels = kernels
    tuning = _lib.Tuning()
    args.exec.tuning = pointer(tuning)
    longest = -(-max(row["lengths"]) // regret.CHUNK)

    def time_of(choice: str | regret.Cut) -> float | None:
        cut = choice if isinstance(choice, regret.Cut) else regret.Cut(0, 0)
        tuning.segment_chunks = cut.decaying or (longest if cut.persistent else 0)  # the longest: not cut
        tuning.persistent_segment_chunks = 0 if cut.decaying == cut.persistent else cut.persistent or longest
        tuning.segment_halves = cut.halves
        try:
            return measure(args, repeats, _lib.CP_OFF if choice == regret.OFF else _lib.CP_AUTO)
        except _lib.UnsupportedError:
            if choice in (regret.AUTO, regret.OFF):
                raise
            return None  # too many work items, or not the portable kernels'

    cuts = regret.equal_cuts(row["lengths"])
    cuts += [cut for cut in proposed if cut not in cuts]
    times = regret.searched(time_of, cuts, longest)
    return regret.judged(row, times.pop(regret.AUTO), times.pop(regret.OFF), times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", help="head counts, e.g. 2/8")
    parser.add_argument("--seq", help="one row name, e.g. 1x32768")
    parser.add_argument("--more", action="store_true", help="other head counts, lengths and ragged packs too")
    parser.add_argument("--portable", action="store_true", help="the portable kernels, which cut in their own way")
    parser.add_argument("--candidates", type=int, default=24, help="cuts that the constants propose (24)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--plot", type=Path, help="time against segment length of some rows")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = selected(forward_rows() + (other_rows() if options.more else []), options.only, options.seq)
    if not rows:
        parser.error("there is no such row")
    if options.plot:
        from bench.plots import (
            segments as plot_segments,  # fails here, not after the last row, if there is no matplotlib
        )

        if not plot_segments.chosen(rows):
            parser.error("none of these rows is drawn")
    if not torch.cuda.is_available() or gpu.gatedelta.info()["cuda_devices"] == 0:
        sys.exit("bench/gpu/segments.py needs a GPU that torch sees and a library that has kernels for it (GD_CUDA=ON)")

    proposed = [[]] * len(rows)
    if not options.portable:
        blocks = torch.cuda.get_device_properties(0).multi_processor_count
        with ProcessPoolExecutor() as pool:
            proposed = list(pool.map(fit_costs.candidates, rows, repeat(blocks), repeat(options.candidates)))
    results = []
    for i, row in enumerate(rows):
        kernels = _lib.KERNELS["portable" if options.portable else "auto"]
        result = measure_all(row, options.repeats, kernels, proposed[i])
        results.append(result)
        best = min(result["forced"], key=result["forced"].get, default=None)
        fastest = "" if best is None else f" fastest forced {result['forced'][best]:.3g} ({best})"
        print(f"[{i + 1}/{len(rows)}] {row['hk']}/{row['hv']} {row['seq']} auto {result['auto_ms']:.3g} "
              f"off {result['off_ms']:.3g}{fastest} regret {result['regret']:.1%}", flush=True)  # fmt: skip
    found = regret.summary(results)
    worst = found["worst"]
    print(f"{found['rows']} shapes: worst regret {worst['regret']:.1%} ({worst['hk']}/{worst['hv']} {worst['seq']}), "
          f"mean {found['mean']:.1%}, median {found['median']:.1%}, "
          f"{found['above']} above {regret.BAR:.0%}")  # fmt: skip
    header = gpu.describe(options.repeats)
    del header["verified_heads"]  # this script verifies nothing
    result = {"header": header, "rows": results}
    if options.output:
        records.write(options.output, result)
        print(f"written: {options.output}")
    if options.plot:
        plot_segments.write(result, options.plot)
        print(f"picture: {options.plot}")


if __name__ == "__main__":
    main()
