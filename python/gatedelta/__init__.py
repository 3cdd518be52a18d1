"""GateDelta: Gated Delta Network linear attention, forward, backward and decode.

Importing this package loads no library and no torch, and touches no GPU. The torch functions are reached as
``gatedelta.torch`` or straight from here (``from gatedelta import chunk_gated_delta_rule``), which imports torch at
that moment; ``gatedelta.numpy`` works on numpy arrays without torch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .torch import (
        Saved,
        causal_conv1d,
        chunk_gated_delta_rule,
        chunk_gated_delta_rule_bwd,
        chunk_gated_delta_rule_fwd,
        cu_seqlens_from_positions,
        fused_recurrent_gated_delta_rule,
        gated_delta_layer_step,
        recurrent_gated_delta_rule,
        rms_norm_gated,
    )

__version__ = "0.1.0"

_TORCH_NAMES = (
    "Saved",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "cu_seqlens_from_positions",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_layer_step",
    "recurrent_gated_delta_rule",
    "rms_norm_gated",
)

_MODULES = ("context_parallel", "numpy", "torch")  # imported at first use

__all__ = [
    "Saved",
    "__version__",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "cu_seqlens_from_positions",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_layer_step",
    "include_directory",
    "info",
    "library_path",
    "recurrent_gated_delta_rule",
    "rms_norm_gated",
]


def __getattr__(name: str) -> Any:
    if name in _TORCH_NAMES:
        return getattr(import_module(".torch", __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_TORCH_NAMES, *_MODULES})


def info() -> dict[str, Any]:
    """What this library is and what this machine offers it."""
    from . import _lib

    native = _lib.get_info()

    def names(bits: int) -> list[str]:
        return [_lib.isa_name(i) for i in range(_lib.ISA_COUNT) if bits >> i & 1]

    return {
        "version": f"{native.version_major}.{native.version_minor}.{native.version_patch}",
        "abi_version": native.abi_version,
        "library": str(library_path()),
        "cpu_count": native.cpu_count,
        "cpu_isa_compiled": names(native.cpu_isa_compiled),
        "cpu_isa_usable": names(native.cpu_isa_usable),
        "cpu_isa_best": _lib.isa_name(native.cpu_isa_best),
        "cpu_isa_forced": _lib.isa_name(_lib.forced_isa()) if _lib.forced_isa() else None,
        "cuda_compiled": bool(native.cuda_compiled),
        "cuda_devices": native.cuda_devices,
    }


def library_path() -> Path:
    """The shared library with the C ABI, to link or load from other languages."""
    from . import _lib

    return _lib.library_path("gatedelta")


def include_directory() -> Path:
    """The folder to give a C or C++ compiler with -I (installed package only)."""
    directory = Path(__file__).parent / "include"
    if not (directory / "gatedelta" / "gatedelta.h").is_file():
        raise FileNotFoundError(f"no headers in {directory}: they come with the installed package")
    return directory
