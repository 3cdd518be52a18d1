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
