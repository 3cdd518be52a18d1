"""How exact are the gradients of this library and of its peers, on the same inputs, and how much memory do they take?

Each library is called as its users call it, through autograd, and compared with autograd through the fp64 recurrence,
head by head. A library is imported only if it is asked for; the outcome of one call replaces what the output file has
of that library, and leaves the others alone. results/SCHEMA.md describes what is written.

Usage: python bench/peer_gradients.py --package gatedelta|flash_qla|fla [--output FILE]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path

import gpu  # first: finds the package
import torch

ROW = {"hk": 4, "hv": 8, "lengths": [600, 300, 64, 33, 27]}
MEMORY_ROW = {"hk": 4, "hv": 8, "lengths": [32768]}
# Distribution and module. FLA would hand the whole call to FlashQLA where that is installed.
PACKAGES = {
    "gatedelta": ("gatedelta", "gatedelta.torch"),
    "flash_qla": ("flash-qla", "flash_qla"),
    "fla": ("fla-core", "fla.ops.gated_delta_rule"),
}


def with_gates(inputs: dict, gates: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    return inputs | {"g": gates(inputs["g"])}


def spiky(g: torch.Tensor) -> torch.Tensor:
    """As a layer has them, A from 0 to 16 over the heads: mostly open, sudden resets."""
    x = torch.empty_like(g).uniform_(-9, 3, generator=generator())
    return -torch.linspace(0, 16, g.shape[-1], device=g.device) * torch.nn.functional.softplus(x)


def generator() -> torch.Generator:
    return torch.Generator(gpu.DEVICE).manual_seed(2)


def with_zero_betas(inputs: dict) -> dict:
    beta = inputs["beta"]
    return inputs | {"beta": beta * (torch.rand(beta.shape, generator=generator(), device=beta.device) > 0.2)}


def with_keys(inputs: dict, keys: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    k = torch.nn.functional.normalize(keys(inputs["k"].float()), dim=-1)
    return inputs | {"k": k.bfloat16()}


KINDS: dict[str, Callable[[dict], dict]] = {
    "benchmark": lambda inputs: inputs,
    "strong gates": lambda i: with_gates(i, lambda g: -torch.empty_like(g).uniform_(10, 30, generator=generator())),
    "spiky gates": lambda i: with_gates(i, spiky),
    "zero betas": with_zero_betas,
    "correlated keys": lambda i: with_keys(i, lambda k: k + 1.33 * k[:, :1]),  # cosine about 0.64 with each other
    "repeated keys": lambda i: with_keys(i, lambda k: k[:, torch.arange(k.shape[1], device=k.device) // 8 * 8]),
}


def leaves_of(inputs: dict) -> dict:
    return gpu.with_leaves(inputs) | {"cu_seqlens": inputs["cu_seqlens"].long()}  # as FLA and FlashQLA want them


def worst_head(name: str, x: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2 distance, over all tokens or sequences."""
    x = x if name == "dh0" else x[0]
    return max(gpu.distance(x[:, h], truth[:, h]) for h in range(truth.shape[1]))


def errors(function: Callable) -> dict[str, dict[str, float]]:
    found = {}
    for kind, change in KINDS.items():
        inputs = change(gpu.make_inputs(ROW))
        gradients = gpu.make_gradients(inputs)
        its = dict(zip(gpu.GRADIENTS, gpu.train(leaves_of(inputs), gradients, function)))
        truth = gpu.true_gradients(ROW, inputs, gradients, ROW["hv"])
        found[kind] = {name: worst_head(name, its[name], true) for name, true in truth.items()}
        print(f"{kind}:", ", ".join(f"{name} {error:.3g}" for name, error in found[kind].items()), flush=True)
        del truth
        torch.cuda.empty_cache()
    return found


def memory(function: Callable) -> dict[str, int]:
    """What a forward holds for the backward beyond inputs and outputs, and what the backward takes at most beyond that,
    its six gradients included."""
    inputs = leaves_of(gpu.make_inputs(MEMORY_ROW))
    gradients = gpu.make_gradients(inputs)

    def once() -> dict[str, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        outputs = function(**inputs, output_final_state=True)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(outputs, [inputs[name] for name in gpu.LEAVES], list(gradients.values()))
        torch.cuda.synchronize()
        return {
            "saved_bytes": held - before - sum(x.nbytes for x in outputs),
            "backward_bytes": torch.cuda.max_memory_allocated() - held,
        }

    once()  # with what compilers and tuners take
    return once()


def write(output: Path | None, package: str, result: dict) -> None:
    if not output:
        return
    whole = json.loads(output.read_text()) if output.exists() else {"libraries": {}}
    whole["header"] = gpu.machine()
    whole |= {"row": ROW, "memory_row": MEMORY_ROW}
    whole["libraries"][package] = result
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"written: {output}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--package", choices=PACKAGES, required=True)
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    os.environ["FLA_FLASH_QLA"] = "0"
    distribution, module = PACKAGES[args.package]
    function = importlib.import_module(module).chunk_gated_delta_rule
    is_ours = args.package == "gatedelta"  # perhaps built, but not installed
    version = gpu.gatedelta.info()["version"] if is_ours else importlib.metadata.version(distribution)
    result = {"version": version, "errors": errors(function)}
    write(args.output, args.package, result)  # what comes next may be compiled for minutes
    result["memory"] = memory(function)
    print(json.dumps(result["memory"]), flush=True)
    write(args.output, args.package, result)


if __name__ == "__main__":
    main()
