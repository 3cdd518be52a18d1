"""FlashQLA's functions, argument for argument as in flash_qla 0.1.3, on GateDelta.

Import these in place of FlashQLA's, which need not be installed; or call ``register()``, and an installed flash_qla
calls them until ``unregister()``. They take what FlashQLA's take and more: float32, the CPU, GPUs from compute
capability 8.0 on, K and V other than 128, any strides.
"""

from __future__ import annotations

from .._extras import explain
from .._plugins.replace import Replacement

try:
    from .rule import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
except ModuleNotFoundError as error:
    explain(error)

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "register",
    "unregister",
]

_replacement = Replacement(
    "flash_qla",
    "0.1.3",
    {
        f"ops.gated_delta_rule.chunk.{function.__name__}": function
        for function in (chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd)
    },
)


def register() -> None:
    """Replaces the three functions of the installed flash_qla, also in modules that have imported them by name. A
    second call changes nothing.

    ImportError where flash_qla is missing, cannot be imported (it needs a GPU that it supports) or has other arguments.
    """
    _replacement.register()


def unregister() -> None:
    """Puts FlashQLA's own functions back."""
    _replacement.unregister()
