"""Test suites of other libraries that are run on this one, as data. tools/peer_tests.py runs them.

A module of this package describes the suites of one peer in `SUITES`. Its `install(device)` is called in the process of
the tests before any of their files is imported: it puts GateDelta where the peer's functions are. The modules import no
peer and no torch before that.
"""

from __future__ import annotations

import fnmatch
import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType

MODULES = ("fla", "flash_qla", "flashinfer")


@dataclass(frozen=True)
class Rule:
    """Tests, named by patterns as of fnmatch against `test_file.py::test_name[parameters]` (`[` stands for itself), and
    a reason."""

    reason: str
    patterns: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")

    def matches(self, test: str, device: str) -> bool:
        return device in self.devices and any(
            fnmatch.fnmatchcase(test, pattern.replace("[", "[[]")) for pattern in self.patterns
        )


@dataclass(frozen=True)
class Suite:
    name: str
    repository: str  # the folder of its checkout, among the others
    files: tuple[str, ...]  # in that folder
    packages: tuple[str, ...]  # what its tests import, to be installed
    source: str | None = None  # requirement of a source distribution that has the tests, for want of a checkout
    foreign: tuple[Rule, ...] = ()  # tests of something that is not ours: left out
    heavy: tuple[Rule, ...] = ()  # tests that need more than a machine usually has: left out
    differences: tuple[Rule, ...] = ()  # documented ones: tests that may fail
    options: tuple[str, ...] = ()  # of pytest
    environment: dict[str, str] = field(default_factory=dict)


def stand_in(name: str, **contents: object) -> ModuleType:
    """A module of that name for the tests to import, also as an attribute of its parent."""
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    parent, _, attribute = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], attribute, module)
    return module


def rule_of(rules: tuple[Rule, ...], test: str, device: str) -> Rule | None:
    return next((rule for rule in rules if rule.matches(test, device)), None)


def modules() -> dict[str, object]:
    """Module of each suite, by the suite's name."""
    found = {}
    for name in MODULES:
        try:
            module = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            continue
        found.update({suite.name: module for suite in module.SUITES})
    return found


def suites() -> dict[str, Suite]:
    return {suite.name: suite for module in modules().values() for suite in module.SUITES}
