"""Draws the results of `gatedelta run --json` or of bench.cpu.vs_transformers.

Usage: python -m bench.plots cpu RESULTS.json PICTURE.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, THEIRS, GOOD, BAD, GREY = "#2a6f97", "#b8c4cc", "#4c956c", "#c1443c", "#5c677d"
SHADES = {"fwd": "#2a6f97", "bwd": "#e09f3e"}


def style() -> None:
    plt.rcParams.update({
        "figure.dpi": 150,
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": GREY,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "x",
        "grid.color": "#e5e8eb",
        "legend.frameon": False,
    })  # fmt: skip


def format_ms(ms: float) -> str:
    if ms < 1:
        return f"{ms * 1e3:.3g} µs"
    return f"{ms:.3g} ms" if ms < 1e3 else f"{ms / 1e3:.3g} s"


def label_bars(axes, bars, texts: list[str]) -> None:
    axes.bar_label(bars, texts, padding=5, fontsize=9, color="#33415c", bbox={"fc": "white", "ec": "none", "pad": 1})
    axes.margins(x=0.28)


def where(result: dict) -> str:
    machine = result["machine"]
    return f"{machine['cpu']} ({machine['architecture']}, {machine['cpus']} CPUs)"


def backend(timing: dict) -> str:
    threads = timing.get("threads")
    return timing["device"] if threads is None else f"{threads} thread{'s' if threads != 1 else ''}"


def draw_run(result: dict):
    """Times and rates of the default job, and its errors as shares of their bounds."""
    names = {"fwd": "forward", "bwd": "backward"}
    timings = result["timings"]
    labels = [f"{names.get(t['op'], t['op'])}, {backend(t)}" for t in timings]
    colours = [SHADES.get(t["op"], GREY) for t in timings]
    figure, (times, errors) = plt.subplots(
        2, 1, figsize=(8.5, 6.2), height_ratios=[max(len(timings), 2), max(len(result["errors"]) * 0.75, 2)],
        layout="constrained",
    )  # fmt: skip
    bars = times.barh(labels, [t["best_ms"] for t in timings], color=colours, height=0.65)
    label_bars(times, bars, [
        f"{format_ms(t['best_ms'])}  ·  {t['tokens_per_s']:,.0f} tokens/s  ·  {t['gflops']:.0f} GFLOP/s"
        for t in timings
    ])  # fmt: skip
    times.margins(x=0.75)
    times.invert_yaxis()
    times.set_xlabel("time of one call, best of several (ms)")
    times.set_title("Time")

    found = result["errors"]
    bars = errors.barh([e["quantity"] for e in found], [e["error"] / e["bound"] for e in found],
                       color=[GOOD if e["ok"] else BAD for e in found], height=0.6)  # fmt: skip
    label_bars(errors, bars, [f"{e['error']:.1e} of {e['bound']:.1e}" for e in found])
    errors.axvline(1, color=BAD, lw=1.6)
    errors.invert_yaxis()
    errors.set_xlim(0, max([1.35, *(1.3 * e["error"] / e["bound"] for e in found)]))
    errors.set_xlabel("relative L2 error of the worst head, as a share of its bound")
    errors.set_title(f"Error against the fp64 recurrence ({result['verified_value_heads']} value heads)")
    figure.suptitle(
        f"GateDelta, {result['tokens']:,} tokens, {result.get('isa', result.get('device'))}\n{where(result)}",
        fontsize=11,
    )
    return figure


def draw_comparison(result: dict):
    """Speedups over transformers with their bars, thread scaling, and the share of torch's matmul rate."""
    rows = [
        (f"{kind}\n1×{s['tokens']}, {s['heads']} heads", s[kind])
        for s in result["shapes"]
        for kind in ("forward", "forward+backward")
    ]
    rows.append((f"decode\n{result['decode']['heads']} heads", result["decode"]))
    bars_of = {bar["what"]: bar for bar in result["bars"]}
    figure, (speed, scaling) = plt.subplots(1, 2, figsize=(11, 4.8), width_ratios=[1.55, 1], layout="constrained")
    bars = speed.barh([name for name, _ in rows], [row["speedup"] for _, row in rows], color=OURS, height=0.6)
    label_bars(speed, bars, [
        f"{row['speedup']:.1f}×  ({format_ms(row['ours']['best_ms'])} vs {format_ms(row['theirs']['best_ms'])})"
        for _, row in rows
    ])  # fmt: skip
    speed.margins(x=0.6)
    drawn = False
    for i, (name, _) in enumerate(rows):
        what = name.replace("\n", ", ").replace("×", "x")
        if what in bars_of:
            speed.plot([bars_of[what]["bar"]] * 2, [i - 0.36, i + 0.36], color=BAD, lw=2,
                       label=None if drawn else "bar to pass")  # fmt: skip
            drawn = True
    speed.invert_yaxis()
    speed.set_xlabel("times faster than transformers' torch code")
    speed.set_title("Speed")
    if drawn:
        speed.legend(loc="upper right")

    for shape, colour in zip(result["shapes"], (OURS, "#e09f3e", GOOD)):
        points = [s for s in result["scaling"] if (s["tokens"], s["heads"]) == (shape["tokens"], shape["heads"])]
        scaling.plot([p["threads"] for p in points], [p["forward_gflops"] for p in points], "o-", color=colour,
                     label=f"1×{shape['tokens']}, {shape['heads']} heads")  # fmt: skip
    matmul = max(s["forward"]["matmul_gflops"] for s in result["shapes"])
    scaling.axhline(matmul, color=GREY, ls="--", lw=1, label=f"bf16 matmul, {result['threads']} threads")
    scaling.set_xticks(sorted({s["threads"] for s in result["scaling"]}))
    scaling.set_ylim(bottom=0)
    scaling.grid(axis="y", color="#e5e8eb")
    scaling.set_xlabel("threads")
    scaling.set_ylabel("GFLOP/s")
    scaling.set_title("Forward rate")
    scaling.legend(fontsize=8, loc="best")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    figure.suptitle(f"{where(result)}, {result['machine']['best_isa']}\n{versions}", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    result = json.loads(options.results.read_text())
    drawings = {"run": draw_run, "cpu_vs_transformers": draw_comparison}
    command = result.get("command")
    if command not in drawings:
        parser.error(f"{options.results} holds results of {command!r}; known are {', '.join(drawings)}")
    style()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure = drawings[command](result)
    figure.savefig(options.picture)
    plt.close(figure)


if __name__ == "__main__":
    main()
