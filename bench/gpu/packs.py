"""Times the forward on packs of short sequences, as engines send them to a prefill, beside FlashInfer's where that can
be imported, and measures errors against the fp64 recurrence.

Inputs are those of bench.gpu.chunked. States are [V, K] in fp32, in a pool, read and written in place. Time is that of
one call in a chain (bench.lib.chain) over so many slots that no state is in the L2. results/SCHEMA.md describes the
output.

Usage: python -m bench.gpu.packs [--only 16/32] [--peers none|all] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from gatedelta import info
from gatedelta import torch as gd

from bench import peers
from bench.gpu import chunked as gpu
from bench.lib import chain, serving
from tools import records


def chain_length(row: dict) -> int:
    """As of a batch of decode with as many states."""
    return serving.chain_length({"batch": len(row["lengths"]), "hv": row["hv"], "state_dtype": "float32"})


class Pack:
    """The tensors of a row, with the slots of `nodes` calls, as a peer without a batch dimension takes them."""

    def __init__(self, row: dict, nodes: int):
        self.row, self.longest, self.count = row, max(row["lengths"]), len(row["lengths"])
        self.inputs = gpu.make_inputs(row)
        states = self.inputs.pop("initial_state").transpose(-1, -2)
        self.cu_seqlens = self.inputs["cu_seqlens"]
        self.q, self.k, self.v, self.g, self.beta = (self.inputs[x][0] for x in ("q", "k", "v", "g", "beta"))
        self.alpha = self.g.exp()
        self.pool = states.repeat(nodes, 1, 1, 1).contiguous()
        self.out = torch.empty_like(self.v)
        self.index_rows = chain.index_rows(nodes, self.count, gpu.DEVICE)

    def indices(self, node: int) -> torch.Tensor:
        return self.index_rows[node, : self.count]

    def states(self, node: int) -> torch.Tensor:
        return self.pool[node * self.count : (node + 1) * self.count]


def our_call(pack: Pack):
    def call(node: int):
        slots = pack.indices(node)
        gd.chunk_gated_delta_rule(
            **pack.inputs, initial_state=pack.pool, initial_state_indices=slots, final_state=pack.pool,
            final_state_indices=slots, out=pack.out[None], state_v_first=True,
        )  # fmt: skip
        return pack.out, None

    return call


def errors_of(pack: Pack, call) -> dict[str, float]:
    """Of the first value heads. The call updates the states."""
    states = pack.states(0).transpose(-1, -2).clone()
    with torch.no_grad():
        call(0)
    inputs = pack.inputs | {"initial_state": states}
    final = pack.states(0).transpose(-1, -2)
    return gpu.forward_errors(pack.row, inputs, pack.out[None], final, gpu.VERIFIED_HEADS)


def measure(row: dict, repeats: int, adapters: list) -> dict:
    nodes = chain_length(row)
    pack = Pack(row, nodes)
    call = our_call(pack)
    errors = errors_of(pack, call)
    result = {name: row[name] for name in ("kind", "hk", "hv", "seq")} | errors
    result["ms"] = chain.chain_ms(call, nodes, repeats)
    times = {}
    for name, call in ((name, call) for adapter in adapters for name, call in adapter.pack_calls(pack).items()):
        try:
            errors = errors_of(pack, call)
            if not max(errors.values()) < 2e-2:
                raise ValueError(f"it computes something else: {errors}")
            times[name] = chain.chain_ms(call, nodes, repeats)
        except Exception as error:  # a peer's failure must not end the run
            print(f"  {name} was not timed: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return result | ({"peers": times} if times else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", help="head counts, e.g. 16/32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peers", choices=["none", "all"], default="all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() or info()["cuda_devices"] == 0:
        sys.exit("bench/gpu/packs.py needs a GPU that torch sees and a library that has kernels for it (GD_CUDA=ON)")
    rows = [row for row in serving.pack_rows() if options.only in (None, f"{row['hk']}/{row['hv']}")]
    if not rows:
        parser.error("there is no such row")
    adapters = [] if options.peers == "none" else peers.importable()
    begin, results = time.perf_counter(), []
    for row in rows:
        result = serving.compared(measure(row, options.repeats, adapters), {})
        results.append(result)
        torch.cuda.empty_cache()
        timed = " ".join(f"{name} {ms * 1e3:.1f}" for name, ms in result.get("peers", {}).items())
        ratio = f", {result['speedup']:.3f}" if "speedup" in result else ""
        print(f"{serving.name_of(row)}: {result['ms'] * 1e3:.1f} us ({result['err_o']:.1e} {result['err_state']:.1e})"
              f"{ratio}; {timed}", flush=True)  # fmt: skip
    header = gpu.machine() | {
        "repeats": options.repeats, "verified_heads": gpu.VERIFIED_HEADS,
        "seconds": round(time.perf_counter() - begin, 1),
        "peers": {adapter.NAME: adapter.version() for adapter in adapters},
    }  # fmt: skip
    print(serving.report(header, results))
    if options.output:
        unjoined = [{k: v for k, v in row.items() if k not in ("best_peer_ms", "speedup")} for row in results]
        records.write(options.output, {"header": header, "rows": unjoined})
        print(f"written: {options.output}")


if __name__ == "__main__":
    main()
