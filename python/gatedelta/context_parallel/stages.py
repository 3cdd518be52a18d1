"""The stages without a group, for frameworks that move the states themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _lib
from .._lib import Saved
from .._operators import arguments, stages
from .._operators.stages import Gradients, Options, Summary


def options_of(function: str, cu_seqlens: Tensor | None, options: dict[str, Any]) -> Options:
    known = {name: options.pop(name) for name in list(options) if name in Options._fields}
    for name in options:
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    result = Options(**known, cu_seqlens=cu_seqlens)
    arguments.check_number("scale", result.scale)
    stages.check_tensors(0, A_log=result.A_log, dt_bias=result.dt_bias)
    _lib.check_neg_eigval(result.allow_neg_eigval, result.use_beta_sigmoid_in_kernel)
    return result


def forward_prepare(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    first_sequence: int = 0,
    sequence_count: int = 0,
    exact: bool = False,
    q: Tensor | None = None,
    saved: Saved | None = None,
    prepared: bool = False,
    **options: Any,
) -> Summary:
    """Summarises how sequences change the states they begin with: (local_state, transition, fade), for the ranks that
    hold the pieces after. A rank summarises the last sequence of each of its pieces, unless it ends there.

    saved: of ``empty_saved``, with q. A GPU leaves there what it prepares: ``forward_apply`` and another summary of the
        same inputs take it with prepared=True.
    options: keywords of ``chunk_gated_delta_rule`` that say how inputs are meant.
    """
    stages.check_tensors(4, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, q=q)
    with torch.no_grad():
        return stages.summary(
            k, v, g, beta, options_of("forward_prepare", cu_seqlens, options), first_sequence, sequence_count,
            exact=exact, q=q, saved=saved, prepared=prepared,
        )  # fmt: skip


def empty_saved(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor | None = None, **options: Any
) -> Saved:
    """Room for what a forward saves for its backward, and for what a summary prepares for a forward."""
    stages.check_tensors(5, q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens)
    return stages.empty_saved(q, k, v, g, beta, options_of("empty_saved", cu_seqlens, options))


def forward_apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    entering: Tensor | None,
    entering_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    save: bool = True,
    saved: Saved | None = None,
    prepared: bool = False,
    **options: Any,
) -> tuple[Tensor, Saved | None]:
    """(o, saved) from the states that sequences begin with: ``entering[entering_indices[n]]``, of -1 zero; without
    indices one row for each sequence. ``merge`` makes them of the summaries before. The backward's stages take the
    saved that is returned: it says that it is of this call."""
    stages.check_tensors(
        5, q=q, k=k, v=v, g=g, beta=beta, entering=entering, entering_indices=entering_indices, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    with torch.no_grad():
        return stages.forward(
            q, k, v, g, beta, options_of("forward_apply", cu_seqlens, options), entering, entering_indices, save=save,
            saved=saved, prepared=prepared,
        )  # fmt: skip


def backward_prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    first_sequence: int = 0,
    sequence_count: int = 0,
    exact: bool = False,
    saved: Saved | None = None,
    **options: Any,
) -> Tensor:
    """Gradients of the states that sequences begin with as if nothing followed, for the ranks that hold the pieces
    before: of the first sequence of each piece, unless it begins there. Transitions are those of the forward."""
    stages.check_tensors(5, q=q, k=k, g=g, beta=beta, do=do, cu_seqlens=cu_seqlens)
    with torch.no_grad():
        return stages.backward_summary(
            q, k, g, beta, do, options_of("backward_prepare", cu_seqlens, options), first_sequence, sequence_count,
            exact=exact, saved=saved,
        )  # fmt: skip


def backward_apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    entering: Tensor | None,
    entering_indices: Tensor | None = None,
    leaving: Tensor | None = None,
    leaving_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    saved: Saved | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of all inputs. leaving: those of the states that sequences end with, ``merge(..., transposed=True)`` of
    what ``backward_prepare`` gave behind them."""
    stages.check_tensors(
        6, q=q, k=k, v=v, g=g, beta=beta, do=do, entering=entering, entering_indices=entering_indices, leaving=leaving,
        leaving_indices=leaving_indices, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    with torch.no_grad():
        return stages.backward(
            q, k, v, g, beta, do, options_of("backward_apply", cu_seqlens, options), entering, entering_indices,
            leaving, leaving_indices, saved=saved,
        )  # fmt: skip
