"""Times decode and draft verification on a GPU, ours and the peers that can be imported, and measures their errors
against the fp64 recurrence.

A row is a batch of sequences with T tokens each and a pool of states. q, k, v, a and b are normal bf16, q and k are
normalised in the kernel, decay and beta are computed there from a, A_log, dt_bias and b. Time is that of one call in a
chain (bench.lib.chain): each call has its own slots, and its slot indices are 64 bytes from those of the call before,
so that these are cold, too. `hot_ms` is the time with all indices in the L2. results/SCHEMA.md describes the output.

Peers compile their kernels at their first call. `--jobs` processes do that first, into the peers' caches on disk.

Usage: python -m bench.gpu.decode [--only 16/32] [--kind verify] [--batch 8] [--peers none|all|16/32] [--jobs 12]
                              [--output FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from gatedelta import info
from gatedelta import torch as gd

from bench import peers
from bench.gpu import chunked as gpu
from bench.lib import chain, serving
from tools import records

DEVICE = "cuda"
D = serving.D
VERIFIED = 4  # sequences that errors are measured on, all heads of them
WRONG = 2e-2  # a peer whose o is further from the truth computes something else
HOST_ROW = {"kind": "decode", "hk": 16, "hv": 32, "batch": 1, "T": 1, "state_dtype": "float32", "layout": "VK",
            "store": "final"}  # fmt: skip

Call = Callable[[int], tuple[torch.Tensor, torch.Tensor | None]]


class Problem:
    """The tensors of a row, with the slots of `nodes` calls. Call i reads the states `states(i)`."""

    def __init__(self, row: dict, nodes: int, hot: bool = False, seed: int = 0):
        self.row, self.nodes = row, nodes
        self.batch, self.tokens, self.hk, self.hv = (row[name] for name in ("batch", "T", "hk", "hv"))
        self.is_v_first, self.dtype = row["layout"] == "VK", getattr(torch, row["state_dtype"])
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        tokens = (self.batch, self.tokens)
        self.q, self.k = (self.normal(*tokens, self.hk, D).bfloat16() for _ in range(2))
        self.v = self.normal(*tokens, self.hv, D).bfloat16()
        self.a, self.b = (self.normal(*tokens, self.hv).bfloat16() for _ in range(2))
        self.A_log, self.dt_bias = self.normal(self.hv).abs().log(), self.normal(self.hv)
        self.out = torch.empty_like(self.v)
        self.pool = self.normal(nodes * self.batch, self.hv, D, D, dtype=self.dtype)
        self.index_rows = chain.index_rows(nodes, self.batch, DEVICE, 1 if hot else chain.INDEX_STRIDE)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=DEVICE, dtype=dtype)

    def indices(self, node: int) -> torch.Tensor:
        return self.index_rows[node, : self.batch]

    def states(self, node: int) -> torch.Tensor:
        return self.pool[node * self.batch : (node + 1) * self.batch]

    @cached_property
    def steps(self) -> torch.Tensor:
        """The state after every token, for every call."""
        return torch.empty(self.nodes, self.batch, self.tokens, self.hv, D, D, dtype=self.dtype, device=DEVICE)

    @cached_property
    def accept_lengths(self) -> torch.Tensor:
        shape = (self.batch,)
        return torch.randint(1, self.tokens + 1, shape, generator=self.generator, device=DEVICE, dtype=torch.int32)


def our_call(problem: Problem) -> Call:
    store = problem.row["store"]
    inputs = {
        "q": problem.q, "k": problem.k, "v": problem.v, "g": problem.a, "beta": problem.b, "A_log": problem.A_log,
        "dt_bias": problem.dt_bias, "initial_state": problem.pool, "out": problem.out, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True, "state_v_first": problem.is_v_first,
    }  # fmt: skip
    if store == "accept":
        inputs["accept_lengths"] = problem.accept_lengths

    def call(node: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        slots = problem.indices(node)
        steps = problem.steps[node] if store == "steps" else None
        stored = {"steps": {"step_states": steps}, "none": {}}
        stored = stored.get(store, {"final_state": problem.pool, "final_state_indices": slots})
        o, _ = gd.fused_recurrent_gated_delta_rule(**inputs, initial_state_indices=slots, **stored)
        return o, steps

    return call


def recurrence(problem: Problem, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp64, from the states [n, hv, K, V] of the first n sequences: o [n, T, hv, V], and the states before the first
    token and after each, [n, T + 1, hv, K, V]."""
    count, group = len(state), problem.hv // problem.hk

    def unit(x: torch.Tensor) -> torch.Tensor:
        x = x[:count].double()
        return (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 2)

    q, k, v = unit(problem.q) * D**-0.5, unit(problem.k), problem.v[:count].double()
    gate = torch.nn.functional.softplus(problem.a[:count].double() + problem.dt_bias.double())
    decay = (-problem.A_log.double().exp() * gate).exp()
    beta = problem.b[:count].double().sigmoid()
    outputs, states = [], [state.double()]
    for t in range(problem.tokens):
        state = states[-1] * decay[:, t, :, None, None]
        e = (v[:, t] - torch.einsum("nhkv,nhk->nhv", state, k[:, t])) * beta[:, t, :, None]
        states.append(state + k[:, t, :, :, None] * e[:, :, None, :])
        outputs.append(torch.einsum("nhkv,nhk->nhv", states[-1], q[:, t]))
    return torch.stack(outputs, 1), torch.stack(states, 1)


