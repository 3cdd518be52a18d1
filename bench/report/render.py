#!/usr/bin/env python3
"""Writes the tables of README and docs, and CSV files of every row, from results/ and bench/peers (results/SCHEMA.md).

A table is between `<!-- results: NAME -->` and `<!-- /results -->`.

usage: python -m bench.report.render            rewrite the tables
       python -m bench.report.render --check    exit 1 if a table differs from the results
"""

import argparse
import re
import sys

from bench.report.tables import chunked, cpu, decode, estimates, headline, in_turns, models, rows
from tools.repo_files import ROOT, repo_files

BLOCK = re.compile(r"<!-- results: ([\w-]+) -->\n.*?<!-- /results -->", re.DOTALL)
MODULES = (cpu, headline, chunked, decode, models, estimates, in_turns)
TABLES = {name: make for module in MODULES for name, make in module.TABLES.items()}


def rendered(text: str) -> str:
    def block(match: re.Match) -> str:
        name = match[1]
        if name not in TABLES:
            sys.exit(f"render_results: unknown table '{name}'; known are {', '.join(TABLES)}")
        found = TABLES[name]()
        return f"<!-- results: {name} -->\n" + (f"\n{found}\n\n" if found else "") + "<!-- /results -->"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale, blocks = [], 0
    for path, make in rows.FILES.items():
        text = make()
        if text and (not (ROOT / path).exists() or (ROOT / path).read_text() != text):
            stale.append(path)
            if not arguments.check:
                (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
                (ROOT / path).write_text(text)
    for path in repo_files(".md"):
        text = (ROOT / path).read_text()
        blocks += len(BLOCK.findall(text))
        new = rendered(text)
        if new == text:
            continue
        stale.append(str(path))
        if not arguments.check:
            (ROOT / path).write_text(new)
    verb = "different from the results" if arguments.check else "rewritten"
    print(f"render_results: {blocks} tables" + (f"; {verb}: {', '.join(stale)}" if stale else ", all current"))
    return 1 if not blocks or (arguments.check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
