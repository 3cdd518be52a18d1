"""FlashQLA's three functions as calls of ours."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .. import _lib
from .. import torch as gatedelta_torch
from .._operators import arguments, ops
from .._operators.saved import call_of

_TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
_BWD_TENSORS = ("q", "k", "v", "do", "g", "beta", "A", "dht", "initial_state", "cu_seqlens")


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    enable_fwd_cp_cache: bool = True,
    cp_context=None,
    force_intra_cp: bool = False,
):
    """``flash_qla.chunk_gated_delta_rule``, with gradients. Returns (o, final_state or None).

    scale: None and 0 mean ``K ** -0.5``, as in FlashQLA.
    auto_cp: whether one sequence may be cut into segments that run in parallel on one GPU.
    enable_fwd_cp_cache: a hint, without effect.
    cp_context: FlashQLA's, FLA's or one of ``gatedelta.context_parallel``: these are one rank's tokens. Summaries
        travel in float32 (FlashQLA rounds them to k's dtype).
    head_first=True and force_intra_cp=True (with auto_cp) are refused.
    """
    if head_first:
        raise NotImplementedError("head_first=True is not supported, nor is it by FlashQLA: pass [B, T, H, D]")
    if force_intra_cp and auto_cp:
        raise NotImplementedError("force_intra_cp=True is not supported: auto_cp lets the library choose the cuts")
    arguments.check_tensors(_TENSORS, q, k, v, g, beta, initial_state, cu_seqlens, required=3)
    arguments.check_number("scale", scale)
    return gatedelta_torch.chunk_gated_delta_rule(
        q, k, v, g, beta, scale or None, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, auto_cp=auto_cp, cp_context=cp_context,
    )  # fmt: skip


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: torch.LongTensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    enable_fwd_cp_cache: bool = False,
    cp_context=None,
    is_train: bool | None = None,
):
    """``flash_qla.chunk_gated_delta_rule_fwd``. Returns (g, A, o, h or None, final_state or None, cp_cache or None).

    The first two and the last are for ``chunk_gated_delta_rule_bwd`` and nothing else: g as it came, where FlashQLA
    returns its sums over chunks; what the forward saves, where FlashQLA returns an inverse; and which call that is of,
    a tuple of numbers, where FlashQLA returns what it knows of its cuts.

    output_h: the state before every chunk of 64 tokens, ``[B, chunks, Hv, K, V]`` in k's dtype, chunks of packed
        sequences one after the other (the host then waits for cu_seqlens, as FlashQLA's does). Such a forward saves
        nothing: A is None, and the backward computes it again.
    enable_fwd_cp_cache, is_train: hints, without effect. cp_context is refused.
    """
    _refuse_cp_context(cp_context)
    arguments.check_tensors(_TENSORS, q, k, v, g, beta, initial_state, cu_seqlens, required=3)
    arguments.check_number("scale", scale)
    if not output_h:
        o, final_state, saved = gatedelta_torch.chunk_gated_delta_rule_fwd(
            q, k, v, g, beta, scale or None, initial_state, cu_seqlens, output_final_state, auto_cp,
            state_v_first,
        )  # fmt: skip
        return g, saved.data, o, None, final_state, saved.call

    h, slots = _states_before_chunks(k, v, initial_state, cu_seqlens, state_v_first)
    places = {}
    if slots:
        places = {
            "checkpoints": h.flatten(0, 1),
            "checkpoint_indices": torch.tensor(slots, dtype=torch.int32, device=k.device),
            "checkpoint_every": _lib.CHUNK,
        }
    with torch.no_grad():
        o, final_state = gatedelta_torch.chunk_gated_delta_rule(
            q, k, v, g, beta, scale or None, initial_state, output_final_state, state_v_first=state_v_first,
            cu_seqlens=cu_seqlens, auto_cp=auto_cp, **places,
        )  # fmt: skip
    return g, None, o, h, final_state, None


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: torch.LongTensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache=None,
    cp_context=None,
):
    """``flash_qla.chunk_gated_delta_rule_bwd``. Returns (dq, dk, dv, dbeta, dg, dh0 or None).

    g and A are what ``chunk_gated_delta_rule_fwd`` of this module returned first: FlashQLA's own are something else.
    cp_cache: the last of its results, by which A of another call is refused. Without it, only A's size can tell.
    """
    _refuse_cp_context(cp_context)
    arguments.check_tensors(_BWD_TENSORS, q, k, v, do, g, beta, A, dht, initial_state, cu_seqlens, required=4)
    arguments.check_number("scale", scale)
    saved = None
    if cp_cache is not None and (A is None or not isinstance(cp_cache, _lib.SavedCall)):
        raise ValueError("cp_cache is not what chunk_gated_delta_rule_fwd returned beside A: pass that, or None")
    if A is not None:
        ops.check_rank(q, "q")
        ops.check_rank(v, "v")
        options = arguments.pack_options(state_v_first=state_v_first)
        own = cp_cache or call_of(q, v, options, cu_seqlens, initial_state, scale or None)
        saved = _lib.Saved(A, own)
    return gatedelta_torch.chunk_gated_delta_rule_bwd(
        q, k, v, g, beta, saved, do, dht, scale or None, initial_state, cu_seqlens, state_v_first, auto_cp
    )


def _refuse_cp_context(cp_context: object | None) -> None:
    if cp_context is not None:
        raise NotImplementedError(
            "cp_context: chunk_gated_delta_rule takes it; its parts are stages of gatedelta.context_parallel"
        )


def _states_before_chunks(
    k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, state_v_first: bool
) -> tuple[Tensor, list[int]]:
    """h with the states that sequences start from, and where in it the state after each 64 tokens belongs: before the
    next chunk. After a sequence's last whole chunk there may be none: -1."""
    batch, tokens = k.shape[:2]
    offsets = [n * tokens for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    slots: list[int] = []
    first: list[int] = []  # chunk of each sequence that has any
    sequences: list[int] = []
    chunk = 0
    for n, (start, end) in enumerate(pairwise(offsets)):
        last = chunk + -(-(end - start) // _lib.CHUNK) - 1
        slots += [chunk + i if chunk + i <= last else -1 for i in range(1, (end - start) // _lib.CHUNK + 1)]
        if last >= chunk:
            first.append(chunk)
            sequences.append(n)
        chunk = last + 1
    matrix = (v.shape[3], k.shape[3]) if state_v_first else (k.shape[3], v.shape[3])
    h = k.new_empty(chunk, v.shape[2], *matrix)
    h[first] = 0 if initial_state is None else initial_state[sequences].to(h.dtype)
    return h.unflatten(0, (batch, chunk // max(batch, 1))), slots
