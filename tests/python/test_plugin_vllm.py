"""gatedelta.vllm on a stand-in of vLLM: registration, refusals, and steps as vLLM schedules them, on CPU and GPU."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tools import dev_paths as paths

torch = pytest.importorskip("torch")

import gatedelta.vllm as plugin  # noqa: E402
from gatedelta._plugins import limits  # noqa: E402

STAND_INS = paths.ROOT / "tests" / "python" / "stand_ins"
from oracle import Shape, Weights, shape_for  # noqa: E402
from vllm_engine import Engine, layer_config, load, vllm_config  # noqa: E402

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or limits.device_refusal(torch.device("cuda", 0)) is not None,
    reason="no GPU, or none that is supported",
)
DEVICES = [
    pytest.param("cpu", torch.float32, id="cpu-float32"), pytest.param("cpu", torch.bfloat16, id="cpu-bfloat16"),
    pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=needs_gpu),
    pytest.param("cuda", torch.float16, id="cuda-float16", marks=needs_gpu),
    pytest.param("cuda", torch.float32, id="cuda-float32", marks=needs_gpu),
]  # fmt: skip


@pytest.fixture
def tree(monkeypatch):
    """The stand-in's file of the layer, imported after register(), and everything undone."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STAND_INS / "packages"))
    importlib.invalidate_caches()
    plugin.register()
    plugin.register()
    yield importlib.import_module("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn")
    plugin.unregister()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def make(tree, device="cpu", dtype=torch.float32, drafts=0, normed=True, **changes):
    shape = shape_for(device, dtype)
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        tree.current_platform.device_name, tree.current_platform.capability = "cuda", 10 * major + minor
    weights = Weights(shape, dtype, device, torch.Generator().manual_seed(0))
    layer = tree.QwenGatedDeltaNetAttention(layer_config(shape, **changes), vllm_config(dtype), prefix="layer")
    load(layer, weights)
    return Engine(layer, tree, weights, drafts, normed)


def test_does_nothing_unless_asked(tree):
    layer = tree.QwenGatedDeltaNetAttention(layer_config(Shape()), vllm_config(asked=False))
    assert layer._forward_core(None, None, None, None) == "_forward_core"
    assert layer._forward_core_fused_norm(None, None, None, None, None) == "_forward_core_fused_norm"
    assert layer._warmup_prefill_kernels(None, 0) == "_warmup_prefill_kernels"
    assert layer.get_kv_cache_spec(None) == tree.MambaSpec()
    assert layer._forward_method.__name__ == "forward_cpu" and not layer.enable_fused_gdn_spec_decode


def test_registration(tree):
    from vllm.model_executor.custom_op import op_registry_oot

    (name, ours), *others = op_registry_oot.items()
    assert name == "QwenGatedDeltaNetAttention" and issubclass(ours, tree.QwenGatedDeltaNetAttention) and not others
    layer = make(tree).layer
    assert isinstance(layer, ours) and layer.enable_fused_gdn_spec_decode
    assert layer._forward_method.__name__ == "forward_cuda"
    assert layer.get_kv_cache_spec(None) == tree.MambaSpec(512, 1, 64)
    config = layer_config(Shape())
    assert not tree.QwenGatedDeltaNetAttention(config, vllm_config(), "", True).enable_fused_gdn_spec_decode
    plugin.unregister()
    plugin.unregister()
    assert not op_registry_oot
    assert type(tree.QwenGatedDeltaNetAttention(config, vllm_config())) is tree.QwenGatedDeltaNetAttention
    plugin.register()  # the file is there already
    assert len(op_registry_oot) == 1


