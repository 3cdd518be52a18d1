"""The build's own checks: what CI, tools/require and CMake say of a machine that is not as it should be."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = """
good:
	@echo it is well
bad:
	@echo it is not; false
"""


@pytest.fixture
def ci(root, tmp_path):
    """Runs .ci/run in a folder whose Makefile has the parts good and bad."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".ci").mkdir()
    shutil.copy(root / ".ci/run", tmp_path / ".ci/run")

    def run(*parts: str, seconds: str = "100") -> subprocess.CompletedProcess:
        environment = {**os.environ, "CI_SECONDS": seconds}
        return subprocess.run([tmp_path / ".ci/run", *parts], env=environment, capture_output=True, text=True)

    return run


def test_ci_passes_where_every_part_passed(ci):
    result = ci("good", "good")
    assert result.returncode == 0 and "ci: 2 of 2 parts ran" in result.stdout


@pytest.mark.parametrize("parts", [["bad"], ["good", "bad"], ["bad", "good"], ["no_such_part"]])
def test_ci_fails_where_a_part_failed(ci, parts):
    result = ci(*parts)
    assert result.returncode == 1 and f"{len(parts)} of {len(parts)} parts ran" in result.stdout
    assert "1 failed" in result.stdout


def test_ci_fails_where_a_part_was_left_out(ci):
    result = ci("good", "bad", seconds="-1")
    assert result.returncode == 1 and "ci: 0 of 2 parts ran" in result.stdout
    assert result.stdout.splitlines()[-1] == "ci: FAILED, left out for lack of time: good bad"


def test_ci_refuses_a_budget_that_is_no_number(ci):
    result = ci("good", seconds="soon")
    assert result.returncode == 2 and "CI_SECONDS is 'soon'" in result.stdout
