"""The gated delta rule for torch: FLA's and FlashQLA's functions, with gradients, torch.compile and state pools.

Shapes everywhere: q, k ``[B, T, Hk, K]``; v, o ``[B, T, Hv, V]`` with Hv a multiple of Hk (value head h reads key head
``h // (Hv // Hk)``); g, beta ``[B, T, Hv]``; states ``[N, Hv, K, V]``, or ``[N, Hv, V, K]`` with ``state_v_first``.
N is B, or ``len(cu_seqlens) - 1`` for packed sequences (then B is 1). Tokens past the last offset are never read; their
outputs and gradients are 0. g is the natural logarithm of the decay. q, k, v are float32, bfloat16 or float16; the
others may each be of another of these. A mistake of the caller's raises ValueError or TypeError with the reason, what
this build or device does not serve NotImplementedError, and a failure RuntimeError (docs/api.md).

Derivatives are those of reverse mode (``backward``, ``torch.func.grad``, ``vjp``). Forward mode (``torch.func.jvp``,
``jacfwd``, ``linearize``), double backward and ``torch.vmap`` are refused.

CUDA tensors run on torch's current stream, from compute capability 8.0 on; ``cp_context`` and ``small_workspace`` need
bfloat16 or float16 there. The contents of cu_seqlens and index tensors are not checked. A forward saves some 172 bytes
per token and value head for the backward on Hopper (docs/api.md has the others), and nothing with ``recompute``.
"""

from __future__ import annotations

from .._extras import explain
from .._lib import Saved

try:
    from ._conv1d import causal_conv1d
    from ._functional import (
        chunk_gated_delta_rule,
        chunk_gated_delta_rule_bwd,
        chunk_gated_delta_rule_fwd,
        cu_seqlens_from_positions,
        fused_recurrent_gated_delta_rule,
        recurrent_gated_delta_rule,
    )
    from ._layer_step import gated_delta_layer_step
    from ._norm import rms_norm_gated
except ModuleNotFoundError as error:
    explain(error)

__all__ = [
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
]
