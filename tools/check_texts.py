#!/usr/bin/env python3
"""Checks every text file of the repository: no path of somebody's machine, no dead relative link in Markdown, no
trailing blanks, a final newline, no line of prose or code over 120 columns."""

import re
import sys

from repo_files import ROOT, repo_files

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home|work|farm|Users|mnt)/[\w.]")
PACKAGE_INDEX = re.compile(r"--(?:extra-)?index-url|--find-links")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MAX_COLUMNS = 120


def problems_of(path, text: str):
    generated = False  # by tools/render_results.py
    for number, line in enumerate(text.split("\n"), start=1):
        if path.suffix == ".md" and re.match(r"<!-- /?results", line):
            generated = not line.startswith("<!-- /")
        where = f"{path}:{number}"
        if MACHINE_PATH.search(line):
            yield f"{where}: names a path of one machine: {line.strip()[:80]}"
        if PACKAGE_INDEX.search(line) and path.name != "check_texts.py":
            yield f"{where}: names a package index; packages come by name only"
        if line != line.rstrip():
            yield f"{where}: trailing blanks"
        unbreakable = path.suffix == ".md" and (generated or line.lstrip().startswith("|") or "](" in line)
        if len(line) > MAX_COLUMNS and path.suffix not in (".json", ".csv") and not unbreakable:
            yield f"{where}: {len(line)} columns, more than {MAX_COLUMNS}"
        if path.suffix == ".md":
            for target in LINK.findall(line):
                file = target.partition("#")[0]
                if file and "://" not in file and not (ROOT / path.parent / file).exists():
                    yield f"{where}: dead link {target}"
    if text and not text.endswith("\n"):
        yield f"{path}: no newline at the end"


def main() -> int:
    count, bad = 0, 0
    for path in repo_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary file
        count += 1
        for problem in problems_of(path, text):
            print(problem)
            bad += 1
    print(f"check_texts: {count} files, {bad} problems")
    return 1 if bad or not count else 0


if __name__ == "__main__":
    sys.exit(main())
