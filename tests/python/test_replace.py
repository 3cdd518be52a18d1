"""gatedelta._plugins.replace: where another library's functions are looked for, and what is put back."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from gatedelta._plugins.replace import Places


def functions():
    """Theirs and ours. Not names of this module: it would be one that has imported theirs."""
    return lambda: "theirs", lambda: "ours"


@pytest.fixture
def module(monkeypatch):
    """Makes a module of this name that is imported already."""

    def make(name: str, **attributes) -> ModuleType:
        result = ModuleType(name)
        vars(result).update(attributes)
        monkeypatch.setitem(sys.modules, name, result)
        return result

    return make


@pytest.fixture
def places():
    result = Places("a_library")
    yield result
    result.restore()


def test_a_function_is_replaced_wherever_it_was_imported(module, places):
    theirs, ours = functions()
    library = module("a_library.ops", rule=theirs, alias=theirs, other=1)
    user = module("a_user", step=theirs)
    assert not places
    places.swap(theirs, ours)
    assert places
    assert library.rule is library.alias is user.step is ours and library.other == 1
    places.restore()
    assert library.rule is library.alias is user.step is theirs and not places


def test_our_own_modules_stay_as_they_are(module, places):
    theirs, ours = functions()
    plugin = module("gatedelta.a_plugin", original=theirs, rule=ours)
    library = module("a_library", rule=theirs)
    places.swap(theirs, ours)
    assert plugin.original is theirs and library.rule is ours
    places.restore()
    assert plugin.rule is ours and library.rule is theirs


def test_modules_imported_since(module, places):
    """The library's own get theirs back. Others may have imported ours from the plug-in, and keep it."""
    theirs, ours = functions()
    module("a_library", rule=theirs)
    places.swap(theirs, ours)
    late, user = module("a_library.late", rule=ours), module("a_user", rule=ours)
    places.restore()
    assert late.rule is theirs and user.rule is ours


def test_a_place_that_somebody_else_has_set_is_left_alone(module, places):
    theirs, ours = functions()
    library = module("a_library", rule=theirs, other=theirs)
    places.swap(theirs, ours)
    library.rule = print
    places.restore()
    assert library.rule is print and library.other is theirs


def test_attributes_of_classes(places):
    theirs, ours = functions()

    class Layer:
        forward = theirs

    class Child(Layer):
        pass

    places.set(Layer, "forward", ours)
    assert Child.forward is ours
    places.restore()
    assert Child.forward is theirs
