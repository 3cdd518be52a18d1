"""FlashInfer's decode functions as calls of ours."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from .. import torch as gatedelta_torch
from .states import States, check_backend, check_given, check_states, has_whole_matrices


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
    check_backend(backend, ("auto", "flashinfer"), ("cake_gdn", "rubin"))
    check_given(q=q)
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
    check_backend(backend, ("auto", "flashinfer"), ("cake_gdn",))
    check_given(q=q)
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
    check_given(q=q, k=k, v=v, state=pool, A_log=A_log, a=a, b=b)
    check_states(state=pool, intermediate_states_buffer=buffer)
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
        if not has_whole_matrices(pool):
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
    # Where states after tokens are stored, a row is padded only if its write slot is null, too.
    final_state = pool if update or (steps is not None and read is not None) else None
    if final_state is not None and not update:
        write = torch.full_like(read, -1)
    states = States(pool, read, final_state, None if final_state is None else write)
    gatedelta_torch.fused_recurrent_gated_delta_rule(
        q, k, v, a, beta=b, scale=scale, use_qk_l2norm_in_kernel=l2norm, use_gate_in_kernel=True, A_log=A_log,
        dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, state_v_first=v_first, out=o, step_states=steps,
        step_indices=slots, **states.arguments,
    )  # fmt: skip
    if update:
        states.store()
    if preserve:
        return torch.where((read < 0)[:, None, None, None], output, o, out=output)
    return o if output is not None else o.to(dtype)
