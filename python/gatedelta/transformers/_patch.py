"""Replaces functions and forwards in transformers' modeling modules, and puts them back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import ModuleType
from typing import Any

from torch import Tensor

from . import _functions
from ._families import FAMILIES, Family
from ._functions import why_not
from ._layer import layer_forward
from ._packs import exporting, with_offsets

_FUNCTIONS = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update",
)  # fmt: skip

# (object, name, what was there), in the order of replacement.
_replaced: list[tuple[Any, str, Any]] = []


def patch() -> tuple[str, ...]:
    if not _replaced:
        for family, module in load().items():
            _patch_module(family, module)
    modules = [place.__name__ for place, name, _ in _replaced if name == _FUNCTIONS[0]]
    return tuple(family.name for family in FAMILIES if family.module in modules)


def unpatch() -> None:
    while _replaced:
        place, name, value = _replaced.pop()
        setattr(place, name, value)


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
        for name in (*_FUNCTIONS, family.layer_class, family.norm_class, family.text_model)
        if not hasattr(module, name)
    ]
    if not found:
        arguments = list(signature(getattr(module, family.layer_class).forward).parameters)
        if arguments != ["self", "hidden_states", "cache_params", "attention_mask", "kwargs"]:
            found.append(f"{family.layer_class}.forward takes {', '.join(arguments)}")
    return found


def _patch_module(family: Family, module: ModuleType) -> None:
    layer, norm, model = (getattr(module, name) for name in (family.layer_class, family.norm_class, family.text_model))
    originals = {name: getattr(module, name) for name in _FUNCTIONS}
    layer_original = layer.forward
    forwards = {
        (module, "torch_chunk_gated_delta_rule"): _rule(originals, "torch_chunk_gated_delta_rule"),
        (module, "torch_recurrent_gated_delta_rule"): _rule(originals, "torch_recurrent_gated_delta_rule"),
        (module, "causal_conv1d_fn"): _conv(originals, "causal_conv1d_fn"),
        (module, "causal_conv1d_update"): _conv(originals, "causal_conv1d_update"),
        (norm, "forward"): _norm(norm.forward),
        (layer, "forward"): layer_forward(family, lambda _: layer_original),
        (model, "forward"): with_offsets(model.forward, lambda _: True),
    }
    for (place, name), value in forwards.items():
        _replaced.append((place, name, getattr(place, name)))
        setattr(place, name, value)


# What follows takes transformers' own function where the library cannot run a call: the layer's forward then finds each
# of its parts either here or there.


def _rule(originals: dict[str, Callable], name: str) -> Callable:
    chunked = name == "torch_chunk_gated_delta_rule"
    original, ours = originals[name], _functions.chunk_rule if chunked else _functions.recurrent_rule

    @wraps(original)
    def rule(query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
        here = not exporting() and query.dtype == value.dtype
        if here and why_not(query.device, query.dtype, chunked=chunked, k=query.shape[-1], v=value.shape[-1]) is None:
            return ours(query, key, value, *args, **kwargs)
        return original(query, key, value, *args, **kwargs)

    return rule


def _conv(originals: dict[str, Callable], name: str) -> Callable:
    original, ours = originals[name], _functions.conv1d if name == "causal_conv1d_fn" else _functions.conv1d_update
    weight_at = 0 if name == "causal_conv1d_fn" else 1  # among the positional arguments after hidden_states

    @wraps(original)
    def conv(hidden_states: Tensor, *args, **kwargs):
        weight = kwargs["weight"] if "weight" in kwargs else args[weight_at]
        activation = kwargs["activation"] if "activation" in kwargs else (*args[weight_at + 2 :], None)[0]
        here = not exporting() and 2 <= weight.shape[-1] <= 4 and activation in (None, "silu", "swish")
        if here and why_not(hidden_states.device, hidden_states.dtype, chunked=False) is None:
            return ours(hidden_states, *args, **kwargs)
        return original(hidden_states, *args, **kwargs)

    return conv


def _norm(original: Callable) -> Callable:
    @wraps(original)
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        channels = hidden_states.shape[-1]
        here = not exporting() and channels % 16 == 0 and channels <= 512
        here = here and getattr(self, "activation", "silu") in ("silu", "swish", "sigmoid")
        if here and why_not(hidden_states.device, hidden_states.dtype, chunked=False) is None:
            return _functions.norm(self, hidden_states, gate)
        return original(self, hidden_states, gate)

    return forward
