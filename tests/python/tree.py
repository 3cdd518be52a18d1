"""Where the package and the libraries come from, for the tests and the benchmarks.

By default: the package in python/ with the libraries of the build in build/release. Two environment variables change
that:

    GATEDELTA_BUILD=<folder>     another CMake build folder
    GATEDELTA_INSTALLED=1        the installed package; only the truth library still comes from the build folder
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("GATEDELTA_BUILD", ROOT / "build" / "release")).resolve()

if not os.environ.get("GATEDELTA_INSTALLED"):
    # Into the environment too, for other Pythons that are started from here.
    sys.path.insert(0, str(ROOT / "python"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
    os.environ["GATEDELTA_LIBRARY_DIR"] = str(BUILD / "src")
