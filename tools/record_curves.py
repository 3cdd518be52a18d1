#!/usr/bin/env python3
"""Keeps the loss curves and pictures that `make train-example` left in a folder in results/train (results/SCHEMA.md).

usage: record_curves.py FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

from repo_files import ROOT, stamp

RESULTS = ROOT / "results" / "train"


def record(folder: Path) -> None:
    recorded = stamp()
    if not recorded["commit"]:
        sys.exit("record_curves: a record names its commit, and git knows none here")
    curves = sorted(folder.glob("*.json"))
    if not curves:
        sys.exit(f"record_curves: there are no curves in {folder}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for path in curves:
        curve = {**json.loads(path.read_text()), "recorded": recorded}
        (RESULTS / path.name).write_text(json.dumps(curve, indent=1) + "\n")
        print(f"recorded results/train/{path.name}")
    for path in folder.glob("*.png"):
        shutil.copyfile(path, RESULTS / path.name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    record(Path(sys.argv[1]))
