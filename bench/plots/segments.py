"""Draws what bench.gpu.segments wrote: for some rows time against segment length, beside that of the automatic cut.

Usage: python -m bench.plots segments RESULTS.json PICTURE.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.lib.regret import Cut
from bench.lib.rows import name_of
from bench.plots.chunked import where
from bench.plots.cpu import BAD, GREY, OURS, format_ms, plt, style

ROWS = ("2/8 1x32768", "2/8 1x2048", "4/16 1x32768", "8/32 1x32768", "16/64 28672+4096", "2/8 8192x4")
COLUMNS = 3


def chosen(rows: list[dict]) -> list[dict]:
    found = {name_of(row): row for row in rows}
    return [found[name] for name in ROWS if name in found]


def draw_row(axes, row: dict) -> None:
    """Both axes are logarithmic: the shortest segments are several times slower than the best."""
    cuts = {Cut.named(name): ms for name, ms in row["forced"].items()}
    equal = {cut.decaying: ms for cut, ms in sorted(cuts.items()) if cut == Cut(cut.decaying, cut.decaying)}
    lengths = list(equal)
    axes.plot(lengths, list(equal.values()), "o-", ms=4, color=GREY, label="one length for all heads")
    axes.axhline(row["best_ms"], color=GREY, ls=":", lw=1.4, label="fastest of the search")
    axes.axhline(row["off_ms"], color=BAD, ls="--", lw=1.4, label="not cut")
    axes.axhline(row["auto_ms"], color=OURS, lw=2, label="automatic")
    axes.annotate(format_ms(row["auto_ms"]), (1, row["auto_ms"]), (-2, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", color=OURS, fontsize=9)  # fmt: skip
    axes.set(xscale="log", yscale="log", title=f"{name_of(row)}   {row['regret']:+.1%}")
    axes.set_xticks(lengths[::2], lengths[::2])
    axes.xaxis.set_minor_locator(plt.NullLocator())
    times = [row["auto_ms"], row["off_ms"], row["best_ms"], *equal.values()]
    axes.set_ylim(min(times) / 1.1, max(times) * 1.1)
    axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(plt.NullLocator())
    axes.set(xlabel="segment length in chunks", ylabel="ms")
    axes.grid(axis="y", color="#e5e8eb")


def draw(result: dict):
    rows = chosen(result["rows"])
    lines = -(-len(rows) // COLUMNS)
    figure, grid = plt.subplots(lines, COLUMNS, figsize=(11, 0.9 + 2.9 * lines), layout="constrained", squeeze=False)
    for axes, row in zip(grid.flat, rows):
        draw_row(axes, row)
    for axes in grid.flat[len(rows) :]:
        axes.set_axis_off()
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(f"The automatic cut against forced cuts; in percent, how much slower than the best it is\n"
                    f"{where(result['header'])}", fontsize=9, color=GREY)  # fmt: skip
    return figure


def write(result: dict, picture: Path) -> None:
    style()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure = draw(result)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    result = json.loads(options.results.read_text())
    if not chosen(result["rows"]):
        parser.error(f"{options.results} holds none of the rows that are drawn")
    write(result, options.picture)


if __name__ == "__main__":
    main()
