"""gatedelta.sglang on a stand-in of SGLang: registration, refusals, and steps as SGLang schedules them, CPU and GPU."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from tools import dev_paths as paths

torch = pytest.importorskip("torch")

import gatedelta.sglang as plugin  # noqa: E402
from gatedelta._plugins import limits  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

STAND_INS = paths.ROOT / "tests" / "python" / "stand_ins"
from oracle import Shape, Weights, shape_for  # noqa: E402
from sglang_engine import Engine, Pool  # noqa: E402

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
LINEAR = "sglang.srt.layers.attention.linear"


@pytest.fixture
def engine_package(monkeypatch):
    """The stand-in, with the plug-in loaded as SGLang loads it; everything undone."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STAND_INS / "packages"))
    importlib.invalidate_caches()
    plugin.register()
    plugin.register()
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    registry.apply_hooks()
    yield SimpleNamespace(
        mamba=importlib.import_module("sglang.srt.runtime_context").get_exec().mamba,
        choices=importlib.import_module("sglang.srt.arg_groups.choices").LINEAR_ATTN_KERNEL_BACKEND_CHOICES,
        wrapper=lambda runner: importlib.import_module(
            "sglang.srt.layers.attention.attention_registry"
        ).attn_backend_wrapper(runner, None),
        tree=lambda: importlib.import_module(f"{LINEAR}.gdn_backend"),
        hooks=registry._hooks,
    )
    plugin.unregister()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def make_runner(shape, dtype=torch.float32, device="cpu", drafts=0, overlap=True, chunk=64):
    pool = Pool(shape, dtype, device, drafts, overlap)
    return SimpleNamespace(req_to_token_pool=pool, device=device, mamba_chunk_size=chunk, dtype=dtype)


def make(package, device="cpu", dtype=torch.float32, drafts=0, overlap=True):
    shape = shape_for(device, dtype)
    package.mamba.linear_attn_backend = "gatedelta"
    runner = make_runner(shape, dtype, device, drafts, overlap)
    weights = Weights(shape, dtype, device, torch.Generator().manual_seed(0))
    return Engine(package.wrapper(runner), package.tree(), weights, runner.req_to_token_pool, drafts)


def test_does_nothing_unless_asked(engine_package):
    backend = engine_package.wrapper(make_runner(Shape()))
    assert type(backend) is engine_package.tree().GDNAttnBackend and not plugin._places
    assert backend.kernel_dispatcher.decode_kernel == "triton"
    assert engine_package.choices == ["triton", "flashinfer", "gatedelta"]


def test_registration_and_undo(engine_package):
    engine = make(engine_package)
    tree, kernels = engine_package.tree(), engine.backend.kernel_dispatcher
    assert type(engine.backend).__name__ == "GateDeltaAttnBackend"
    assert not engine.backend.requires_contiguous_prefill_state
    ours = type(kernels.decode_kernel)
    assert ours.__name__ == "GateDeltaKernel" and isinstance(kernels.decode_kernel, ours.__mro__[2])
    assert kernels.decode_kernel is kernels.extend_kernel is kernels.verify_kernel
    plugin.install()
    assert type(engine.backend) is tree.GDNAttnBackend, "once is enough"
    plugin.unregister()
    plugin.unregister()
    assert tree.GDNAttnBackend.__name__ == "GDNAttnBackend" and engine_package.choices == ["triton", "flashinfer"]
    assert not any(engine_package.hooks.values())


def test_one_mode_alone(engine_package):
    engine_package.mamba.linear_attn_prefill_backend = "gatedelta"
    backend = engine_package.wrapper(make_runner(Shape()))
    assert backend.kernel_dispatcher.decode_kernel == backend.kernel_dispatcher.verify_kernel == "triton"
    assert backend.forward_decode(None, None, None, None, None) == "triton"
    engine_package.mamba.linear_attn_prefill_backend, engine_package.mamba.linear_attn_decode_backend = (
        None,
        "gatedelta",
    )
    engine_package.mamba.linear_attn_verify_backend = "triton"
    backend = engine_package.wrapper(make_runner(Shape()))
    assert backend.kernel_dispatcher.extend_kernel == backend.kernel_dispatcher.verify_kernel == "triton"
    assert backend._convolve_prefill(None, None, None, None, None) == "triton"
    assert backend.requires_contiguous_prefill_state
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: True))
    assert backend.forward_extend(None, batch, None, None, None) == "triton"


def test_words_of_others_are_refused_by_sglang(engine_package):
    engine_package.mamba.linear_attn_decode_backend = "gatedelta"
    engine_package.mamba.linear_attn_backend = "another"
    with pytest.raises(ValueError, match="Unsupported GDN prefill backend"):
        engine_package.wrapper(make_runner(Shape()))


