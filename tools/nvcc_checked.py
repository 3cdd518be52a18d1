#!/usr/bin/env python3
"""Runs nvcc and fails where a kernel is not what it was written to be: registers that spill, a stack frame, wgmma that
ptxas serialises. All of these compile, and give right results, slowly.

usage: nvcc_checked.py NVCC ARGUMENT...   (-Xptxas -v is added; the object is removed if the check fails)
"""

import re
import subprocess
import sys
from pathlib import Path

FUNCTION = re.compile(r"ptxas info\s*: Function properties for (\S+)")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
ADVISORY = re.compile(r"\(C75\d\d\)|Potential Performance Loss")
ROUTINE = re.compile(r"^ptxas info\s*: |^\s*\d+ bytes (stack frame|gmem|cmem)")  # what -v says of every kernel


def problems_of(text: str) -> list[str]:
    """What is wrong with the kernels, from what ptxas -v printed."""
    problems = []
    function = None
    checked = 0
    for line in text.splitlines():
        if ADVISORY.search(line):
            problems.append(line.strip())
        elif match := FUNCTION.search(line):
            function = match.group(1)
        elif match := MEMORY.search(line):
            checked += 1
            if any(int(number) for number in match.groups()):
                problems.append(f"{function}: {match.group(0)}")
    if not checked:
        problems.append("ptxas named no kernel: nothing was checked")
    return problems


def main() -> int:
    command = [*sys.argv[1:], "-Xptxas", "-v"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line for line in result.stdout.splitlines() if not ROUTINE.match(line)]
    print(*lines, sep="\n", end="\n" if lines else "")
    if result.returncode != 0:
        return result.returncode
    problems = problems_of(result.stdout)
    for problem in problems:
        print(f"nvcc_checked: {problem}")
    if problems and "-o" in command:
        Path(command[command.index("-o") + 1]).unlink(missing_ok=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
