#!/usr/bin/env python3
"""Keeps the loss curves and pictures of `make train-example` in results/train (results/SCHEMA.md).

usage: python -m bench.report.record_curves FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

from tools import records
from tools.repo_files import ROOT, stamp

RESULTS = ROOT / "results" / "train"


def record(folder: Path) -> None:
    recorded = stamp()
    if not recorded["commit"]:
        sys.exit("record_curves: a record names its commit, and there is no git here to name it")
    curves = sorted(folder.glob("*.json"))
    if not curves:
        sys.exit(f"record_curves: there are no curves in {folder}")
    for path in curves:
        curve = {**json.loads(path.read_text()), "recorded": recorded}
        records.write(RESULTS / path.name, curve)
        print(f"recorded results/train/{path.name}")
    for path in folder.glob("*.png"):
        shutil.copyfile(path, RESULTS / path.name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    record(Path(sys.argv[1]))
