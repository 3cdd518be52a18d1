"""GateDelta as the kernels of vLLM's Gated DeltaNet layer, out of tree and without a patch.

``register()`` is vLLM's entry point ``vllm.general_plugins``: vLLM calls it in each of its processes. It does nothing
to an engine that is not configured for GateDelta:

    vllm serve MODEL --additional-config '{"gdn_prefill_backend": "gatedelta"}'

A configured engine gets a subclass of vLLM's layer (Qwen3-Next, Qwen3.5, Qwen4-exp). Everything between the layer's
projections runs here, prefill, decode and drafts: convolution, rule and, where the layer has a hook for it, the gated
norm. States are read and written in vLLM's own pools. Index tensors are vLLM's; nothing waits for the device, and
decode can be captured in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.util
import sys
from typing import Any

_GDN_MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_LAYER = "QwenGatedDeltaNetAttention"
_OPTION = "gdn_prefill_backend"
_CHUNK = 64  # states can be stored between chunks

# Methods of the layer that this module overrides or calls, and fields of the metadata that it reads.
_METHODS = ("_forward_core", "_forward_core_fused_norm", "_warmup_prefill_kernels", "forward_cuda", "get_kv_cache_spec")
_FIELDS = (
    "num_prefills", "num_decodes", "num_spec_decodes", "num_actual_tokens", "spec_sequence_masks", "checkpoint",
    "prefill_query_start_loc", "prefill_state_indices", "prefill_has_initial_state", "non_spec_state_indices_tensor",
    "spec_state_indices_tensor", "spec_query_start_loc", "num_accepted_tokens", "spec_token_indx",
    "non_spec_token_indx",
)  # fmt: skip


def register() -> None:
    """Registers the layer with vLLM; may be called more than once.

    vLLM's file of the layer initialises CUDA when it is imported, and plug-ins are loaded before processes
    fork. So the class is made when vLLM imports that file, not here.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ImportError("gatedelta.vllm.register() needs vLLM, which is not installed")
    if _GDN_MODULE in sys.modules:
        _register_layer(sys.modules[_GDN_MODULE])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def unregister() -> None:
    """Undoes register(). Layers that exist stay what they are."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
    if "vllm.model_executor.custom_op" in sys.modules:
        registry = sys.modules["vllm.model_executor.custom_op"].op_registry_oot
        if getattr(registry.get(_LAYER), "is_gatedelta", False):
            del registry[_LAYER]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets Python find vLLM's file of the layer as it would, and registers ours when it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _GDN_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            _register_layer(module)

        spec.loader.exec_module = execute_and_register
        return spec


def asked_for(vllm_config: Any) -> bool:
    """Whether this engine was started with ``additional_config={"gdn_prefill_backend": "gatedelta"}``."""
    options = getattr(vllm_config, "additional_config", None)
    return isinstance(options, dict) and str(options.get(_OPTION)).strip().lower() == "gatedelta"


def _register_layer(module: Any) -> None:
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    base = getattr(module, _LAYER, None)
    if base is None or _LAYER in op_registry_oot:  # a vLLM that names it otherwise; another plug-in's, or ours
        return
    PluggableLayer.register_oot(name=_LAYER)(_layer_class(module, base))


def _layer_class(module: Any, base: type) -> type:
    class GateDeltaAttention(base):
        is_gatedelta = True

        def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, vllm_config, *args, **kwargs)
            self.runs_gatedelta = asked_for(vllm_config)
            if not self.runs_gatedelta:
                return
            reason = _refusal(module, self, vllm_config)
            if reason is not None:
                raise ValueError(f"{_OPTION}=gatedelta: {reason}")
            if module.current_platform.is_cpu():
                self._forward_method = self.forward_cuda  # whose operator ends in _forward_core, on any device
            # The layer's operator with the norm inside takes q, k, v and z side by side.
            self.enable_fused_gdn_spec_decode = not self.gqa_interleaved_layout

        def _forward_core(self, mixed_qkv, b, a, core_attn_out):
            if not self.runs_gatedelta:
                return super()._forward_core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
            return self._run_gatedelta(mixed_qkv, b, a, None, core_attn_out)

        def _forward_core_fused_norm(self, mixed_qkv, b, a, output_gate, core_attn_out):
            if not self.runs_gatedelta:
                return super()._forward_core_fused_norm(
                    mixed_qkv=mixed_qkv, b=b, a=a, output_gate=output_gate, core_attn_out=core_attn_out
                )
            return self._run_gatedelta(mixed_qkv, b, a, output_gate, core_attn_out)

        def _run_gatedelta(self, mixed_qkv, b, a, z, out):
            metadata = module.get_forward_context().attn_metadata
            metadata = metadata.get(self.prefix) if isinstance(metadata, dict) else None
            if metadata is None:  # vLLM measures memory
                self._warmup_prefill_kernels(mixed_qkv, 0)
            else:
                from .layer import forward_core

                forward_core(self, module, metadata, mixed_qkv, b, a, z, out)

        def _warmup_prefill_kernels(self, qkv_or_qkvz, v_dim):
            if not self.runs_gatedelta:
                return super()._warmup_prefill_kernels(qkv_or_qkvz, v_dim)
            if self._prefill_kernels_warmed_up:
                return None
            from .layer import profile

            self._prefill_kernels_warmed_up = True
            return profile(self, qkv_or_qkvz)

        def get_kv_cache_spec(self, vllm_config):
            """With prefix caching (mamba_cache_mode "align") a prefill stores a state on its way: vLLM need not cut it
            there."""
            spec = super().get_kv_cache_spec(vllm_config)
            if not self.runs_gatedelta or not hasattr(spec, "prefill_checkpoint_alignment"):
                return spec
            return dataclasses.replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=_CHUNK)

    return GateDeltaAttention


def _refusal(module: Any, layer: Any, vllm_config: Any) -> str | None:
    """Why this layer cannot run on GateDelta, or None."""
    missing = [name for name in _METHODS if not hasattr(type(layer), name)]
    fields = {field.name for field in dataclasses.fields(module.GDNAttentionMetadata)}
    missing += [f"GDNAttentionMetadata.{name}" for name in _FIELDS if name not in fields]
    if missing:
        from vllm import __version__ as version

        return f"this version of vLLM ({version}) is not known, its layer has no {', '.join(missing)}"
    if layer.activation not in ("silu", "swish"):
        return f"the convolution's activation is {layer.activation!r}, must be 'silu' or 'swish'"
    if not 2 <= layer.conv_kernel_size <= 4:
        return f"the convolution has {layer.conv_kernel_size} taps, must have 2 to 4"
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        return "ReplaySSM keeps tokens instead of states, which is not supported: start without it"
    from .._plugins import limits

    platform = module.current_platform
    if platform.is_cuda():
        if not platform.has_device_capability(limits.LEAST_CAPABILITY):
            return "it needs a GPU of compute capability 8.0 or later"
        reason = limits.build_refusal()
    else:
        reason = None if platform.is_cpu() else f"it runs on NVIDIA GPUs and CPUs, not on {platform.device_name}"
    return (
        reason
        or limits.head_refusal(layer.head_k_dim, layer.head_v_dim)
        or limits.dtype_refusal(vllm_config.model_config.dtype)
    )
