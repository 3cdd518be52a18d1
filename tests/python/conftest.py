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


@pytest.fixture
def run_ranks(tmp_path):
    """Runs a script as the ranks of a group, each with <rank> <ranks> <rendezvous file> <report file> and `more`.
    Returns the report's path, and what the ranks have written."""

    def run(script: Path, ranks: int, *more: str, seconds: float = 300) -> tuple[Path, str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        report = tmp_path / "report.json"
        started = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(ranks), str(tmp_path / "meet"), str(report), *more],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            return report, "\n".join(process.communicate(timeout=seconds)[0] for process in started)
        finally:
            for process in started:
                process.kill()

    return run
