"""FlashInfer's functions of the gated delta rule, argument for argument as in flashinfer 0.7.2, on GateDelta.

Import these in place of FlashInfer's, which need not be installed; or call ``register()``, and an installed flashinfer
calls them until ``unregister()``. None of them has a gradient. States are ``[V, K]``, except in
``gated_delta_rule_decode``. They take what FlashInfer's take and more: float32, the CPU, GPUs from compute capability
8.0 on, K and V other than 128, states of float16.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from . import _lib
from . import torch as _gd
from ._replace import Replacement

__all__ = [
    "chunk_gated_delta_rule",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "register",
    "unregister",
]

_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    checkpoint_cu_starts, max_seqlen, _cp_chunk_len: checked, and without effect: the library needs none of them.
    States of 8 bits and the backends cake_gdn and cudnn are refused.
    """
    _check_backend(backend, ("auto", "flashinfer"), ("cake_gdn", "cudnn"))
    if use_cp not in ("auto", True, False):
        raise ValueError(f"use_cp must be 'auto', True or False, not {use_cp!r}")
    _check_checkpoint_arguments(checkpoint_every_n_tokens, state_checkpoints, checkpoint_cu_starts)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens is required: the tokens of all sequences lie one after the other")
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError("q, k and v must be [tokens, heads, head size]")
    count = cu_seqlens.shape[0] - 1
    _check_hints(q.shape[0], count, max_seqlen, _cp_chunk_len)
    _check_states(initial_state=initial_state, output_state=output_state, state_checkpoints=state_checkpoints)
    if checkpoint_every_n_tokens and checkpoint_cu_starts.shape != (count + 1,):
        raise ValueError(f"checkpoint_cu_starts must have {count + 1} elements, not {list(checkpoint_cu_starts.shape)}")
    if state_indices is not None and output_final_state and output_state is None:
        raise ValueError("state_indices needs an explicit output_state pool: its entries are slots of that pool")

    k, v = _with_query_heads(q, k, v)
    write = state_indices
    if output_state is None:
        write = None
        if output_final_state:  # nobody can tell what an empty sequence leaves in a new tensor
            output_state = q.new_empty(count, v.shape[1], v.shape[2], q.shape[2], dtype=torch.float32)
    elif not _same(output_state, initial_state):
        slots = torch.arange(count, device=q.device) if write is None else write
        write = torch.where(cu_seqlens[1:] > cu_seqlens[:-1], slots, -1)
    final_state = initial_state if _same(output_state, initial_state) else output_state
    o = q.new_empty(v.shape) if output is None else output
    states = _States(initial_state, state_indices if initial_state is not None else None, final_state, write)
    _gd.chunk_gated_delta_rule(
        q[None], k[None], v[None], None if g is None else g[None].float().log(), None if beta is None else beta[None],
        scale or None, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True, cu_seqlens=cu_seqlens,
        auto_cp=use_cp is not False, out=o[None], checkpoints=state_checkpoints,
        checkpoint_every=checkpoint_every_n_tokens, **states.arguments,
    )  # fmt: skip
    states.store()
    return (o, output_state) if output_final_state else o


@torch.no_grad()
def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: Literal["auto", "flashinfer", "cake_gdn", "rubin"] = "auto",
) -> tuple[Tensor, Tensor]:
    """``flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose``. Returns (o, the state or the pool).

    Either ``state [B, Hv, V, K]``, or the pool initial_state with initial_state_indices; updated in place. A row with a
    negative index is padding: o there is 0 and no slot is read or written, whatever the dtype of the pool (FlashInfer
    lets slot 0 of a bfloat16 pool be overwritten). A negative entry of output_state_indices alone stores nothing.
    float16 inputs become bfloat16 first, as in FlashInfer.
    """
    _check_backend(backend, ("auto", "flashinfer"), ("cake_gdn", "rubin"))
    if (initial_state is None) != (initial_state_indices is None):
        raise ValueError("initial_state and initial_state_indices must be given together")
    if (state is None) == (initial_state is None):
        raise ValueError("either state, or initial_state with initial_state_indices, must be given")
    if output_state_indices is not None and initial_state is None:
        raise ValueError("output_state_indices needs initial_state, the pool to write to")
    pool = state if initial_state is None else initial_state
    if pool.dim() == 5:
        raise NotImplementedError(
            "a pool of ugpu_state_pool ([slots, Hv, 2, V / 2, K]) is not supported: pass [slots, Hv, V, K]"
        )
    tokens_kept = q.shape[1] > 1 and pool.dtype == torch.float32  # FlashInfer then calls gated_delta_rule_mtp
    o = _step(
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, pool, initial_state_indices, output_state_indices,
        not disable_state_update, intermediate_states_buffer, keep_padding=tokens_kept,
    )  # fmt: skip
    return o, pool


