"""The figures of README's first screen."""

import ratios
import serving
from rows import name_of, of_kind

from tables.cpu import cpu_rows
from tables.files import load, load_h200
from tables.in_turns import headline_cells
from tables.text import (
    EARLIER_LEGEND,
    EARLIER_MARK,
    LEGEND,
    NOTHING,
    OPS,
    PUBLISHED_MARK,
    libraries_of,
    serving_speedup,
    speedup,
    table,
)


def serving_headline(rows: list[dict]) -> list[list[str]]:
    cells = []
    for name, members in serving.groups_of(rows).items():
        if found := serving.summary(members):
            worst = found["worst"]
            cells.append([
                f"H200, {name}, over {libraries_of([row for row in members if 'peers' in row])}",
                f"**{found['geomean']:.2f}×**",
                f"{serving_speedup(worst)} ({serving.name_of(worst)})",
                str(found["rows"]),
                str(found["recorded"]),
            ])  # fmt: skip
    return cells


def headline() -> str:
    """The figures of README's first screen."""
    result = load_h200()
    if not result:
        return NOTHING
    cells = []
    for kind in ("fwd", "bwd"):
        rows = of_kind(result["rows"], kind)
        if found := ratios.summary(rows):
            cells.append([
                f"H200, {OPS[kind]}, over {libraries_of(rows)}",
                f"**{found['geomean']:.2f}×**",
                f"{speedup(found['worst'])} ({name_of(found['worst'])})",
                str(found["rows"]),
                str(found["published"]),
            ])  # fmt: skip
    cells += headline_cells()
    cells += serving_headline(result["serving"])
    machines = [result for _, result in load("transformers")]
    rows = [(machine, name, row) for machine in machines for name, row in cpu_rows(machine)]
    if rows:
        machine, name, worst = min(rows, key=lambda row: row[2]["speedup"])
        isas = ", ".join(dict.fromkeys(result["machine"]["best_isa"] for result in machines))
        cells.append([
            f"CPU, {len(machines)} machines ({isas}), over transformers' torch code",
            f"**{ratios.geomean([row['speedup'] for _, _, row in rows]):.1f}×**",
            f"{worst['speedup']:.1f}× ({name}, {machine['threads']} threads)",
            str(len(rows)),
            "0",
        ])  # fmt: skip
    marks = f"of these over a published time ({PUBLISHED_MARK})"
    legends = [LEGEND]
    if result["serving"]:
        marks = f"of these over a published time ({PUBLISHED_MARK}) or one of an earlier run ({EARLIER_MARK})"
        legends.append(EARLIER_LEGEND)
    columns = ["speedup", "geometric mean", "worst row", "rows", marks]
    return "\n\n".join([table(columns, cells), *legends])


TABLES = {"headline": headline}
