"""gatedelta.vllm with vLLM itself on a CPU: its registry, layer, metadata and their builder.

vLLM's Python files import on a machine without a GPU; none of its kernels is needed. test_plugin_vllm.py runs this file
in a Python of its own.
"""

from __future__ import annotations

from types import SimpleNamespace

import gatedelta.vllm as plugin
import installed
import pytest
import torch
from oracle import Shape, Weights, close, outputs
from vllm_engine import Engine, layer_config, load, pages

PREFIX = "model.layers.0.linear_attn"


@pytest.fixture(scope="module")
def tree():
    """vLLM's file of the layer, on its CPU platform, after register()."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    plugin.register()
    from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module

    with current_config(make_config()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29533", 0, "gloo")
        initialize_model_parallel()
    module.forward_context = SimpleNamespace(attn_metadata=None, no_compile_layers={})
    module.get_forward_context = lambda: module.forward_context
    yield module
    plugin.unregister()
    destroy_model_parallel()


def current_config(config):
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)


def make_config(asked: bool = True, dtype=None):
    from vllm.config import VllmConfig

    config = VllmConfig(additional_config={"gdn_prefill_backend": "gatedelta"} if asked else {})
    config.cache_config.mamba_block_size = 512
    if dtype is not None:
        text = layer_config(Shape(), hidden_size=64)
        config.model_config = SimpleNamespace(dtype=dtype, hf_text_config=text, hf_config=text)
    return config


def make(tree, dtype, asked=True, drafts=0, normed=True):
    weights = Weights(Shape(), dtype, "cpu", torch.Generator().manual_seed(0))
    config = make_config(asked, dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with current_config(config):
            layer = tree.QwenGatedDeltaNetAttention(layer_config(Shape(), hidden_size=64), config, prefix=PREFIX)
    finally:
        torch.set_default_dtype(before)
    load(layer, weights)
    layer.requires_grad_(False)
    tree.forward_context.no_compile_layers = {PREFIX: layer}
    return Engine(layer, tree, weights, drafts, normed), config


def test_registry(tree):
    layer = make(tree, torch.float32)[0].layer
    assert type(layer).__name__ == "GateDeltaAttention" and layer.gdn_prefill_backend == "triton"
    layer = make(tree, torch.float32, asked=False)[0].layer
    assert not layer.runs_gatedelta and layer._forward_method.__name__ == "forward_cpu"


def test_entry_point(monkeypatch, tmp_path):
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    monkeypatch.syspath_prepend(installed.write(tmp_path))
    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["gatedelta"] is plugin.register


def test_kv_cache_spec(tree):
    engine, config = make(tree, torch.float32)
    spec = engine.layer.get_kv_cache_spec(config)
    assert (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment) == (1, 64)
    engine, config = make(tree, torch.float32, asked=False)
    assert engine.layer.get_kv_cache_spec(config).num_prefill_checkpoint_blocks == 0


@pytest.mark.parametrize("normed", [True, False])
def test_steps(tree, normed):
    engine, _ = make(tree, torch.float32, drafts=3, normed=normed)
    first, second, third = (engine.request() for _ in range(3))
    engine.plain([], [(first, 66), (second, 5)])
    engine.plain([first], [(third, 130, 64, engine.free.pop()), (second, 3, 0, 0)])
    engine.drafts([(first, 4, 3), (second, 2, 1)])
    engine.drafts([(first, 4, 2)], [(third, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_with_metadata_of_the_builder(tree, dtype):
    """The whole layer, from hidden states to hidden states, by vLLM's operators: with the norm in its own one (fp32) or
    in the core's (bf16). Its builder makes the metadata."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    engine, config = make(tree, dtype)
    layer, weights, generator = engine.layer, engine.weights, engine.generator
    layer.kv_cache = pages(weights.shape, dtype, "cpu", 0, tree.is_conv_state_dim_first())
    for linear in (layer.in_proj_qkvz, layer.in_proj_ba, layer.out_proj):
        linear.weight.data = (torch.randn(linear.weight.shape, generator=generator) * 0.3).to(dtype)
        linear.quant_method.process_weights_after_loading(linear)
    builder = GDNAttentionMetadataBuilder(layer.get_kv_cache_spec(config), [PREFIX], config, torch.device("cpu"))
    requests, computed = [engine.request() for _ in range(3)], [0, 0, 0]

    def step(lengths):
        """A step of the first requests, decodes first."""
        count, tokens = len(lengths), sum(lengths)
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        lens = torch.tensor([n + length for n, length in zip(computed, lengths)], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=offsets, query_start_loc_cpu=offsets, seq_lens=lens, num_reqs=count,
            num_actual_tokens=tokens, max_query_len=max(lengths), max_seq_len=int(lens.max()),
            block_table_tensor=torch.tensor([request.slots for request in requests[:count]], dtype=torch.int32),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64), seq_lens_cpu_upper_bound=lens,
            is_prefilling=torch.tensor([n == 0 for n in computed[:count]]),
        )  # fmt: skip
        metadata = builder.build(0, common)
        tree.forward_context.attn_metadata = {PREFIX: metadata}
        hidden = torch.randn(tokens, 64, generator=generator).to(dtype)
        with torch.inference_mode():
            got = layer(hidden)
            qkvz, ba = layer.in_proj_qkvz(hidden)[0], layer.in_proj_ba(hidden)[0]
        x, z = qkvz.split([weights.shape.channels, weights.shape.value_heads * weights.shape.V], -1)
        b, a = ba.chunk(2, -1)
        for i, request in enumerate(requests[:count]):
            rows = slice(int(offsets[i]), int(offsets[i + 1]))
            z_rows = z[rows].unflatten(-1, (-1, weights.shape.V))
            _, normed, states = outputs(weights, request, x[rows], a[rows], b[rows], z_rows)
            with torch.inference_mode():
                expected = layer.out_proj(normed.to(dtype).flatten(-2))[0].double()
            close(got[rows, None], expected[:, None], dtype)
            close(layer.kv_cache[1][request.slots], states[-1:], dtype)
            request.keep(x[rows], states, lengths[i])
            computed[i] += lengths[i]

    step([70, 9])
    step([1, 1, 66])
    step([1, 1, 1])
