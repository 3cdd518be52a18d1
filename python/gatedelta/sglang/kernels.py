"""The classes that gatedelta.sglang puts in front of SGLang's: kernel, dispatcher and backend of GDN.

Pools are ``[slots, Hv, V, K]`` and, of the convolution, ``[slots, D, W - 1]``, of any strides between slots. Slot 0 is
SGLang's padding, and -1 marks padded rows of a captured batch: both are null slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._plugins import limits
from ..torch import causal_conv1d, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .options import BACKEND_NAME, selected_modes

_NULL_INDEX = 0
_CHUNK = 64


class Kernel:
    """The rule; a LinearAttnKernelBase of SGLang."""

    supports_packed_decode = True
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = True  # one state of each request, instead of those of all chunks

    def __init__(self, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def extend(
        self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, output=None, track_state=None,
        track_chunk_idx=None, inplace_update=True, num_state_checkpoints=0, **hints,
    ):  # fmt: skip
        """o, None, None. track_state ``[N, Hv, V, K]``: the state before chunk ``track_chunk_idx [N]`` of each request,
        where that is not negative."""
        if num_state_checkpoints:
            raise NotImplementedError("state checkpoints by FlashInfer's plan are not supported, track_state is")
        checkpoints = {}
        if track_state is not None:
            # Chunk 0 begins with the state before the first token, which no checkpoint holds.
            track_state.copy_(ssm_states[cache_indices.clamp(min=0)])
            checkpoints = {"checkpoints": track_state, "checkpoint_offsets": track_chunk_idx * _CHUNK}
        final = {"final_state": ssm_states, "final_state_indices": cache_indices} if inplace_update else {}
        o, _ = chunk_gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=query_start_loc,
            initial_state=ssm_states, initial_state_indices=cache_indices, null_index=_NULL_INDEX,
            out=torch.empty_like(v) if output is None else output, batch_invariant=self.batch_invariant, **final,
            **checkpoints,
        )  # fmt: skip
        return o, None, None

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **hints):
        """``[1, B, H, D]`` each, a token of a request."""
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        o = self._step(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, final_state=ssm_states)
        return o.transpose(0, 1)

    def packed_decode(
        self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim,
        replayssm_d=None, **hints,
    ):  # fmt: skip
        """mixed_qkv ``[B, D]``, after the convolution."""
        if replayssm_d is not None:
            raise NotImplementedError("ReplaySSM's ring is not supported: start without --enable-linear-replayssm")
        value, K = num_v_heads * head_v_dim, ssm_states.shape[-1]
        q, k, v = split(mixed_qkv[:, None], (mixed_qkv.shape[1] - value) // 2, value, K, head_v_dim)
        o = self._step(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, scale, final_state=ssm_states)
        return o.transpose(0, 1)

    def target_verify(
        self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc,
        intermediate_states_buffer, intermediate_state_indices, cache_steps, retrieve_parent_token=None,
        stable_rows=False, **hints,
    ):  # fmt: skip
        """A chain of drafts each. The pool stays as it is; the state after each token goes to a row of the buffer."""
        if retrieve_parent_token is not None:
            raise NotImplementedError("trees of drafts are not supported: Triton verifies them")
        count = query_start_loc.shape[0] - 1
        tokens = v.numel() // (v.shape[-2] * v.shape[-1])
        if tokens % count:
            raise NotImplementedError(f"{tokens} tokens of {count} requests: windows must have one length")
        drafts, slots, rows = tokens // count, cache_indices[:count], intermediate_states_buffer
        q, k, v = (x.reshape(count, drafts, *x.shape[-2:]) for x in (q, k, v))
        gates = (a, b, A_log, dt_bias, ssm_states)
        if not stable_rows and count <= rows.shape[0]:  # the rows are 0, 1, ...
            o = self._step(q, k, v, *gates, slots, step_states=rows[:count, :drafts])
        else:
            stride = rows.stride(0) // rows.stride(1)
            flat = rows.as_strided(((rows.shape[0] - 1) * stride + rows.shape[1], *rows.shape[2:]), rows.stride()[1:])
            first = intermediate_state_indices[:count, None] * stride
            index = first + torch.arange(drafts, device=first.device, dtype=first.dtype)
            live = slots > _NULL_INDEX  # row 0 of the buffer belongs to a request
            index, slots = torch.where(live[:, None], index, -1), torch.where(live, slots, -1)
            o = self._step(q, k, v, *gates, slots, null_index=-1, step_states=flat, step_indices=index)
        return o.flatten(0, 1)[None]

    def _step(
        self, q, k, v, a, b, A_log, dt_bias, pool, slots, scale=None, final_state=None, null_index=_NULL_INDEX, **steps
    ):
        """``[B, T, H, D]``"""
        a, b = (x.reshape(v.shape[:3]) for x in (a, b))
        o, _ = fused_recurrent_gated_delta_rule(
            q, k, v, a, beta=b, scale=scale, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log,
            dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, state_v_first=True, out=v.new_empty(v.shape),
            initial_state=pool, initial_state_indices=slots, final_state=final_state,
            final_state_indices=None if final_state is None else slots, null_index=null_index,
            batch_invariant=self.batch_invariant, **steps,
        )  # fmt: skip
        return o


class Dispatcher:
    """In front of SGLang's GDNKernelDispatcher, which has no kernels but its own."""

    kernel_class: type

    def __init__(self, decode_backend: Any, prefill_backend: Any, verify_backend: Any = None) -> None:
        from sglang.srt.runtime_context import get_exec

        # Every name but its own is "custom" to SGLang; another plug-in's is for SGLang to refuse.
        ours, triton = selected_modes(), type(decode_backend).TRITON
        decode, prefill = ours.decode and decode_backend.is_custom(), ours.prefill and prefill_backend.is_custom()
        super().__init__(triton if decode else decode_backend, triton if prefill else prefill_backend, verify_backend)
        kernel = self.kernel_class(bool(get_exec().deterministic.enable_deterministic_inference))
        if decode:
            self.decode_kernel, self.supports_packed_decode = kernel, True
        if prefill:
            self.extend_kernel = kernel
        if decode and ours.verify:
            self.verify_kernel, self.verify_kernel_is_flashinfer = kernel, False


