"""Which gatedelta the tests and the benchmarks run: the package in python/ with the libraries of a build, or an
installed package.

By default: the libraries of build/release; where that has none, the installed package. Environment variables change it:

    GATEDELTA_BUILD=<folder>         another CMake build folder
    GATEDELTA_LIBRARY_DIR=<folder>   a folder of libraries; the truth library still comes from the build folder
    GATEDELTA_INSTALLED=1            the installed package, though there is a build
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("GATEDELTA_BUILD", ROOT / "build" / "release")).resolve()


def uses_build() -> bool:
    if os.environ.get("GATEDELTA_INSTALLED"):
        return False
    is_built = "GATEDELTA_LIBRARY_DIR" in os.environ or any((BUILD / "src").glob("libgatedelta.*"))
    return is_built or importlib.util.find_spec("gatedelta") is None  # without both, the package says what is missing


# Into the environment too, for other Pythons that are started from here.
folders = [str(ROOT)]
if uses_build():
    folders.insert(0, str(ROOT / "python"))
    os.environ.setdefault("GATEDELTA_LIBRARY_DIR", str(BUILD / "src"))
sys.path[:0] = [folder for folder in folders if folder not in sys.path]
before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *(x for x in before if x and x not in folders)])
