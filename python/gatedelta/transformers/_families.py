"""The models of transformers that have Gated DeltaNet layers, and how their layers project hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Projections = tuple[Tensor, Tensor, Tensor, Tensor]


def _separate(layer: nn.Module, hidden: Tensor) -> Projections:
    z = layer.in_proj_z(hidden).unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    return layer.in_proj_qkv(hidden), z, layer.in_proj_a(hidden), layer.in_proj_b(hidden)


def _interleaved(layer: nn.Module, hidden: Tensor) -> Projections:
    """Qwen3-Next: every key head's q and k come with v and z, b and a, of the value heads that read it."""
    group = layer.num_v_heads // layer.num_k_heads
    values = group * layer.head_v_dim
    qkvz = layer.in_proj_qkvz(hidden).unflatten(-1, (layer.num_k_heads, -1))
    q, k, v, z = qkvz.split([layer.head_k_dim, layer.head_k_dim, values, values], -1)
    b, a = layer.in_proj_ba(hidden).unflatten(-1, (layer.num_k_heads, -1)).split(group, -1)
    mixed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1)
    # z stays where it is: with both kinds of heads the norm takes it as a view.
    return mixed, z.flatten(0, 1).unflatten(-1, (group, -1)), a.flatten(2), b.flatten(2)


def _single(layer: nn.Module, hidden: Tensor) -> Projections:
    mixed = torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], -1)
    z = layer.g_proj(hidden).unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    return mixed, z, layer.a_proj(hidden), layer.b_proj(hidden)


@dataclass(frozen=True)
class Family:
    """Names in ``transformers.models.<name>.modeling_<name>``."""

    name: str
    prefix: str  # of the classes of layer and norm
    text_model: str
    project: Callable[[nn.Module, Tensor], Projections]  # -> mixed_qkv [B, T, D], z (any rank), a, b [B, T, Hv]
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


FAMILIES = (
    Family("qwen3_next", "Qwen3Next", "Qwen3NextModel", _interleaved),
    Family("qwen3_5", "Qwen3_5", "Qwen3_5TextModel", _separate),
    Family("qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeTextModel", _separate),
    Family("qwen4_exp", "Qwen4ExpText", "Qwen4ExpTextModel", _separate),
    Family("olmo_hybrid", "OlmoHybrid", "OlmoHybridModel", _single, norm="o_norm", out_proj="o_proj"),
)
