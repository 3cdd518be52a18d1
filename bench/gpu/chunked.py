"""Times the CUDA forward and backward on the rows of the public H200 table by CUDA-graph replay, and measures their
errors against the fp64 recurrence.

The inputs are those of the peers' measurements: q and k l2-normalised bf16, v normal bf16, g = logsigmoid(normal) / 16
in fp32 with a quarter of the heads at 0, beta = sigmoid(normal) in fp32, an fp32 initial state; the final state is
written. A backward is one call. It takes what the forward saved, normal gradients of o (bf16) and normal gradients of
the final state divided by 8 (fp32), and returns all six gradients. Errors are relative L2 distances over all tokens
and sequences of the first heads. Errors of gradients are measured on the row scaled down. results/SCHEMA.md describes
the output.

Usage: python -m bench.gpu.chunked [--kinds fwd,bwd] [--only 16/64] [--seq 8192x4] [--no-errors] [--profile]
                                  [--kernels FILE] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gatedelta
import torch
from gatedelta import torch as gd

from bench.lib import ncu, ratios
from bench.lib.chain import host_us
from bench.lib.rows import KINDS, name_of, of_kind, scaled_down, selected
from tools import records
from tools.repo_files import stamp

DEVICE = "cuda"
D = 128
VERIFIED_HEADS = 4  # one in four has g = 0
LEAVES = ("q", "k", "v", "g", "beta", "initial_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")  # of those
# A small ragged pack; its errors are measured over all heads.
ACCURACY_ROW = {"hk": 4, "hv": 8, "lengths": [1000, 3000, 64, 32]}
LONG_HEADS, LONG_TOKENS = ((2, 8), (16, 64)), (32768, 131072, 524288)  # one sequence each
PROFILED = [("16/64", "8192x4"), ("16/64", "1x32768")]  # whole heads on every SM; one sequence, a CTA per half of V


def make_inputs(row: dict, seed: int = 0, persistent: bool = True) -> dict[str, torch.Tensor]:
    """With or without heads that do not decay."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tokens, hk, hv, count = sum(row["lengths"]), row["hk"], row["hv"], len(row["lengths"])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1).bfloat16()

    g = torch.nn.functional.logsigmoid(normal(1, tokens, hv)) / 16
    if persistent:
        g[:, :, ::4] = 0
    offsets = torch.tensor([0, *row["lengths"]], device=DEVICE).cumsum(0).int()
    return {
        "q": unit(1, tokens, hk, D), "k": unit(1, tokens, hk, D), "v": normal(1, tokens, hv, D).bfloat16(), "g": g,
        "beta": normal(1, tokens, hv).sigmoid(), "initial_state": normal(count, hv, D, D), "cu_seqlens": offsets,
    }  # fmt: skip


