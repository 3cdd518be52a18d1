"""Draws README's chart from what bench.gpu.models wrote: the time of the Gated DeltaNet layers of one model, FLA's = 1.

Usage: python -m bench.plots layers RESULTS.json PICTURE.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.lib import model_rows
from bench.plots.chunked import where
from bench.plots.cpu import GREY, OURS, plt, style

MODEL = "4B"
WANTED = {  # rows by name, and how the chart calls them
    "prefill, 32k tokens": "prefill\n32k tokens",
    "decode, batch 1, CUDA graph": "decode, batch 1\nCUDA graph",
    "training step, 8192 tokens in 5 sequences": "training step\n8192 tokens",
}
FLA = "#b9c0c7"


def found(result: dict) -> dict[str, dict[str, dict]]:
    """The groups of WANTED that both paths have, by name."""
    groups = {}
    for group in model_rows.by_path(result["rows"]).values():
        ours = group.get("gatedelta", {})
        if ours.get("model") == MODEL and model_rows.speedup(ours, group.get("fla"), "gdn_ms"):
            groups[model_rows.name_of(ours)] = group
    return {name: groups[name] for name in WANTED if name in groups}


def draw(result: dict):
    groups = found(result)
    figure, axes = plt.subplots(figsize=(7.2, 0.55 + 0.52 * len(groups)), layout="constrained")
    for y, group in enumerate(groups.values()):
        ours, fla = group["gatedelta"], group["fla"]
        share = ours["gdn_ms"] / fla["gdn_ms"]
        whole = model_rows.speedup(ours, fla, "ms")
        axes.barh(y - 0.18, 1, 0.32, color=FLA, label=None if y else "FLA")
        axes.barh(y + 0.18, share, 0.32, color=OURS, label=None if y else "GateDelta")
        axes.text(share + 0.01, y + 0.18, f"{1 / share:.1f}× faster; the whole model {whole:.1f}×", va="center",
                  fontsize=8)  # fmt: skip
        axes.text(1.01, y - 0.18, f"{fla['gdn_ms']:.3g} ms", va="center", fontsize=8, color=GREY)
    axes.set_yticks(range(len(groups)), [WANTED[name] for name in groups], fontsize=9)
    axes.set(xlim=(0, 1.12), ylim=(len(groups) - 0.5, -0.5))
    axes.set_xticks([])
    axes.grid(visible=False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
    axes.set_title(f"Qwen3.5-{MODEL}: time of the Gated DeltaNet layers", fontsize=10, loc="left")
    header = result["header"]
    figure.supxlabel(f"transformers {header['transformers']}, bf16, {where(header)}", fontsize=7, color=GREY)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    result = json.loads(options.results.read_text())
    if not found(result):
        parser.error(f"{options.results} has none of the chart's rows for both GateDelta and FLA")
    style()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(result).savefig(options.picture, dpi=130)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