def errors_of(problem: Problem, call: Call) -> dict[str, float]:
    """Of one call, on the first sequences. It may update the states."""
    count, store = min(VERIFIED, problem.batch), problem.row["store"]

    def k_first(states: torch.Tensor) -> torch.Tensor:
        return states.transpose(-1, -2) if problem.is_v_first else states

    o, states = recurrence(problem, k_first(problem.states(0)[:count]).double())
    with torch.no_grad():
        found, stored = call(0)
    errors = {"err_o": gpu.distance(found.reshape(problem.v.shape)[:count], o)}
    if store == "none":
        return errors
    if store == "steps":
        expected = states[:, 1:]
    elif store == "accept":
        expected = states[torch.arange(count, device=o.device), problem.accept_lengths[:count].long()]
    else:
        expected = states[:, -1]
    stored = problem.states(0) if stored is None else stored
    return errors | {"err_state": gpu.distance(k_first(stored[:count]), expected)}


def peer_calls(problem: Problem, adapters: list) -> dict[str, Call]:
    return {name: call for adapter in adapters for name, call in adapter.decode_calls(problem).items()}


def measure(row: dict, repeats: int, adapters: list) -> dict:
    nodes = serving.chain_length(row)
    problem = Problem(row, nodes)
    call = our_call(problem)
    result = row | errors_of(problem, call) | {"ms": chain.chain_ms(call, nodes, repeats)}
    if row["kind"] == "decode" and row["batch"] == 1:
        result["hot_ms"] = chain.chain_ms(our_call(Problem(row, nodes, hot=True)), nodes, repeats)
    times = {}
    for name, call in peer_calls(problem, adapters).items():
        try:
            errors = errors_of(problem, call)
            if errors["err_o"] > WRONG or not errors.get("err_state", 0) <= WRONG:
                raise ValueError(f"it computes something else: {errors}")
            times[name] = chain.chain_ms(call, nodes, repeats)
        except Exception as error:  # a peer's failure must not end the run
            print(f"  {name} was not timed: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return result | ({"peers": times} if times else {})


def call_us(adapters: list) -> dict[str, float]:
    """Host time of one eager call at batch 1."""
    problem = Problem(HOST_ROW, 1)
    calls = {"gatedelta": our_call(problem)} | peer_calls(problem, adapters)
    with torch.no_grad():
        return {
            name: chain.host_us(lambda call=call: call(0), 10, torch.cuda.synchronize) for name, call in calls.items()
        }


def compiled_together(rows: list[dict]) -> list[list[dict]]:
    """Rows that may share kernels, so that no two processes compile the same."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in serving.KEY if name != "batch"), []).append(row)
    return list(groups.values())


def compile_share(rows: list[dict], share: str, adapters: list) -> None:
    """Calls every peer once for the rows of one process."""
    index, count = map(int, share.split("/"))
    for adapter in adapters:
        adapter.compile_in_parallel()
    for group in compiled_together(rows)[index::count]:
        for row in group:
            problem = Problem(row, 1)
            for name, call in peer_calls(problem, adapters).items():
                try:
                    call(0)
                except Exception as error:  # said again, and judged, when it is timed
                    print(f"{serving.name_of(row)}: {name}: {error}", file=sys.stderr)
            torch.cuda.empty_cache()  # other processes need memory, too


def compile_peers(jobs: int) -> None:
    """In processes of their own, which take the same options."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
    running = [subprocess.Popen([*command, "--compile-share", f"{i}/{jobs}"]) for i in range(jobs)]
    failed = sum(process.wait() != 0 for process in running)
    print(f"peers' kernels compiled in {time.perf_counter() - begin:.0f} s by {jobs} processes, {failed} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", help="head counts, e.g. 16/32")
    parser.add_argument("--kind", choices=["decode", "verify"])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peers", default="all", help="none, all, or the head counts of rows that peers are timed on")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile the peers' kernels first")
    parser.add_argument("--compile-share", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not info()["cuda_compiled"]:
        sys.exit("bench/gpu/decode.py needs a GPU that torch sees and a library with CUDA kernels (GD_CUDA=ON)")

    def chosen(row: dict, heads: str | None) -> bool:
        return heads in (None, f"{row['hk']}/{row['hv']}")

    rows = [
        row
        for row in serving.decode_rows() + serving.verify_rows()
        if chosen(row, options.only) and options.kind in (None, row["kind"]) and options.batch in (None, row["batch"])
    ]
    if not rows:
        parser.error("there is no such row")
    adapters = [] if options.peers == "none" else peers.importable()
    peer_heads = None if options.peers == "all" else options.peers
    peer_rows = [row for row in rows if chosen(row, peer_heads)] if adapters else []
    if options.compile_share:
        compile_share(peer_rows, options.compile_share, adapters)
        return
    if options.jobs and peer_rows:
        compile_peers(options.jobs)

    recorded_gpu, recorded = serving.load_recorded()
    if torch.cuda.get_device_name() != recorded_gpu:
        recorded = {}
    begin, results = time.perf_counter(), []
    header = gpu.machine() | {
        "repeats": options.repeats, "verified_sequences": VERIFIED,
        "peers": {adapter.NAME: adapter.version() for adapter in adapters},
        "copy_bytes_per_s": chain.copy_bytes_per_s(options.repeats),
    }  # fmt: skip

    def save() -> None:
        if options.output:
            records.write(options.output, {"header": header, "rows": results})

    for i, row in enumerate(rows):
        result = measure(row, options.repeats, adapters if row in peer_rows else [])
        results.append(result)
        save()  # a peer may yet crash the process
        torch.cuda.empty_cache()  # gigabytes that belong to finished graphs
        shown = serving.compared(result, recorded)
        ratio = f", {shown['speedup']:.3f} of {serving.best_peer(shown)}" if "speedup" in shown else ""
        timed = " ".join(f"{name} {ms * 1e3:.2f}" for name, ms in result.get("peers", {}).items())
        errors = " ".join(f"{result[name]:.1e}" for name in serving.ERRORS if name in result)
        print(f"[{i + 1}/{len(rows)}] {serving.name_of(row)}: {result['ms'] * 1e3:.2f} us ({errors}){ratio}; {timed}",
              flush=True)  # fmt: skip
    header |= {
        "sm_clock_mhz": gpu.machine()["sm_clock_mhz"],  # before it falls
        "copy_bytes_per_s": max(header["copy_bytes_per_s"], chain.copy_bytes_per_s(options.repeats)),
        "decode_call_us": call_us(adapters), "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip
    save()
    print(f"{header['seconds']} s; copy {header['copy_bytes_per_s'] / 1e12:.3f} TB/s; host time of a call, us: "
          + ", ".join(f"{name} {us:.1f}" for name, us in header["decode_call_us"].items()))  # fmt: skip
    print(serving.report(header, [serving.compared(row, recorded) for row in results]))
    if options.output:
        print(f"written: {options.output}")


if __name__ == "__main__":
    main()
