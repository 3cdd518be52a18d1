"""The models of transformers that have Gated DeltaNet layers, and how their layers project hidden states."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._projections import Groups, project

Projections = tuple[Tensor, Tensor, Tensor, Tensor]


def _separate(layer: nn.Module, mixed: Tensor, z: Tensor, a: Tensor, b: Tensor) -> Projections:
    return mixed, z.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)), a, b


def _interleaved(layer: nn.Module, qkvz: Tensor, ba: Tensor) -> Projections:
    """Qwen3-Next: every key head's q and k come with v and z, b and a, of the value heads that read it."""
    group = layer.num_v_heads // layer.num_k_heads
    values = group * layer.head_v_dim
    qkvz = qkvz.unflatten(-1, (layer.num_k_heads, -1))
    q, k, v, z = qkvz.split([layer.head_k_dim, layer.head_k_dim, values, values], -1)
    b, a = ba.unflatten(-1, (layer.num_k_heads, -1)).split(group, -1)
    mixed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1)
    # z stays where it is: with both kinds of heads the norm takes it as a view.
    return mixed, z.flatten(0, 1).unflatten(-1, (group, -1)), a.flatten(2), b.flatten(2)


_QWEN3_NEXT: Groups = (("in_proj_qkvz",), ("in_proj_ba",))
_QWEN3_5: Groups = (("in_proj_qkv",), ("in_proj_z",), ("in_proj_a",), ("in_proj_b",))
_OLMO_HYBRID: Groups = (("q_proj", "k_proj", "v_proj"), ("g_proj",), ("a_proj",), ("b_proj",))


@dataclass(frozen=True)
class Family:
    """Names in ``transformers.models.<name>.modeling_<name>``."""

    name: str
    prefix: str  # of the classes of layer and norm
    text_model: str
    projections: Groups
    arrange: Callable[..., Projections]  # layer, what each group gives -> what project() returns
    norm: str = "norm"
    out_proj: str = "out_proj"

    @property
    def module(self) -> str:
        return f"transformers.models.{self.name}.modeling_{self.name}"

    @property
    def layer_class(self) -> str:
        return f"{self.prefix}GatedDeltaNet"

    @property
    def norm_class(self) -> str:
        return f"{self.prefix}RMSNormGated"

    def project(self, layer: nn.Module, hidden: Tensor) -> Projections:
        """mixed_qkv ``[B, T, D]``, z (any rank), a and b ``[B, T, Hv]``."""
        return self.arrange(layer, *project(layer, hidden, self.projections))

    def layers(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model's layers of this family."""
        kind = getattr(sys.modules.get(self.module), self.layer_class, None)
        return (module for module in model.modules() if kind is not None and isinstance(module, kind))


FAMILIES = (
    Family("qwen3_next", "Qwen3Next", "Qwen3NextModel", _QWEN3_NEXT, _interleaved),
    Family("qwen3_5", "Qwen3_5", "Qwen3_5TextModel", _QWEN3_5, _separate),
    Family("qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeTextModel", _QWEN3_5, _separate),
    Family("qwen4_exp", "Qwen4ExpText", "Qwen4ExpTextModel", _QWEN3_5, _separate),
    Family("olmo_hybrid", "OlmoHybrid", "OlmoHybridModel", _OLMO_HYBRID, _separate, norm="o_norm", out_proj="o_proj"),
)
