"""A whole Gated DeltaNet layer: convolution, rule and norm on what the projections give, without copies between them.

Gates and beta are computed in the rule's kernel, q and k are not repeated for the value heads, and the states of a
standard cache are read and written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.integrations.accelerate import force_accelerate_hooks

from .._plugins import limits
from .._plugins.warn import warn
from ..torch import causal_conv1d, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, gated_delta_layer_step
from ._families import Family
from ._functions import why_not
from ._packs import exporting, offsets_of
from ._projections import product_dtype

_SILU = ("silu", "swish")


def layer_forward(family: Family, original: Callable[[nn.Module], Callable]) -> Callable:
    """The forward of a family's layers. ``original(layer)`` is the one that takes over what this one cannot run."""

    # The weights of these two are read here, past their own forwards, which hooks of offloading wait for.
    @force_accelerate_hooks(["conv1d", family.norm])
    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        if exporting() or not _can_run(self, family, hidden_states):
            return original(self)(
                self, hidden_states=hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        mixed, z, a, b = family.project(self, hidden_states)
        norm = getattr(self, family.norm)
        offsets = offsets_of(kwargs)
        if cache_params is None:
            conv_out, _ = _conv(self, _flat(mixed, offsets), cu_seqlens=offsets)
            o, _ = _rule(self, conv_out, a, b, cu_seqlens=offsets)
        elif offsets is not None:
            o = _packed_with_cache(self, mixed, a, b, offsets, cache_params)
        elif _records(self, mixed, z, a, b, norm) or not _in_place(cache_params.layers[self.layer_idx]):
            o = _through_cache(self, mixed, a, b, cache_params)
        else:
            states = cache_params.layers[self.layer_idx]
            if mixed.shape[1] == 1 and states.has_previous_state[0]:
                y = _step(self, mixed, z, a, b, norm, states)
                return getattr(self, family.out_proj)(y.flatten(2))
            o = _prefill(self, mixed, a, b, states)
        y = norm(o.view(z.shape), z)
        return getattr(self, family.out_proj)(y.view(*hidden_states.shape[:2], -1))

    return forward


def _can_run(layer: nn.Module, family: Family, hidden: Tensor) -> bool:
    reason = why_not(hidden.device, product_dtype(hidden)) or limits.head_refusal(layer.head_k_dim, layer.head_v_dim)
    if reason is None and not 2 <= layer.conv_kernel_size <= 4:
        reason = f"a convolution of {layer.conv_kernel_size} taps (2 to 4 can be run)"
    if reason is None and layer.activation not in _SILU:
        reason = f"activation {layer.activation!r} of the convolution ('silu' can be run)"
    activation = getattr(getattr(layer, family.norm), "activation", "silu")
    if reason is None and activation not in (*_SILU, "sigmoid"):
        reason = f"activation {activation!r} of the norm ('silu' and 'sigmoid' can be run)"
    if reason is not None and not torch.compiler.is_compiling():
        warn(f"gatedelta leaves {type(layer).__name__} to transformers: {reason}", "transformers", "accelerate")
    return reason is None


def _flat(x: Tensor, offsets: Tensor | None) -> Tensor:
    """Packed sequences lie in one row."""
    return x if offsets is None or x.shape[0] == 1 else x.flatten(0, 1).unsqueeze(0)


def _conv(layer: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    return causal_conv1d(x, layer.conv1d.weight, layer.conv1d.bias, "silu", **options)


def _rule(layer: nn.Module, conv_out: Tensor, a: Tensor, b: Tensor, recurrent: bool = False, **options: Any):
    q, k, v = conv_out.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    rule = fused_recurrent_gated_delta_rule if recurrent else chunk_gated_delta_rule
    return rule(
        q.unflatten(-1, (-1, layer.head_k_dim)), k.unflatten(-1, (-1, layer.head_k_dim)),
        v.unflatten(-1, (-1, layer.head_v_dim)), g=_flat(a, options.get("cu_seqlens")),
        beta=_flat(b, options.get("cu_seqlens")), use_gate_in_kernel=True, A_log=layer.A_log, dt_bias=layer.dt_bias,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        use_qk_l2norm_in_kernel=True, **options,
    )  # fmt: skip


def _records(layer: nn.Module, mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, norm: nn.Module) -> bool:
    """Whether autograd records the call: then no state is updated in place."""
    tensors = (mixed, z, a, b, layer.conv1d.weight, layer.conv1d.bias, layer.A_log, layer.dt_bias, norm.weight)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _in_place(states: Any) -> bool:
    """Whether the states are plain tensors of a fixed size, kept as transformers' own class keeps them."""
    kind = type(states)
    return (
        isinstance(states, LinearAttentionLayer)
        and kind.update_conv_state is LinearAttentionLayer.update_conv_state
        and kind.update_recurrent_state is LinearAttentionLayer.update_recurrent_state
        and not states.record_past
    )


def _step(layer: nn.Module, mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, norm: nn.Module, states: Any) -> Tensor:
    return gated_delta_layer_step(
        mixed, z.reshape(mixed.shape[0], 1, layer.num_v_heads, layer.head_v_dim), a, b, key_heads=layer.num_k_heads,
        conv_weight=layer.conv1d.weight.squeeze(1), conv_bias=layer.conv1d.bias, conv_state=states.conv_states[0],
        A_log=layer.A_log, dt_bias=layer.dt_bias, state=states.recurrent_states[0], norm_weight=norm.weight,
        allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        norm_activation=getattr(norm, "activation", "silu"), norm_eps=norm.variance_epsilon, round_before_gate=True,
    )  # fmt: skip


def _prefill(layer: nn.Module, mixed: Tensor, a: Tensor, b: Tensor, states: Any) -> Tensor:
    if not states.is_conv_states_initialized[0]:
        states.lazy_initialization(conv_states=mixed.mT, conv_kernel_size=layer.conv_kernel_size)
    if not states.is_recurrent_states_initialized[0]:
        shape = (mixed.shape[0], layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        states.lazy_initialization(recurrent_states=mixed.new_empty(shape, dtype=torch.float32))
    conv_state, state = states.conv_states[0], states.recurrent_states[0]
    goes_on = states.has_previous_state[0]
    conv_out, _ = _conv(layer, mixed, initial_state=conv_state if goes_on else None, final_state=conv_state)
    o, _ = _rule(layer, conv_out, a, b, initial_state=state if goes_on else None, final_state=state)
    states.has_previous_state[0] = True
    return o


def _through_cache(layer: nn.Module, mixed: Tensor, a: Tensor, b: Tensor, cache: Cache) -> Tensor:
    """By the cache's own functions: for gradients, caches that record the past, and caches of other kinds."""
    index, tokens = layer.layer_idx, mixed.shape[1]
    goes_on = cache.layers[index].has_previous_state[0]
    state = cache.layers[index].recurrent_states[0].clone() if goes_on else None  # its own is overwritten below
    full = cache.update_conv_state(mixed.mT, index, conv_kernel_size=layer.conv_kernel_size)
    conv_out, _ = _conv(layer, full.mT)
    o, state = _rule(
        layer, conv_out[:, -tokens:], a, b, recurrent=goes_on and tokens == 1, initial_state=state,
        output_final_state=True,
    )  # fmt: skip
    cache.update_recurrent_state(state, index)
    return o


def _packed_with_cache(layer: nn.Module, mixed: Tensor, a: Tensor, b: Tensor, offsets: Tensor, cache: Cache) -> Tensor:
    """The cache keeps the states of the pack's last sequence: one row, one state."""
    index = layer.layer_idx
    if cache.layers[index].has_previous_state[0]:
        raise ValueError("a pack cannot go on from a cache, which has one state a row: pass packs without a cache")
    if mixed.shape[0] > 1:
        raise ValueError(f"a pack of {mixed.shape[0]} rows cannot fill a cache: pass use_cache=False")
    conv_out, conv_state = _conv(
        layer, mixed, cu_seqlens=offsets, output_final_state=True, state_size=layer.conv_kernel_size
    )
    o, state = _rule(layer, conv_out, a, b, cu_seqlens=offsets, output_final_state=True)
    cache.update_conv_state(conv_state[-1:], index, conv_kernel_size=layer.conv_kernel_size)
    cache.update_recurrent_state(state[-1:], index)
    return o
