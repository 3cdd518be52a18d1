"""Replaces functions and forwards in transformers' modeling modules, and puts them back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import ModuleType

from .._plugins.replace import Places
from . import _functions
from ._families import FAMILIES, Family
from ._layer import layer_forward
from ._packs import unwatch, watch

FUNCTIONS = {
    "torch_chunk_gated_delta_rule": _functions.choose_chunk_rule,
    "torch_recurrent_gated_delta_rule": _functions.choose_recurrent_rule,
    "causal_conv1d_fn": _functions.choose_conv1d,
    "causal_conv1d_update": _functions.choose_conv1d_update,
}

_places = Places("transformers")


def patch() -> tuple[str, ...]:
    modules = load()
    if not _places:
        for family, module in modules.items():
            _patch_module(family, module)
        watch("patch", text_models(modules), lambda _: True)
    return tuple(family.name for family in modules)


def unpatch() -> None:
    unwatch("patch")
    _places.restore()


def text_models(modules: dict[Family, ModuleType]) -> list[type]:
    return [getattr(module, family.text_model) for family, module in modules.items()]


def load() -> dict[Family, ModuleType]:
    """The modeling modules of the families that this transformers has; raises where it has another shape."""
    modules = {}
    for family in FAMILIES:
        try:
            modules[family] = importlib.import_module(family.module)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("transformers.models."):
                raise
    problems = [problem for family, module in modules.items() for problem in _differences(family, module)]
    if problems or not modules:
        import transformers

        found = "; ".join(problems) or "it has none of " + ", ".join(family.name for family in FAMILIES)
        raise RuntimeError(
            f"gatedelta.transformers knows transformers 5.17 to 5.23, and {transformers.__version__} differs: {found}. "
            "Nothing was changed"
        )
    return modules


def _differences(family: Family, module: ModuleType) -> list[str]:
    found = [
        f"{module.__name__} has no {name}"
        for name in (*FUNCTIONS, family.layer_class, family.norm_class, family.text_model)
        if not hasattr(module, name)
    ]
    if not found:
        arguments = list(signature(getattr(module, family.layer_class).forward).parameters)
        if arguments != ["self", "hidden_states", "cache_params", "attention_mask", "kwargs"]:
            found.append(f"{family.layer_class}.forward takes {', '.join(arguments)}")
    return found


def _patch_module(family: Family, module: ModuleType) -> None:
    layer, norm = getattr(module, family.layer_class), getattr(module, family.norm_class)
    original = layer.forward
    _places.set(layer, "forward", layer_forward(family, lambda _: original))
    _places.set(norm, "forward", _choosing(_functions.choose_norm, norm.forward))
    for name, choose in FUNCTIONS.items():
        _places.set(module, name, _choosing(choose, getattr(module, name)))


def _choosing(choose: Callable, original: Callable) -> Callable:
    @wraps(original, updated=())  # where the kernels package is, original is a module, whose attributes stay its own
    def function(*args, **kwargs):
        return choose(original, *args, **kwargs)

    return function
