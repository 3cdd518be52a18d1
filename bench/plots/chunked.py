"""Draws what bench.gpu.chunked wrote: every peer against ours for each pair of head counts, and all ratios in one
picture.

Usage: python -m bench.plots chunked RESULTS.json FOLDER [--peers FILE]

Writes FOLDER/<hk>x<hv>.png and FOLDER/overview.png for forward rows, backward-<hk>x<hv>.png and backward-overview.png
for backward rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.lib.ratios import FULL, PEERS, PUBLISHED, geomean, is_full, with_peers
from bench.lib.rows import lengths_of, of_kind
from bench.plots.cpu import BAD, GOOD, GREY, OURS, format_ms, plt, style

COLOURS = {"flashinfer": "#e09f3e", "flash_qla": GOOD, "fla": "#8e6c8a"}  # the others are grey
MARKERS = "osD^vPX"
TIMES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
TOKENS = (8192, 32768)  # of the backward's rows
FACTORS = (0.18, 0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8, 11, 16)


def configurations(rows: list[dict]) -> dict[tuple[int, int], list[dict]]:
    found: dict[tuple[int, int], list[dict]] = {}
    for row in rows:
        if "peers" in row:
            found.setdefault((row["hk"], row["hv"]), []).append(row)
    return found


def peers_of(rows: list[dict]) -> list[str]:
    return sorted({name for row in rows for name in row.get("peers", ())})


def where(header: dict) -> str:
    return f"{header['gpu']}, torch {header['torch']}, gatedelta {header['gatedelta']}"


def scale(axis) -> None:
    """Logarithmic, two ticks per doubling."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_ticks(FACTORS, [f"{factor:g}×" for factor in FACTORS])
    axis.set_minor_locator(plt.NullLocator())


def draw_configuration(header: dict, rows: list[dict], names: list[str]):
    """A line per row: the peers' times as multiples of ours, so that slower ones are to the right of 1."""
    lines = range(len(rows))
    figure, axes = plt.subplots(figsize=(8.5, 1.6 + 0.3 * len(rows)), layout="constrained")
    for i, name in enumerate(names):
        points = [(row["peers"][name] / row["ms"], y) for y, row in zip(lines, rows) if name in row["peers"]]
        if not points:
            continue
        colour = COLOURS.get(name.split()[0], GREY)
        face = "none" if name.endswith(PUBLISHED) else colour
        marker = MARKERS[i % len(MARKERS)]
        axes.plot(*zip(*points), marker, ms=6, mec=colour, mfc=face, label=name, zorder=3)
    axes.axvline(1, color=OURS, lw=2.5, label="GateDelta")
    furthest = [time / row["ms"] for row in rows for time in row["peers"].values()]
    axes.set_yticks(lines, [f"{row['seq']}   {format_ms(row['ms'])}" for row in rows])
    axes.invert_yaxis()
    scale(axes.xaxis)
    axes.set_xlim(min(0.7, *furthest) * 0.9, max(furthest) * 1.1)
    axes.set_xlabel("time as a multiple of GateDelta's (right of the line: slower than GateDelta)")
    axes.set_title(f"Forward, {rows[0]['hk']}/{rows[0]['hv']} heads")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(where(header), fontsize=9, color=GREY)
    return figure


def draw_lines(axes, rows: list[dict], names: list[str], position) -> None:
    """The times of some rows, ours and the peers'. `position` gives a row's place on the axis."""
    rows = sorted(rows, key=position)
    for i, name in enumerate(names):
        points = [(position(row), row["peers"][name]) for row in rows if name in row["peers"]]
        if points:
            colour, published = COLOURS.get(name.split()[0], GREY), name.endswith(PUBLISHED)
            axes.plot(*zip(*points), MARKERS[i % len(MARKERS)], ls="--" if published else "-", lw=1.2, ms=5,
                      color=colour, mfc="none" if published else colour, label=name)  # fmt: skip
    axes.plot([position(row) for row in rows], [row["ms"] for row in rows], "o-", lw=2.5, ms=5, color=OURS,
              label="GateDelta", zorder=3)  # fmt: skip


