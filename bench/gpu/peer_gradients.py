"""Measures the errors of gradients, and the memory they take, for this library and its peers on the same inputs.

Each library is called through autograd, as its users call it, and compared head by head with autograd through the fp64
recurrence. Only the library named by --package is imported. Its results replace those that the output file has for it;
the other libraries' results stay. results/SCHEMA.md describes the output.

Usage: python -m bench.gpu.peer_gradients --package gatedelta|flash_qla|fla [--output FILE]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu import chunked as gpu
from tools import records

ROW = {"hk": 4, "hv": 8, "lengths": [600, 300, 64, 33, 27]}
MEMORY_ROW = {"hk": 4, "hv": 8, "lengths": [32768]}
# Distribution and module.
PACKAGES = {
    "gatedelta": ("gatedelta", "gatedelta.torch"),
    "flash_qla": ("flash-qla", "flash_qla"),
    "fla": ("fla-core", "fla.ops.gated_delta_rule"),
}


# Half of the worst head's error is chance in one draw: a head whose dg happens to be small has a large relative error.
DRAWS = 5


class Draw:
    """Random inputs and gradients of the outputs."""

    def __init__(self, seed: int) -> None:
        self.inputs = gpu.make_inputs(ROW, 2 * seed)
        self.gradients = gpu.make_gradients(self.inputs, 2 * seed + 1)
        self.generator = torch.Generator(gpu.DEVICE).manual_seed(100 + seed)

    def uniform_like(self, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.empty_like(x).uniform_(low, high, generator=self.generator)

    def strong_gates(self) -> dict:
        return {"g": -self.uniform_like(self.inputs["g"], 10, 30)}

    def spiky_gates(self) -> dict:
        """Gates like those of a layer with A from 0 to 16 over the heads: mostly open, with sudden resets."""
        g = self.inputs["g"]
        decay = torch.linspace(0, 16, g.shape[-1], device=g.device)
        return {"g": -decay * torch.nn.functional.softplus(self.uniform_like(g, -9, 3))}

    def zero_betas(self) -> dict:
        beta = self.inputs["beta"]
        return {"beta": beta * (self.uniform_like(beta, 0, 1) > 0.2)}

    def correlated_keys(self) -> dict:
        """Two keys have a cosine of about 0.64."""
        return self.unit_keys(lambda k: k + 1.33 * k[:, :1])

    def repeated_keys(self) -> dict:
        return self.unit_keys(lambda k: k[:, torch.arange(k.shape[1], device=k.device) // 8 * 8])

    def unit_keys(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict:
        return {"k": torch.nn.functional.normalize(change(self.inputs["k"].float()), dim=-1).bfloat16()}


KINDS: dict[str, Callable[[Draw], dict]] = {
    "benchmark": lambda draw: {},
    "strong gates": Draw.strong_gates,
    "spiky gates": Draw.spiky_gates,
    "zero betas": Draw.zero_betas,
    "correlated keys": Draw.correlated_keys,
    "repeated keys": Draw.repeated_keys,
}


def leaves_of(inputs: dict) -> dict:
    return gpu.with_leaves(inputs) | {"cu_seqlens": inputs["cu_seqlens"].long()}  # as FLA and FlashQLA want them


def worst_head(name: str, x: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2 distance, over all tokens or sequences."""
    x = x if name == "dh0" else x[0]
    return max(gpu.distance(x[:, h], truth[:, h]) for h in range(truth.shape[1]))


def errors_of_draw(draw: Draw, change: Callable[[Draw], dict], function: Callable) -> dict[str, float]:
    inputs = draw.inputs | change(draw)
    its = dict(zip(gpu.GRADIENTS, gpu.train(leaves_of(inputs), draw.gradients, function)))
    truth = gpu.true_gradients(ROW, inputs, draw.gradients, ROW["hv"])
    return {name: worst_head(name, its[name], true) for name, true in truth.items()}


def errors(function: Callable) -> dict[str, dict[str, float]]:
    """Means over draws."""
    found = {}
    for kind, change in KINDS.items():
        draws = [errors_of_draw(Draw(seed), change, function) for seed in range(DRAWS)]
        found[kind] = {name: sum(draw[name] for draw in draws) / DRAWS for name in gpu.GRADIENTS}
        print(f"{kind}:", ", ".join(f"{name} {error:.3g}" for name, error in found[kind].items()), flush=True)
        torch.cuda.empty_cache()
    return found


def memory(function: Callable) -> dict[str, int]:
    """Memory that the forward keeps for the backward beyond inputs and outputs, and the backward's peak beyond that,
    with its six gradients."""
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

    once()  # includes what compilers and tuners allocate
    return once()


def write(output: Path | None, package: str, result: dict) -> None:
    if not output:
        return
    whole = json.loads(output.read_text()) if output.exists() else {"libraries": {}}
    whole["header"] = gpu.machine()
    whole |= {"row": ROW, "draws": DRAWS, "memory_row": MEMORY_ROW}
    whole["libraries"][package] = result
    records.write(output, whole)
    print(f"written: {output}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--package", choices=PACKAGES, required=True)
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA calls FlashQLA otherwise, if that is installed
    distribution, module = PACKAGES[args.package]
    function = importlib.import_module(module).chunk_gated_delta_rule
    is_ours = args.package == "gatedelta"  # may be built but not installed
    version = gpu.gatedelta.info()["version"] if is_ours else importlib.metadata.version(distribution)
    result = {"version": version, "errors": errors(function)}
    write(args.output, args.package, result)  # compiling the next shape may take minutes
    result["memory"] = memory(function)
    if is_ours:
        small = memory(functools.partial(function, small_workspace=True))
        result["memory"]["small_backward_bytes"] = small["backward_bytes"]
    print(json.dumps(result["memory"]), flush=True)
    write(args.output, args.package, result)


if __name__ == "__main__":
    main()
