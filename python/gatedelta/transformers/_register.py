"""The library's functions as entries of a mapping of the ``kernels`` package. Nothing is downloaded: the package asks
an entry for a class, and these have theirs at hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from inspect import Parameter, Signature, signature
from typing import Any

from kernels import CUDAProperties, Device, register_kernel_mapping
from kernels.layer import globals as kernels_globals
from torch import nn

from .._plugins import limits
from . import _functions
from ._families import FAMILIES
from ._layer import layer_forward
from ._packs import unwatch, watch
from ._patch import load, text_models

_registered = False
_before: dict[str, Any] = {}  # what the mapping had under our names


def _function(choose: Callable, ours: Callable) -> type[nn.Module]:
    """A class as `kernels` requires it: a forward with the parameters of the function it replaces, and nothing else."""

    def forward(self, *args, **kwargs):
        original = type(self).forward  # transformers' own: only the instance has this one
        if not _registered:
            return original(self, *args, **kwargs)
        return choose(lambda *a, **k: original(self, *a, **k), *args, **kwargs)

    parameters = signature(ours).parameters.values()
    forward.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *parameters])
    return type(ours.__name__, (nn.Module,), {"forward": forward, "can_torch_compile": True})


class RMSNormGated(nn.Module):
    can_torch_compile = True

    def forward(self, hidden_states, gate):
        if not _registered:
            return type(self).forward(self, hidden_states, gate)
        return _functions.choose_norm(type(self).forward, self, hidden_states, gate)


def _layer(name: str) -> type[nn.Module]:
    family = next(family for family in FAMILIES if family.name == name)
    whole = layer_forward(family, lambda layer: type(layer).forward)

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        run = whole if _registered else type(self).forward
        return run(self, hidden_states, cache_params, attention_mask, **kwargs)

    return type(f"{family.prefix}GatedDeltaNet", (nn.Module,), {"forward": forward, "can_torch_compile": True})


CHUNK_RULE = _function(_functions.choose_chunk_rule, _functions.chunk_rule)
LAYER = _layer("qwen3_5")  # dense and MoE share a name; other families have none for their layers
# Name in transformers -> class.
_CLASSES = {
    "chunk_gated_delta_rule": CHUNK_RULE,
    "fused_recurrent_gated_delta_rule": _function(_functions.choose_recurrent_rule, _functions.recurrent_rule),
    "causal_conv1d_fn": _function(_functions.choose_conv1d, _functions.conv1d),
    "causal_conv1d_update": _function(_functions.choose_conv1d_update, _functions.conv1d_update),
    "RMSNormGated": RMSNormGated,
    "Qwen3_5GatedDeltaNet": LAYER,
}


class _Entry:
    """`kernels` copies mappings and keeps loaded classes by entry: a copy is the entry itself."""

    def __init__(self, kind: type[nn.Module]):
        self.kind = kind

    def load(self) -> type[nn.Module]:
        return self.kind

    def __deepcopy__(self, memo: dict) -> _Entry:
        return self

    def __str__(self) -> str:
        return f"gatedelta, {self.kind.__name__}"


_ENTRIES = {name: _Entry(kind) for name, kind in _CLASSES.items()}


def mapping() -> dict[str, dict]:
    """transformers enters its own kernels for GPUs of all capabilities: the narrower range of these wins."""
    devices: list[str | Device] = ["cpu"]
    if limits.build_refusal() is None:
        major, minor = limits.LEAST_CAPABILITY
        devices.append(Device("cuda", CUDAProperties(10 * major + minor, sys.maxsize)))
    return {name: dict.fromkeys(devices, entry) for name, entry in _ENTRIES.items()}


def register() -> None:
    global _registered
    modules = load()
    if not _registered:
        current = kernels_globals._KERNEL_MAPPING.get()
        _before.update({name: deepcopy(current[name]) for name in _CLASSES if name in current})
        register_kernel_mapping(mapping())
        watch("register", text_models(modules), _uses_gatedelta)
        _registered = True


def unregister() -> None:
    global _registered
    if _registered:
        current = kernels_globals._KERNEL_MAPPING.get()
        for name in _CLASSES:
            current.pop(name, None)
        current.update(_before)
        _before.clear()
        unwatch("register")
        _registered = False


def _uses_gatedelta(model: nn.Module) -> bool:
    """Whether `kernels` has put these forwards into the model's layers, or into the functions that they call."""
    names = {family.layer_class for family in FAMILIES}
    for block in model.layers:
        for layer in block.children():
            if type(layer).__name__ in names:
                rule = sys.modules[type(layer).__module__].torch_chunk_gated_delta_rule
                return _replaced_by(layer, LAYER) or _replaced_by(rule, CHUNK_RULE)
    return False


def _replaced_by(module: Any, kind: type[nn.Module]) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is kind.forward
