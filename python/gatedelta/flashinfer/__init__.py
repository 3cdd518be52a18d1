"""FlashInfer's functions of the gated delta rule, argument for argument as in flashinfer 0.7.2, on GateDelta.

Import these in place of FlashInfer's, which need not be installed; or call ``register()``, and an installed flashinfer
calls them until ``unregister()``. None of them has a gradient. States are ``[V, K]``, except in
``gated_delta_rule_decode``. They take what FlashInfer's take and more: float32, the CPU, GPUs from compute capability
8.0 on, K and V other than 128, states of float16.
"""

from __future__ import annotations

from .._extras import explain
from .._plugins.replace import Replacement

try:
    from .decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
    from .prefill import chunk_gated_delta_rule
except ModuleNotFoundError as error:
    explain(error)

__all__ = [
    "chunk_gated_delta_rule",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "register",
    "unregister",
]

_replacement = Replacement(
    "flashinfer",
    "0.7.2",
    {
        "gdn_prefill.chunk_gated_delta_rule": chunk_gated_delta_rule,
        "gdn_decode.gated_delta_rule_decode_pretranspose": gated_delta_rule_decode_pretranspose,
        "gdn_decode.gated_delta_rule_decode": gated_delta_rule_decode,
        "gdn_decode.gated_delta_rule_mtp": gated_delta_rule_mtp,
    },
)


def register() -> None:
    """Replaces the four functions of the installed flashinfer, also in modules that have imported them by name. A
    second call changes nothing.

    ImportError where flashinfer is missing, cannot be imported or has other arguments.
    """
    _replacement.register()


def unregister() -> None:
    """Puts FlashInfer's own functions back."""
    _replacement.unregister()
