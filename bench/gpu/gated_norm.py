"""Times the gated RMSNorm on a GPU against a copy of as many bytes, and against FLA's kernel where it can be imported.

Each time is that of one call in a CUDA graph of many, over buffers that together exceed the L2 cache (of a few tokens
nothing does: those calls find their rows there, as they do in a layer). The bandwidth of a call is what it must read
and write over its time; "of copy" divides it by that of torch's copy of as many bytes. results/SCHEMA.md describes the
output.

Usage: python -m bench.gpu.gated_norm [--tokens 1 64 4096] [--heads 32 64] [--dim 128] [--dtype bfloat16]
                                   [--output FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from gatedelta._operators import norm as _norm

from bench.gpu import chunked as gpu
from tools import records

CHAIN = 40  # calls in a graph
POOL_BYTES = 1 << 29  # far more than an L2 cache
MAX_SETS = 64


def call_us(call: Callable[[int], object], sets: int, repeats: int = 15) -> float:
    """Median time of one of a chain of calls; call(i) uses the i-th set of buffers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(sets, 3)):
            call(i)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(CHAIN):
                call(i % sets)
        times = []
        for _ in range(repeats + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CHAIN)
    return statistics.median(times[2:])


def fla_norm() -> ModuleType | None:
    try:
        from fla.modules.norm import fused_norm_gate
    except ImportError:
        try:
            from fla.modules import fused_norm_gate
        except ImportError:
            return None
    return fused_norm_gate


def measure(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, tuple[float, int]]:
    """Time in us and bytes of each."""
    size = tokens * heads * dim * dtype.itemsize
    sets = max(1, min(MAX_SETS, POOL_BYTES // size))
    tensors = [[torch.randn(tokens, heads, dim, device="cuda").to(dtype) for _ in range(5)] for _ in range(sets)]
    weight = torch.randn(dim, device="cuda", dtype=dtype)
    found = {}

    def norm(i: int) -> None:
        x, gate, _, y, _ = tensors[i]
        _norm.forward_out(x, gate, weight, 1e-6, 0, y)

    def rounded(i: int) -> None:
        x, gate, _, y, _ = tensors[i]
        _norm.forward_out(x, gate, weight, 1e-6, _norm.ROUND_BEFORE_GATE, y)

    def backward(wanted: int, i: int) -> object:
        x, gate, dy, _, _ = tensors[i]
        return _norm.backward(x, gate, weight, 1e-6, 0, dy, wanted)

    found["forward"] = call_us(norm, sets), 3 * size
    found["forward, rounded"] = call_us(rounded, sets), 3 * size
    found["backward"] = call_us(lambda i: backward(0b111, i), sets), 5 * size
    found["backward without dweight"] = call_us(lambda i: backward(0b011, i), sets), 5 * size
    found["copy, as forward"] = copy_us(3 * size), 3 * size
    found["copy, as backward"] = copy_us(5 * size), 5 * size
    if (theirs := fla_norm()) is not None:
        rows = [[t.view(-1, dim) for t in group] for group in tensors]

        def fla_forward(i: int) -> object:
            return theirs.layer_norm_gated_fwd(rows[i][0], rows[i][1], weight, None, eps=1e-6, is_rms_norm=True)

        _, mean, rstd, _ = fla_forward(0)

        def fla_backward(i: int) -> object:
            return theirs.layer_norm_gated_bwd(rows[i][2], rows[i][0], rows[i][1], weight, None, eps=1e-6, mean=mean,
                                               rstd=rstd, is_rms_norm=True)  # fmt: skip

        found["FLA forward"] = call_us(fla_forward, sets), 3 * size
        found["FLA backward"] = call_us(fla_backward, sets), 5 * size
    return found


def copy_us(moved: int) -> float:
    """Of a copy that reads and writes this many bytes all together."""
    count = moved // 2
    sets = max(1, min(MAX_SETS, POOL_BYTES // count))
    pairs = [torch.empty(2, count, dtype=torch.uint8, device="cuda") for _ in range(sets)]
    return call_us(lambda i: pairs[i][1].copy_(pairs[i][0]), sets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512, 4096, 16384])
    parser.add_argument("--heads", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}: heads of {options.dim}, {options.dtype}")
    versions = {"fla": sys.modules["fla"].__version__} if fla_norm() else {}
    result = {"header": gpu.machine() | {"peers": versions}, "rows": []}
    for heads in options.heads:
        for tokens in options.tokens:
            found = measure(tokens, heads, options.dim, getattr(torch, options.dtype))
            row = {"tokens": tokens, "heads": heads, "dim": options.dim, "dtype": options.dtype}
            result["rows"].append(row | {"us": {name: us for name, (us, _) in found.items()}})
            for name, (us, moved) in found.items():
                copy = found["copy, as backward" if "backward" in name else "copy, as forward"][0]
                print(f"{tokens:6} x {heads} {name:26} {us:8.2f} us  {moved / us / 1e6:5.2f} TB/s  "
                      f"{copy / us:5.2f} of copy", flush=True)  # fmt: skip
            if options.output:
                records.write(options.output, result)


if __name__ == "__main__":
    main()
