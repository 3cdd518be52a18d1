"""A plug-in's warning names the user's line, whatever packages lie between."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch")

from gatedelta._plugins.warn import warn


def in_package(name, function):
    """The function, called from a module of this name."""
    code = compile("def call(): return function()", f"/packages/{name}.py", "exec")
    exec(code, module := {"__name__": name, "function": function})
    return module["call"]


def location(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    assert len(caught) == 1
    return caught[0].filename, caught[0].lineno


def test_packages_are_passed_over():
    code = compile("def call(): warn('w', 'other')", "/packages/ours.py", "exec")
    exec(code, ours := {"__name__": "gatedelta.plugin", "warn": warn})
    call = in_package("torch.nn.modules.module", in_package("other.models", ours["call"]))

    def user():
        return call()  # this line

    assert location(user) == (__file__, user.__code__.co_firstlineno + 1)
    between = in_package("others", call)  # another package, in spite of its name
    assert location(between) == ("/packages/others.py", 1)
