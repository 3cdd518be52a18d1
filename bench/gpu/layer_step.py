"""Times the layer's step on a GPU: in one call, as three calls of ours, and as the peers' separate kernels.

A row is a batch of decode steps at bf16: convolution of four taps with SiLU, rule, gated norm. Time is that of one step
in a chain (bench.lib.chain) over states of its own. `ms` is that of gated_delta_layer_step, `separate_ms` that of three
calls in a row, `parts_ms` of each of them alone. Peers are timed operation by operation where they can be imported;
`best_peer_ms` is the sum of the fastest of each, which is what an engine that picks them can reach without fusing.

Usage: python -m bench.gpu.layer_step [--batch 8] [--peers none] [--output FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gatedelta import _lib, info
from gatedelta import torch as gd

from bench import peers
from bench.gpu import chunked as gpu
from bench.gpu import decode
from bench.lib import chain, serving
from tools import records

BATCHES = (1, 2, 4, 8, 32, 128)
TAPS = 4
D = serving.D

Call = Callable[[int], object]


def rows_of(batches: tuple[int, ...]) -> list[dict]:
    return [
        {"kind": "layer_step", "hk": 16, "hv": 32, "batch": batch, "T": 1, "state_dtype": dtype, "layout": "VK",
         "store": "final"}
        for dtype in serving.ITEM_BYTES
        for batch in batches
    ]  # fmt: skip


class Problem(decode.Problem):
    """q, k and v are slices of the convolution's output, so that every operation can be timed alone."""

    def __init__(self, row: dict, nodes: int):
        super().__init__(row, nodes)
        self.channels = 2 * self.hk * D + self.hv * D
        self.mixed_qkv = self.normal(self.batch, 1, self.channels).bfloat16()
        self.z = self.normal(self.batch, 1, self.hv, D).bfloat16()
        self.conv_weight = (0.5 * self.normal(self.channels, TAPS)).bfloat16()
        self.norm_weight = self.normal(D).bfloat16()
        self.windows = self.normal(nodes * self.batch, TAPS - 1, self.channels).bfloat16()
        self.conv_pool = self.windows.transpose(1, 2)  # channels are contiguous, as engines have them
        self.convolved = torch.empty_like(self.mixed_qkv)
        self.y = torch.empty_like(self.z)
        sizes = [self.hk * D, self.hk * D, self.hv * D]
        self.q, self.k, self.v = (t.unflatten(-1, (-1, D)) for t in self.convolved.split(sizes, -1))


def described(tensor: torch.Tensor) -> _lib.Tensor:
    dtypes = {torch.float32: _lib.DTYPE_F32, torch.bfloat16: _lib.DTYPE_BF16, torch.int32: _lib.DTYPE_I32}
    result = _lib.Tensor(data=tensor.data_ptr(), dtype=dtypes[tensor.dtype], rank=tensor.dim())
    result.shape[: tensor.dim()] = tensor.shape
    result.stride[: tensor.dim()] = tensor.stride()
    return result


def our_calls(problem: Problem) -> dict[str, Call]:
    rule = {
        "q": problem.q, "k": problem.k, "v": problem.v, "g": problem.a, "beta": problem.b, "A_log": problem.A_log,
        "dt_bias": problem.dt_bias, "initial_state": problem.pool, "final_state": problem.pool, "out": problem.out,
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
    }  # fmt: skip

    def step(node: int) -> torch.Tensor:
        return gd.gated_delta_layer_step(
            problem.mixed_qkv, problem.z, problem.a, problem.b, key_heads=problem.hk, conv_weight=problem.conv_weight,
            conv_state=problem.conv_pool, A_log=problem.A_log, dt_bias=problem.dt_bias, state=problem.pool,
            norm_weight=problem.norm_weight, state_indices=problem.indices(node), state_v_first=True, out=problem.y,
        )  # fmt: skip

    def conv(node: int) -> torch.Tensor:
        args = _lib.Conv1dArgs()
        args.exec.device, args.exec.stream = _lib.CUDA, torch.cuda.current_stream().cuda_stream
        args.inputs.x = described(problem.mixed_qkv)
        args.inputs.weight = described(problem.conv_weight)
        args.inputs.initial_state = args.final_state = described(problem.conv_pool)
        args.inputs.initial_state_indices = args.final_state_indices = described(problem.indices(node))
        args.inputs.activation = _lib.CONV1D_SILU
        args.out = described(problem.convolved)
        _lib.check(_lib.library().gd_conv1d(ctypes.byref(args)))
        return problem.convolved

    def recurrent(node: int) -> torch.Tensor:
        slots = problem.indices(node)
        return gd.fused_recurrent_gated_delta_rule(**rule, initial_state_indices=slots, final_state_indices=slots)[0]

    def norm(node: int) -> torch.Tensor:
        return gd.rms_norm_gated(problem.out, problem.z, problem.norm_weight, out=problem.y)

    def separate(node: int) -> torch.Tensor:
        conv(node)
        recurrent(node)
        return norm(node)

    return {"step": step, "separate": separate, "conv": conv, "rule": recurrent, "norm": norm}


