"""Fixtures. What is tested, and how to test something else: see tools/dev_paths.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import dev_paths  # first of all: puts the package on the path


def pytest_report_header() -> str:
    import gatedelta

    return f"gatedelta: {gatedelta.__file__}, {gatedelta.info()}"


@pytest.fixture(scope="session")
def root() -> Path:
    return dev_paths.ROOT


@pytest.fixture(scope="session")
def run_python():
    """Runs code or a script in a fresh Python; with `path`, a folder from which it can import."""

    def run(
        *arguments: str, env: dict[str, str] | None = None, path: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess:
        environment = {**os.environ, **(env or {})}
        if path:
            environment["PYTHONPATH"] = os.pathsep.join([str(path), environment["PYTHONPATH"]])
        result = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if check and result.returncode != 0:
            raise AssertionError(f"python {' '.join(arguments)[:200]} failed:\n{result.stdout}\n{result.stderr}")
        return result

    return run