def make_gradients(inputs: dict[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    """Of o and of the final state."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    v, states = inputs["v"].shape, inputs["initial_state"].shape
    return {
        "do": torch.randn(v, generator=generator, device=DEVICE).bfloat16(),
        "dht": torch.randn(states, generator=generator, device=DEVICE) / 8,
    }


def replay_ms(call: Callable[[], None], repeats: int) -> float:
    """Median of graph replays in ms."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):  # bench.lib.ncu profiles the third
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
    return statistics.median(times)


def measure(inputs: dict[str, torch.Tensor], repeats: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The time in ms, o and the final state."""
    out, final = torch.empty_like(inputs["v"]), torch.empty_like(inputs["initial_state"])
    ms = replay_ms(lambda: gd.chunk_gated_delta_rule(**inputs, out=out, final_state=final), repeats)
    return ms, out, final


def run_forward(inputs: dict[str, torch.Tensor]) -> gd.Saved:
    """Returns what it saves for the backward."""
    _, _, saved = gd.chunk_gated_delta_rule_fwd(**inputs)
    return saved


def run_backward(
    inputs: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    saved: gd.Saved,
    small_workspace: bool = False,
) -> dict[str, torch.Tensor]:
    """Calls what autograd calls, once."""
    dq, dk, dv, dbeta, dg, dh0 = gd.chunk_gated_delta_rule_bwd(
        **inputs, **gradients, saved=saved, small_workspace=small_workspace
    )
    return dict(zip(GRADIENTS, (dq, dk, dv, dg, dbeta, dh0)))


def with_leaves(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same inputs; LEAVES require gradients."""
    return inputs | {name: inputs[name].detach().requires_grad_() for name in LEAVES}


def train(
    inputs: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    function: Callable[..., tuple[torch.Tensor, ...]] = gd.chunk_gated_delta_rule,
) -> tuple[torch.Tensor, ...]:
    """Forward and backward by autograd; returns the gradients of LEAVES, which must require them."""
    with torch.enable_grad():
        outputs = function(**inputs, output_final_state=True)
        return torch.autograd.grad(outputs, [inputs[name] for name in LEAVES], list(gradients.values()))


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak memory of a call, beyond what was allocated before it and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    stats = torch.cuda.memory_stats()
    del kept
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]


def measure_backward(inputs: dict[str, torch.Tensor], repeats: int) -> dict:
    gradients = make_gradients(inputs)
    with torch.no_grad():
        saved = run_forward(inputs)
    found = {"saved_bytes": saved.data.nbytes}
    for of, small in (("", False), ("small_", True)):
        call = partial(run_backward, inputs, gradients, saved, small)
        found |= {f"{of}workspace_bytes": peak_bytes(call), f"{of}ms": replay_ms(call, repeats)}
    leaves = with_leaves(inputs)
    return found | {"train_ms": replay_ms(lambda: train(leaves, gradients), repeats)}


def side_by_side(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpacks sequences: the position of each token [longest, N], and whether the sequence has that token."""
    ends = torch.tensor(lengths, device=DEVICE).cumsum(0)
    lengths = torch.tensor(lengths, device=DEVICE)
    step = torch.arange(int(lengths.max()), device=DEVICE)[:, None]
    valid = step < lengths
    return torch.where(valid, step + ends - lengths, 0), valid


def recurrence(row: dict, inputs: dict[str, torch.Tensor], heads: range) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp64 recurrence of some heads, all sequences at once: o [T, heads, V] and states [N, heads, K, V]."""
    group, lengths = row["hv"] // row["hk"], row["lengths"]
    longest, count = max(lengths), len(lengths)
    index, valid = side_by_side(lengths)
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
    stream.wait_stream(torch.cuda.current_stream())
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


def true_gradients(
    row: dict, inputs: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], heads: int
) -> dict[str, torch.Tensor]:
    """Autograd through the fp64 recurrence, for the first value heads and the key heads that only they read."""
    group = row["hv"] // row["hk"]
    first = {"q": heads // group, "k": heads // group}
    leaves = {name: inputs[name][:, :, : first.get(name, heads)][0].double() for name in LEAVES[:-1]}
    leaves["initial_state"] = inputs["initial_state"][:, :heads].double()
    index, valid = side_by_side(row["lengths"])
    with torch.enable_grad():
        for leaf in leaves.values():
            leaf.requires_grad_()
        q, k = (leaves[name].repeat_interleave(group, 1)[index] for name in "qk")  # [longest, N, heads, D]
        g, beta = (leaves[name][index] * valid[..., None] for name in ("g", "beta"))
        steps = (q * D**-0.5, k, leaves["v"][index], g.exp()[..., None, None], beta[..., None])
        state, outputs = leaves["initial_state"], []
        for qt, kt, vt, decay, bt in zip(*(x.unbind() for x in steps)):
            state = state * decay
            e = (vt - torch.einsum("nhkv,nhk->nhv", state, kt)) * bt
            state = state + kt[..., None] * e[..., None, :]
            outputs.append(torch.einsum("nhkv,nhk->nhv", state, qt))
        o = torch.stack(outputs)[valid]
        do = gradients["do"][0][:, :heads].double()[index[valid]]
        dht = gradients["dht"][:, :heads].double()
        return dict(zip(GRADIENTS, torch.autograd.grad((o, state), list(leaves.values()), (do, dht))))


def gradient_errors(row: dict) -> dict:
    """Of the row scaled down."""
    row = row | {"lengths": scaled_down(row["lengths"])}
    inputs = make_inputs(row)
    gradients = make_gradients(inputs)
    with torch.no_grad():
        found = run_backward(inputs, gradients, run_forward(inputs))
    truth = true_gradients(row, inputs, gradients, VERIFIED_HEADS)
    errors = {"verified_lengths": row["lengths"]}
    for name, true in truth.items():
        x = found[name] if name == "dh0" else found[name][0]
        errors[f"err_{name}"] = distance(x[:, : true.shape[1]], true)
    return errors


def distance(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


def forward_errors(
    row: dict, inputs: dict[str, torch.Tensor], o: torch.Tensor, final: torch.Tensor, heads: int
) -> dict[str, float]:
    """Of the first value heads."""
    true_o, true_state = recurrence(row, inputs, range(heads))
    return {"err_o": distance(o[0][:, :heads], true_o), "err_state": distance(final[:, :heads], true_state)}


def accuracy() -> dict:
    """Errors over all heads of a small pack, with a quarter of the heads persistent ("mixed") and with none."""
    found = {}
    for gates in ("mixed", "decaying"):
        inputs = make_inputs(ACCURACY_ROW, persistent=gates == "mixed")
        with torch.no_grad():
            o, final = gd.chunk_gated_delta_rule(**inputs, output_final_state=True)
        found[gates] = forward_errors(ACCURACY_ROW, inputs, o, final, ACCURACY_ROW["hv"])
        print(f"{gates} gates:", ", ".join(f"{k} {v:.3g}" for k, v in found[gates].items()), flush=True)
    return found


def long_sequences(repeats: int) -> list[dict]:
    """Time and memory of one sequence, shorter and longer."""
    found = []
    for hk, hv in LONG_HEADS:
        for tokens in LONG_TOKENS:
            inputs = make_inputs({"hk": hk, "hv": hv, "lengths": [tokens]})
            with torch.no_grad():
                workspace = peak_bytes(partial(gd.chunk_gated_delta_rule, **inputs, output_final_state=True))
            ms = measure(inputs, repeats)[0]
            found.append({"hk": hk, "hv": hv, "tokens": tokens, "ms": ms, "workspace_bytes": workspace})
            print(f"{hk}/{hv} 1x{tokens} ms {ms:.3g}", flush=True)
            torch.cuda.empty_cache()  # gigabytes that belong to finished streams and graphs
    return found


EAGER_ROW = {"hk": 2, "hv": 8, "lengths": [64]}


def eager_call_us() -> float:
    inputs = make_inputs(EAGER_ROW)
    with torch.no_grad():
        return host_us(lambda: gd.chunk_gated_delta_rule(**inputs, output_final_state=True), 10, torch.cuda.synchronize)


def machine() -> dict:
    """Machine, versions and commit."""
    fields = ("driver_version", "clocks.max.sm", "clocks.sm")
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        text = ""
    driver, *clocks = (text.partition("\n")[0] or ", , ").split(", ")
    clock_max, clock = (int(mhz) if mhz.isdigit() else None for mhz in clocks)
    return {
        "gpu": torch.cuda.get_device_name(), "driver": driver or None, "sm_clock_max_mhz": clock_max,
        "sm_clock_mhz": clock, "cuda": torch.version.cuda, "torch": torch.__version__,
        "python": platform.python_version(), "gatedelta": gatedelta.info()["version"], **stamp(),
    }  # fmt: skip


def describe(repeats: int) -> dict:
    """The header. The clock is read right after the last row, before it falls."""
    return machine() | {"repeats": repeats, "verified_heads": VERIFIED_HEADS, "eager_call_us": eager_call_us()}


def profiles() -> dict:
    """ncu's figures for the kernels of two rows, each row in its own process. Prints why if there are none."""
    tool = ncu.find()
    if not tool:
        print("no ncu here: the kernels were not profiled")
        return {}
    found = {}
    for heads, seq in PROFILED:
        command = [sys.executable, "-m", __spec__.name, "--only", heads, "--seq", seq, "--no-errors", "--repeats", "1"]
        try:
            found[f"{heads} {seq}"] = ncu.profile(tool, command)
        except RuntimeError as error:
            print(f"{heads} {seq} was not profiled: {error}")
            continue
        for kernel, values in found[f"{heads} {seq}"].items():
            print(f"{heads} {seq} {kernel}:", ", ".join(f"{k} {v:.1f}" for k, v in values.items()), flush=True)
    return found


def forward_result(row: dict, repeats: int, errors: bool) -> dict:
    inputs = make_inputs(row)
    ms, o, final = measure(inputs, repeats)
    result = named(row) | {"ms": ms}
    if errors:
        result |= forward_errors(row, inputs, o, final, VERIFIED_HEADS)
    return result


def backward_result(row: dict, repeats: int, errors: bool) -> dict:
    result = named(row) | measure_backward(make_inputs(row), repeats)
    if errors:
        result |= gradient_errors(row)
    torch.cuda.empty_cache()  # gigabytes that belong to finished streams and graphs
    return result


def named(row: dict) -> dict:
    return {key: row[key] for key in ("kind", "hk", "hv", "seq")}


MEASURES = {"fwd": forward_result, "bwd": backward_result}


def groups_of(results: list[dict]) -> dict[str, list[dict]]:
    """The groups that are summed up, by name."""
    forward = of_kind(results, "fwd")
    full = [row for row in forward if ratios.is_full(row)]
    return {
        "forward rows": forward,
        f"forward rows with sequences x value heads >= {ratios.FULL}": full,
        "backward rows": of_kind(results, "bwd"),
    }


def kinds(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= KINDS.keys():
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of {', '.join(KINDS)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kinds", type=kinds, default=list(KINDS), help="fwd, bwd, or fwd,bwd as without it")
    parser.add_argument("--only", help="head counts, e.g. 16/64")
    parser.add_argument("--seq", help="one row name, e.g. 8192x4")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-errors", action="store_true", help="times only")
    parser.add_argument("--peers", type=Path, default=ratios.PEERS, help="the peers' times (bench/peers/h200.json)")
    parser.add_argument("--kernels", type=Path, help="json with the digest of each kernel's code, for the header")
    parser.add_argument("--profile", action="store_true", help="two rows under ncu, into the header")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() or gatedelta.info()["cuda_devices"] == 0:
        sys.exit("bench/gpu/chunked.py needs a GPU that torch sees and a library that has kernels for it (GD_CUDA=ON)")
    kernels = json.loads(options.kernels.read_text()) if options.kernels else None
    peers_gpu, peers = ratios.load_peers(options.peers)
    if torch.cuda.get_device_name() != peers_gpu:
        print(f"the peers were measured on one {peers_gpu}: no ratios here")
        peers = {}

    rows = {kind: selected(KINDS[kind](), options.only, options.seq) for kind in options.kinds}
    if not any(rows.values()):
        parser.error("there is no such row")
    header, results = {}, []

    def save() -> None:
        if options.output:
            records.write(options.output, {"header": header, "rows": results})
            print(f"written: {options.output}")

    for kind, members in rows.items():
        for i, row in enumerate(members):
            result = MEASURES[kind](row, options.repeats, not options.no_errors)
            results.append(result)
            compared = ratios.compared(result, peers)
            shown = " ".join(f"{k} {v:.3g}" for k, v in compared.items() if isinstance(v, float))
            print(f"[{i + 1}/{len(members)}] {kind} {row['hk']}/{row['hv']} {row['seq']} {shown}", flush=True)
        if members and options.output:  # keeps this kind if the next one fails
            header = describe(options.repeats) | ({"kernels": kernels} if kernels else {})
            save()
    for name, members in groups_of([ratios.compared(row, peers) for row in results]).items():
        if found := ratios.summary(members):
            worst = found["worst"]
            print(f"{found['rows']} {name}: geometric mean {found['geomean']:.2f}, worst {worst['speedup']:.2f} "
                  f"({name_of(worst)})")  # fmt: skip
    if header and "fwd" in options.kinds and not (options.only or options.seq or options.no_errors):
        header |= {"accuracy": accuracy(), "long": long_sequences(options.repeats)}
        save()
    if options.profile:  # last, because ncu may hang: the rows are written
        torch.cuda.empty_cache()
        header["profile"] = profiles()
        save()


if __name__ == "__main__":
    main()
