"""The library's functions with the arguments that transformers' modeling files have for them, and the choice between
them and transformers' own: a call that the library cannot run stays where it was."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._plugins import limits
from ..torch import (
    causal_conv1d,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    rms_norm_gated,
)
from ._packs import exporting, offsets_of


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the library cannot run tensors like these, or None."""
    return limits.dtype_refusal(dtype) or limits.device_refusal(device)


def chunk_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """``torch_chunk_gated_delta_rule``. The chunk size is the library's own: it changes the result by rounding alone.
    Of the keywords that a model was called with, those that say where sequences begin act."""
    offsets, shape = offsets_of(kwargs), value.shape
    if offsets is not None:
        query, key, value, g, beta = (x.flatten(0, 1).unsqueeze(0) for x in (query, key, value, g, beta))
    o, state = chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=offsets,
    )  # fmt: skip
    return o.view(shape), state


def recurrent_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """``torch_recurrent_gated_delta_rule``."""
    offsets, shape = offsets_of(kwargs), value.shape
    if offsets is not None:
        query, key, value, g, beta = (x.flatten(0, 1).unsqueeze(0) for x in (query, key, value, g, beta))
    o, state = fused_recurrent_gated_delta_rule(
        query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=offsets,
    )  # fmt: skip
    return o.view(shape), state


def conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs
) -> Tensor:
    """``causal_conv1d_fn``: ``[B, D, T]``. Packs are kept apart by offsets as well as by ``seq_idx``."""
    offsets = offsets_of(kwargs)
    length = hidden_states.shape[-1]
    if offsets is not None and offsets.shape[0] == 2:
        offsets = None  # one sequence; behind a cache, hidden_states begin with tokens that the offsets do not count
    if offsets is not None and length <= weight.shape[-1] and int(offsets[-1]) != length:
        raise ValueError(
            f"a pack of {int(offsets[-1])} tokens fills a cache, which is longer: pass use_cache=False with packs"
        )
    x = hidden_states.transpose(1, 2)
    batch = x.shape[0]
    if offsets is not None and batch > 1:
        x = x.reshape(1, batch * length, -1)
    y, _ = causal_conv1d(x, weight, bias, activation, offsets)
    return y.reshape(batch, length, -1).transpose(1, 2)


def conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """``causal_conv1d_update``: ``[B, D, T]``, the state ``[B, D, W]`` in place."""
    x = hidden_states.transpose(1, 2)
    tensors = (x, conv_state, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        y, state = causal_conv1d(x, weight, bias, activation, None, conv_state.clone(), True)
        conv_state.copy_(state)
    else:
        y, _ = causal_conv1d(x, weight, bias, activation, initial_state=conv_state, final_state=conv_state)
    return y.transpose(1, 2)


def norm(module: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """The forward of a ``RMSNormGated`` module."""
    activation = getattr(module, "activation", "silu")
    return rms_norm_gated(
        hidden_states, gate, module.weight, module.variance_epsilon, activation, round_before_gate=True
    )


# The same, or `original`, which is transformers' own function.


def choose_chunk_rule(original: Callable, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
    rule = chunk_rule if _runs_rule(query, value) else original
    return rule(query, key, value, *args, **kwargs)


def choose_recurrent_rule(original: Callable, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
    rule = recurrent_rule if _runs_rule(query, value) else original
    return rule(query, key, value, *args, **kwargs)


def choose_conv1d(original: Callable, hidden_states: Tensor, *args, **kwargs) -> Tensor:
    conv = conv1d if _runs_conv1d(hidden_states, *args, **kwargs) else original
    return conv(hidden_states, *args, **kwargs)


def choose_conv1d_update(original: Callable, hidden_states: Tensor, conv_state: Tensor, *args, **kwargs) -> Tensor:
    conv = conv1d_update if _runs_conv1d(hidden_states, *args, **kwargs) else original
    return conv(hidden_states, conv_state, *args, **kwargs)


def choose_norm(original: Callable, module: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
    channels = hidden_states.shape[-1]
    runs = not exporting() and channels % 16 == 0 and channels <= 512
    runs = runs and getattr(module, "activation", "silu") in ("silu", "swish", "sigmoid")
    if runs and why_not(hidden_states.device, hidden_states.dtype) is None:
        return norm(module, hidden_states, gate)
    return original(module, hidden_states, gate)


def _runs_rule(query: Tensor, value: Tensor) -> bool:
    if exporting() or query.dtype != value.dtype:
        return False
    return why_not(query.device, query.dtype) is None and limits.head_refusal(query.shape[-1], value.shape[-1]) is None


def _runs_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs
) -> bool:
    if exporting() or not 2 <= weight.shape[-1] <= 4 or activation not in (None, "silu", "swish"):
        return False
    return why_not(x.device, x.dtype) is None
