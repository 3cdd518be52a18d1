"""GateDelta in transformers' models: Qwen3-Next, Qwen3.5 (dense and MoE), Qwen4-exp and OLMo hybrid.

    import gatedelta.transformers
    gatedelta.transformers.patch()       # every model of this process, from now on

Importing this module imports neither torch nor transformers, and changes nothing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["patch", "unpatch"]


def patch() -> tuple[str, ...]:
    """Lets the models' layers run on GateDelta: convolution, rule, decode step and gated norm. Returns their names.

    Replaces functions and forwards of transformers' modeling modules; models that exist already follow, too. What the
    library cannot run (float32 on CUDA, other devices, ...) stays with transformers, with a warning that says why, and
    so does what torch.export and torch.jit read. Packed sequences are kept apart, however they are announced. A second
    call changes nothing.
    """
    _require("transformers")
    from . import _patch

    return _patch.patch()


def unpatch() -> None:
    """Puts back what patch() replaced."""
    if (module := sys.modules.get(f"{__name__}._patch")) is not None:
        module.unpatch()


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise ImportError(f"gatedelta.transformers needs {package}: pip install 'gatedelta[transformers]'")
