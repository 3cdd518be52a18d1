"""Draws loss curves of examples/train/train.py, and how far each is from the first one.

Usage: python examples/train/plot.py reference.json curve.json... --out curves.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#5c677d", "#2a6f97", "#e09f3e", "#4c956c", "#c1443c")


def name_of(curve: dict) -> str:
    return f"{curve['backend']}, {curve['dtype']}, {curve['processor']}"


def draw(curves: list[dict]):
    figure, (losses, distances) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    first = curves[0]["losses"]
    for i, curve in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        # Curves that agree lie on each other: the first is wide, the others are drawn upon it.
        losses.plot(curve["losses"], color=colour, lw=4 if i == 0 else 1.4, alpha=0.4 if i == 0 else 1,
                    label=name_of(curve))  # fmt: skip
        if i > 0:
            distances.plot([abs(x - y) for x, y in zip(curve["losses"], first)], color=colour, lw=1)
    losses.set(ylabel="loss", yscale="log", title="Associative recall, loss of each step")
    losses.legend(frameon=False, fontsize=9)
    distances.set(xlabel="step", ylabel="distance from the first", yscale="log")
    for axes in (losses, distances):
        axes.grid(color="#e5e8eb")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("curves", type=Path, nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    options = parser.parse_args()
    figure = draw([json.loads(path.read_text()) for path in options.curves])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
