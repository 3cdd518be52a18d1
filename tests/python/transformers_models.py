"""Tiny random models of transformers' GDN families, for the tests of the plug-in."""

from __future__ import annotations

import torch
import transformers

_SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "bos_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 512,
    "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
}  # fmt: skip
CONFIGS = {
    "qwen3_next": ("Qwen3NextConfig", {}),
    "qwen3_5": ("Qwen3_5TextConfig", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {}),
    "qwen4_exp": ("Qwen4ExpTextConfig", _INDEXER),
    "olmo_hybrid": ("OlmoHybridConfig", {"linear_allow_neg_eigval": True}),
}


def build(family: str, **changes) -> torch.nn.Module:
    """The same weights at every call, with gates away from those that models begin with."""
    name, extra = CONFIGS[family]
    config = getattr(transformers, name)(**{**_SIZES, **extra, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.uniform_(-3, 1)
            elif parameter_name.endswith("dt_bias"):
                parameter.normal_()
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(1))


def packed_mask(lengths: list[int], dtype: torch.dtype = torch.float32) -> dict:
    """The masks of a pack: full attention sees its own sequence alone."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (ids[:, None] == ids[None, :]).tril()
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    mask = mask[None, None]
    return {"full_attention": mask, "linear_attention": None}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
