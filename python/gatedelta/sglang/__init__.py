"""GateDelta as a kernel backend of SGLang's Gated DeltaNet layers, out of tree.

``register()`` is SGLang's entry point ``sglang.srt.plugins``: SGLang calls it in each of its processes, before it reads
its arguments. It registers the value ``gatedelta`` for ``--linear-attn-backend``, and does nothing to an engine that is
not started with it:

    python -m sglang.launch_server --model MODEL --linear-attn-backend gatedelta

(or ``--linear-attn-prefill-backend``, ``--linear-attn-decode-backend`` for one of the two; drafts are verified by the
decode backend unless ``--linear-attn-verify-backend`` names another). Prefill, decode and verification of a chain of
drafts, rule and convolution, then run on SGLang's pools in place. Trees of drafts stay with Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from .._plugins.replace import Places
from .options import BACKEND_NAME, selected_modes

_GDN_MODULE = "sglang.srt.layers.attention.linear.gdn_backend"
_HOOK = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"  # makes a runner's backends
_CLASSES = ("GDNKernelDispatcher", "GDNAttnBackend")
_METHODS = {
    "GDNKernelDispatcher": ("extend", "decode", "packed_decode", "target_verify"),
    "GDNAttnBackend": ("_convolve_prefill", "forward_decode", "forward_extend", "_track_mamba_state_decode"),
}
_places = Places("sglang")


def register() -> None:
    """Registers the backend's name with SGLang; may be called more than once. If you call it yourself, and SGLang does
    not as a plug-in, call ``HookRegistry.apply_hooks()`` afterwards."""
    if importlib.util.find_spec("sglang") is None:
        raise ImportError("gatedelta.sglang.register() needs SGLang, which is not installed")
    from sglang.srt.arg_groups.choices import (
        LINEAR_ATTN_KERNEL_BACKEND_CHOICES,
        add_linear_attn_kernel_backend_choices,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND_NAME not in LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        add_linear_attn_kernel_backend_choices([BACKEND_NAME])
    if not any(hook is _before_backends for _, hook, _ in HookRegistry._hooks.get(_HOOK, ())):
        HookRegistry.register(_HOOK, _before_backends, HookType.BEFORE)


def unregister() -> None:
    """Undoes register(), and puts SGLang's classes back. Backends that exist stay what they are."""
    _places.restore()
    if "sglang.srt.plugins.hook_registry" not in sys.modules:
        return
    from sglang.srt.arg_groups.choices import LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    from sglang.srt.plugins.hook_registry import HookRegistry

    if BACKEND_NAME in LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        LINEAR_ATTN_KERNEL_BACKEND_CHOICES.remove(BACKEND_NAME)
    hooks = HookRegistry._hooks.get(_HOOK, [])
    hooks[:] = [entry for entry in hooks if entry[1] is not _before_backends]


def _before_backends(*args: Any, **kwargs: Any) -> None:
    """Runs before SGLang makes the backends of a runner: its file of GDN is imported by then, if at all."""
    if any(selected_modes()):
        install()


def install() -> None:
    """Puts our classes in the place of SGLang's dispatcher of GDN kernels and of its backend, whose subclasses they
    are; they act for the selected modes."""
    if _places:
        return
    module = importlib.import_module(_GDN_MODULE)
    missing = [name for name in _CLASSES if not hasattr(module, name)]
    missing += [
        f"{name}.{method}"
        for name, methods in _METHODS.items()
        for method in methods
        if name not in missing and not hasattr(getattr(module, name), method)
    ]
    if missing:
        from sglang.version import __version__ as version

        raise RuntimeError(
            f"--linear-attn-backend {BACKEND_NAME}: this version of SGLang ({version}) is not known, {_GDN_MODULE} has "
            f"no {', '.join(missing)}"
        )
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

    from . import kernels

    kernel = type("GateDeltaKernel", (kernels.Kernel, LinearAttnKernelBase), {})
    ours = {
        "GDNKernelDispatcher": type(
            "GateDeltaDispatcher", (kernels.Dispatcher, module.GDNKernelDispatcher), {"kernel_class": kernel}
        ),
        "GDNAttnBackend": type("GateDeltaAttnBackend", (kernels.Backend, module.GDNAttnBackend), {}),
    }
    for name, replacement in ours.items():
        _places.set(module, name, replacement)
