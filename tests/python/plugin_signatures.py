"""Signatures of other packages' functions, kept in plugin_signatures.json, beside those of the installed package and
those of ours. Source text is parsed: these packages need not be importable on the machine.

As a program, it prints the file anew from installed packages: plugin_signatures.py flash_qla flashinfer
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
DISTRIBUTIONS = {"flash_qla": "flash-qla", "flashinfer": "flashinfer-python"}


def kept(package: str) -> dict:
    """{"version": ..., "functions": {"file:name": [[argument, default as text or null], ...]}}"""
    return json.loads(FILE.read_text())[package]


def installed(package: str) -> dict | None:
    """The same of the installed package, or None."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    functions = {}
    for function in kept(package)["functions"]:
        file, _, name = function.partition(":")
        tree = ast.parse((Path(spec.origin).parent / file).read_text())
        (node,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name)
        arguments = node.args
        assert not (arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg), name
        defaults = [ast.unparse(default) for default in arguments.defaults]
        defaults = [None] * (len(arguments.args) - len(defaults)) + defaults
        functions[function] = [[argument.arg, default] for argument, default in zip(arguments.args, defaults)]
    return {"version": importlib.metadata.version(DISTRIBUTIONS[package]), "functions": functions}


def of(function: Callable) -> list[list[str | None]]:
    parameters = inspect.signature(function).parameters.values()
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    return [[p.name, None if p.default is p.empty else repr(p.default)] for p in parameters]


def compare_with_installed(package: str) -> None:
    """The test of the kept signatures, where the package is installed in the kept version."""
    there = installed(package)
    if there is None:
        pytest.skip(f"{package} is not installed")
    if there["version"] != kept(package)["version"]:
        pytest.skip(f"{package} {there['version']} is installed")
    assert there == kept(package)


if __name__ == "__main__":
    json.dump({package: installed(package) for package in sys.argv[1:]}, sys.stdout, indent=1)
