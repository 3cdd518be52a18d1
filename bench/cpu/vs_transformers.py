"""Times the CPU backend against the torch code in transformers and against torch's bf16 matmul, all in one run. One row
is a prefill of a whole model, a small Qwen3.5 with random weights.

The two sides are measured in turns, so that both see the same machine. Prints a table with the project's bars.
results/SCHEMA.md describes the output.

Usage: python -m bench.cpu.vs_transformers [--repeats 7] [--output FILE] [--smoke]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gatedelta
import numpy as np
import torch
from gatedelta import _lib
from gatedelta import torch as gd
from gatedelta import transformers as plugin

from bench.lib import model_calls
from bench.lib.targets import judged_on_cpu
from bench.peers import transformers_torch as peer
from testing import truth
from tools import dev_paths, records

CHUNK, K, V = 64, 128, 128
MFLOP_PER_CHUNK_AND_HEAD = 10.5 * 2 * CHUNK * CHUNK * 128 / 1e6  # the forward's products, at K = V = 128
SHAPES = [{"tokens": 4096, "heads": 8}, {"tokens": 2048, "heads": 32}]
DECODE_HEADS = 8
# Qwen3.5's 0.8B at half its width and a third of its depth.
MODEL = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1792, "num_attention_heads": 4,
         "num_key_value_heads": 1, "linear_num_key_heads": 8, "linear_num_value_heads": 8}  # fmt: skip
SMOKE_MODEL = MODEL | {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64}
MODEL_TOKENS, VOCABULARY = 1024, 4096


def benchmark_inputs(tokens: int, heads: int, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, g, beta, initial state, and gradients of o and of the final state."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(randn(1, tokens, heads, K), dim=-1).bfloat16() for _ in range(2))
    v, do = (randn(1, tokens, heads, V).bfloat16() for _ in range(2))
    g = torch.nn.functional.logsigmoid(randn(1, tokens, heads)) / 16
    g[:, :, ::4] = 0
    return [q, k, v, g, randn(1, tokens, heads).sigmoid(), randn(1, heads, K, V), do, randn(1, heads, K, V)]


def ours_chunk(q, k, v, g, beta, initial_state):
    return gd.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, output_final_state=True)


def training_step(chunk: Callable, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    leaves = [x.detach().requires_grad_() for x in inputs[:6]]
    results = chunk(*leaves)
    return list(results), torch.autograd.grad(results, leaves, inputs[6:])


def alternate(repeats: int, calls: dict[str, Callable], inner: dict[str, int] | None = None) -> dict[str, dict]:
    """Times the calls in turns; milliseconds per call, best and median. `inner` calls make one measurement."""
    inner = inner or {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            count = inner.get(name, 1)
            start = time.perf_counter()
            for _ in range(count):
                call()
            times[name].append((time.perf_counter() - start) * 1e3 / count)
    return {name: {"best_ms": min(t), "median_ms": statistics.median(t)} for name, t in times.items()}


def ratio(times: dict[str, dict]) -> dict:
    return {
        "ours": times["ours"],
        "theirs": times["theirs"],
        "speedup": times["theirs"]["best_ms"] / times["ours"]["best_ms"],
        "speedup_median": times["theirs"]["median_ms"] / times["ours"]["median_ms"],
    }


def gflop(shape: dict) -> float:
    return MFLOP_PER_CHUNK_AND_HEAD * -(-shape["tokens"] // CHUNK) * shape["heads"] / 1e3


def measure_shape(shape: dict, repeats: int, matmul_size: int) -> dict:
    inputs = benchmark_inputs(**shape)
    a, b = (torch.randn(matmul_size, matmul_size).bfloat16() for _ in range(2))
    with torch.no_grad():
        times = alternate(repeats, {
            "ours": lambda: ours_chunk(*inputs[:6]),
            "theirs": lambda: peer.chunk(*inputs[:6]),
            "matmul": lambda: a @ b,
        })  # fmt: skip
    forward = ratio(times)
    forward["gflops"] = gflop(shape) / (times["ours"]["best_ms"] / 1e3)
    forward["matmul_gflops"] = 2 * matmul_size**3 / 1e9 / (times["matmul"]["best_ms"] / 1e3)
    forward["share_of_matmul"] = forward["gflops"] / forward["matmul_gflops"]
    step = ratio(alternate(repeats, {
        "ours": lambda: training_step(ours_chunk, inputs),
        "theirs": lambda: training_step(peer.chunk, inputs),
    }))  # fmt: skip
    return {**shape, "K": K, "V": V, "dtype": "bfloat16", "forward": forward, "forward+backward": step}


def measure_decode(repeats: int, steps: int) -> dict:
    """One token at a time, as an engine does: ours updates the state in place, theirs returns a new one."""
    q, k, v, g, beta, state = benchmark_inputs(1, DECODE_HEADS)[:6]
    pool, out = state.clone(), torch.empty_like(v)
    with torch.no_grad():
        times = alternate(repeats, {
            "ours": lambda: gd.fused_recurrent_gated_delta_rule(
                q, k, v, g, beta=beta, initial_state=pool, final_state=pool, out=out
            ),
            "theirs": lambda: peer.recurrent(q, k, v, g, beta, state),
            "ours_new_state": lambda: gd.fused_recurrent_gated_delta_rule(
                q, k, v, g, beta=beta, initial_state=state, output_final_state=True
            ),
        }, {"ours": 10 * steps, "theirs": steps, "ours_new_state": 10 * steps})  # fmt: skip
    return {"heads": DECODE_HEADS, "tokens": 1, **ratio(times), "ours_new_state": times["ours_new_state"]}


def measure_model(shape: dict, tokens: int, repeats: int) -> dict:
    """A prefill of one sequence, with the layers patched and as transformers has them."""
    model_calls.choose_path("torch")
    model = model_calls.Model(shape, VOCABULARY, "cpu")
    model.net.eval()
    prefill = model.prefill({"batch": 1, "tokens": tokens})

    def ours() -> None:
        plugin.patch()
        prefill()

    def theirs() -> None:
        plugin.unpatch()
        prefill()

    with torch.no_grad():
        times = alternate(repeats, {"ours": ours, "theirs": theirs})
    plugin.unpatch()
    return {"tokens": tokens, "parameters": model.parameters, "shape": shape, **ratio(times)}


def measure_scaling(repeats: int, shapes: list[dict]) -> list[dict]:
    everything = torch.get_num_threads()
    counts = sorted({1, everything, *(n for n in (2, 4, 8, 16, 32, 64, 128) if n < everything)})

    def measure(shape: dict, threads: int) -> dict:
        inputs = benchmark_inputs(**shape)
        torch.set_num_threads(threads)
        with torch.no_grad():
            times = alternate(repeats, {
                "ours": lambda: ours_chunk(*inputs[:6]),
                "theirs": lambda: peer.chunk(*inputs[:6]),
            })  # fmt: skip
        step = alternate(repeats, {"ours": lambda: training_step(ours_chunk, inputs)})
        torch.set_num_threads(everything)
        return {
            **shape,
            "threads": threads,
            "forward_ms": times["ours"]["best_ms"],
            "forward_gflops": gflop(shape) / (times["ours"]["best_ms"] / 1e3),
            "forward+backward_ms": step["ours"]["best_ms"],
            "theirs_forward_ms": times["theirs"]["best_ms"],
        }

    return [measure(shape, threads) for shape in shapes for threads in counts]


def measure_errors(shape: dict, verified_heads: int) -> list[dict]:
    """Relative L2 of the worst head against the fp64 recurrence, over the first heads (every fourth has no decay)."""
    inputs = benchmark_inputs(**shape)
    heads = min(verified_heads, shape["heads"])
    q, k, v, g, beta, state, do, dht = (x[:, :heads] if x.shape[1] == shape["heads"] and x.dim() == 4
                                        and x.shape[2:] == (K, V) else x[:, :, :heads] for x in inputs)  # fmt: skip
    exact = {name: np.empty(x.shape) for name, x in
             {"o": v, "final_state": state, "dq": q, "dk": k, "dv": v, "dg": g, "dbeta": beta,
              "d_initial_state": state}.items()}  # fmt: skip
    forward, backward = _lib.ForwardArgs(), _lib.BackwardArgs()
    for args in (forward, backward):
        for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}.items():
            setattr(args.inputs, name, truth.describe(x))
    forward.out, forward.final_state = truth.describe(v), truth.describe(state)
    backward.do, backward.dht = truth.describe(do), truth.describe(dht)
    truth.reference_forward(forward, exact["o"], exact["final_state"])
    gradients = ("dq", "dk", "dv", "dg", "dbeta")
    truth.reference_backward(backward, *(exact[name] for name in gradients), None, None, exact["d_initial_state"])

    def errors(chunk) -> dict[str, float]:
        (o, final_state), grads = training_step(chunk, inputs)
        got = {"o": o[:, :, :heads].detach(), "final_state": final_state[:, :heads].detach()}
        got |= {name: x[:, :, :heads] for name, x in zip(gradients, grads)}
        got["d_initial_state"] = grads[5][:, :heads]
        return {name: truth.compare(name, x, exact[name]).error for name, x in got.items()}

    ours, theirs = errors(ours_chunk), errors(peer.chunk)
    return [{**shape, "quantity": name, "ours": ours[name], "theirs": theirs[name]} for name in exact]


def machine() -> dict:
    """As the command line tool describes it."""
    tool = dev_paths.BUILD / "cli" / "gatedelta"
    text = subprocess.run([tool, "info", "--json", "-"], check=True, capture_output=True, text=True).stdout
    return json.loads(text)["machine"]


def print_report(result: dict) -> None:
    machine, versions = result["machine"], result["versions"]
    print(f"\n{machine['cpu']} ({machine['architecture']}), {result['threads']} threads, {machine['best_isa']}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    heading = f"   (best of {result['repeats']}; median in brackets)"
    print(f"\n{'':34}{'ours':>12}{'transformers':>14}{'speedup':>10}{heading}")
    rows = [
        (f"{kind}, 1x{shape['tokens']}, {shape['heads']} heads", shape[kind])
        for shape in result["shapes"]
        for kind in ("forward", "forward+backward")
    ]
    rows.append((f"decode, {DECODE_HEADS} heads, per token", result["decode"]))
    rows.append((f"prefill of a model, 1x{result['model']['tokens']}", result["model"]))
    for name, row in rows:
        unit, factor = ("us", 1e3) if row["ours"]["best_ms"] < 0.5 else ("ms", 1)
        ours, theirs = row["ours"]["best_ms"] * factor, row["theirs"]["best_ms"] * factor
        print(f"{name:34}{ours:>9.2f} {unit}{theirs:>11.2f} {unit}{row['speedup']:>9.1f}x"
              f"   ({row['speedup_median']:.1f}x)")  # fmt: skip
    fresh = result["decode"]["ours_new_state"]["best_ms"] * 1e3
    print(f"{'  the same, returning a new state':34}{fresh:>9.2f} us")
    print("\nforward against torch's bf16 matmul:")
    for shape in result["shapes"]:
        f = shape["forward"]
        print(f"  1x{shape['tokens']}, {shape['heads']} heads: {f['gflops']:.0f} of {f['matmul_gflops']:.0f} GFLOP/s, "
              f"{f['share_of_matmul']:.0%}")  # fmt: skip
    print("\nthreads:")
    for s in result["scaling"]:
        print(f"  1x{s['tokens']}, {s['heads']} heads, {s['threads']:>3}: forward {s['forward_ms']:.1f} ms, "
              f"{s['forward_gflops']:.0f} GFLOP/s; forward+backward {s['forward+backward_ms']:.1f} ms")  # fmt: skip
    print(f"\nerror against the fp64 recurrence, worst of {result['verified_heads']} heads:")
    for e in result["errors"]:
        case = f"1x{e['tokens']}, {e['heads']} heads"
        print(f"  {case}, {e['quantity']:16} ours {e['ours']:.1e}, theirs {e['theirs']:.1e}")
    print()
    for bar in result["bars"]:
        print(f"{'PASS' if bar['passed'] else 'MISS'}  {bar['what']:44} {bar['value']:6.2f}  bar {bar['bar']:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each side (7)")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: only shows that it runs, judges nothing")
    options = parser.parse_args()
    shapes, matmul_size, steps, verified = SHAPES, 4096, 50, 2
    model_shape, model_tokens = MODEL, MODEL_TOKENS
    if options.smoke:
        shapes = [{"tokens": 192, "heads": 4}, {"tokens": 128, "heads": 4}]
        matmul_size, steps = 256, 2
        model_shape, model_tokens = SMOKE_MODEL, 80
    info = gatedelta.info()

    def say(text: str) -> None:
        print(f"{text} ...", file=sys.stderr, flush=True)

    measured = []
    for shape in shapes:
        say(f"timing 1x{shape['tokens']} tokens, {shape['heads']} heads")
        measured.append(measure_shape(shape, options.repeats, matmul_size))
    say("timing decode")
    decode = measure_decode(options.repeats, steps)
    say("timing a model's prefill")
    model = measure_model(model_shape, model_tokens, options.repeats)
    say("timing thread counts")
    scaling = measure_scaling(max(2, options.repeats // 2), shapes)
    say("computing the truth")
    errors = [error for shape in shapes for error in measure_errors(shape, verified)]

    result = {
        "command": "cpu_vs_transformers",
        "machine": machine() | {"best_isa": info["cpu_isa_forced"] or info["cpu_isa_best"]},
        "versions": {"gatedelta": info["version"], "torch": torch.__version__, peer.NAME: peer.version()},
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "shapes": measured,
        "decode": decode,
        "model": model,
        "scaling": scaling,
        "verified_heads": verified,
        "errors": errors,
    }
    result["bars"] = [] if options.smoke else judged_on_cpu(result)
    print_report(result)
    if options.output:
        records.write(options.output, result)
        print(f"\nwritten: {options.output}")


if __name__ == "__main__":
    main()
