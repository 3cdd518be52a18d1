"""FlashInfer's prefill as a call of ours."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .. import _lib
from .. import torch as gatedelta_torch
from .states import States, check_backend, check_given, check_states


@torch.no_grad()
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: Literal["auto"] | bool = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: Literal["auto", "flashinfer", "cake_gdn", "cudnn"] = "auto",
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flashinfer.gdn_prefill.chunk_gated_delta_rule``. Returns o, or (o, final states) with output_final_state.

    q ``[T, Hq, K]``, k ``[T, Hk, K]``, v ``[T, Hv, V]``, packed by cu_seqlens; o has max(Hq, Hv) heads. g is the decay
    itself: its logarithm is one small kernel more. Where there are more query than key heads, k and v are repeated.
    scale: None and 0 mean ``K ** -0.5``.
    output_state: written whenever it is given. An empty sequence leaves its state there untouched.
    state_indices: where the final state is stored, a negative entry is a padded row: its o is 0, nothing is stored.
    use_cp: False keeps sequences whole; otherwise the library may cut them (CUDA).
    checkpoint_cu_starts, max_seqlen, _cp_chunk_len: checked (the contents of the first on the CPU alone), and without
        effect: the library needs none of them.
    States of 8 bits and the backends cake_gdn and cudnn are refused.
    """
    check_backend(backend, ("auto", "flashinfer"), ("cake_gdn", "cudnn"))
    if use_cp not in ("auto", True, False):
        raise ValueError(f"use_cp must be 'auto', True or False, not {use_cp!r}")
    _check_checkpoint_arguments(checkpoint_every_n_tokens, state_checkpoints, checkpoint_cu_starts)
    check_given(q=q, k=k, v=v)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens is required: the tokens of all sequences lie one after the other")
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError("q, k and v must be [tokens, heads, head size]")
    count = cu_seqlens.shape[0] - 1
    _check_hints(q.shape[0], count, max_seqlen, _cp_chunk_len)
    check_states(initial_state=initial_state, output_state=output_state, state_checkpoints=state_checkpoints)
    if checkpoint_every_n_tokens and checkpoint_cu_starts.shape != (count + 1,):
        raise ValueError(f"checkpoint_cu_starts must have {count + 1} elements, not {list(checkpoint_cu_starts.shape)}")
    if checkpoint_every_n_tokens:
        _check_starts(checkpoint_cu_starts, cu_seqlens, checkpoint_every_n_tokens)
    if state_indices is not None and output_final_state and output_state is None:
        raise ValueError("state_indices needs an explicit output_state pool: its entries are slots of that pool")
    if state_indices is not None and initial_state is None and output_state is None:
        raise ValueError(
            "state_indices is given, but neither initial_state nor output_state: there is no pool to index"
        )

    k, v = _with_query_heads(q, k, v)
    write = state_indices
    if output_state is None:
        write = None
        if output_final_state:  # an empty sequence leaves its row unwritten: a new tensor needs every row
            output_state = q.new_empty(count, v.shape[1], v.shape[2], q.shape[2], dtype=torch.float32)
    elif not _same(output_state, initial_state):
        slots = torch.arange(count, device=q.device) if write is None else write
        write = torch.where(cu_seqlens[1:] > cu_seqlens[:-1], slots, -1)
    final_state = initial_state if _same(output_state, initial_state) else output_state
    o = q.new_empty(v.shape) if output is None else output
    states = States(initial_state, state_indices if initial_state is not None else None, final_state, write)
    gatedelta_torch.chunk_gated_delta_rule(
        q[None], k[None], v[None], None if g is None else g[None].float().log(), None if beta is None else beta[None],
        scale or None, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True, cu_seqlens=cu_seqlens,
        auto_cp=use_cp is not False, out=o[None], checkpoints=state_checkpoints,
        checkpoint_every=checkpoint_every_n_tokens, **states.arguments,
    )  # fmt: skip
    states.store()
    return (o, output_state) if output_final_state else o


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether both are the same states in the same memory."""
    if x is None or y is None or x is y or torch.compiler.is_compiling():  # a traced tensor has no address
        return x is y and x is not None
    return all(f(x) == f(y) for f in (Tensor.data_ptr, Tensor.size, Tensor.stride, Tensor.is_neg, lambda t: t.dtype))


def _with_query_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v for every query head, where there are fewer; otherwise value heads are a multiple of the others."""
    queries, keys, values = q.shape[1], k.shape[1], v.shape[1]
    if queries == keys:
        return k, v
    if keys != values or queries % keys:
        raise ValueError(
            f"{queries} query, {keys} key and {values} value heads: either q and k have the same number and v a "
            "multiple of it, or k and v have the same number and q a multiple of it"
        )
    return k.repeat_interleave(queries // keys, 1), v.repeat_interleave(queries // keys, 1)


def _check_checkpoint_arguments(every: int, checkpoints: Tensor | None, starts: Tensor | None) -> None:
    if every < 0:
        raise ValueError(f"checkpoint_every_n_tokens must be non-negative, not {every}")
    if every % _lib.CHUNK:
        raise ValueError(f"checkpoint_every_n_tokens must be a multiple of the chunk size (64), not {every}")
    if every and (checkpoints is None or starts is None):
        raise ValueError(
            "with checkpoint_every_n_tokens, state_checkpoints and checkpoint_cu_starts must both be provided"
        )
    if not every and (checkpoints is not None or starts is not None):
        raise ValueError("without checkpoint_every_n_tokens, state_checkpoints and checkpoint_cu_starts must be None")


def _check_starts(starts: Tensor, cu_seqlens: Tensor, every: int) -> None:
    """The library packs checkpoints in one way alone. Reading a GPU's tensor would wait for it."""
    if torch.compiler.is_compiling() or type(starts) is not Tensor or type(cu_seqlens) is not Tensor:
        return
    if starts.device.type == "cpu" and cu_seqlens.device.type == "cpu":
        counts = torch.div(cu_seqlens.diff(), every, rounding_mode="floor")
        expected = [0, *counts.cumsum(0).tolist()]
        if starts.tolist() != expected:
            raise ValueError(
                f"checkpoint_cu_starts is {starts.tolist()}, but sequences of these lengths have a checkpoint every "
                f"{every} tokens from {expected} on"
            )


def _check_hints(tokens: int, count: int, max_seqlen: int | None, cp_chunk_len: int | None) -> None:
    if count < 1:
        raise ValueError("cu_seqlens must have at least two elements")
    if max_seqlen is not None and not -(-tokens // count) <= max_seqlen <= tokens:
        raise ValueError(
            f"max_seqlen is {max_seqlen}, but the longest of {count} sequences with {tokens} tokens together has from "
            f"{-(-tokens // count)} to {tokens}"
        )
    if cp_chunk_len is not None and (cp_chunk_len <= 0 or cp_chunk_len % _lib.CHUNK):
        raise ValueError(f"_cp_chunk_len must be a multiple of 64, not {cp_chunk_len}")
