"""The pytest plugin in each process of a peer's suite: puts GateDelta in place, picks the process's share of the tests,
and writes a line of JSON for each. tools/peer_tests.py sets the environment and reads the lines."""

from __future__ import annotations

import json
import os
import sys

import pytest

from . import modules, rule_of, suites

_SUITE = suites()[os.environ["PEER_SUITE"]]
_DEVICE = os.environ["PEER_DEVICE"]
_SHARD, _SHARDS = map(int, os.environ["PEER_SHARD"].split("/"))
_EVERY = int(os.environ["PEER_EVERY"])


def _write(**line: object) -> None:
    with open(os.environ["PEER_LINES"], "a") as file:
        file.write(json.dumps(line) + "\n")


def _name(nodeid: str) -> str:
    path, _, test = nodeid.partition("::")
    return f"{path.rsplit('/', 1)[-1]}::{test}"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line that says what is wrong, of a failure; of a skip what the suite says."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return (text.strip().splitlines() or ["no message"])[0 if crash else -1][:300]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    try:
        modules()[_SUITE.name].install(_DEVICE)
    except Exception as error:
        _write(stopped=f"{type(error).__name__}: {error}"[:300])
        sys.exit(3)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every process collects the same tests in the same order, and takes one in so many."""
    ours = []
    for item in items:
        for outcome in ("foreign", "heavy"):
            rule = rule_of(getattr(_SUITE, outcome), _name(item.nodeid), _DEVICE)
            if rule is not None:
                if _SHARD == 0:
                    _write(test=_name(item.nodeid), outcome=outcome, reason=rule.reason)
                break
        else:
            ours.append(item)
    items[:] = ours[::_EVERY][_SHARD::_SHARDS]
    _write(collected=[_name(item.nodeid) for item in items])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and _SHARD == 0:
        _write(test=_name(report.nodeid), outcome="failed", reason=_reason(report))
    elif report.skipped and _SHARD == 0:
        _write(test=_name(report.nodeid), outcome="skipped", reason=_reason(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(test=_name(report.nodeid), outcome=report.outcome, reason="" if report.passed else _reason(report))