class Backend:
    """In front of SGLang's GDNAttnBackend: the convolution by our kernels, too, where the rule is."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        kernels = self.kernel_dispatcher
        self.gatedelta_decodes = isinstance(kernels.decode_kernel, Kernel)
        self.gatedelta_extends = isinstance(kernels.extend_kernel, Kernel)
        self.gatedelta_verifies = isinstance(kernels.verify_kernel, Kernel)
        if not self.gatedelta_decodes and not self.gatedelta_extends:
            return
        reason = self._refusal(model_runner)
        if reason is not None:
            raise ValueError(f"linear attention backend {BACKEND_NAME}: {reason}")
        if self.gatedelta_extends:
            self.requires_contiguous_prefill_state = False  # pools of any strides are written in place

    def _refusal(self, model_runner: Any) -> str | None:
        """Why this model cannot run on GateDelta here, or None."""
        taps = self.conv_states_shape[-1] + 1
        if not 2 <= taps <= 4:
            return f"the convolution has {taps} taps, must have 2 to 4"
        if self.mamba_chunk_size != _CHUNK:
            return f"states are tracked every {self.mamba_chunk_size} tokens, must be {_CHUNK}"
        pool = self.req_to_token_pool.mamba_pool.mamba_cache.temporal
        V, K = pool.shape[-2:]
        return (
            limits.device_refusal(pool.device) or limits.head_refusal(K, V) or limits.dtype_refusal(model_runner.dtype)
        )

    def _convolve_prefill(self, layer, forward_batch, mixed_qkv, conv_states, cache_indices):
        if not self.gatedelta_extends:
            return super()._convolve_prefill(layer, forward_batch, mixed_qkv, conv_states, cache_indices)
        metadata = self.forward_metadata
        read = getattr(metadata, "gatedelta_read", None)
        if read is None:  # the first layer of the step
            has_prefix = forward_batch.extend_prefix_lens > 0
            read = metadata.gatedelta_read = torch.where(has_prefix, cache_indices, _NULL_INDEX)
        y, _ = causal_conv1d(
            mixed_qkv[None], layer.conv_weights, layer.bias, layer.activation, cu_seqlens=metadata.query_start_loc,
            initial_state=conv_states, initial_state_indices=read, final_state=conv_states,
            final_state_indices=cache_indices, null_index=_NULL_INDEX,
        )  # fmt: skip
        return y[0]

    def forward_decode(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        # A tuple is for SGLang's kernel that unpacks the projections and convolves.
        if not self.gatedelta_decodes or not isinstance(mixed_qkv, Tensor):
            return super().forward_decode(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        count = mixed_qkv.shape[0]
        if count == 0:
            return mixed_qkv.new_zeros((1, 0, layer.num_v_heads, layer.head_v_dim))
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        conv, state, slots = cache.conv[0], cache.temporal, self.forward_metadata.mamba_cache_indices
        x, _ = causal_conv1d(
            mixed_qkv[:, None], layer.conv_weights, layer.bias, layer.activation, initial_state=conv, final_state=conv,
            initial_state_indices=slots[:count], final_state_indices=slots[:count], null_index=_NULL_INDEX,
        )  # fmt: skip
        o = self.kernel_dispatcher.packed_decode(
            x[:, 0], a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, scale=layer.head_k_dim**-0.5, ssm_states=state,
            cache_indices=slots[:count], num_v_heads=layer.num_v_heads, head_v_dim=layer.head_v_dim,
            replayssm_d=cache.replayssm_d,
        )  # fmt: skip
        self._track_mamba_state_decode(forward_batch, conv, state, slots, layer.layer_id)
        return o

    def forward_extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        if not self.gatedelta_verifies or not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        metadata, cache = self.forward_metadata, self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        drafts = forward_batch.spec_info.draft_token_num
        count, windows = mixed_qkv.shape[0] // drafts, cache.intermediate_conv_window[0]
        if (
            metadata.retrieve_parent_token is not None  # a tree
            or cache.intermediate_ssm is None  # ReplaySSM
            or count > windows.shape[0]
            or not self._rows_are_positions()
        ):
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        slots = metadata.mamba_cache_indices[:count]
        x, _ = causal_conv1d(
            mixed_qkv.unflatten(0, (count, drafts)), layer.conv_weights, layer.bias, layer.activation,
            initial_state=cache.conv[0], initial_state_indices=slots, null_index=_NULL_INDEX,
            **window_buffer(windows, count, drafts),
        )  # fmt: skip
        q, k, v = split(x, layer.k_dim, layer.v_dim, layer.head_k_dim, layer.head_v_dim)
        return self.kernel_dispatcher.target_verify(
            A_log=layer.A_log, dt_bias=layer.dt_bias, q=q, k=k, v=v, a=a, b=b, ssm_states=cache.temporal,
            cache_indices=slots, query_start_loc=metadata.query_start_loc,
            intermediate_states_buffer=cache.intermediate_ssm,
            intermediate_state_indices=self.verify_intermediate_state_indices, cache_steps=drafts,
            retrieve_parent_token=None,
        )  # fmt: skip

    def _rows_are_positions(self) -> bool:
        """Whether request i of a batch has row i of the buffers for drafts; with pipeline parallelism it may not."""
        from sglang.srt.layers.attention.linear.utils import pp_spec_stable_rows_enabled

        return not pp_spec_stable_rows_enabled()


def split(x: Tensor, key: int, value: int, K: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v ``[..., H, D]`` of rows with so many channels of q, of k and of v."""
    q, k, v = x.split([key, key, value], -1)
    return q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V))


def window_buffer(windows: Tensor, count: int, drafts: int) -> dict[str, Tensor]:
    """The buffer for the convolution's state after each draft: windows ``[rows, steps, D, W - 1]``.

    SGLang may let the windows of a request overlap, each one token further in one row of tokens: that row is the state
    after the last draft, with more columns.
    """
    if windows.stride(1) != windows.stride(3):
        return {"step_states": windows[:count, :drafts]}
    channels, columns = windows.shape[2], drafts + windows.shape[3] - 1
    return {
        "final_state": windows.as_strided(
            (count, channels, columns), (windows.stride(0), windows.stride(2), windows.stride(3))
        )
    }