def peer_calls(problem: Problem, adapters: list) -> dict[str, dict[str, Call]]:
    """By operation. Their kernels for the convolution and the norm, where they have been installed, too."""
    calls = {"conv": {}, "rule": decode.peer_calls(decode.Problem(problem.row, problem.nodes), adapters), "norm": {}}
    try:
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update as sglang_update

        calls["conv"]["sglang"] = lambda node: sglang_update(
            problem.mixed_qkv[:, 0], problem.conv_pool, problem.conv_weight, None, "silu",
            conv_state_indices=problem.indices(node),
        )  # fmt: skip
    except ImportError as error:
        print(f"peers: no convolution of sglang here: {error}")
    try:
        from fla.modules.causal_conv1d.ops import causal_conv1d_update as fla_update

        cache = problem.normal(problem.nodes * problem.batch, problem.channels, TAPS).bfloat16()  # its own layout
        calls["conv"]["fla"] = lambda node: fla_update(
            problem.mixed_qkv, cache[node * problem.batch : (node + 1) * problem.batch], weight=problem.conv_weight,
            activation="silu",
        )  # fmt: skip
    except ImportError as error:
        print(f"peers: no convolution of fla here: {error}")
    try:
        from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd

        rows, gates = problem.out.view(-1, D), problem.z.view(-1, D)
        calls["norm"]["fla"] = lambda node: layer_norm_gated_fwd(
            rows, gates, problem.norm_weight, None, eps=1e-6, is_rms_norm=True
        )
    except ImportError as error:
        print(f"peers: no norm of fla here: {error}")
    return calls


def errors_of(problem: Problem, step: Call) -> dict[str, float]:
    """Of one call, on the first sequences, against float64 with the roundings between the operations."""
    count = min(decode.VERIFIED, problem.batch)
    slots = problem.indices(0)[:count].long()
    window = torch.cat([problem.windows[slots], problem.mixed_qkv[:count]], 1).double()
    filtered = torch.nn.functional.silu((window * problem.conv_weight.double().t()).sum(1, keepdim=True))
    problem.convolved[:count] = filtered.bfloat16()
    o, states = decode.recurrence(problem, problem.states(0)[:count].transpose(-1, -2).double())
    o = o.bfloat16().double()
    expected = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6) * problem.norm_weight.double()
    expected *= torch.nn.functional.silu(problem.z[:count].double())
    found = step(0)
    if not torch.equal(problem.windows[slots].double(), window[:, 1:]):
        sys.exit("bench/gpu/layer_step.py: the conv states are wrong")
    return {
        "err_o": gpu.distance(found[:count], expected),
        "err_state": gpu.distance(problem.states(0)[:count].transpose(-1, -2), states[:, -1]),
    }


def measure(row: dict, repeats: int, adapters: list | None) -> dict:
    nodes = serving.chain_length(row)
    problem = Problem(row, nodes)
    calls = our_calls(problem)
    result = row | errors_of(problem, calls["step"])
    times = {name: chain.chain_ms(call, nodes, repeats) for name, call in calls.items()}
    result |= {"ms": times.pop("step"), "separate_ms": times.pop("separate"), "parts_ms": times}
    if adapters is None:
        return result
    found = {}
    for operation, peers_of in peer_calls(problem, adapters).items():
        for name, call in peers_of.items():
            try:
                call(0)
                found.setdefault(operation, {})[name] = chain.chain_ms(call, nodes, repeats)
            except Exception as error:  # a peer's failure must not end the run
                print(f"  {operation}, {name} was not timed: {type(error).__name__}: {str(error)[:300]}", flush=True)
    result["peers_ms"] = found
    if len(found) == len(times):
        result["best_peer_ms"] = sum(min(of.values()) for of in found.values())
        result["speedup"] = result["best_peer_ms"] / result["ms"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peers", choices=["none", "all"], default="all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not info()["cuda_compiled"]:
        sys.exit("bench/gpu/layer_step.py needs a GPU that torch sees and a library with CUDA kernels (GD_CUDA=ON)")
    adapters = None if options.peers == "none" else peers.importable()
    header = gpu.machine() | {
        "repeats": options.repeats, "peers": {adapter.NAME: adapter.version() for adapter in adapters or []},
    }  # fmt: skip
    results = []
    for row in rows_of(tuple(options.batch)):
        result = measure(row, options.repeats, adapters)
        results.append(result)
        torch.cuda.empty_cache()
        parts = " + ".join(f"{name} {ms * 1e3:.2f}" for name, ms in result["parts_ms"].items())
        theirs = ", ".join(
            f"{name} {operation} {ms * 1e3:.2f}"
            for operation, of in result.get("peers_ms", {}).items()
            for name, ms in of.items()
        )
        ratio = f"; {result['speedup']:.2f} of the peers' best" if "speedup" in result else ""
        print(f"{serving.name_of(row)}: {result['ms'] * 1e3:.2f} us, three calls {result['separate_ms'] * 1e3:.2f} us "
              f"(alone: {parts}) errors {result['err_o']:.1e} {result['err_state']:.1e}{ratio}; {theirs}",
              flush=True)  # fmt: skip
        if options.output:
            records.write(options.output, {"header": header, "rows": results})


if __name__ == "__main__":
    main()
