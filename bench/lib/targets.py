"""The project's bars, from results/targets.json."""

from __future__ import annotations

import json
from pathlib import Path

TARGETS = json.loads((Path(__file__).resolve().parents[2] / "results" / "targets.json").read_text())


def judged(what: str, value: float, target: dict) -> dict:
    """`value` against a target, which has a bound `at_least` or `at_most`."""
    bar = target.get("at_least", target.get("at_most"))
    passed = value >= bar if "at_least" in target else value <= bar
    return {"what": what, "value": value, "bar": bar, "passed": passed}


def judged_on_cpu(result: dict) -> list[dict]:
    """What bench.cpu.vs_transformers has measured."""
    targets, decode, model, first = TARGETS["cpu"], result["decode"], result["model"], result["shapes"][0]
    bars = [
        judged(f"{kind}, 1x{shape['tokens']}, {shape['heads']} heads", shape[kind]["speedup"], targets[kind])
        for shape in result["shapes"]
        for kind in ("forward", "forward+backward")
    ]
    return bars + [
        judged(f"decode, {decode['heads']} heads", decode["speedup"], targets["decode"]),
        judged(f"prefill of a model, 1x{model['tokens']}", model["speedup"], targets["model"]),
        judged(f"share of bf16 matmul, 1x{first['tokens']}, {first['heads']} heads",
               first["forward"]["share_of_matmul"], targets["share_of_matmul"]),
    ]  # fmt: skip
