"""python -m gatedelta info|selftest"""

from __future__ import annotations

import argparse
import sys

import gatedelta


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gatedelta", description="GateDelta, from Python")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, library, what this machine offers it")
    commands.add_parser("selftest", help="a quick check of this installation")
    command = parser.parse_args().command
    if command == "info":
        for key, value in gatedelta.info().items():
            print(f"{key:18} {', '.join(value) if isinstance(value, list) else value}")
        return 0
    from . import _selftest

    verdicts = {True: "ok", False: "FAILED", None: "not checked"}
    counts = dict.fromkeys(verdicts, 0)
    for result in _selftest.run():
        counts[result.passed] += 1
        print(f"{verdicts[result.passed]:11} {result.name}: {result.detail}")
    print(", ".join(f"{counts[passed]} {word.lower()}" for passed, word in verdicts.items()))
    return 1 if counts[False] else 0


if __name__ == "__main__":
    sys.exit(main())
