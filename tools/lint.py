#!/usr/bin/env python3
"""All linters: clang-format, ruff, texts, generated tables, shell syntax, clang-tidy. --fix reformats instead.

clang-tidy reads build/lint/compile_commands.json (`make lint` writes it first) and covers what of the library, the tool
and the binding is compiled on this machine; tests are left to the compiler's warnings. clang-format and clang-tidy must
be of version 14: others format and warn differently.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from repo_files import ROOT, repo_files

CXX_SUFFIXES = (".c", ".h", ".cpp", ".hpp", ".inl", ".cu", ".cuh")
TIDIED_FOLDERS = ("src", "cli", "bindings")
LLVM_VERSION = 14


def run(*command) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)


def llvm_tool(name: str) -> str:
    """The program of version LLVM_VERSION: clang-tidy-14, or a clang-tidy that is 14. Refuses any other."""
    found = "none"
    for program in (f"{name}-{LLVM_VERSION}", name):
        if shutil.which(program) and (match := re.search(r"version ([\d.]+)", run(program, "--version").stdout)):
            found = match.group(1)
            if found.split(".")[0] == str(LLVM_VERSION):
                return program
    sys.exit(f"lint: needs {name} {LLVM_VERSION}, found {found}: other versions differ, so nothing was checked")


def clang_format(fix: bool) -> str:
    files = repo_files(*CXX_SUFFIXES)
    result = run(llvm_tool("clang-format"), *(["-i"] if fix else ["--dry-run", "-Werror"]), *files)
    return "" if result.returncode == 0 else result.stderr


def ruff(fix: bool) -> str:
    ruff = ROOT / ".venv/bin/ruff"
    results = [
        run(ruff, "check", "--quiet", *(["--fix"] if fix else []), "."),
        run(ruff, "format", "--quiet", *([] if fix else ["--diff"]), "."),
    ]
    return "".join(result.stdout + result.stderr for result in results if result.returncode != 0)


def shell_syntax(_fix: bool) -> str:
    scripts = [path for path in repo_files() if (ROOT / path).read_bytes().startswith(b"#!/usr/bin/env bash")]
    return "".join(run("bash", "-n", path).stderr for path in scripts)


def python_tool(*command):
    def check(_fix: bool) -> str:
        result = run(sys.executable, *command)
        return "" if result.returncode == 0 else result.stdout + result.stderr

    return check


def clang_tidy(_fix: bool) -> str:
    build = ROOT / "build/lint"
    entries = json.loads((build / "compile_commands.json").read_text())
    files = {Path(entry["file"]) for entry in entries}
    files = sorted(file for file in files if file.is_relative_to(ROOT))
    files = [file for file in files if file.relative_to(ROOT).parts[0] in TIDIED_FOLDERS]
    if not files:
        return "no source of the library in compile_commands.json"

    program = llvm_tool("clang-tidy")

    def tidy(file: Path) -> str:
        result = run(program, "-p", build, "--quiet", file)
        return result.stdout + result.stderr if result.returncode != 0 else ""

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return "".join(pool.map(tidy, files))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="reformat sources and regenerate tables, check nothing else")
    fix = parser.parse_args().fix
    for name in ("clang-format",) if fix else ("clang-format", "clang-tidy"):
        llvm_tool(name)  # before anything is checked
    checks = {"clang-format": clang_format, "ruff": ruff}
    if fix:
        checks["tables"] = python_tool("-m", "bench.report.render")
    else:
        checks["tables"] = python_tool("-m", "bench.report.render", "--check")
        checks["texts"] = python_tool("tools/check_texts.py")
        checks["shell"] = shell_syntax
        checks["clang-tidy"] = clang_tidy
    failed = []
    for name, check in checks.items():
        start = time.monotonic()
        complaint = check(fix)
        if complaint:
            failed.append(name)
            print(complaint.rstrip())
        print(f"{name}: {'FAILED' if complaint else 'ok'} ({time.monotonic() - start:.0f} s)", flush=True)
    print(
        f"lint: {len(checks) - len(failed)} of {len(checks)} passed"
        + (f", failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
