"""The layer, its metadata and what it takes from the rest of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.custom_op import PluggableLayer

envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
current_platform = SimpleNamespace(
    device_name="cpu", capability=None, is_cpu=lambda: current_platform.device_name == "cpu",
    is_cuda=lambda: current_platform.device_name == "cuda",
    has_device_capability=lambda capability: divmod(current_platform.capability, 10) >= capability,
)  # fmt: skip
forward_context = SimpleNamespace(attn_metadata=None)
conv_dim_first = False


def get_forward_context() -> Any:
    return forward_context


def is_conv_state_dim_first() -> bool:
    return conv_dim_first


@dataclass
class GDNAttentionMetadata:
    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_actual_tokens: int
    checkpoint: Any = None
    has_initial_state: torch.Tensor | None = None
    spec_query_start_loc: torch.Tensor | None = None
    non_spec_query_start_loc: torch.Tensor | None = None
    spec_state_indices_tensor: torch.Tensor | None = None
    non_spec_state_indices_tensor: torch.Tensor | None = None
    spec_sequence_masks: torch.Tensor | None = None
    spec_token_indx: torch.Tensor | None = None
    non_spec_token_indx: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None
    prefill_query_start_loc: torch.Tensor | None = None
    prefill_state_indices: torch.Tensor | None = None
    prefill_has_initial_state: torch.Tensor | None = None


@dataclass(frozen=True)
class MambaSpec:
    block_size: int = 512
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None


class QwenGatedDeltaNetAttention(PluggableLayer):
    """Between the projections only; what vLLM's own kernels would do answers with the name of the method."""

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "", gqa_interleaved_layout: bool = False) -> None:
        super().__init__()
        self.prefix, self.tp_size, self.gqa_interleaved_layout = prefix, 1, gqa_interleaved_layout
        self.num_k_heads, self.num_v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_dim, self.value_dim = self.num_k_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.conv_dim, self.conv_kernel_size = 2 * self.key_dim + self.value_dim, config.linear_conv_kernel_dim
        self.activation, self.layer_norm_epsilon = config.hidden_act, config.rms_norm_eps
        dtype = vllm_config.model_config.dtype
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.empty(self.conv_dim, 1, self.conv_kernel_size, dtype=dtype), False)
        self.conv1d.bias = None
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads), False)
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads, dtype=dtype), False)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.empty(self.head_v_dim, dtype=dtype), False)
        self.norm.eps, self.norm.activation = self.layer_norm_epsilon, "silu"
        self._prefill_kernels_warmed_up = False
        self.enable_fused_gdn_spec_decode = False
        self._forward_method = self.forward_cpu if current_platform.is_cpu() else self.forward_cuda

    def forward_cuda(self, hidden_states):
        raise NotImplementedError

    def forward_cpu(self, hidden_states):
        raise NotImplementedError

    def _forward_core(self, mixed_qkv, b, a, core_attn_out):
        return "_forward_core"

    def _forward_core_fused_norm(self, mixed_qkv, b, a, output_gate, core_attn_out):
        return "_forward_core_fused_norm"

    def _warmup_prefill_kernels(self, qkv_or_qkvz, v_dim):
        return "_warmup_prefill_kernels"

    def get_kv_cache_spec(self, vllm_config):
        return MambaSpec()
