"""What is tested: the package in python/ with the libraries of a build, or an installed package.

By default the build in build/release (`cmake --preset test && cmake --build --preset test`) is taken. Two environment
variables change that:

    GATEDELTA_BUILD=<folder>     another CMake build folder
    GATEDELTA_INSTALLED=1        the installed package; only the truth library still comes from the build folder
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("GATEDELTA_BUILD", ROOT / "build" / "release")).resolve()

if not os.environ.get("GATEDELTA_INSTALLED"):
    # Into the environment too, for the tests that start another Python.
    sys.path.insert(0, str(ROOT / "python"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    os.environ["GATEDELTA_LIBRARY_DIR"] = str(BUILD / "src")


def pytest_report_header() -> str:
    import gatedelta

    return f"gatedelta: {gatedelta.__file__}, {gatedelta.info()}"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def run_python():
    """Runs code or a script in a fresh Python; returns its stdout, raises with its stderr."""

    def run(*arguments: str, env: dict[str, str] | None = None, check: bool = True) -> subprocess.CompletedProcess:
        result = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if check and result.returncode != 0:
            raise AssertionError(f"python {' '.join(arguments)[:200]} failed:\n{result.stdout}\n{result.stderr}")
        return result

    return run
