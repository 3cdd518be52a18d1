"""transformers' GDN models on a GPU: against float32 on the CPU, packed, cached, without waits and copies."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen4_exp", reason="this transformers lacks the models")

import gatedelta.transformers as plugin  # noqa: E402
from gatedelta._plugins import limits  # noqa: E402
from torch.utils._triton import has_triton  # noqa: E402
from transformers_models import CONFIGS, build, error, packed_mask, tokens  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or limits.device_refusal(torch.device("cuda", 0)) is not None,
    reason="no GPU, or none that is supported",
)

transformers.logging.set_verbosity_error()
# Every token takes all 4 experts: which ones it takes must not hang on a rounding in bf16.
SIZES = {
    "hidden_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts_per_tok": 4,
}  # fmt: skip
OTHER_HEADS = {"linear_key_head_dim": 48, "linear_value_head_dim": 64}
LENGTHS = [50, 3, 97]


@pytest.fixture(autouse=True)
def undo():
    yield
    plugin.unpatch()


def pair(family, **sizes):
    """A bf16 model on the GPU, and the same weights in float32 on the CPU."""
    model = build(family, **{**SIZES, **sizes}).bfloat16()
    return copy.deepcopy(model).cuda(), model.float()


def run_packed(model, ids, packed):
    """Logits and gradients of sequences: as a pack, or each for itself."""
    model.zero_grad()
    device = model.device
    row = torch.cat([ids[i, :n] for i, n in enumerate(LENGTHS)])[None].to(device)
    if packed:
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device)
        mask = packed_mask(LENGTHS, model.dtype)
        mask["full_attention"] = mask["full_attention"].to(device)
        logits = model(row, position_ids=positions, attention_mask=mask, use_cache=False).logits
    else:
        logits = torch.cat([model(part, use_cache=False).logits for part in row.split(LENGTHS, 1)], 1)
    logits.float().square().mean().backward()
    gradients = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return logits.detach().float().cpu(), gradients.cpu()


@pytest.mark.parametrize(("family", "sizes"), [*((family, {}) for family in CONFIGS), ("qwen3_5", OTHER_HEADS)])
def test_a_training_step(family, sizes):
    """Qwen4-exp's sparse attention compresses across a pack's boundaries: its sequences run one by one."""
    on_gpu, on_cpu = pair(family, **sizes)
    ids = tokens(3, 100)
    want = run_packed(on_cpu, ids, packed=False)
    theirs = run_packed(on_gpu, ids, packed=False)  # by whatever transformers finds on this machine
    plugin.patch()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "gatedelta leaves")
        got = run_packed(on_gpu, ids, packed=family != "qwen4_exp")
    for ours, other, truth in zip(got, theirs, want):
        assert error(ours, truth) < 2 * error(other, truth) + 1e-3


@pytest.mark.parametrize(("family", "sizes"), [*((family, {}) for family in CONFIGS), ("qwen3_5", OTHER_HEADS)])
def test_cached_steps(family, sizes):
    """A prompt and single tokens, each with the logits that the whole sequence gives."""
    on_gpu, on_cpu = pair(family, **sizes)
    ids = tokens(2, 80)
    with torch.no_grad():
        want = on_cpu(ids, use_cache=False).logits
        theirs = on_gpu(ids.cuda(), use_cache=False).logits.cpu()
        plugin.patch()
        cache = transformers.DynamicCache(config=on_gpu.config)
        parts = [ids[:, :40], ids[:, 40:70], *ids[:, 70:].split(1, 1)]
        got = torch.cat([on_gpu(part.cuda(), past_key_values=cache).logits for part in parts], 1).cpu()
    assert error(got, want) < 2 * error(theirs, want) + 1e-3


def test_greedy_tokens_in_float32():
    """Prompts and single tokens in float32 run here: on the same states."""
    model, ids = build("qwen3_5", **SIZES).cuda(), tokens(2, 40).cuda()
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **options)
    plugin.patch()
    got = model.generate(ids, **options)
    assert torch.equal(got, want)


def gdn_layer(family):
    model = build(family, **SIZES)
    layer = next(module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet"))
    return layer.bfloat16().cuda(), model.config


def kernels_of(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("fused", [False, True])
def test_no_wait_and_no_kernel_but_products_and_ours(fused):
    plugin.patch()
    layer, config = gdn_layer("qwen3_5")
    if fused:
        assert plugin.fuse_projections(layer) == 1
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, 130, 400], dtype=torch.int32, device="cuda")
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        for _ in range(2):
            layer(x)
            layer(x, cu_seq_lens_q=offsets)
            layer(x[:, :1], cache_params=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x)
            layer(x, cu_seq_lens_q=offsets)
            layer(x[:, :1], cache_params=cache)
            with torch.enable_grad():
                layer(x, cu_seq_lens_q=offsets).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for call in (lambda: layer(x), lambda: layer(x[:, :1], cache_params=cache)):
            names = kernels_of(call)
            assert names
            assert not [name for name in names if "elementwise" in name or "Memcpy" in name or "CatArray" in name]


@pytest.mark.parametrize("family", CONFIGS)
def test_fused_projections(family):
    """Single tokens with the logits of a product each, as far as bf16 goes."""
    on_gpu, on_cpu = pair(family)
    ids = tokens(2, 80)
    plugin.patch()

    def run(model):
        cache = transformers.DynamicCache(config=model.config)
        parts = [ids[:, :70], *ids[:, 70:].split(1, 1)]
        return torch.cat([model(part.to(model.device), past_key_values=cache).logits for part in parts], 1).cpu()

    with torch.no_grad():
        want, separate = run(on_cpu), run(on_gpu)
        assert plugin.fuse_projections(on_gpu) == 2
        got = run(on_gpu)
    assert error(got, want) < 2 * error(separate, want) + 1e-3


@pytest.mark.parametrize("fused", [False, True])
def test_a_captured_step(fused):
    plugin.patch()
    layer, config = gdn_layer("qwen3_5")
    if fused:
        assert plugin.fuse_projections(layer) == 1
    x = torch.randn(2, 71, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        caches = [transformers.DynamicCache(config=config) for _ in range(2)]
        for cache in caches:
            layer(x[:, :70], cache_params=cache)
        want = layer(x[:, 70:], cache_params=caches[0])
        states = [*caches[1].layers[0].conv_states.values(), *caches[1].layers[0].recurrent_states.values()]
        first = [state.clone() for state in states]
        step = x[:, 70:].clone()
        layer(step, cache_params=caches[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer(step, cache_params=caches[1])
        for state, value in zip(states, first):
            state.copy_(value)
        graph.replay()
    assert torch.equal(got, want)


@pytest.mark.skipif(not has_triton(), reason="torch compiles for GPUs with triton")
def test_compiled_layer():
    plugin.patch()
    layer, config = gdn_layer("qwen3_5")
    x = torch.randn(2, 70, 256, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in (layer, compiled):
            layer.zero_grad()
            y = run(x)
            y.float().square().sum().backward()
            gradients = torch.cat([p.grad.float().flatten() for p in layer.parameters()])
            with torch.no_grad():
                cache = transformers.DynamicCache(config=config)
                run(x, cache_params=cache)
                results.append((y.detach(), gradients, run(x[:, :1], cache_params=cache)))
    for want, got in zip(*results):
        assert error(got, want) < 1e-2