def test_register_before_the_import_touches_nothing(run_python):
    code = (
        "import sys, gatedelta.vllm as plugin\n"
        "before = list(sys.meta_path); plugin.register(); plugin.register()\n"
        "print('torch' in sys.modules, 'vllm' in sys.modules, len(sys.meta_path) - len(before))\n"
        "plugin.unregister(); print(sys.meta_path == before)"
    )
    assert run_python("-c", code, path=STAND_INS / "packages").stdout.split() == ["False", "False", "1", "True"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_entry_points():
    import tomllib

    points = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert sorted(points) == ["sglang.srt.plugins", "vllm.general_plugins"]
    for group in points.values():
        ((name, target),) = group.items()
        module, _, function = target.partition(":")
        assert name == "gatedelta" and callable(getattr(importlib.import_module(module), function))


def test_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gatedelta.vllm.register\(\) needs vLLM, which is not installed"):
        plugin.register()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "the convolution's activation is 'gelu', must be 'silu' or 'swish'"),
        ({"linear_conv_kernel_dim": 5}, "the convolution has 5 taps, must have 2 to 4"),
    ],
)
def test_refuses_layers(tree, changes, message):
    with pytest.raises(ValueError, match=f"gdn_prefill_backend=gatedelta: {message}"):
        make(tree, **changes)


def test_refuses_devices(tree, monkeypatch):
    platform, config = tree.current_platform, vllm_config(torch.float32)

    def refused(message):
        with pytest.raises(ValueError, match=message):
            tree.QwenGatedDeltaNetAttention(layer_config(Shape(K=K, V=K)), config)

    K = 128
    platform.device_name = "xpu"
    refused("it runs on NVIDIA GPUs and CPUs, not on xpu")
    platform.device_name, platform.capability = "cuda", 75
    refused("it needs a GPU of compute capability 8.0 or later")
    platform.capability = 80
    monkeypatch.setattr(limits, "build_refusal", lambda: "built without CUDA")
    refused("built without CUDA")
    monkeypatch.setattr(limits, "build_refusal", lambda: None)
    for K in (100, 272):
        refused(f"head sizes are K = {K}, V = {K}; multiples of 16 up to 256 are taken")
    K, config.model_config.dtype = 64, torch.float64
    refused("dtype is torch.float64; float32, bfloat16 and float16 are taken")
    platform.device_name, config.cache_config.use_replayssm = "cpu", True
    refused("ReplaySSM keeps tokens instead of states, which is not supported")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_takes_gpus(tree, monkeypatch, capability, dtype):
    monkeypatch.setattr(limits, "build_refusal", lambda: None)
    tree.current_platform.device_name, tree.current_platform.capability = "cuda", capability
    for K, V in ((128, 128), (64, 256), (16, 48)):
        config = layer_config(Shape(K=K, V=V))
        assert tree.QwenGatedDeltaNetAttention(config, vllm_config(dtype)).runs_gatedelta


def test_refuses_versions_it_does_not_know(tree, monkeypatch):
    monkeypatch.delattr(tree.QwenGatedDeltaNetAttention, "_forward_core_fused_norm")
    plugin.unregister()
    monkeypatch.setattr(plugin, "_METHODS", (*plugin._METHODS, "_next_door"))
    plugin.register()
    with pytest.raises(ValueError, match=r"this version of vLLM \(0.32.0\) is not known, its layer has no _next_door"):
        make(tree)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(("normed", "dim_first"), [(True, False), (False, True)])
def test_prefills_and_decodes(tree, device, dtype, normed, dim_first):
    tree.conv_dim_first = dim_first
    engine = make(tree, device, dtype, normed=normed)
    first, second, third = (engine.request() for _ in range(3))
    engine.plain([], [(first, 70), (second, 2)])
    engine.plain([first, second], [], padding=2)
    engine.plain([second], [(third, 130), (first, 65)])  # first goes on with another part of its prompt
    engine.plain([third, first, second], [])
    engine.plain([first], [(engine.request(), 1), (second, 3)], padding=2)
    engine.plain([first, second, third], [], padding=1)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("normed", [True, False])
