"""Compares builds of the library, and FlashInfer and FLA where they can be imported, replay by replay in turns.

The clock of a GPU under load depends on what ran before, by more than the differences between two builds: only calls
that take turns can be compared. Inputs and rows are those of bench.gpu.chunked, and packs of many ragged sequences. The
first library is what the others are divided by; errors are relative L2 distances to its results. LIBRARY:portable
forces the portable kernels of a library. results/SCHEMA.md describes the output.

Usage: python -m bench.gpu.in_turns [NAME=]LIBRARY[:portable]... [--kinds fwd,bwd,ragged] [--only 16/64] [--seq 8192x4]
                                [--head-sizes 64,256] [--peers flashinfer,fla] [--repeats N] [--output FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gatedelta import _lib
from gatedelta._operators import queries as _queries

from bench import peers
from bench.gpu import chunked as gpu
from bench.gpu import packs
from bench.lib.ratios import geomean
from bench.lib.rows import KINDS, name_of, ragged_rows
from tools import records

CUDA = 1  # GD_CUDA of gatedelta.h
WARM_UP = 3  # replays
ROWS = KINDS | {"ragged": ragged_rows}
PEERS = ("flashinfer", "fla")


def describe(tensor: torch.Tensor, name: str) -> _lib.Tensor:
    result = _queries.describe(tensor, name)
    result.data = tensor.data_ptr()
    result.stride[: tensor.dim()] = tensor.stride()
    return result


class Library:
    """A build of the library, called through its C ABI."""

    def __init__(self, text: str):
        name, _, path = text.rpartition("=")
        self.name = name or path
        self.kernels = _lib.KERNELS["portable" if path.endswith(":portable") else "auto"]
        path = path.removesuffix(":portable")
        self.lib = ctypes.CDLL(str(Path(path).resolve()))
        self.lib.gd_last_error.restype = ctypes.c_char_p

    def check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{self.name}: {self.lib.gd_last_error().decode()}")

    def size(self, query: str, args: ctypes.Structure) -> int:
        size = ctypes.c_size_t()
        self.check(getattr(self.lib, query)(ctypes.byref(args), ctypes.byref(size)))
        return size.value

    def arguments(self, kind: type[ctypes.Structure], inputs: dict[str, torch.Tensor]) -> ctypes.Structure:
        args = kind()
        args.exec.device, args.exec.device_index, args.exec.kernels = CUDA, torch.cuda.current_device(), self.kernels
        for name, tensor in inputs.items():
            setattr(args.inputs, name, describe(tensor, name))
        return args

    def prepare(self, function: str, args: ctypes.Structure, kept: list) -> Callable[[], None]:
        """A call with its workspace. `kept` holds the tensors that the arguments point to."""
        args.exec.workspace_bytes = self.size(f"{function}_workspace", args)
        workspace = torch.empty(args.exec.workspace_bytes, dtype=torch.uint8, device=gpu.DEVICE)
        args.exec.workspace = workspace.data_ptr()

        def call() -> None:
            args.exec.stream = torch.cuda.current_stream().cuda_stream
            self.check(getattr(self.lib, function)(ctypes.byref(args)))

        call.kept = [workspace, *kept]
        return call

    def forward(self, inputs: dict[str, torch.Tensor], saves: bool = False) -> tuple[Callable, list[torch.Tensor]]:
        """The call, and its results: o and the final state, or what a backward takes."""
        args = self.arguments(_lib.ForwardArgs, inputs)
        results = [torch.empty_like(inputs["v"]), torch.empty_like(inputs["initial_state"])]
        args.out, args.final_state = describe(results[0], "out"), describe(results[1], "final_state")
        if saves:
            saved = torch.empty(self.size("gd_forward_saved_size", args), dtype=torch.uint8, device=gpu.DEVICE)
            args.saved, args.saved_bytes, results = saved.data_ptr(), saved.nbytes, [*results, saved]
        return self.prepare("gd_forward", args, [inputs, results]), results

    def backward(self, inputs: dict[str, torch.Tensor]) -> tuple[Callable, list[torch.Tensor]]:
        forward, (*_, saved) = self.forward(inputs, saves=True)
        forward()
        gradients = gpu.make_gradients(inputs)
        args = self.arguments(_lib.BackwardArgs, inputs)
        args.do, args.dht = describe(gradients["do"], "do"), describe(gradients["dht"], "dht")
        args.saved, args.saved_bytes = saved.data_ptr(), saved.nbytes
        saving = self.arguments(_lib.ForwardArgs, inputs)
        saving.out = describe(gradients["do"], "out")
        self.check(self.lib.gd_forward_saved_call(ctypes.byref(saving), ctypes.byref(args.saved_call)))
        results = [torch.empty_like(inputs[name]) for name in gpu.LEAVES]
        for name, tensor in zip(("dq", "dk", "dv", "dg", "dbeta", "d_initial_state"), results):
            setattr(args, name, describe(tensor, name))
        return self.prepare("gd_backward", args, [inputs, gradients, saved, results]), results


def captured(call: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def replays_in_turns(
    calls: dict[str, Callable[[], object]], stream: torch.cuda.Stream, repeats: int
) -> dict[str, float]:
    """The median time of each call in ms. Every round begins with another call."""
    times = {name: [] for name in calls}
    graphs = list({name: captured(call, stream) for name, call in calls.items()}.items())
    for i in range(repeats + WARM_UP):
        for name, graph in graphs[i % len(graphs) :] + graphs[: i % len(graphs)]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if i >= WARM_UP:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}


def calls_of_peer(adapter, row: dict, inputs: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    if row["kind"] == "bwd":
        make = getattr(adapter, "backward_calls", None)
        return make(inputs, gpu.make_gradients(inputs), gpu.LEAVES) if make else {}
    if hasattr(adapter, "forward_calls"):
        return adapter.forward_calls(inputs)
    return {name: partial(call, 0) for name, call in adapter.pack_calls(packs.Pack(row, 1)).items()}


def peer_calls(row: dict, inputs: dict[str, torch.Tensor], adapters: list) -> dict[str, Callable[[], object]]:
    """Those that succeed. A backward stays on the stream of this first call."""
    found = {}
    for adapter in adapters:
        for name, call in calls_of_peer(adapter, row, inputs).items():
            try:
                call()
                torch.cuda.synchronize()
                found[name] = call
            except Exception as error:  # a peer's failure must not end the run
                print(f"  {name} was not timed: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return found


def measure(row: dict, libraries: list[Library], adapters: list, repeats: int) -> dict:
    gpu.D = row["head_size"]
    inputs = gpu.make_inputs(row)
    calls, results = {}, {}
    for library in libraries:
        make = library.backward if row["kind"] == "bwd" else library.forward
        calls[library.name], results[library.name] = make(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        calls |= peer_calls(row, inputs, adapters)
        times = replays_in_turns(calls, stream, repeats)
    first = results[libraries[0].name]
    errors = {
        library.name: max(gpu.distance(x, y.double()) for x, y in zip(results[library.name], first))
        for library in libraries[1:]
    }
    return {key: row[key] for key in ("kind", "hk", "hv", "seq", "head_size")} | {"ms": times, "distance": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("libraries", type=Library, nargs="+", metavar="[NAME=]LIBRARY[:portable]")
    parser.add_argument("--kinds", default="fwd", help="of fwd, bwd and ragged")
    parser.add_argument("--only", help="head counts, e.g. 16/64; several with commas")
    parser.add_argument("--seq", help="row names, e.g. 8192x4; several with commas")
    parser.add_argument("--head-sizes", default=str(gpu.D), help="K and V, 128; several with commas")
    parser.add_argument("--peers", default="", help="of flashinfer and fla, with commas")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [
        row | {"head_size": int(size)}
        for size in options.head_sizes.split(",")
        for kind in options.kinds.split(",")
        for row in ROWS[kind]()
        if not options.only or f"{row['hk']}/{row['hv']}" in options.only.split(",")
        if not options.seq or row["seq"] in options.seq.split(",")
    ]
    if not rows:
        parser.error("there is no such row")
    wanted = [name for name in options.peers.split(",") if name]
    if unknown := set(wanted) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {' and '.join(PEERS)}")
    if not torch.cuda.is_available():
        sys.exit("bench/gpu/in_turns.py needs a GPU")
    adapters = peers.importable(wanted)
    base, results = options.libraries[0].name, []
    for row in rows:
        result = measure(row, options.libraries, adapters, options.repeats)
        results.append(result)
        ms = result["ms"]
        shown = ", ".join(f"{name} {ms[name] * 1e3:.1f} ({ms[name] / ms[base]:.3f})" for name in ms)
        worst = max(result["distance"].values(), default=0.0)
        size = "" if row["head_size"] == 128 else f" K = V = {row['head_size']}"
        print(f"{row['kind']} {name_of(row)}{size}: {shown}; distance {worst:.1e}", flush=True)
        torch.cuda.empty_cache()
    for name in results[0]["ms"]:
        for kind in options.kinds.split(","):
            of = [row["ms"][name] / row["ms"][base] for row in results if row["kind"] == kind and name in row["ms"]]
            if of and name != base:
                print(f"{name} / {base}, {kind}: {geomean(of):.4f}, {min(of):.3f} to {max(of):.3f}, {len(of)} rows")
    if options.output:
        header = gpu.machine() | {"repeats": options.repeats, "base": base}
        records.write(options.output, {"header": header, "rows": results})
        print(f"written: {options.output}")


if __name__ == "__main__":
    main()
