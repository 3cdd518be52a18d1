#!/usr/bin/env python3
"""Runs the test programs and examples of a build, each once with all its cases, and writes one JUnit report.

ctest starts a process per case, which is what `make test` wants. Under sanitizers and emulators starting and ending a
process costs far more than most cases: GCC's leak checker needs 4 s at the end of every process on aarch64.

usage: run_programs.py BUILD REPORT.xml [--jobs N] [--without CASE...] [--under COMMAND]   (exit 1 if one failed)
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDERS = ("tests/cpp", "tests/fuzz", "examples")
# Programs that have slow cases, and the suites these are in.
SLOW_SUITES = {"numerics_": "*", "cli_tests": "Cli"}
SECONDS = 1500  # for one program


def programs_of(build: Path) -> list[Path]:
    files = [path for folder in FOLDERS for path in (build / folder).rglob("*") if "CMakeFiles" not in path.parts]
    programs = [path for path in files if path.is_file() and os.access(path, os.X_OK)]
    # By name backwards: numerics come first, and they take longest.
    return sorted(programs, key=lambda path: path.name, reverse=True)


def filter_of(name: str, without: list[str]) -> str:
    suites = [suite for prefix, suite in SLOW_SUITES.items() if name.startswith(prefix)]
    return "-" + ":".join(f"{suite}.{case}" for suite in suites for case in without) if suites and without else "*"


def run(build: Path, program: Path, under: list[str], without: list[str]) -> list[ET.Element]:
    """The program's cases, from GoogleTest's report; a program without one is a case itself."""
    name = program.name
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        settings = {"GTEST_OUTPUT": f"xml:{report}", "GTEST_FILTER": filter_of(name, without), "GTEST_BRIEF": "1"}
        settings["LD_LIBRARY_PATH"] = str(build / "src")  # for an example that opens the library by its name
        command = [*under, str(program)]
        try:
            result = subprocess.run(command, env={**os.environ, **settings}, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS)  # fmt: skip
            status, output = result.returncode, result.stdout
        except subprocess.TimeoutExpired as error:
            status, output = f"none after {SECONDS} s", (error.stdout or b"").decode(errors="replace")
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    for case in cases:
        case.set("classname", f"{name}.{case.get('classname')}")
    # A program can fail after its last case: a leak is found at its end.
    if not cases or (status != 0 and all(case.find("failure") is None for case in cases)):
        cases.append(ET.Element("testcase", name=name, classname=name))
        if status != 0:
            ET.SubElement(cases[-1], "failure", message=f"exit status {status}")
    print(f"{name}: {'ok' if status == 0 else f'FAILED, exit status {status}'}", flush=True)
    if status != 0:
        print(output.rstrip(), flush=True)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time (1)")
    parser.add_argument("--without", nargs="*", default=[], help="slow cases, of numerics and tool, to leave out")
    parser.add_argument("--under", default="", help="an emulator with its arguments")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    programs = programs_of(build)
    if not programs:
        sys.exit(f"run_programs: no program in {arguments.build}")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(
            pool.map(lambda path: run(build, path, shlex.split(arguments.under), arguments.without), programs)
        )
    suite = ET.Element("testsuite")
    suite.extend(case for cases in results for case in cases)
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(arguments.report)
    return 1 if suite.find(".//failure") is not None else 0


if __name__ == "__main__":
    sys.exit(main())