def test_drafts(tree, device, dtype, normed):
    engine = make(tree, device, dtype, drafts=3, normed=normed)
    first, second, third = (engine.request() for _ in range(3))
    engine.plain([], [(first, 66), (second, 5)])
    engine.drafts([(first, 4, 3), (second, 4, 1)])
    engine.drafts([(first, 4, 4), (second, 2, 2)], padding=2)  # ragged, and padded for a graph
    engine.drafts([(second, 4, 2), (first, 1, 1)], [(third, 80)])  # beside a prefill
    engine.drafts([(second, 3, 3), (third, 4, 2)], [(first, 1)])  # a decode counts as a prefill there
    engine.drafts([(first, 4, 4), (second, 4, 4), (third, 4, 1)])


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_checkpoints(tree, device, dtype):
    engine = make(tree, device, dtype)
    first, second, third, fourth = (engine.request() for _ in range(4))
    engine.plain([], [(first, 200, 128, engine.free.pop()), (second, 40, 0, 0)])
    engine.plain([second], [(third, 64, 64, engine.free.pop()), (first, 130, 64, engine.free.pop()), (fourth, 9, 0, 0)])


@pytest.mark.parametrize("taps", [2, 3])
def test_short_convolutions_and_sigmoid_gates(tree, taps):
    shape, generator = Shape(taps=taps), torch.Generator().manual_seed(0)
    weights = Weights(shape, torch.float32, "cpu", generator)
    layer = tree.QwenGatedDeltaNetAttention(layer_config(shape), vllm_config(), prefix="layer")
    load(layer, weights)
    layer.norm.activation = "sigmoid"
    engine = Engine(layer, tree, weights, drafts=2)
    request = engine.request()
    engine.plain([], [(request, 3)])
    engine.drafts([(request, 3, 2)])
    engine.drafts([(request, 2, 1)])
    engine.plain([request], [])


def test_batch_invariant(tree):
    tree.envs.VLLM_BATCH_INVARIANT = True
    engine = make(tree, drafts=2)
    first, second = engine.request(), engine.request()
    engine.plain([], [(first, 66), (second, 5)])
    engine.plain([first], [(second, 3)])
    engine.drafts([(first, 3, 2), (second, 3, 1)])


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_profile_run(tree, device, dtype):
    """Without metadata vLLM measures memory: the call computes a prefill of that size, once, and writes nothing."""
    engine = make(tree, device, dtype)
    x, a, b, z = engine.tokens(300)
    tree.forward_context.attn_metadata = None
    out = torch.full_like(z, torch.nan)
    for _ in range(2):
        engine.layer._forward_core_fused_norm(x, b, a, z, out)
    assert out.isnan().all() and engine.layer._prefill_kernels_warmed_up


@needs_gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_graph(tree, drafts):
    """A captured step of decodes, or of windows: what vLLM writes into its buffers is read at every replay."""
    engine = make(tree, "cuda", torch.bfloat16, drafts=drafts)
    requests = [engine.request() for _ in range(4)]
    engine.plain([], [(request, 60 + 7 * i) for i, request in enumerate(requests)])
    graph, captured = torch.cuda.CUDAGraph(), []

    def run(metadata, rows):
        x, a, b, z = rows
        out = torch.zeros_like(z)
        tree.forward_context.attn_metadata = {"layer": metadata}
        engine.layer._forward_core_fused_norm(x, b, a, z, out)
        return out

    def replay(metadata, rows):
        tensors = [value for value in vars(metadata).values() if torch.is_tensor(value)] + rows
        if not captured:
            pools = [pool.clone() for pool in engine.layer.kv_cache]
            run(metadata, rows)
            with torch.cuda.graph(graph):
                out = run(metadata, rows)
            for pool, before in zip(engine.layer.kv_cache, pools):
                pool.copy_(before)
            captured.extend((tensors, out))
        for buffer, value in zip(captured[0], tensors):
            buffer.copy_(value)
        graph.replay()
        return captured[1].clone()

    engine.call = replay
    for batch in (requests, requests[:3], requests[1:]):
        if drafts:  # of 8 tokens, however they are spread; the last request may have none
            lengths = [2] * 4 if len(batch) == 4 else [4, 1, 3]
            windows = [(request, length, 1 + length // 3) for request, length in zip(batch, lengths)]
            engine.drafts(windows, padding=4 - len(batch))
        else:
            engine.plain(batch, [], padding=4 - len(batch))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_with_vllm_itself(run_python):
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(STAND_INS / "real_vllm.py"))
