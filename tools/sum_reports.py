#!/usr/bin/env python3
"""Adds up JUnit reports of ctest and pytest and names every failed and skipped test.

usage: sum_reports.py NAME=REPORT.xml...   (exit 1 if a test failed, a report is missing or a report is empty)
"""

import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict


def reason_of_skip(case: ET.Element) -> str:
    """pytest writes the reason into the element; ctest knows only GoogleTest's output."""
    message = case.find("skipped").get("message", "")
    if message in ("", "SKIP_REGULAR_EXPRESSION_MATCHED"):
        text = case.findtext("system-out") or ""
        match = re.search(r": Skipped\n(.*?)\n\[  SKIPPED \]", text, re.DOTALL)
        message = match.group(1) if match else "no reason given"
    return " ".join(message.split())


def name_of(case: ET.Element) -> str:
    name, group = case.get("name"), case.get("classname", "")
    return name if group in ("", name) else f"{group}::{name}"


def print_output(case: ET.Element) -> None:
    """What a failed test of ctest printed; pytest has shown its own already."""
    output = (case.findtext("system-out") or "").rstrip().splitlines()
    if output:
        print(f"---- {name_of(case)}", *output[-60:], sep="\n")


def main() -> int:
    passed = defaultdict(int)
    failed = defaultdict(list)
    skipped = defaultdict(list)
    by_reason = defaultdict(list)
    broken = []
    names = []
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        names.append(name)
        try:
            cases = list(ET.parse(path).getroot().iter("testcase"))
        except (OSError, ET.ParseError) as error:
            broken.append(f"{name}: no report ({error})")
            continue
        if not cases:
            broken.append(f"{name}: the report holds no test")
        for case in cases:
            if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
                failed[name].append(name_of(case))
                print_output(case)
            elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
                skipped[name].append(name_of(case))
                reason = reason_of_skip(case) if case.find("skipped") is not None else "disabled"
                by_reason[reason].append(name_of(case))
            else:
                passed[name] += 1

    for reason, tests in sorted(by_reason.items()):
        print(f"skipped, {reason}:")
        for test in tests:
            print(f"  {test}")
    for name in names:
        for test in failed[name]:
            print(f"FAILED {test}")
    for line in broken:
        print(f"FAILED {line}")
    width = max(map(len, [*names, "total"]))
    for name in names:
        print(f"{name:{width}}  {passed[name]} passed, {len(failed[name])} failed, {len(skipped[name])} skipped")
    failures = sum(map(len, failed.values())) + len(broken)
    skips = sum(map(len, skipped.values()))
    print(f"{'total':{width}}  {sum(passed.values())} passed, {failures} failed, {skips} skipped")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
