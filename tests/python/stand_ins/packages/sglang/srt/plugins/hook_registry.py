"""Hooks by dotted name; only those that run before a function."""

from __future__ import annotations

import functools
import pkgutil
from collections import defaultdict
from enum import Enum
from typing import ClassVar


class HookType(Enum):
    BEFORE = "before"


class HookRegistry:
    _hooks: ClassVar[dict[str, list[tuple]]] = defaultdict(list)

    @classmethod
    def register(cls, target, hook, hook_type):
        cls._hooks[target].append((hook_type, hook, None))

    @classmethod
    def apply_hooks(cls):
        for target, hooks in cls._hooks.items():
            module, _, name = target.rpartition(".")
            module = pkgutil.resolve_name(module)
            for _, hook, _ in hooks:
                setattr(module, name, _before(getattr(module, name), hook))


def _before(function, hook):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        args, kwargs = hook(*args, **kwargs) or (args, kwargs)
        return function(*args, **kwargs)

    return wrapper
