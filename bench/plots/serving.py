"""Draws what bench.gpu.decode wrote: every peer's time over ours, against the batch size.

Usage: python -m bench.plots serving RESULTS.json FOLDER [--peers FILE]

Writes FOLDER/decode-<hk>x<hv>.png and verify-<hk>x<hv>.png for each pair of head counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.lib import serving
from bench.plots.chunked import MARKERS, scale, where
from bench.plots.cpu import GOOD, GREY, OURS, plt, style

COLOURS = {"fla": "#8e6c8a", "flashinfer": "#e09f3e", "sglang": GOOD, "vllm": "#c1443c", "transformers": GREY}
FORMATS = {("float32", "VK"): "fp32 [V, K]", ("bfloat16", "VK"): "bf16 [V, K]", ("float32", "KV"): "fp32 [K, V]"}
STORES = {"final": "last state", "steps": "every state", "none": "outputs only"}
MOST = 4  # times slower; what is slower still is not drawn


def draw_panel(axes, rows: list[dict], dashes: str, names: list[str]) -> None:
    """A line per peer."""
    for i, name in enumerate(names):
        points = [(row["batch"], row["peers"][name] / row["ms"]) for row in rows if name in row["peers"]]
        points = [(batch, ratio) for batch, ratio in sorted(points) if ratio <= MOST]
        if not points:
            continue
        colour, recorded = COLOURS[name.split()[0]], name.endswith(serving.RECORDED_MARK)
        axes.plot(*zip(*points), MARKERS[i % len(MARKERS)], ls=dashes, lw=1.2, ms=4, color=colour,
                  mfc="none" if recorded else colour, label=name)  # fmt: skip


def finish(figure, panels: list, batches: tuple[int, ...], title: str) -> None:
    for axes in panels:
        axes.axhline(1, color=OURS, lw=2.5, label="GateDelta")
        axes.set(xscale="log", xlabel="batch")
        axes.set_xticks(batches, batches, fontsize=8)
        axes.xaxis.set_minor_locator(plt.NullLocator())
        scale(axes.yaxis)
        axes.grid(axis="both", color="#e5e8eb")
        axes.set_ylim(0.65, MOST * 1.1)
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=9, color=GREY)


def draw_decode(header: dict, rows: list[dict], names: list[str]):
    figure, panels = plt.subplots(1, 3, figsize=(11, 4.4), sharey=True, layout="constrained")
    for axes, ((dtype, layout), title) in zip(panels, FORMATS.items()):
        draw_panel(axes, [row for row in rows if (row["state_dtype"], row["layout"]) == (dtype, layout)], "-", names)
        axes.set_title(title)
    panels[0].set_ylabel("time as a multiple of GateDelta's")
    title = f"Decode, {rows[0]['hk']}/{rows[0]['hv']} heads, cold states (hollow: recorded earlier): {where(header)}"
    finish(figure, list(panels), serving.BATCHES, title)
    return figure


def draw_verify(header: dict, rows: list[dict], names: list[str]):
    lengths = sorted({row["T"] for row in rows})
    shape = (len(STORES), len(lengths))
    figure, panels = plt.subplots(*shape, figsize=(3.6 * shape[1] + 1, 8.6), sharey=True, squeeze=False,
                                  layout="constrained")  # fmt: skip
    for line, (store, what) in zip(panels, STORES.items()):
        for axes, tokens in zip(line, lengths):
            for (dtype, layout), dashes in zip(FORMATS, ("-", "--", ":")):
                kind = (tokens, store, dtype, layout)
                some = [row for row in rows if tuple(row[x] for x in ("T", "store", "state_dtype", "layout")) == kind]
                draw_panel(axes, some, dashes, names)
            axes.set_title(f"{tokens} drafts, {what}")
        line[0].set_ylabel("time as a multiple of GateDelta's")
    title = (f"Verification, {rows[0]['hk']}/{rows[0]['hv']} heads (line fp32 [V, K], dashed bf16, dotted fp32 [K, V]; "
             f"hollow: recorded earlier): {where(header)}")  # fmt: skip
    finish(figure, list(panels.flat), serving.VERIFY_BATCHES, title)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", type=Path, default=serving.RECORDED, help="recorded times of peers")
    options = parser.parse_args()
    result = json.loads(options.results.read_text())
    groups: dict[tuple, list[dict]] = {}
    for row in serving.with_peers(result, options.peers):
        if row["kind"] in ("decode", "verify") and "peers" in row:
            groups.setdefault((row["kind"], row["hk"], row["hv"]), []).append(row)
    if not groups:
        parser.error(f"there is no peer's time for any row of {options.results}")
    style()
    options.folder.mkdir(parents=True, exist_ok=True)
    for (kind, hk, hv), rows in groups.items():
        names = sorted({name for row in rows for name in row["peers"]})
        figure = (draw_decode if kind == "decode" else draw_verify)(result["header"], rows, names)
        figure.savefig(options.folder / f"{kind}-{hk}x{hv}.png", dpi=110)
        plt.close(figure)
    print(f"{len(groups)} pictures in {options.folder}")


if __name__ == "__main__":
    main()
