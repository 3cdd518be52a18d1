"""Draws what bench.gpu.models wrote: the time of every other path over GateDelta's, for the whole model and inside its
Gated Delta Network layers.

Usage: python -m bench.plots models RESULTS.json PICTURE.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.lib import model_rows
from bench.plots.chunked import where
from bench.plots.cpu import GOOD, GREY, OURS, SHADES, plt, style

COLOURS = {"gatedelta-fused": SHADES["bwd"], "fla": "#8e6c8a", "fla-all": GOOD, "torch": GREY}
TIMES = {"ms": ("o", "whole model"), "gdn_ms": ("D", "GDN layers")}


def draw_model(axes, groups: list[dict[str, dict]]) -> None:
    """A line per row; what is slower than GateDelta is to the right of 1."""
    names = []
    for y, group in enumerate(groups):
        ours = group["gatedelta"]
        names.append(model_rows.name_of(ours))
        for path, colour in COLOURS.items():
            for time, (marker, what) in TIMES.items():
                ratio = model_rows.speedup(ours, group.get(path), time)
                if ratio is not None:
                    axes.plot(ratio, y, marker, ms=6, mec=colour, mfc=colour if time == "ms" else "none", zorder=3,
                              label=f"{model_rows.PATHS[path]}, {what}")  # fmt: skip
    axes.axvline(1, color=OURS, lw=2.5, label="GateDelta")
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=min(0.7, axes.get_xlim()[0]))
    ticks = [2**i for i in range(8) if 2**i <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick}×" for tick in ticks])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(groups[0]["gatedelta"]["model"])
    axes.set_xlabel("time as a multiple of GateDelta's")


def draw(result: dict):
    models: dict[str, list[dict[str, dict]]] = {}
    for group in model_rows.by_path(result["rows"]).values():
        if "ms" in group.get("gatedelta", {}):
            models.setdefault(group["gatedelta"]["model"], []).append(group)
    lines = max(len(groups) for groups in models.values())
    shape = (1, len(models))
    figure, panels = plt.subplots(*shape, figsize=(6 * shape[1], 1.8 + 0.34 * lines), layout="constrained",
                                  squeeze=False)  # fmt: skip
    for axes, groups in zip(panels.flat, models.values()):
        draw_model(axes, groups)
    labels = {label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, fontsize=8)
    header = result["header"]
    figure.suptitle(f"Qwen3.5 with random weights in transformers {header['transformers']}, bf16: {where(header)}",
                    fontsize=9, color=GREY)  # fmt: skip
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    result = json.loads(options.results.read_text())
    if not any("ms" in row for row in result["rows"] if row["path"] == "gatedelta"):
        parser.error(f"{options.results} has no time of GateDelta's path")
    style()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(result).savefig(options.picture, dpi=110)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
