"""GateDelta in transformers' models: Qwen3-Next, Qwen3.5 (dense and MoE), Qwen4-exp and OLMo hybrid.

    import gatedelta.transformers
    gatedelta.transformers.patch()       # every model of this process, from now on

or, for the models that are told so, with the ``kernels`` package:

    gatedelta.transformers.register()
    model.use_kernels = True

Importing this module imports neither torch nor transformers, and changes nothing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

__all__ = ["kernel_mapping", "patch", "register", "unpatch", "unregister"]


def patch() -> tuple[str, ...]:
    """Lets the models' layers run on GateDelta: convolution, rule, decode step and gated norm. Returns their names.

    Replaces functions and forwards of transformers' modeling modules; models that exist already follow, too. What the
    library cannot run (float64, other devices, ...) stays with transformers, with a warning that says why, and
    so does what torch.export and torch.jit read. Packed sequences are kept apart, however they are announced. A second
    call changes nothing.
    """
    _require_transformers()
    from . import _patch

    return _patch.patch()


def unpatch() -> None:
    """Puts back what patch() replaced."""
    if (module := sys.modules.get(f"{__name__}._patch")) is not None:
        module.unpatch()


def register() -> None:
    """Enters GateDelta's functions into the mapping of the ``kernels`` package, without a download.

    Models then take them with ``model.use_kernels = True``, or ``from_pretrained(..., use_kernels=True)``: Qwen3.5 as a
    whole layer, the others function by function. `kernels` replaces functions for every model of a modeling file at
    once. What is said of patch() about packs, calls that stay with transformers, and second calls holds here as well.
    """
    _require_kernels()
    from . import _register

    _register.register()


def unregister() -> None:
    """Takes register()'s entries out of the mapping. Models that use them run on transformers' own code again."""
    if (module := sys.modules.get(f"{__name__}._register")) is not None:
        module.unregister()


def kernel_mapping() -> dict[str, dict[Any, Any]]:
    """The entries of register(), for ``kernels.use_kernel_mapping(..., inherit_mapping=False)``: a model that is
    kernelized there takes these, and no kernel from the Hub. They act while register() does."""
    _require_kernels()
    from . import _register

    return _register.mapping()


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise ImportError("gatedelta.transformers needs transformers: pip install 'gatedelta[transformers]'")


def _require_kernels() -> None:
    _require_transformers()
    import transformers.utils.import_utils as versions

    if not versions.is_kernels_available():
        low, high = (getattr(versions, f"KERNELS_{end}_VERSION", "?") for end in ("MIN", "MAX"))
        raise ImportError(
            f"register() needs the kernels package, of a version that transformers takes ({low} <= version < {high}); "
            "patch() does without it"
        )
