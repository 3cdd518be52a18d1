"""The dispatcher and the backend. SGLang's own kernels are a name here; what it does around them is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend


@dataclass(kw_only=True)
class ForwardMetadata:
    query_start_loc: torch.Tensor
    mamba_cache_indices: torch.Tensor
    conv_block_table: torch.Tensor | None = None
    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None
    retrieve_parent_token: torch.Tensor | None = None
    has_mamba_track_mask: bool = False
    track_conv_indices: torch.Tensor | None = None
    conv_states_mask_indices: torch.Tensor | None = None
    track_chunk_idx: torch.Tensor | None = None
    track_ssm_h_src: torch.Tensor | None = None
    track_ssm_h_dst: torch.Tensor | None = None
    track_ssm_h_batch_src: torch.Tensor | None = None
    track_ssm_final_src: torch.Tensor | None = None
    track_ssm_final_dst: torch.Tensor | None = None


class GDNKernelDispatcher:
    def __init__(self, decode_backend, prefill_backend, verify_backend=None):
        for name, backend in (("decode", decode_backend), ("prefill", prefill_backend)):
            if backend is not LinearAttnKernelBackend.TRITON:
                raise ValueError(f"Unsupported GDN {name} backend: {backend}")
        self.decode_kernel = self.extend_kernel = self.verify_kernel = "triton"
        self.verify_kernel_is_flashinfer = self.supports_packed_decode = False

    def packed_decode(self, mixed_qkv, a, b, **kwargs):
        return self.decode_kernel.packed_decode(mixed_qkv, a, b, **kwargs)

    def decode(self, q, k, v, a, b, **kwargs):
        return self.decode_kernel.decode(q, k, v, a, b, **kwargs)

    def extend(self, q, k, v, g, beta, **kwargs):
        return self.extend_kernel.extend(q, k, v, g, beta, **kwargs)

    def target_verify(self, **kwargs):
        return self.verify_kernel.target_verify(**kwargs)


class GDNAttnBackend:
    requires_contiguous_prefill_state = True

    def __init__(self, model_runner: Any) -> None:
        self.req_to_token_pool, self.mamba_chunk_size = model_runner.req_to_token_pool, model_runner.mamba_chunk_size
        self.conv_states_shape = model_runner.req_to_token_pool.mamba_pool.mamba_cache.conv[0].shape
        backends = model_runner.linear_attn_backends
        self.kernel_dispatcher = GDNKernelDispatcher(backends.decode, backends.prefill, backends.verify)
        self.verify_intermediate_state_indices = torch.arange(8, dtype=torch.int32, device=model_runner.device)

    def _convolve_prefill(self, layer, forward_batch, mixed_qkv, conv_states, cache_indices):
        return "triton"

    def forward_decode(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        return "triton"

    def _track_mamba_state_decode(self, forward_batch, conv_states, ssm_states, cache_indices, layer_id=None):
        self.tracked = layer_id

    @staticmethod
    def _prefill_gates(layer, a, b):
        g = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
        return g[None], b.float().sigmoid()[None]

    def forward_extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        if forward_batch.forward_mode.is_target_verify():
            return "triton"
        metadata, cache = self.forward_metadata, self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        conv, states, snapshot = cache.conv[0], cache.temporal, None
        assert not self.requires_contiguous_prefill_state
        if metadata.has_mamba_track_mask:
            conv[metadata.conv_states_mask_indices] = mixed_qkv[metadata.track_conv_indices].transpose(1, 2)
            assert self.kernel_dispatcher.extend_kernel.supports_track_state_snapshot
            snapshot = torch.empty(len(metadata.mamba_cache_indices), *states.shape[1:], device=states.device)
        x = self._convolve_prefill(layer, forward_batch, mixed_qkv, conv, metadata.mamba_cache_indices)
        q, k, v = x.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
        q, k = (t.view(1, -1, layer.num_k_heads, layer.head_k_dim) for t in (q, k))
        o, _, _ = self.kernel_dispatcher.extend(
            q=q, k=k, v=v.view(1, -1, layer.num_v_heads, layer.head_v_dim), g=self._prefill_gates(layer, a, b)[0],
            beta=self._prefill_gates(layer, a, b)[1], ssm_states=states, cache_indices=metadata.mamba_cache_indices,
            query_start_loc=metadata.query_start_loc, state_checkpoint_cu_starts=None, num_state_checkpoints=0,
            state_checkpoint_every_n_tokens=0, output=kwargs.get("linear_attn_output"), layer_id=layer.layer_id,
            extend_prefix_lens=forward_batch.extend_prefix_lens, track_state=snapshot,
            track_chunk_idx=metadata.track_chunk_idx if snapshot is not None else None,
        )  # fmt: skip
        if snapshot is not None:
            states[metadata.track_ssm_h_dst] = snapshot[metadata.track_ssm_h_batch_src].to(states.dtype)
        return o
