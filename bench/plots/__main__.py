"""Draws what the benchmarks wrote. Each subject has its own arguments: python -m bench.plots SUBJECT --help."""

from __future__ import annotations

import argparse
import importlib
import sys

SUBJECTS = ("cpu", "chunked", "serving", "segments", "context_parallel", "models", "layers", "history")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    subject = parser.parse_args(sys.argv[1:2]).subject
    sys.argv[:2] = [f"python -m bench.plots {subject}"]
    importlib.import_module(f"bench.plots.{subject}").main()


if __name__ == "__main__":
    main()
