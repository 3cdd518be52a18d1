"""Functions of an installed package, replaced by ours in every module of it that holds them, and put back."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


class Replacement:
    """Ours for functions of `package`, each known by the module it is defined in: "module.name"."""

    def __init__(self, package: str, version: str, functions: dict[str, Callable]) -> None:
        self._package = package
        self._version = version
        self._functions = functions
        self._originals: dict[str, Callable] = {}

    def register(self) -> None:
        """Puts ours in place. All are looked up and compared before the first one is replaced."""
        if self._originals:
            return
        found = {name: self._find(name) for name in self._functions}
        for name, original in found.items():
            self._compare(name, original)
        for name, original in found.items():
            _swap(self._package, original, self._functions[name])
        self._originals = found

    def unregister(self) -> None:
        """Puts the package's own back, also in modules of it that were imported since."""
        for name, original in self._originals.items():
            _swap(self._package, self._functions[name], original)
        self._originals = {}

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


def _swap(package: str, old: Callable, new: Callable) -> None:
    for module in _modules_of(package):
        for name in [name for name, value in vars(module).items() if value is old]:
            setattr(module, name, new)


def _modules_of(package: str) -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == package or name.startswith(f"{package}.")):
            yield module
