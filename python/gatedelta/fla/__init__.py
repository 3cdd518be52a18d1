"""GateDelta inside flash-linear-attention (FLA) 0.6: ``import gatedelta.fla; gatedelta.fla.register()``.

At each call FLA runs the verifiers of its registered backends, and its own kernels where none accepts the call. This
module registers a backend for the gated delta rule in chunks, the short convolution and the gated RMSNorm. FLA's
recurrent function cannot be registered: it is replaced by name. What is not covered stays with FLA's code, and FLA
logs the reason (``logging.getLogger("fla.backends")``; here ``"gatedelta.fla"`` for the recurrent function).

``FLA_GATEDELTA=0`` in the environment turns all of it off, at any time; ``unregister()`` takes it out. FLA is imported
by ``register()``, not before.
"""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .._plugins.replace import Places

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["register", "unregister"]

_SWITCH = "FLA_GATEDELTA"
_logger = logging.getLogger(__name__)
_registered = False
_places = Places("fla")  # of FLA's recurrent function


def register() -> None:
    """Let FLA run on GateDelta from now on, also where FLA's functions were imported before. Calling it again does
    nothing. Models that keep a function in an attribute must be made after this."""
    global _registered
    backends, conv, norm, rule = _import_fla()
    from . import modules

    backend = _make_backend(backends.BaseBackend)
    backends.register("gated_delta_rule")(_with_chunk_rule(backend))
    for function, verifier, implementation in (
        (conv.causal_conv1d_fwd, modules.conv_refusal, modules.conv_fwd),
        (conv.causal_conv1d_bwd, modules.conv_bwd_refusal, modules.conv_bwd),
        (conv.causal_conv1d_update, modules.conv_update_refusal, modules.conv_update),
        (norm.layer_norm_gated_fwd, modules.norm_refusal, modules.norm_fwd),
        (norm.layer_norm_gated_bwd, modules.norm_bwd_refusal, modules.norm_bwd),
    ):
        backends.register(function, backend=backend, verifier=_as_verifier(verifier))(implementation)
    if not _places:
        original = rule.fused_recurrent_gated_delta_rule
        _places.swap(original, _replacement_of(original))
    _registered = True


def unregister() -> None:
    """Undo ``register()``: FLA runs its own code again. Calling it again, or without a register, does nothing."""
    global _registered
    _registered = False  # FLA has no way to take a backend out: this makes it unavailable
    _places.restore()


def _import_fla() -> tuple[ModuleType, ...]:
    try:
        import fla
    except ImportError as error:
        raise ImportError(
            "gatedelta.fla.register() needs flash-linear-attention (pip install flash-linear-attention), which cannot "
            f"be imported: {error}"
        ) from error
    version = getattr(fla, "__version__", "of unknown version")
    try:
        from fla import backends
        from fla.modules.causal_conv1d import ops as conv
        from fla.modules.norm import fused_norm_gate as norm
        from fla.ops import gated_delta_rule as rule

        for module, names in (
            (backends, ("BaseBackend", "register")),
            (conv, ("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update")),
            (norm, ("layer_norm_gated_fwd", "layer_norm_gated_bwd")),
            (rule, ("fused_recurrent_gated_delta_rule",)),
        ):
            for name in names:
                getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "gatedelta.fla.register() needs flash-linear-attention 0.6, which has the registry fla.backends; this is "
            f"{version}: {error}"
        ) from error
    if getattr(backends, "_DISPATCH_DISABLED", False):
        raise RuntimeError(
            "gatedelta.fla.register() would do nothing: FLA_DISABLE_BACKEND_DISPATCH=1 was set when fla was imported"
        )
    return backends, conv, norm, rule


def _is_available() -> bool:
    return _registered


def _make_backend(base: type) -> type:
    class GateDeltaBackend(base):
        backend_type = "gatedelta"
        env_var = _SWITCH
        priority = 2  # FLA tries lower numbers first: FlashQLA is 3, most others 5

        @classmethod
        def is_available(cls) -> bool:
            return _is_available()

    return GateDeltaBackend


def _with_chunk_rule(backend: type) -> type:
    from . import rule

    class GateDeltaRule(backend):
        chunk_gated_delta_rule_verifier = staticmethod(_as_verifier(rule.chunk_refusal))
        chunk_gated_delta_rule = staticmethod(rule.chunk)

    return GateDeltaRule


def _as_verifier(refusal: Callable[..., str | None]) -> Callable[..., tuple[bool, str | None]]:
    def verifier(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        reason = refusal(*args, **kwargs)
        return reason is None, reason

    return verifier


def _replacement_of(original: Callable) -> Callable:
    from . import rule

    @functools.wraps(original)  # callers look at the signature to see which arguments they may pass
    def fused_recurrent_gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if not _is_available() or os.environ.get(_SWITCH) == "0":
            return original(*args, **kwargs)
        results = rule.recurrent(*args, **kwargs)
        if isinstance(results, str):
            _logger.info("fused_recurrent_gated_delta_rule stays with FLA: %s", results)
            return original(*args, **kwargs)
        return results

    return fused_recurrent_gated_delta_rule
