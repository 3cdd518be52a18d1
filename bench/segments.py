"""Compares the automatic cut of the CUDA forward with uncut sequences and with every forced segment length, shape by
shape.

Inputs and timing are those of bench/gpu.py. The script calls the C ABI because the torch functions cannot force a
segment length. results/SCHEMA.md describes the output.

Usage: python bench/segments.py [--only 2/8] [--seq 1x32768] [--more] [--portable] [--plot PICTURE.png]
                                [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from ctypes import byref
from pathlib import Path

import gpu  # first: finds the package
import records
import regret
import torch
from gatedelta import _lib
from gatedelta.torch import _ops
from rows import forward_rows, other_rows, selected

CUDA = 1  # GD_CUDA of gatedelta.h


def describe(tensor: torch.Tensor, name: str) -> _lib.Tensor:
    result = _ops._describe(tensor, name)
    result.data = tensor.data_ptr()
    result.stride[: tensor.dim()] = tensor.stride()
    return result


def arguments(inputs: dict[str, torch.Tensor], out: torch.Tensor, final: torch.Tensor) -> _lib.ForwardArgs:
    """The arguments hold addresses only: the tensors must outlive them."""
    args = _lib.ForwardArgs()
    for name, tensor in inputs.items():
        setattr(args.inputs, name, describe(tensor, name))
    args.o, args.final_state = describe(out, "o"), describe(final, "final_state")
    return args


def measure(args: _lib.ForwardArgs, repeats: int, context_parallel: int = _lib.CP_AUTO, segment: int = 0) -> float:
    args.context_parallel, args.segment_chunks = context_parallel, segment
    args.exec.device, args.exec.device_index = CUDA, torch.cuda.current_device()
    args.exec.workspace_bytes = _lib.size_query("gd_forward_workspace", args)
    workspace = torch.empty(args.exec.workspace_bytes, dtype=torch.uint8, device="cuda")
    args.exec.workspace = workspace.data_ptr()

    def call() -> None:
        args.exec.stream = torch.cuda.current_stream().cuda_stream
        _lib.check(_lib.library().gd_forward(byref(args)))

    return gpu.replay_ms(call, repeats)


def measure_all(row: dict, repeats: int, isa: int) -> dict:
    inputs = gpu.make_inputs(row)
    out, final = torch.empty_like(inputs["v"]), torch.empty_like(inputs["initial_state"])
    args = arguments(inputs, out, final)
    args.exec.isa = isa

    def time_of(choice: str | int) -> float | None:
        context_parallel = _lib.CP_OFF if choice == regret.OFF else _lib.CP_AUTO
        try:
            return measure(args, repeats, context_parallel, choice if isinstance(choice, int) else 0)
        except _lib.UnsupportedError:
            if choice in (regret.AUTO, regret.OFF):
                raise
            return None  # too many work items

    times = regret.swept(time_of, regret.segments_of(row["lengths"]))
    return regret.judged(row, times.pop(regret.AUTO), times.pop(regret.OFF), times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", help="head counts, e.g. 2/8")
    parser.add_argument("--seq", help="one row name, e.g. 1x32768")
    parser.add_argument("--more", action="store_true", help="other head counts, lengths and ragged packs too")
    parser.add_argument("--portable", action="store_true", help="the portable kernels, which cut in their own way")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--plot", type=Path, help="time against segment length of some rows")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = selected(forward_rows() + (other_rows() if options.more else []), options.only, options.seq)
    if not rows:
        parser.error("there is no such row")
    if options.plot:
        import plot_segments  # fails here, not after the last row, if there is no matplotlib

        if not plot_segments.chosen(rows):
            parser.error("none of these rows is drawn")
    if not torch.cuda.is_available() or gpu.gatedelta.info()["cuda_devices"] == 0:
        sys.exit("bench/segments.py needs a GPU that torch sees and a library that has kernels for it (GD_CUDA=ON)")

    results = []
    for i, row in enumerate(rows):
        result = measure_all(row, options.repeats, _lib.ISA_CUDA_PORTABLE if options.portable else 0)
        results.append(result)
        best = min(result["forced"], key=result["forced"].get, default=None)
        fastest = "" if best is None else f" fastest forced {result['forced'][best]:.3g} ({best} chunks)"
        print(f"[{i + 1}/{len(rows)}] {row['hk']}/{row['hv']} {row['seq']} auto {result['auto_ms']:.3g} "
              f"off {result['off_ms']:.3g}{fastest} regret {result['regret']:.1%}", flush=True)  # fmt: skip
    found = regret.summary(results)
    worst = found["worst"]
    print(f"{found['rows']} shapes: worst regret {worst['regret']:.1%} ({worst['hk']}/{worst['hv']} {worst['seq']}), "
          f"median {found['median']:.1%}, {found['above']} above {regret.BAR:.0%}")  # fmt: skip
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
