"""gatedelta.sglang with SGLang itself on a CPU: its hooks, dispatcher and backend.

SGLang's Python files import on a machine without a GPU. Its kernel of the gates does not run there: a few lines of
torch stand in for it. test_plugin_sglang.py runs this file in a Python of its own.
"""

from __future__ import annotations

from types import SimpleNamespace

import gatedelta.sglang as plugin
import installed
import pytest
import torch
from oracle import Shape, Weights
from sglang_engine import ROWS, Engine, Pool


@pytest.fixture
def mamba(monkeypatch):
    """The arguments that choose kernels."""
    import sglang.srt.runtime_context as context

    arguments = SimpleNamespace(
        linear_attn_backend="gatedelta", linear_attn_decode_backend=None, linear_attn_prefill_backend=None,
        linear_attn_verify_backend=None,
    )  # fmt: skip
    group = SimpleNamespace(
        mamba=arguments, deterministic=SimpleNamespace(enable_deterministic_inference=False),
        features=SimpleNamespace(enable_mis=False),
    )  # fmt: skip
    import sglang.srt.layers.attention.linear.utils as utils
    from sglang.srt.layers.attention.linear import gdn_backend

    for module in (context, utils, gdn_backend):
        monkeypatch.setattr(module, "get_exec", lambda: group)
    return arguments


@pytest.fixture
def tree(mamba):
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = attention_registry.attn_backend_wrapper
    plugin.register()
    HookRegistry.apply_hooks()
    assert attention_registry.attn_backend_wrapper is not original
    with pytest.raises(AttributeError):  # our hook has run when SGLang reads the runner
        attention_registry.attn_backend_wrapper(SimpleNamespace(), None)
    gdn_backend.ForwardMetadata = ForwardMetadata
    yield gdn_backend
    plugin.unregister()
    attention_registry.attn_backend_wrapper = original
    HookRegistry._patched.discard(plugin._HOOK)


def make(tree, drafts=0, overlap=True):
    """SGLang's backend without its constructor, which wants a whole model; with its dispatcher."""
    from sglang.srt.layers.attention.linear.utils import resolve_linear_attn_backends

    backends = resolve_linear_attn_backends()
    weights = Weights(Shape(), torch.float32, "cpu", torch.Generator().manual_seed(0))
    pool = Pool(weights.shape, torch.float32, "cpu", drafts, overlap)
    backend = tree.GDNAttnBackend.__new__(tree.GDNAttnBackend)
    backend.kernel_dispatcher = tree.GDNKernelDispatcher(backends.decode, backends.prefill, backends.verify)
    backend.gatedelta_decodes = backend.gatedelta_extends = backend.gatedelta_verifies = True
    backend.requires_contiguous_prefill_state, backend.mis_metadata = False, None
    backend._use_strided_target_verify_qkv = True
    backend.verify_intermediate_state_indices = torch.arange(ROWS, dtype=torch.int32)
    backend.req_to_token_pool = pool

    def gates(layer, a, b):
        g = -layer.A_log.exp() * torch.nn.functional.softplus(a + layer.dt_bias)
        return g[None], b.sigmoid()[None]

    backend._prefill_gates = gates
    return Engine(backend, tree, weights, pool, drafts)


def test_arguments_take_the_word(tree):
    from sglang.srt.arg_groups.choices import LINEAR_ATTN_KERNEL_BACKEND_CHOICES

    assert LINEAR_ATTN_KERNEL_BACKEND_CHOICES.count("gatedelta") == 1


def test_entry_point(monkeypatch, tmp_path):
    from sglang.srt import plugins

    monkeypatch.syspath_prepend(installed.write(tmp_path))
    found = plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP)
    assert found["gatedelta"] == (plugin.register, "gatedelta")


def test_dispatcher(tree, mamba):
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

    kernels = make(tree).backend.kernel_dispatcher
    for kernel in (kernels.decode_kernel, kernels.extend_kernel, kernels.verify_kernel):
        assert type(kernel).__name__ == "GateDeltaKernel" and isinstance(kernel, LinearAttnKernelBase)
    assert type(kernels.tree_verify_kernel).__name__ == "TritonGDNKernel" and kernels.supports_packed_decode
    assert not kernels.extend_uses_state_checkpoints and kernels.target_verify_supports_strided_qkv(None)
    mamba.linear_attn_verify_backend = "triton"
    kernels = make(tree).backend.kernel_dispatcher
    assert type(kernels.verify_kernel).__name__ == "TritonGDNKernel"
    mamba.linear_attn_backend = "another"
    with pytest.raises(ValueError, match="Unsupported GDN decode backend"):
        make(tree)


def test_steps(tree):
    engine = make(tree)
    first, second, third = (engine.request() for _ in range(3))
    engine.extend([(first, 70), (second, 2)])
    engine.decode([first, second], padding=(-1, 0))
    engine.extend([(third, 130, 128, engine.free.pop()), (first, 65), (second, 1)], padding=2)
    engine.decode([third, second, first])


@pytest.mark.parametrize("overlap", [True, False])
def test_drafts(tree, overlap):
    engine = make(tree, drafts=4, overlap=overlap)
    first, second = (engine.request() for _ in range(2))
    engine.extend([(first, 66), (second, 5)])
    engine.verify([(first, 3), (second, 1)])
    engine.verify([(first, 2), (second, 4)], padding=1)
    engine.decode([first, second])
