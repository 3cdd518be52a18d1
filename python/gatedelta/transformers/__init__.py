"""GateDelta in transformers' models: Qwen3-Next, Qwen3.5 (dense and MoE), Qwen4-exp and OLMo hybrid.

    import gatedelta.transformers
    gatedelta.transformers.patch()       # every model of this process, from now on

or, for single models, with the ``kernels`` package:

    gatedelta.transformers.register()
    model.use_kernels = True

Importing this module imports neither torch nor transformers, and changes nothing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "fuse_projections", "kernel_mapping", "patch", "register", "unfuse_projections", "unpatch", "unregister",
]  # fmt: skip


def patch() -> tuple[str, ...]:
    """Lets the models' layers run on GateDelta: convolution, rule, decode step and gated norm. Returns their names.

    Replaces functions and forwards of transformers' modeling modules; models that exist already follow, too. What the
    library cannot run (float64, other devices, ...) stays with transformers, with a warning that says why, and
    so does what torch.export and torch.jit read. The linear layers keep packed sequences apart, however they are
    announced; full attention is transformers' own. A second call changes nothing.
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


def fuse_projections(model: nn.Module) -> int:
    """Lets each layer of a model take one product for all of its input projections in decode. Returns for how many
    layers it moved weights.

    Their weights move into one tensor, and the parameters become views of it: names, state dicts, optimisers and the
    amount of memory stay as they are. A layer takes one product where its weights lie so, up to 64 tokens go through
    it, autograd records nothing, and the model is not compiled; otherwise, and after anything that moves weights again
    (``model.to()``, ``load_state_dict(assign=True)``), it takes a product each. Layers whose projections are not plain
    (quantised, wrapped, offloaded, with hooks or a bias, of several dtypes or devices, in a trainer's flat buffer) stay
    as they are. Only layers that patch() or register() replaces as a whole look for such weights.
    """
    _require_transformers()
    from ._families import FAMILIES
    from ._projections import fuse

    return sum(fuse(layer, family.projections) for family in FAMILIES for layer in family.layers(model))


def unfuse_projections(model: nn.Module) -> int:
    """Gives the weights that fuse_projections() moved tensors of their own. Returns for how many layers it did."""
    _require_transformers()
    from ._families import FAMILIES
    from ._projections import unfuse

    return sum(unfuse(layer, family.projections) for family in FAMILIES for layer in family.layers(model))


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise ImportError("gatedelta.transformers needs transformers: pip install '.[transformers]' in a clone")


def _require_kernels() -> None:
    _require_transformers()
    import transformers.utils.import_utils as versions

    if not versions.is_kernels_available():
        low, high = (getattr(versions, f"KERNELS_{end}_VERSION", "?") for end in ("MIN", "MAX"))
        raise ImportError(
            f"register() needs the kernels package, of a version that transformers takes ({low} <= version < {high}); "
            "patch() does without it"
        )