def test_register_imports_no_kernels(run_python):
    code = (
        "import sys, gatedelta.sglang as plugin\n"
        "print('sglang' in sys.modules); plugin.register()\n"
        f"print('torch' in sys.modules, '{LINEAR}.gdn_backend' in sys.modules)"
    )
    assert run_python("-c", code, path=STAND_INS / "packages").stdout.split() == ["False", "False", "False"]


def test_without_sglang(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gatedelta.sglang.register\(\) needs SGLang, which is not installed"):
        plugin.register()


def test_refusals(engine_package):
    engine_package.mamba.linear_attn_backend = "gatedelta"
    with pytest.raises(ValueError, match="linear attention backend gatedelta: the convolution has 5 taps, must have 2"):
        engine_package.wrapper(make_runner(Shape(taps=5)))
    with pytest.raises(ValueError, match="states are tracked every 128 tokens, must be 64"):
        engine_package.wrapper(make_runner(Shape(), chunk=128))
    with pytest.raises(ValueError, match="head sizes are K = 100, V = 32; multiples of 16 up to 256 are taken"):
        engine_package.wrapper(make_runner(Shape(K=100)))
    with pytest.raises(ValueError, match=r"dtype is torch.float64; float32, bfloat16 and float16 are taken"):
        engine_package.wrapper(make_runner(Shape(), torch.float64))
    with pytest.raises(ValueError, match="device is meta; cpu and cuda are taken"):
        engine_package.wrapper(make_runner(Shape(), device="meta"))
    kernel = make(engine_package).backend.kernel_dispatcher.decode_kernel
    x = torch.zeros(1, 3, 2, 32)
    with pytest.raises(NotImplementedError, match="state checkpoints by FlashInfer's plan are not supported"):
        kernel.extend(x, x, x, x, x, ssm_states=x, cache_indices=x, query_start_loc=x, num_state_checkpoints=2)
    with pytest.raises(NotImplementedError, match="ReplaySSM's ring is not supported"):
        kernel.packed_decode(x, x, x, A_log=x, dt_bias=x, scale=1, ssm_states=x, cache_indices=x, num_v_heads=2,
                             head_v_dim=32, replayssm_d=x)  # fmt: skip
    verify = {"ssm_states": x, "cache_indices": x, "query_start_loc": x[0, :, 0, 0], "intermediate_states_buffer": x,
              "intermediate_state_indices": x, "cache_steps": 2}  # fmt: skip
    with pytest.raises(NotImplementedError, match="trees of drafts are not supported"):
        kernel.target_verify(x, x, x, x, x, x, x, **verify, retrieve_parent_token=x)
    with pytest.raises(NotImplementedError, match="3 tokens of 2 requests: windows must have one length"):
        kernel.target_verify(x, x, x, x, x, x, x, **verify)


@pytest.mark.parametrize("word", ["linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend"])
def test_gpus(engine_package, monkeypatch, word):
    setattr(engine_package.mamba, word, "gatedelta")
    with FakeTensorMode():
        runner = make_runner(Shape(K=64, V=256), torch.bfloat16, "cuda")
        monkeypatch.setattr(limits, "_gpu_refusal", lambda index: "why not")
        with pytest.raises(ValueError, match="linear attention backend gatedelta: why not"):
            engine_package.wrapper(runner)
        monkeypatch.setattr(limits, "_gpu_refusal", lambda index: None)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            engine_package.wrapper(make_runner(Shape(K=64, V=256), dtype, "cuda"))


def test_refuses_versions_it_does_not_know(engine_package, monkeypatch):
    engine_package.mamba.linear_attn_backend = "gatedelta"
    monkeypatch.delattr(engine_package.tree().GDNAttnBackend, "_convolve_prefill")
    with pytest.raises(
        RuntimeError, match=r"SGLang \(0.5.23\) is not known, .* has no GDNAttnBackend._convolve_prefill"
    ):
        engine_package.wrapper(make_runner(Shape()))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_prefills_and_decodes(engine_package, device, dtype):
    engine = make(engine_package, device, dtype)
    first, second, third = (engine.request() for _ in range(3))
    engine.extend([(first, 70), (second, 2)])
    engine.decode([first, second], padding=(-1, 0))
    engine.extend([(third, 130), (first, 65), (second, 1)], padding=2)  # a decode may be among them
    engine.decode([third, second, first])
    assert engine.backend.forward_decode(engine.layer, None, torch.zeros(0, 8), None, None).shape[1] == 0


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_tracked_states(engine_package, device, dtype):
    engine = make(engine_package, device, dtype)
    first, second, third = (engine.request() for _ in range(3))
    engine.extend([(first, 200, 128, engine.free.pop()), (second, 40), (third, 70, 64, engine.free.pop())])
    engine.extend([(second, 9, 5, engine.free.pop()), (first, 65, 64, engine.free.pop())])  # 5: what it starts from


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("overlap", [True, False])
def test_drafts(engine_package, device, dtype, overlap):
    engine = make(engine_package, device, dtype, drafts=4, overlap=overlap)
    first, second, third = (engine.request() for _ in range(3))
    engine.extend([(first, 66), (second, 5)])
    engine.verify([(first, 3), (second, 1)])
    engine.extend([(third, 3)])
    engine.verify([(third, 4), (first, 1), (second, 2)], padding=2)
    engine.decode([first, third])
    engine.verify([(first, 2), (third, 4)])


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_drafts_in_rows_of_their_own(engine_package, device, dtype):
    """The kernel alone, as SGLang calls it where a request's row of the buffer is not its place in the batch."""
    engine = make(engine_package, device, dtype, drafts=4)
    requests = [engine.request() for _ in range(3)]
    engine.extend([(request, 20 + i) for i, request in enumerate(requests)])
    kernel, shape, cache = engine.backend.kernel_dispatcher.verify_kernel, engine.weights.shape, engine.pool.cache

    def randn(*size):
        return torch.randn(*size, generator=engine.generator).to(device, dtype)

    q, k, v = randn(1, 16, shape.key_heads, shape.K), randn(1, 16, shape.key_heads, shape.K), randn(1, 16, 4, shape.V)
    slots = engine.int32([*(request.slots[0] for request in requests), -1])
    arguments = {
        "A_log": engine.weights.A_log, "dt_bias": engine.weights.dt_bias, "q": q, "k": k, "v": v, "a": randn(16, 4),
        "b": randn(16, 4), "ssm_states": cache.temporal, "cache_indices": slots, "cache_steps": 4,
        "query_start_loc": engine.offsets([4] * 4), "intermediate_states_buffer": cache.intermediate_ssm,
        "retrieve_parent_token": None,
    }  # fmt: skip
    o = kernel.target_verify(**arguments, intermediate_state_indices=engine.int32([0, 1, 2, 3]))
    states = cache.intermediate_ssm[:3].clone()
    cache.intermediate_ssm.fill_(torch.nan)
    again = kernel.target_verify(**arguments, intermediate_state_indices=engine.int32([6, 0, 2, 7]), stable_rows=True)
    assert torch.equal(o, again) and torch.equal(cache.intermediate_ssm[[6, 0, 2]], states)
    assert cache.intermediate_ssm[[1, 3, 4, 5, 7]].isnan().all()


def test_decode_by_the_kernel_alone(engine_package):
    """q, k and v apart, as SGLang calls kernels without a packed form; deterministic inference."""
    importlib.import_module("sglang.srt.runtime_context").get_exec().deterministic.enable_deterministic_inference = True
    engine = make(engine_package)
    requests = [engine.request() for _ in range(3)]
    engine.extend([(request, 20 + i) for i, request in enumerate(requests)])
    kernel, weights, pool = engine.backend.kernel_dispatcher, engine.weights, engine.pool.cache.temporal
    assert kernel.decode_kernel.batch_invariant
    x, a, b = engine.tokens(3)
    common = {
        "A_log": weights.A_log, "dt_bias": weights.dt_bias,
        "cache_indices": engine.int32([request.slots[0] for request in requests]),
    }  # fmt: skip
    packed, apart = pool.clone(), pool.clone()
    o = kernel.packed_decode(x, a, b, scale=32**-0.5, ssm_states=packed, num_v_heads=4, head_v_dim=32, **common)
    q, k, v = x[None].split([64, 64, 128], -1)
    q, k, v = (t.unflatten(-1, (-1, 32)) for t in (q, k, v))
    again = kernel.decode(q, k, v, a, b, ssm_states=apart, query_start_loc=engine.offsets([1, 1, 1]), **common)
    assert torch.equal(o, again) and torch.equal(packed.nan_to_num(9), apart.nan_to_num(9))


@needs_gpu
def test_graph(engine_package):
    """A captured decode step: slots are read at every replay."""
    engine = make(engine_package, "cuda", torch.bfloat16)
    requests = [engine.request() for _ in range(4)]
    engine.extend([(request, 60 + 7 * i) for i, request in enumerate(requests)])
    run, graph, captured = engine.run_decode, torch.cuda.CUDAGraph(), []

    def replay(*rows):
        tensors = [engine.backend.forward_metadata.mamba_cache_indices, *rows]
        if not captured:
            cache = engine.pool.cache
            pools = cache.temporal.clone(), cache.conv[0].clone()
            run(*rows)
            with torch.cuda.graph(graph):
                out = run(*rows)
            for pool, before in zip((cache.temporal, cache.conv[0]), pools):
                pool.copy_(before)
            captured.extend((tensors, out))
        for buffer, value in zip(captured[0], tensors):
            buffer.copy_(value)
        graph.replay()
        return captured[1].clone()

    engine.run_decode = replay
    for batch in (requests, requests[:3], requests[1:]):
        engine.decode(batch, padding=(-1,) * (4 - len(batch)))


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_with_sglang_itself(run_python):
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(STAND_INS / "real_sglang.py"))