def draw_backward(header: dict, rows: list[dict], names: list[str]):
    """Time over the number of sequences, for each total of tokens, and over that total, for one sequence."""
    figure, panels = plt.subplots(1, len(TOKENS) + 1, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axes, tokens in zip(panels, TOKENS):
        some = [row for row in rows if sum(lengths_of(row)) == tokens]
        draw_lines(axes, some, names, lambda row: len(lengths_of(row)))
        counts = sorted({len(lengths_of(row)) for row in some})
        axes.set(xscale="log", xlabel="sequences", title=f"{tokens // 1024}k tokens")
        axes.set_xticks(counts, counts)
    single = [row for row in rows if len(lengths_of(row)) == 1]
    draw_lines(panels[-1], single, names, lambda row: sum(lengths_of(row)))
    panels[-1].set(xscale="log", xlabel="tokens", title="one sequence")
    panels[-1].set_xticks(TOKENS, [f"{tokens // 1024}k" for tokens in TOKENS])
    times = [time for row in rows for time in (row["ms"], *row["peers"].values())]
    ticks = [tick for tick in TIMES if min(times) / 1.5 < tick < max(times) * 1.5]
    panels[0].set(yscale="log", ylabel="backward, ms", ylim=(min(times) / 1.2, max(times) * 1.2))
    panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for axes in panels:
        axes.margins(x=0.1)
        axes.grid(axis="both", color="#e5e8eb")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(plt.NullLocator())
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle(f"Backward, {rows[0]['hk']}/{rows[0]['hv']} heads: {where(header)}", fontsize=9, color=GREY)
    return figure


def draw_overview(header: dict, groups: dict[tuple[int, int], list[dict]], what: str):
    """A point per row, by head counts: how many times faster than the fastest peer."""
    figure, axes = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    kinds = {True: (OURS, f"sequences × value heads ≥ {FULL}"), False: ("none", "fewer: these do not fill the GPU")}
    places = [
        (x + 0.6 * (i / max(len(rows) - 1, 1) - 0.5), row)
        for x, rows in enumerate(groups.values())
        for i, row in enumerate(rows)
    ]
    for kind, (face, label) in kinds.items():
        points = [(x, row["speedup"]) for x, row in places if is_full(row) == kind]
        if points:
            axes.plot(*zip(*points), "o", ms=5, mec=OURS, mfc=face, label=label)
    for x, rows in enumerate(groups.values()):
        mean = geomean([row["speedup"] for row in rows])
        axes.plot([x - 0.38, x + 0.38], [mean] * 2, color="#e09f3e", lw=2, label=None if x else "geometric mean of all")
    axes.axhline(1, color=BAD, lw=1.6)
    axes.set_xticks(range(len(groups)), [f"{hk}/{hv}" for hk, hv in groups])
    scale(axes.yaxis)
    ratios = [row["speedup"] for rows in groups.values() for row in rows]
    axes.set_ylim(min(0.8, *ratios) * 0.9, max(1.25, *ratios) * 1.1)
    axes.grid(axis="y", color="#e5e8eb")
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("key heads/value heads")
    axes.set_title(f"{what}: times faster than the fastest peer, a point per row")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(where(header), fontsize=9, color=GREY)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", type=Path, default=PEERS, help="the peers' times (bench/peers/h200.json)")
    options = parser.parse_args()
    result = json.loads(options.results.read_text())
    header, rows = result["header"], with_peers(result, options.peers)
    if not configurations(rows):
        parser.error(f"{options.peers} has times for no row of {options.results}")
    style()
    options.folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    for kind, what, prefix, draw in (
        ("fwd", "Forward", "", draw_configuration),
        ("bwd", "Backward", "backward-", draw_backward),
    ):
        some = of_kind(rows, kind)
        groups, names = configurations(some), peers_of(some)
        figures |= {f"{prefix}{hk}x{hv}": draw(header, members, names) for (hk, hv), members in groups.items()}
        if groups:
            figures[f"{prefix}overview"] = draw_overview(header, groups, what)
    for name, figure in figures.items():
        figure.savefig(options.folder / f"{name}.png", dpi=110)
        plt.close(figure)
    print(f"{len(figures)} pictures in {options.folder}")


if __name__ == "__main__":
    main()
