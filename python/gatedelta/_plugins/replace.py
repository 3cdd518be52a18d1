"""The one way in which plug-ins put functions of ours in the place of another library's, and put those back.

A plug-in with a list of places (an attribute of a module or a class) sets them with ``Places.set``. One that replaces a
public function uses ``Places.swap``, because other modules import such a function by name. The rule for where it is
looked for: in every module of this process but gatedelta's own, under any name. ``Places.restore`` puts back what was
replaced, and looks once more in the package's own modules, some of which may have been imported since.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_OURS = __name__.partition(".")[0]


class Places:
    """Attributes of another package's objects, or of modules that use it, that hold something of ours."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # object, attribute, theirs, ours
        self._swapped: list[tuple[Callable, Callable]] = []  # theirs, ours

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def set(self, place: Any, name: str, ours: Any) -> None:
        """place: a module or a class."""
        self._replaced.append((place, name, getattr(place, name), ours))
        setattr(place, name, ours)

    def swap(self, theirs: Callable, ours: Callable) -> None:
        """In every module that holds their function."""
        self._swapped.append((theirs, ours))
        for path, module, name in list(_holders(theirs)):
            if not _is_of(path, _OURS):
                self.set(module, name, ours)

    def restore(self) -> None:
        """Leaves a place alone that holds something else by now."""
        while self._replaced:
            place, name, theirs, ours = self._replaced.pop()
            if vars(place).get(name) is ours:
                setattr(place, name, theirs)
        while self._swapped:
            theirs, ours = self._swapped.pop()
            for path, module, name in list(_holders(ours)):
                if _is_of(path, self._package):
                    setattr(module, name, theirs)


class Replacement:
    """Ours for functions of `package`, each known by the module it is defined in: "module.name"."""

    def __init__(self, package: str, version: str, functions: dict[str, Callable]) -> None:
        self._package = package
        self._version = version
        self._functions = functions
        self._places = Places(package)

    def register(self) -> None:
        """Puts ours in place. All are looked up and compared before the first one is replaced."""
        if self._places:
            return
        found = {name: self._find(name) for name in self._functions}
        for name, original in found.items():
            self._compare(name, original)
        for name, original in found.items():
            self._places.swap(original, self._functions[name])

    def unregister(self) -> None:
        self._places.restore()

    def _find(self, name: str) -> Callable:
        path, _, attribute = name.rpartition(".")
        try:
            module = importlib.import_module(f"{self._package}.{path}")
            return getattr(module, attribute)
        except ModuleNotFoundError as error:
            if error.name == self._package:
                raise ImportError(f"{self._package} is not installed, so there is nothing to replace") from error
            raise ImportError(f"{self._package}.{path} cannot be imported: {error}") from error
        except AttributeError as error:
            raise ImportError(
                f"{self._package}.{path} has no {attribute}: this plug-in is made for {self._package} {self._version}"
            ) from error
        except Exception as error:  # some packages look for a GPU as they are imported, and raise anything
            raise ImportError(f"{self._package}.{path} cannot be imported here: {error}") from error

    def _compare(self, name: str, original: Callable) -> None:
        """Older versions lack our last arguments, which does no harm. Anything else would change what calls mean."""
        theirs = list(inspect.signature(original).parameters.values())
        ours = list(inspect.signature(self._functions[name]).parameters.values())
        for i, parameter in enumerate(theirs):
            if i >= len(ours) or _shape(parameter) != _shape(ours[i]):
                known = f"{ours[i].name!r}" if i < len(ours) else "nothing"
                raise ImportError(
                    f"the installed {self._package}.{name} has argument {str(parameter)!r} at place {i + 1}, "
                    f"where that of {self._version}, which this plug-in is made for, has {known}"
                )


def _shape(parameter: inspect.Parameter) -> tuple[str, Any, Any]:
    return parameter.name, parameter.kind, parameter.default


def _holders(function: Callable) -> Iterator[tuple[str, ModuleType, str]]:
    """Path, module and attribute."""
    for path, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            yield from ((path, module, name) for name, value in list(vars(module).items()) if value is function)


def _is_of(path: str, package: str) -> bool:
    return path == package or path.startswith(f"{package}.")
