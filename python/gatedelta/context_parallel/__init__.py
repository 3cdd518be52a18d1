"""Context parallelism: one pack of sequences over the ranks of a torch.distributed group, exactly.

    context = gatedelta.context_parallel.build_context(cu_seqlens, group)          # once per pack
    x, _ = gatedelta.context_parallel.causal_conv1d(x, weight, activation="silu", cp_context=context)
    o, _ = gatedelta.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)  # gradients as usual

Each rank passes its own tokens, ``[1, T / ranks, ...]``, and gets theirs. Between ranks travel one state and one
``[K, K]`` matrix a head and piece, whatever the length; gradients of parameters (A_log, dt_bias, convolution weights)
are a rank's share, to be summed over the group as those of all other parameters. Groups are NCCL's on GPUs and gloo's
on CPUs. ``forward_prepare``, ``forward_apply``, ``backward_prepare`` and ``backward_apply`` are the same without a
group, for frameworks that have their own (docs/context_parallel.md).
"""

from __future__ import annotations

from .._extras import explain
from .._lib import Saved

try:
    from .._operators.stages import Gradients, Summary, merge
    from .context import Context, build_context
    from .conv1d import causal_conv1d
    from .foreign import as_context
    from .rule import chunk_gated_delta_rule
    from .stages import backward_apply, backward_prepare, empty_saved, forward_apply, forward_prepare
except ModuleNotFoundError as error:
    explain(error)

__all__ = [
    "Context",
    "Gradients",
    "Saved",
    "Summary",
    "as_context",
    "backward_apply",
    "backward_prepare",
    "build_context",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "empty_saved",
    "forward_apply",
    "forward_prepare",
    "merge",
]
