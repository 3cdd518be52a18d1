#!/usr/bin/env python3
"""Checks every text file of the repository: no path of somebody's machine, no dead relative link or anchor in Markdown,
no file named there that does not exist, no trailing blanks, a final newline, no line of prose or code over 120
columns, no file of the product over 500 lines, no word that retired_words.ini replaces."""

import configparser
import re
import sys
from pathlib import Path
from typing import NamedTuple

from repo_files import ROOT, repo_files

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home|work|farm|Users|mnt)/[\w.]")
PACKAGE_INDEX = re.compile(r"--(?:extra-)?index-url|--find-links")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = "bench|bindings|cli|cmake|docs|examples|include|python|results|src|testing|tests|tools"
NAMED_PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")
HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MAX_COLUMNS = 120
MAX_LINES = 500
PRODUCT = ("src", "bindings", "python")
RETIRED_WORDS = Path(__file__).with_name("retired_words.ini")
# Texts of the past and of others, and the list of words itself.
OF_THE_PAST = re.compile(r"(CHANGELOG|THIRD_PARTY)\.md|LICENSE|docs/experiments.*|results/.*|tools/retired_words\.ini")


class RetiredWord(NamedTuple):
    pattern: re.Pattern
    places: tuple[str, ...]  # folders and files; none: everywhere
    replacement: str
    example: str


def retired_words() -> list[RetiredWord]:
    table = configparser.ConfigParser(interpolation=None)
    table.read_string(RETIRED_WORDS.read_text())
    found = []
    for replacement in table.sections():
        section = table[replacement]
        places = tuple(section.get("in", "").split())
        patterns, examples = (section[name].strip().split("\n") for name in ("patterns", "examples"))
        for pattern, example in zip(patterns, examples, strict=True):
            found.append(RetiredWord(re.compile(pattern), places, replacement, example))
    return found


WORDS = retired_words()


def anchors_of(text: str) -> set[str]:
    """Of the headings of a page, as GitHub names them."""
    found = {}
    for heading in HEADING.findall(FENCED.sub("", text)):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w -]", "", words).strip().replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {f"{anchor}-{i}" if i else anchor for anchor, count in found.items() for i in range(count + 1)}


def is_dead(path, text: str, target: str) -> bool:
    file, _, anchor = target.partition("#")
    if "://" in file:
        return False
    place = ROOT / path.parent / file
    if file and not place.exists():
        return True
    return bool(anchor) and path.suffix == ".md" and anchor not in anchors_of(place.read_text() if file else text)


def words_of(path, text: str):
    """The retired words in `text`."""
    if OF_THE_PAST.fullmatch(path.as_posix()):
        return
    for word in WORDS:
        if not word.places or any(path.is_relative_to(place) for place in word.places):
            for match in word.pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                yield f"{path}:{line}: '{match.group()}' is a retired word: use {word.replacement}"


def problems_of(path, text: str):
    generated = False  # by bench.report.render
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
                if is_dead(path, text, target):
                    yield f"{where}: dead link {target}"
            for target in () if OF_THE_PAST.fullmatch(path.as_posix()) else NAMED_PATH.findall(line):
                if not (ROOT / target).exists():
                    yield f"{where}: there is no {target}"
    yield from words_of(path, text)
    if path.parts[0] in PRODUCT and text.count("\n") > MAX_LINES:
        yield f"{path}: {text.count(chr(10))} lines, more than {MAX_LINES}"
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