@torch.no_grad()
def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: Literal["auto", "flashinfer", "cake_gdn"] = "auto",
) -> tuple[Tensor, Tensor]:
    """``flashinfer.gdn_decode.gated_delta_rule_decode``: one token, ``state [B, Hv, K, V]`` in place.

    Returns (o, state). float16 inputs become bfloat16 first, as in FlashInfer.
    """
    _check_backend(backend, ("auto", "flashinfer"), ("cake_gdn",))
    if q.shape[1] != 1:
        raise ValueError(f"decode takes one token a row, not {q.shape[1]}: gated_delta_rule_mtp takes more")
    o = _step(q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, state, None, None, True, None, v_first=False)
    return o, state


@torch.no_grad()
def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``flashinfer.gdn_decode.gated_delta_rule_mtp``: several tokens a row, over a pool. Returns (o, the pool).

    intermediate_states_buffer ``[>= B, >= T, Hv, V, K]``: the state after every token. ssm_state_indices ``[B, T]``:
    these states go to slots of the pool instead, and there is no final one. disable_state_update: None means True, and
    warns, as in FlashInfer before 0.8. A row with a negative index is padding: no slot is read or written, and its rows
    of output stay as they are (0 without output). float16 inputs become bfloat16 first, as in FlashInfer. ReplaySSM is
    refused.
    """
    replay = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    if cache_replayssm or any(x is not None for x in replay):
        raise NotImplementedError(
            "cache_replayssm and replayssm_*: ReplaySSM is not supported; gatedelta.fused_recurrent_gated_delta_rule "
            "commits accepted tokens with accept_lengths"
        )
    if disable_state_update is None:
        warnings.warn(
            "disable_state_update is not given: True is meant now, and False from FlashInfer 0.8 on",
            FutureWarning,
            stacklevel=3,
        )
        disable_state_update = True
    if ssm_state_indices is not None:
        if intermediate_states_buffer is not None:
            raise ValueError("ssm_state_indices and intermediate_states_buffer are mutually exclusive")
        if disable_state_update:
            raise ValueError("ssm_state_indices requires state writes: disable_state_update must be False")
    o = _step(
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, initial_state, initial_state_indices,
        output_state_indices, not disable_state_update, intermediate_states_buffer, ssm_state_indices,
        keep_padding=True,
    )  # fmt: skip
    return o, initial_state


def _step(
    q, k, v, A_log, a, dt_bias, b, scale, output, l2norm, pool, read, write, update, buffer, slots=None, *,
    v_first=True, keep_padding=False,
) -> Tensor:  # fmt: skip
    """One call of the recurrence; `slots [B, T]` of the pool, or the dense `buffer`, take the states after tokens."""
    _check_states(state=pool, intermediate_states_buffer=buffer)
    dtype = q.dtype
    if dtype == torch.float16:
        q, k, v, a, b = (x.bfloat16() for x in (q, k, v, a, b))
    preserve = keep_padding and output is not None and read is not None
    o = q.new_empty(v.shape, dtype=output.dtype if preserve else None) if output is None or preserve else output

    if write is None:
        write = read
    elif read is not None:
        write = torch.where(read < 0, -1, write)  # a padded row stores nothing, whatever its write slot
    if slots is not None:
        if not _has_whole_matrices(pool):
            raise ValueError("ssm_state_indices needs a pool whose [V, K] matrices are contiguous")
        update, steps = False, pool
        slots = torch.where(read[:, None] < 0, -1, slots)
    else:
        if buffer is not None and (buffer.dim() != 5 or buffer.shape[0] < q.shape[0] or buffer.shape[1] < q.shape[1]):
            raise ValueError(
                f"intermediate_states_buffer is {list(buffer.shape)}, but it must have room for {q.shape[0]} rows of "
                f"{q.shape[1]} tokens: [>= B, >= T, Hv, V, K]"
            )
        steps = None if buffer is None else buffer[: q.shape[0], : q.shape[1]]
    # Where states after tokens are stored, the library needs a write slot to know a padded row.
    final_state = pool if update or (steps is not None and read is not None) else None
    if final_state is not None and not update:
        write = torch.full_like(read, -1)
    states = _States(pool, read, final_state, None if final_state is None else write)
    _gd.fused_recurrent_gated_delta_rule(
        q, k, v, a, beta=b, scale=scale, use_qk_l2norm_in_kernel=l2norm, use_gate_in_kernel=True, A_log=A_log,
        dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, state_v_first=v_first, out=o, step_states=steps,
        step_indices=slots, **states.arguments,
    )  # fmt: skip
    if update:
        states.store()
    if preserve:
        return torch.where((read < 0)[:, None, None, None], output, o, out=output)
    return o if output is not None else o.to(dtype)


class _States:
    """Initial and final states as the library takes them. Of tensors whose matrices are not contiguous, the rows in use
    are copied, and ``store`` writes them back."""

    def __init__(
        self, initial_state: Tensor | None, read: Tensor | None, final_state: Tensor | None, write: Tensor | None
    ) -> None:
        self._target, self._write = final_state, write
        self._rows = None
        in_place = final_state is not None and final_state is initial_state
        if initial_state is not None and not _has_whole_matrices(initial_state):
            initial_state, read = _gather(initial_state, read)
        if final_state is not None and not _has_whole_matrices(final_state):
            in_place = False
            final_state, write = self._rows, _ = _gather(final_state, write)
        self.arguments = {
            "initial_state": final_state if in_place else initial_state,
            "initial_state_indices": read,
            "final_state": final_state,
            "final_state_indices": write,
        }

    def store(self) -> None:
        if self._rows is None:
            return
        if self._write is None:
            self._target.copy_(self._rows)
        elif self._write.numel():
            # Padded rows repeat what the first other one writes: no wait for the number of those, and no race.
            stored = self._write >= 0
            rows = torch.where(stored, _range(stored), stored.int().argmax())
            self._target[self._write[rows].clamp_min(0)] = self._rows[rows]


def _gather(states: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if slots is None:
        return states.contiguous(), None
    return states[slots.clamp_min(0)].contiguous(), torch.where(slots < 0, -1, _range(slots))


def _range(like: Tensor) -> Tensor:
    return torch.arange(like.shape[0], device=like.device)


def _has_whole_matrices(states: Tensor) -> bool:
    rows, columns = states.shape[-2:]
    return (states.stride(-1) == 1 or columns == 1) and (states.stride(-2) == columns or rows == 1)


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether both are the same states in the same memory."""
    if x is None or y is None or x is y or torch.compiler.is_compiling():  # a traced tensor has no address
        return x is y and x is not None
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)


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


def _check_backend(backend: str, ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    if backend in theirs:
        raise NotImplementedError(f"backend {backend!r} names kernels of FlashInfer's own: pass 'auto'")
    if backend not in ours:
        raise ValueError(f"backend {backend!r} is unknown: pass 'auto'")


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


def _check_states(**states: Tensor | None) -> None:
    for name, tensor in states.items():
        if tensor is None or tensor.dtype in _STATE_DTYPES:
            continue
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            raise NotImplementedError(
                f"{name} is {tensor.dtype}: states of 8 bits are not supported, only float32, bfloat16 and float16"
            )
        raise ValueError(f"{name} must have dtype float32, bfloat16 or float16, not {tensor.dtype}")


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
    """Replaces the four functions in every module of the installed flashinfer. A second call changes nothing.

    Modules outside of flashinfer that have imported a function by name keep it: call this first. ImportError where
    flashinfer is missing, cannot be imported or has other arguments.
    """
    _replacement.register()


def unregister() -> None:
    """Puts FlashInfer's own functions back."""
    _replacement.unregister()
