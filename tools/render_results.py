#!/usr/bin/env python3
"""Writes the tables of README and docs from results/ and bench/peers (see results/SCHEMA.md).

A table is between `<!-- results: NAME -->` and `<!-- /results -->`.

usage: render_results.py            rewrite the tables
       render_results.py --check    exit 1 if a table differs from the results
"""

import argparse
import re
import sys

from repo_files import ROOT, repo_files
from tables import chunked, cpu, decode, estimates, headline, in_turns, models

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
