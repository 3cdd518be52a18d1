"""GateDelta as a kernel backend of SGLang's Gated DeltaNet layers, out of tree.

``register()`` is SGLang's entry point ``sglang.srt.plugins``: SGLang calls it in each of its processes, before it reads
its arguments. It adds a word to them, and does nothing to an engine that does not use it:

    python -m sglang.launch_server --model MODEL --linear-attn-backend gatedelta

(or ``--linear-attn-prefill-backend``, ``--linear-attn-decode-backend`` for one of the two; drafts are verified by the
decode backend unless ``--linear-attn-verify-backend`` names another). Prefill, decode and verification of a chain of
drafts, rule and convolution, then run on SGLang's pools in place. Trees of drafts stay with Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, NamedTuple

WORD = "gatedelta"

_TREE = "sglang.srt.layers.attention.linear.gdn_backend"
_HOOK = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"  # makes a runner's backends
_CLASSES = ("GDNKernelDispatcher", "GDNAttnBackend")
_METHODS = {
    "GDNKernelDispatcher": ("extend", "decode", "packed_decode", "target_verify"),
    "GDNAttnBackend": ("_convolve_prefill", "forward_decode", "forward_extend", "_track_mamba_state_decode"),
}
_replaced: dict[str, type] = {}


def register() -> None:
    """Tells SGLang of the word; may be called more than once. Who calls it by hand, and not as SGLang's plug-in, calls
    ``HookRegistry.apply_hooks()`` afterwards, too."""
    if importlib.util.find_spec("sglang") is None:
        raise ImportError("gatedelta.sglang.register() needs SGLang, which is not installed")
    from sglang.srt.arg_groups.choices import (
        LINEAR_ATTN_KERNEL_BACKEND_CHOICES,
        add_linear_attn_kernel_backend_choices,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if WORD not in LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        add_linear_attn_kernel_backend_choices([WORD])
    if not any(hook is _before_backends for _, hook, _ in HookRegistry._hooks.get(_HOOK, ())):
        HookRegistry.register(_HOOK, _before_backends, HookType.BEFORE)


def unregister() -> None:
    """Undoes register(), and puts SGLang's classes back. Backends that exist stay what they are."""
    if _TREE in sys.modules:
        for name, original in _replaced.items():
            setattr(sys.modules[_TREE], name, original)
    _replaced.clear()
    if "sglang.srt.plugins.hook_registry" not in sys.modules:
        return
    from sglang.srt.arg_groups.choices import LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    from sglang.srt.plugins.hook_registry import HookRegistry

    if WORD in LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        LINEAR_ATTN_KERNEL_BACKEND_CHOICES.remove(WORD)
    hooks = HookRegistry._hooks.get(_HOOK, [])
    hooks[:] = [entry for entry in hooks if entry[1] is not _before_backends]


class Chosen(NamedTuple):
    """Which of a runner's modes are GateDelta's."""

    decode: bool
    prefill: bool
    verify: bool


def chosen() -> Chosen:
    """What this process's arguments say."""
    from sglang.srt.runtime_context import get_exec

    mamba = get_exec().mamba
    base, verify = mamba.linear_attn_backend, mamba.linear_attn_verify_backend
    decode = (mamba.linear_attn_decode_backend or base) == WORD
    prefill = (mamba.linear_attn_prefill_backend or base) == WORD
    return Chosen(decode, prefill, decode if verify is None else verify == WORD)


def _before_backends(*args: Any, **kwargs: Any) -> None:
    """Runs before SGLang makes the backends of a runner: its file of GDN is imported by then, if at all."""
    if any(chosen()):
        install()


def install() -> None:
    """Puts our classes in the place of SGLang's dispatcher of GDN kernels and of its backend, whose subclasses they
    are; they act for the modes that are chosen."""
    if _replaced:
        return
    tree = importlib.import_module(_TREE)
    missing = [name for name in _CLASSES if not hasattr(tree, name)]
    missing += [
        f"{name}.{method}"
        for name, methods in _METHODS.items()
        for method in methods
        if name not in missing and not hasattr(getattr(tree, name), method)
    ]
    if missing:
        from sglang.version import __version__ as version

        raise RuntimeError(
            f"--linear-attn-backend {WORD}: this version of SGLang ({version}) is not known, {_TREE} has no "
            f"{', '.join(missing)}"
        )
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

    from . import _sglang_core as core

    kernel = type("GateDeltaKernel", (core.Kernel, LinearAttnKernelBase), {})
    ours = {
        "GDNKernelDispatcher": type(
            "GateDeltaDispatcher", (core.Dispatcher, tree.GDNKernelDispatcher), {"kernel_class": kernel}
        ),
        "GDNAttnBackend": type("GateDeltaAttnBackend", (core.Backend, tree.GDNAttnBackend), {}),
    }
    for name, replacement in ours.items():
        _replaced[name] = getattr(tree, name)
        setattr(tree, name, replacement)
