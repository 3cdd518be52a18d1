"""tools/peer_tests.py: a suite of a made-up library is run, shared among processes, and counted."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap

import pytest

from tools import dev_paths

pytest.importorskip("torch")

TESTS = """
    import os
    import pytest
    import peer
    from .helper import one

    @pytest.mark.parametrize("n", range(8))
    def test_number(n):
        assert peer.function(n) == n + one

    @pytest.mark.parametrize("kind", ["wide", "fp8"])
    def test_kind(kind):
        assert kind == "wide", "fp8 is not there\\nmore"

    def test_wrong():
        raise ValueError("what is wrong")

    def test_skipped():
        pytest.skip("not today")

    def test_inner():
        assert False
"""
SUITE = """
    import sys, types
    from . import Rule, Suite

    SUITES = (
        Suite(
            name="peer", repository="Peer", files=("tests/test_peer.py",), packages=("json",),
            foreign=(Rule("an inner function", ("*::test_inner",)),),
            heavy=(Rule("too long", ("*::test_number[7]",), ("cpu",)),),
            differences=(Rule("no fp8", ("*::test_kind[fp8]",)), Rule("never", ("*::test_number*",), ("cuda",))),
        ),
        Suite(name="absent", repository="Absent", files=("tests",), packages=()),
        Suite(name="uninstalled", repository="Peer", files=("tests",), packages=("no_such_package",)),
        Suite(name="broken", repository="Peer", files=("tests/test_peer.py",), packages=()),
    )


    def install(device):
        import os

        if os.environ["PEER_SUITE"] == "broken":
            raise RuntimeError("no way to install it")
        sys.modules["peer"] = types.ModuleType("peer")
        sys.modules["peer"].function = lambda n: n + 1
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """The tools with the suites of one made-up peer, and its checkout."""
    folder = tmp_path_factory.mktemp("peers")
    tests = folder / "Peer" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_peer.py").write_text(textwrap.dedent(TESTS))
    (tests / "helper.py").write_text("one = 1\n")
    # A library of the checkout must not be imported, and neither its options be taken.
    (folder / "Peer" / "peer.py").write_text("raise ImportError('of the checkout')\n")
    (folder / "Peer" / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    copy = folder / "tree" / "tools" / "peer_suites"
    copy.mkdir(parents=True)
    for name in ("peer_suites/__init__.py", "peer_suites/plugin.py", "peer_tests.py", "repo_files.py",
                 "dev_paths.py", "records.py"):  # fmt: skip
        text = (dev_paths.ROOT / "tools" / name).read_text()
        (folder / "tree" / "tools" / name).write_text(text.replace('MODULES = ("fla", ', 'MODULES = ("peer", "fla", '))
    (copy / "peer.py").write_text(textwrap.dedent(SUITE))
    (folder / "tree" / "python").symlink_to(dev_paths.ROOT / "python")
    return folder


def run(folder, *options, status=1):
    output = folder / "record.json"
    command = [sys.executable, str(folder / "tree" / "tools" / "peer_tests.py"), "--peers", str(folder), "--output",
               str(output), *options]  # fmt: skip
    environment = {**os.environ, "GATEDELTA_BUILD": str(dev_paths.BUILD)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == status, result.stdout + result.stderr
    return (json.loads(output.read_text()) if status != 2 else None), result


def test_a_suite_is_counted(tools):
    record, result = run(tools, "--suites", "peer,absent,uninstalled,broken", "--jobs", "3")
    header, (peer, absent, uninstalled, broken) = record["header"], record["suites"]
    assert header["device"] == "cpu" and header["versions"]["gatedelta"] and header["every"] == 1
    assert peer["source"] == "checkout" and peer["passed"] == 8
    assert peer["failed"] == [{"test": "test_peer.py::test_wrong", "reason": "ValueError: what is wrong"}]
    assert peer["differences"] == [{"reason": "no fp8", "tests": 1}]
    assert peer["skipped"] == [{"reason": "not today", "tests": 1}]
    assert peer["foreign"] == [{"reason": "an inner function", "tests": 1}]
    assert peer["heavy"] == [{"reason": "too long", "tests": 1}]
    assert peer["not_run"] == 0 and "why_not_run" not in peer
    assert "no source distribution has it" in absent["why_not_run"]
    assert uninstalled["why_not_run"] == "the package no_such_package is not installed"
    assert broken["why_not_run"] == "RuntimeError: no way to install it"
    assert "peer: 8 passed, 1 failed, 1 differ as documented, 1 skipped by the suite, 1 not ours" in result.stdout
    assert "absent: NOT RUN" in result.stdout


def test_one_test_in_so_many_and_a_time_limit(tools):
    record, _ = run(tools, "--suites", "peer", "--every", "4", status=0)
    (peer,) = record["suites"]
    assert peer["passed"] + sum(entry["tests"] for entry in peer["differences"] + peer["skipped"]) == 3
    record, result = run(tools, "--suites", "peer", "--seconds", "0.2")
    assert record["suites"][0]["why_not_run"] == "stopped after 0 s" and "NOT RUN" in result.stdout
    _, result = run(tools, "--suites", "of nobody", status=2)
    assert "no such suite: of nobody" in result.stderr


def test_the_suites_that_ship():
    peer_suites = importlib.import_module("peer_suites")
    suites = peer_suites.suites()
    assert "fla" in suites
    for suite in suites.values():
        for rule in (*suite.foreign, *suite.differences):
            assert rule.reason and rule.patterns and set(rule.devices) <= {"cpu", "cuda"}
    rule = peer_suites.Rule("why", ("*::test_x[a-*",), ("cuda",))
    assert rule.matches("t.py::test_x[a-b]", "cuda") and not rule.matches("t.py::test_x[a-b]", "cpu")
    assert not rule.matches("t.py::test_xa-b", "cuda")
