"""The CUDA forward on the rows of the public H200 table: time by CUDA-graph replay, error against the fp64 recurrence.

Inputs as in the comparison with the peers: q and k l2-normalised bf16, v normal bf16, g = logsigmoid(normal) / 16 in
fp32 with a quarter of the heads at 0, beta = sigmoid(normal) in fp32, an fp32 initial state, the final state written.

Usage: python bench/gpu.py [--only 16/64] [--seq 8192x4] [--peers FILE] [--output FILE] [--no-errors]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

import tree  # noqa: E402, F401, I001  (finds the package, as for the tests)
import torch  # noqa: E402

import gatedelta  # noqa: E402
from gatedelta import torch as gd  # noqa: E402
from rows import forward_rows  # noqa: E402

D = 128
VERIFIED_HEADS = 4  # one of every four has g = 0


def make_inputs(row: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens, hk, hv, count = sum(row["lengths"]), row["hk"], row["hv"], len(row["lengths"])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1).bfloat16()

    g = torch.nn.functional.logsigmoid(normal(1, tokens, hv)) / 16
    g[:, :, ::4] = 0
    offsets = torch.tensor([0, *row["lengths"]], device="cuda").cumsum(0).int()
    return {
        "q": unit(1, tokens, hk, D), "k": unit(1, tokens, hk, D), "v": normal(1, tokens, hv, D).bfloat16(), "g": g,
        "beta": normal(1, tokens, hv).sigmoid(), "initial_state": normal(count, hv, D, D), "cu_seqlens": offsets,
    }  # fmt: skip


def measure(row: dict, inputs: dict[str, torch.Tensor], repeats: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Median of graph replays in ms, o and the final state."""
    out, final = torch.empty_like(inputs["v"]), torch.empty_like(inputs["initial_state"])

    def call() -> None:
        gd.chunk_gated_delta_rule(**inputs, out=out, final_state=final)

    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        times = []
        for i in range(repeats + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if i >= 3:
                times.append(begin.elapsed_time(end))
    return statistics.median(times), out, final


def recurrence(row: dict, inputs: dict[str, torch.Tensor], heads: range) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp64 recurrence of some heads, sequence by sequence side by side: [T, heads, V] and [N, heads, K, V]."""
    group, lengths = row["hv"] // row["hk"], row["lengths"]
    starts, longest, count = [0], max(lengths), len(lengths)
    for n in lengths[:-1]:
        starts.append(starts[-1] + n)
    index = torch.arange(longest, device="cuda")[:, None] + torch.tensor(starts, device="cuda")
    valid = torch.arange(longest, device="cuda")[:, None] < torch.tensor(lengths, device="cuda")
    index = torch.where(valid, index, 0)
    pick = [h // group for h in heads]
    q, k = (inputs[x][0][:, pick].double()[index] for x in "qk")  # [longest, N, heads, D]
    v = inputs["v"][0][:, list(heads)].double()[index]
    g, beta = (inputs[x][0][:, list(heads)].double()[index] * valid[..., None] for x in ("g", "beta"))
    state = inputs["initial_state"][:, list(heads)].double().clone()
    o = torch.empty(longest, count, len(heads), D, dtype=torch.float64, device="cuda")
    q, decay = q * D**-0.5, g.exp()

    def steps(begin: torch.Tensor, block: int) -> None:
        for i in range(block):
            t = begin + i
            kt, qt = k.index_select(0, t)[0], q.index_select(0, t)[0]
            state.mul_(decay.index_select(0, t)[0][..., None, None])
            e = (v.index_select(0, t)[0] - torch.einsum("nhkv,nhk->nhv", state, kt)) * beta.index_select(0, t)[0][
                ..., None
            ]
            state.addcmul_(kt[..., None], e[..., None, :])
            o.index_copy_(0, t, torch.einsum("nhkv,nhk->nhv", state, qt)[None])

    block = math.gcd(longest, 64)
    begin = torch.zeros(1, dtype=torch.long, device="cuda")
    kept = state.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        steps(begin, block)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            steps(begin, block)
            begin += block
        state.copy_(kept)
        begin.zero_()
        for _ in range(longest // block):
            graph.replay()
    stream.synchronize()
    flat = torch.empty(sum(lengths), len(heads), D, dtype=torch.float64, device="cuda")
    flat[index[valid]] = o[valid]
    return flat, state


def distance(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="head counts, e.g. 16/64")
    parser.add_argument("--seq", help="one row name, e.g. 8192x4")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-errors", action="store_true", help="times only")
    parser.add_argument("--peers", type=Path, help="json with the peers' best_ms per row, for ratios")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/gpu.py needs a CUDA device")
    peers = {}
    if options.peers:
        for entry in json.loads(options.peers.read_text()):
            peers[entry["kind"], entry["hk"], entry["hv"], entry["seq"]] = entry["best_ms"]

    rows = [
        row
        for row in forward_rows()
        if (not options.only or f"{row['hk']}/{row['hv']}" == options.only)
        and (not options.seq or row["seq"] == options.seq)
    ]
    results = []
    for i, row in enumerate(rows):
        inputs = make_inputs(row)
        ms, o, final = measure(row, inputs, options.repeats)
        result = {key: row[key] for key in ("kind", "hk", "hv", "seq")} | {"ms": ms}
        if not options.no_errors:
            heads = range(VERIFIED_HEADS)
            true_o, true_state = recurrence(row, inputs, heads)
            result["err_o"] = distance(o[0][:, list(heads)], true_o)
            result["err_state"] = distance(final[:, list(heads)], true_state)
        best = peers.get(("fwd", row["hk"], row["hv"], row["seq"]))
        if best:
            result |= {"best_peer_ms": best, "speedup": best / ms}
        results.append(result)
        shown = " ".join(f"{k} {v:.3g}" if isinstance(v, float) else str(v) for k, v in result.items() if k != "kind")
        print(f"[{i + 1}/{len(rows)}] {shown}", flush=True)
        del inputs, o, final
    ratios = [r["speedup"] for r in results if "speedup" in r]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{len(ratios)} rows: geometric mean {mean:.2f}, worst {min(ratios):.2f}")
    if options.output:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"],
            capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        header = {
            "gpu": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__,
            "cuda": torch.version.cuda, "gatedelta": gatedelta.info()["version"], "repeats": options.repeats,
        }  # fmt: skip
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"header": header, "rows": results}, indent=1) + "\n")
        print(f"written: {options.output}")


if __name__ == "__main__":
    main()
