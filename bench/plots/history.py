"""Draws results/h200/history.csv: speedups and landmark times of every record.

Usage: python -m bench.plots history HISTORY.csv PICTURE.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.lib.rows import LANDMARKS
from bench.plots.cpu import BAD, GOOD, GREY, OURS, plt, style
from bench.report.history import read

COLOURS = (OURS, "#e09f3e", GOOD, "#8e6c8a", BAD, GREY)  # of the landmarks
SPEEDUPS = {  # column: colour, line, label
    "backward": ("#e09f3e", "-", "backward, geometric mean"),
    "backward_worst": ("#e09f3e", ":", "backward, worst row"),
    "forward": (OURS, "-", "forward, geometric mean"),
    "forward_full": (GOOD, "-", "forward rows that fill the GPU, geometric mean"),
    "forward_worst": (OURS, ":", "forward, worst row"),
}


def draw_columns(axes, lines: list[dict[str, str]], columns: dict[str, tuple], is_relative: bool = False) -> None:
    """A record without a value, such as one from before the backward existed, leaves its point out."""
    for name, (colour, dashes, label) in columns.items():
        points = [(i, float(line[name])) for i, line in enumerate(lines) if line[name]]
        if not points:
            continue
        unit = points[-1][1] if is_relative else 1
        axes.plot([i for i, _ in points], [value / unit for _, value in points], "o", ls=dashes, ms=3.5, lw=1.6,
                  color=colour, label=label)  # fmt: skip


def draw(lines: list[dict[str, str]]):
    figure, (speed, times) = plt.subplots(2, 1, figsize=(8.5, 7), sharex=True, layout="constrained")
    draw_columns(speed, lines, SPEEDUPS)
    speed.axhline(1, color=BAD, lw=1.2)
    speed.set_title("Times faster than the fastest peer")
    speed.set_ylim(bottom=0)
    labels = [f"{name}, {float(lines[-1][name]):.3g} ms" for name in LANDMARKS]
    landmarks = {name: (colour, "-", label) for name, colour, label in zip(LANDMARKS, COLOURS, labels)}
    draw_columns(times, lines, landmarks, is_relative=True)
    times.set_title("Time of six forward rows, as a multiple of the newest record's")
    times.set_xticks(range(len(lines)), [f"{line['date'][5:]} {line['commit'][:7]}" for line in lines], rotation=45,
                     ha="right", fontsize=8)  # fmt: skip
    for axes in (speed, times):
        axes.grid(axis="y", color="#e5e8eb")
        axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.02 if axes is speed else -0.28))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("history", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    lines = read(options.history)
    if not lines:
        parser.error(f"{options.history} holds no record")
    style()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure = draw(lines)
    figure.savefig(options.picture, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
