"""Draws what bench.gpu.context_parallel wrote: the speedup that 2, 4 and 8 cards are predicted to have.

Usage: python -m bench.plots context_parallel RESULTS.json PICTURE.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.plots.cpu import BAD, GREY, OURS, plt, style

TITLES = {"last": "M of every head (no gate decays)", "fade": "all heads fade (the benchmark's gates)"}


def draw(result: dict):
    figure, grid = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for axes, (heads, title) in zip(grid, TITLES.items()):
        rows = [row for row in result["rows"] if row["heads"] == heads]
        for row, color in zip(rows, (BAD, GREY, OURS)):
            cards = [1, *map(int, row["predicted"])]
            speedups = [1, *(card["speedup"] for card in row["predicted"].values())]
            axes.plot(cards, speedups, "o--", ms=4, color=color, label=f"{row['tokens']:,} tokens")
            axes.annotate(f"{speedups[-1]:.1f}", (cards[-1], speedups[-1]), (5, -3), textcoords="offset points",
                          color=color, fontsize=9)  # fmt: skip
        axes.plot([1, 8], [1, 8], color="#e5e8eb", zorder=0)
        axes.set(title=title, xlabel="cards", xticks=[1, 2, 4, 8], xlim=(0.7, 8.8))
        axes.grid(axis="y", color="#e5e8eb")
        axes.legend(fontsize=9, loc="upper left")
    grid[0].set_ylabel("speedup, forward and backward")
    links = result["header"]["predicted"]
    figure.suptitle(
        f"PREDICTED from stages measured on one {result['header']['device']}, 16/64 heads; links assumed at "
        f"{links['gather_bytes_per_s'] / 1e9:.0f} and {links['other_bytes_per_s'] / 1e9:.0f} GB/s, "
        f"{links['seconds_per_collective'] * 1e6:.0f} µs a collective",
        fontsize=9, color=GREY,
    )  # fmt: skip
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    style()
    figure = draw(json.loads(options.results.read_text()))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=110)


if __name__ == "__main__":
    main()
