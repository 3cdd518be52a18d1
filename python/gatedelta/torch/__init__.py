"""The gated delta rule for torch: FLA's and FlashQLA's functions, with gradients, torch.compile and state pools.

Shapes everywhere: q, k ``[B, T, H, K]``; v, o ``[B, T, HV, V]`` with HV a multiple of H (value head h reads key head
``h // (HV // H)``); g, beta ``[B, T, HV]``; states ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``.
N is B, or ``len(cu_seqlens) - 1`` for packed sequences (then B is 1). Tokens past the last offset are never read; their
outputs and gradients are 0. g is the natural logarithm of the decay. q, k, v are float32, bfloat16 or float16; the rest
may also be of another of these. A call the library refuses raises RuntimeError with the reason; an argument these
functions refuse themselves raises ValueError or NotImplementedError.

CUDA tensors run on torch's current stream: the chunk functions and their gradients, on Hopper, for K = V = 128 in
bfloat16 and float16. What lies in cu_seqlens and index tensors there is not checked. For the backward some 172 bytes
per token and value head are kept, and with ``recompute`` nothing.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .. import _lib
from . import _ops

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "cu_seqlens_from_positions",
    "fused_recurrent_gated_delta_rule",
    "recurrent_gated_delta_rule",
]


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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
    auto_cp: bool = True,
    enable_fwd_cp_cache: bool = True,
    recompute: bool = False,
    batch_invariant: bool = False,
    small_workspace: bool = False,
    out: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    final_state: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoint_every: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over whole sequences, for training and prefill. Returns (o, final_state or None).

    o has q's dtype; the final state is float32, or whatever ``final_state`` is. Gradients reach q, k, v, g, beta,
    A_log, dt_bias and initial_state, from o and from the final state.

    As in FLA and FlashQLA:
        scale: factor on q; None means ``K ** -0.5``.
        initial_state: the states that sequences start from; None means 0.
        output_final_state: return the states at the ends, too; a ``final_state`` buffer is returned in any case.
        use_qk_l2norm_in_kernel: q and k are divided by ``sqrt(sum of squares + 1e-6)`` first.
        use_beta_sigmoid_in_kernel: beta holds logits; ``sigmoid(beta)`` is used, twice that with allow_neg_eigval.
        use_gate_in_kernel: g holds raw ``a``; the decay is ``-exp(A_log) * softplus(a + dt_bias)``, A_log and dt_bias
            ``[HV]``, dt_bias optional.
        cu_seqlens: offsets ``[N + 1]`` of packed sequences, int32 or int64.
        cu_seqlens_cpu, chunk_indices: what callers computed from cu_seqlens for other kernels. Nothing here needs them
            and they cannot change the result; they are only checked for belonging to cu_seqlens by shape.
        chunk_size: None or 64, the one there is. The result does not depend on it beyond rounding.
        cp_context: not supported, refused. head_first: removed from FLA, refused.
        transpose_state_layout: FLA's older name for state_v_first.
        auto_cp: whether one sequence may be cut into segments that run in parallel on one card (CUDA).
        enable_fwd_cp_cache: a hint of FlashQLA's that changes nothing: ``recompute`` says what is kept for a backward.

    Beyond them:
        recompute: keep nothing but the inputs for the backward, which then computes the rest again.
        batch_invariant: a sequence's bits do not depend on its neighbours (always so on the CPU).
        small_workspace: the backward takes less memory and more time, for the same bits (CUDA). Not with recompute.
        out: buffer for o.
        initial_state_indices ``[N]``: initial_state is a pool ``[slots, HV, ...]``, and this the slot each sequence
            starts from; negative = from zero.
        final_state, final_state_indices: buffer, or pool with slots ``[N]``, the final states go to; negative = not
            stored. It may be initial_state itself (in place). A sequence whose slots are both negative is skipped, with
            zero outputs.
        checkpoints, checkpoint_indices, checkpoint_every: buffer ``[C, HV, ...]``, or pool with slots ``[C]``, for the
            state after every ``checkpoint_every`` tokens (a multiple of 64) of each sequence, packed sequence by
            sequence: ``floor(length / checkpoint_every)`` entries each.
        Buffers that are written to have no gradient: with them, no other argument may require one.
    """
    if cp_context is not None:
        raise NotImplementedError("cp_context: context parallelism across devices is not supported; pass None")
    if head_first:
        raise NotImplementedError("head_first=True is not supported: transpose the inputs to [B, T, H, D]")
    if chunk_size is not None and chunk_size != _lib.CHUNK:
        raise ValueError(f"chunk_size is {chunk_size}, but the kernels work in chunks of {_lib.CHUNK} tokens")
    if cu_seqlens_cpu is not None or chunk_indices is not None:
        _check_hints(cu_seqlens, cu_seqlens_cpu, chunk_indices)
    if transpose_state_layout is not None:
        state_v_first = _state_layout(state_v_first, transpose_state_layout)
    options = _options(use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
                       use_qk_l2norm_in_kernel, auto_cp, batch_invariant)  # fmt: skip
    if small_workspace and recompute:
        raise ValueError("small_workspace needs what the forward keeps, and with recompute it keeps nothing")
    needs_grad = torch.is_grad_enabled() and _requires_grad(q, k, v, g, beta, A_log, dt_bias, initial_state)

    if (
        out is not None
        or final_state is not None
        or final_state_indices is not None
        or checkpoints is not None
        or checkpoint_indices is not None
        or checkpoint_every
    ):
        if needs_grad:
            raise RuntimeError(_NO_GRADIENT)
        if out is None:
            out = q.new_empty(v.shape)
        final_state = _final_state_buffer(q, v, cu_seqlens, state_v_first, output_final_state, final_state,
                                          final_state_indices)  # fmt: skip
        in_place = final_state is not None and final_state is initial_state
        _ops.chunk_fwd_out(q, k, v, g, beta, options, cu_seqlens, None if in_place else initial_state, scale, A_log,
                           dt_bias, initial_state_indices, out, final_state, final_state_indices, in_place,
                           checkpoints, checkpoint_indices, checkpoint_every)  # fmt: skip
        _mark_written(out, final_state, checkpoints)
        return out, final_state

    if output_final_state:
        options |= _ops.FINAL_STATE
    if needs_grad:
        _check_gradient(initial_state, initial_state_indices)
        if small_workspace:
            options |= _ops.SMALL_WORKSPACE
        o, states, _ = _GatedDeltaRule.apply(q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log,
                                             dt_bias, initial_state_indices, True, recompute)  # fmt: skip
    elif scale is None and A_log is None and dt_bias is None and initial_state_indices is None:
        o, states = _ops.chunk_fwd(q, k, v, g, beta, options, cu_seqlens, initial_state)  # faster without Nones
    else:
        o, states = _ops.chunk_fwd(q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias,
                                   initial_state_indices)  # fmt: skip
    return o, states if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    output_o: bool = True,
    out: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    final_state: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    accept_lengths: Tensor | None = None,
    step_states: Tensor | None = None,
    step_indices: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gated delta rule token by token, for decode (T = 1) and draft verification. Returns (o, final_state or None).

    Arguments are those of FLA's function and mean what they mean in ``chunk_gated_delta_rule``. g None means no decay,
    beta None means 1; gk and gv (decays per channel) are refused. Gradients work and cost a chunked backward.

    Beyond FLA:
        out, initial_state_indices, final_state, final_state_indices: as in ``chunk_gated_delta_rule``; an engine
            decodes with ``initial_state=pool, final_state=pool`` and the same slots for both.
        accept_lengths ``[N]``: the final state is the one after so many tokens of the sequence (0 = the initial state);
            o covers all tokens.
        step_states: buffer ``[B, T, HV, ...]`` for the state after each token, or a pool ``[slots, HV, ...]`` with
            slots ``step_indices [B, T]``, negative = not stored.
        output_o: False computes and returns no o: only the states move (commit of accepted tokens).
        Buffers that are written to have no gradient: with them, no other argument may require one.
    """
    if gk is not None or gv is not None:
        raise NotImplementedError("gk and gv (decays per key or value channel) are not supported: GDN has one per head")
    if g is None:
        if use_gate_in_kernel:
            raise ValueError("use_gate_in_kernel=True takes raw `a` as g, but g is None")
        g = q.new_zeros((), dtype=torch.float32).expand(v.shape[:3])
    if beta is None:
        if use_beta_sigmoid_in_kernel:
            raise ValueError("use_beta_sigmoid_in_kernel=True takes logits as beta, but beta is None")
        beta = q.new_ones((), dtype=torch.float32).expand(v.shape[:3])
    if transpose_state_layout is not None:
        state_v_first = _state_layout(state_v_first, transpose_state_layout)
    options = _options(use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
                       use_qk_l2norm_in_kernel)  # fmt: skip
    needs_grad = torch.is_grad_enabled() and _requires_grad(q, k, v, g, beta, A_log, dt_bias, initial_state)

    if (
        out is not None
        or final_state is not None
        or final_state_indices is not None
        or accept_lengths is not None
        or step_states is not None
        or step_indices is not None
        or not output_o
    ):
        if needs_grad:
            raise RuntimeError(_NO_GRADIENT)
        if not output_o and out is not None:
            raise ValueError("out= is given, but output_o=False computes no o")
        if out is None and output_o:
            out = q.new_empty(v.shape)
        final_state = _final_state_buffer(q, v, cu_seqlens, state_v_first, output_final_state, final_state,
                                          final_state_indices)  # fmt: skip
        in_place = final_state is not None and final_state is initial_state
        _ops.recurrent_out(q, k, v, g, beta, options, cu_seqlens, None if in_place else initial_state, scale, A_log,
                           dt_bias, initial_state_indices, out, final_state, final_state_indices, in_place,
                           accept_lengths, step_states, step_indices)  # fmt: skip
        _mark_written(out, final_state, step_states)
        return out, final_state

    if output_final_state:
        options |= _ops.FINAL_STATE
    if not needs_grad:
        o, states = _ops.recurrent(q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias,
                                   initial_state_indices)  # fmt: skip
    else:
        _check_gradient(initial_state, initial_state_indices)
        o, states, _ = _GatedDeltaRule.apply(q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log,
                                             dt_bias, initial_state_indices, False, True)  # fmt: skip
    return o, states if output_final_state else None


recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    enable_fwd_cp_cache: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The forward alone, called as FlashQLA's. Returns (o, final_state or None, saved).

    FlashQLA returns (g_cumsum, A, o, h, final_state, cp_cache); here ``saved``, an opaque buffer for
    ``chunk_gated_delta_rule_bwd``, stands for g_cumsum, A and cp_cache. Nobody records a gradient. Arguments are those
    of ``chunk_gated_delta_rule``; enable_fwd_cp_cache changes nothing.
    """
    if output_h:
        raise NotImplementedError(
            "output_h=True is not supported: chunk_gated_delta_rule writes the states you need with checkpoints="
        )
    options = _options(state_v_first=state_v_first, auto_cp=auto_cp)
    if output_final_state:
        options |= _ops.FINAL_STATE
    with torch.no_grad():
        o, states, saved = _ops.chunk_fwd_save(q, k, v, g, beta, options, cu_seqlens, initial_state, scale)
    return o, states if output_final_state else None, saved


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    saved: Tensor | None,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    small_workspace: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The backward alone, called as FlashQLA's. Returns (dq, dk, dv, dbeta, dg, dh0 or None).

    Where FlashQLA takes g_cumsum and A, this takes g itself and ``saved`` of the forward; saved None computes it again.
    Each gradient has the dtype of what it is the gradient of; dh0 is None without initial_state. small_workspace: less
    memory, more time, the same bits (CUDA, with ``saved``).
    """
    wanted = 0b00011111 | (initial_state is not None) << 7
    options = _options(state_v_first=state_v_first, auto_cp=auto_cp)
    if small_workspace:
        options |= _ops.SMALL_WORKSPACE
    with torch.no_grad():
        dq, dk, dv, dg, dbeta, _, _, dh0 = _ops.chunk_bwd(
            q, k, v, g, beta, options, cu_seqlens, initial_state, scale, None, None, None, do, dht, saved, wanted
        )
    return dq, dk, dv, dbeta, dg, dh0 if initial_state is not None else None


def cu_seqlens_from_positions(position_ids: Tensor) -> Tensor:
    """Offsets of packed sequences, int32 ``[N + 1]``, from their position ids ``[T]`` or ``[B, T]``.

    A sequence starts wherever a position does not continue the one before (``p[t] != p[t - 1] + 1``) and at every row
    of a batch; rows are taken one after the other, as ``x.flatten(0, 1).unsqueeze(0)`` lays out their tokens. Packed
    training without these offsets leaks the state of one sample into the next. The number of sequences depends on the
    data, so on a GPU this waits for it.
    """
    if position_ids.dim() not in (1, 2):
        raise ValueError(
            f"position_ids must be [T] or [B, T], not {list(position_ids.shape)}; of multi-axis positions pass the one "
            "that counts tokens"
        )
    if position_ids.is_floating_point() or position_ids.is_complex() or position_ids.dtype == torch.bool:
        raise ValueError(f"position_ids must be integers, not {position_ids.dtype}")
    rows = position_ids if position_ids.dim() == 2 else position_ids.unsqueeze(0)
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[:, 1:] = rows[:, 1:] != rows[:, :-1] + 1
    offsets = starts.flatten().nonzero().flatten()
    return torch.cat([offsets, offsets.new_full((1,), rows.numel())]).to(torch.int32)


_NO_GRADIENT = (
    "a call that writes to buffers of yours (out=, final_state=, checkpoints=, step_states=, ...) has no gradient, but "
    "an input requires one: call it under torch.no_grad(), or without the buffers"
)


class _GatedDeltaRule(torch.autograd.Function):
    """o, final state and what the backward wants kept. The backward of both forms is the chunked one."""

    @staticmethod
    def forward(
        q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_indices, chunked,
        recompute,
    ):  # fmt: skip
        options &= ~_ops.SMALL_WORKSPACE  # of the backward alone
        inputs = (q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_indices)
        if not recompute:
            return _ops.chunk_fwd_save(*inputs)
        forward = _ops.chunk_fwd if chunked else _ops.recurrent
        return *forward(*inputs), q.new_empty((0,), dtype=torch.uint8)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, g, beta, options, cu_seqlens, initial_state, ctx.scale, A_log, dt_bias, indices, _, recompute = inputs
        ctx.has_final_state, ctx.recompute = bool(options & _ops.FINAL_STATE), recompute
        ctx.options = options & ~_ops.FINAL_STATE
        _, states, saved = output
        ctx.save_for_backward(q, k, v, g, beta, cu_seqlens, initial_state, A_log, dt_bias, indices, saved)
        ctx.mark_non_differentiable(*((saved,) if ctx.has_final_state else (states, saved)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_o, d_final_state, _):
        q, k, v, g, beta, cu_seqlens, initial_state, A_log, dt_bias, indices, saved = ctx.saved_tensors
        if d_o is None:
            d_o = q.new_zeros(v.shape)
        if not ctx.has_final_state:
            d_final_state = None  # compiled graphs pass one of the empty tensor
        needs = ctx.needs_input_grad
        positions = (0, 1, 2, 3, 4, 9, 10, 7)  # of _ops.GRADIENTS among this function's arguments
        wanted = sum(1 << bit for bit, position in enumerate(positions) if needs[position])
        # Compiled graphs refuse a double backward themselves.
        record = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        results = (_Gradients.apply if record else _ops.chunk_bwd)(
            q, k, v, g, beta, ctx.options, cu_seqlens, initial_state, ctx.scale, A_log, dt_bias, indices, d_o,
            d_final_state, None if ctx.recompute else saved, wanted,
        )  # fmt: skip
        gradients = [None] * 14
        for bit, position in enumerate(positions):
            if needs[position]:
                gradients[position] = results[bit]
        return tuple(gradients)


class _Gradients(torch.autograd.Function):
    """The backward, where its results are to be differentiated again: says that they cannot be."""

    @staticmethod
    def forward(*args):
        return _ops.chunk_bwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError("the gradients of the gated delta rule cannot be differentiated again (double backward)")


def _options(
    gate: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    state_v_first: bool = False,
    l2norm: bool = False,
    auto_cp: bool = True,
    batch_invariant: bool = False,
) -> int:
    """The operators' options, except whether there is a final state."""
    options = 0
    if gate:
        options |= _ops.GATE_RAW
    if neg_eigval:
        if not beta_sigmoid:
            raise ValueError(
                "allow_neg_eigval doubles the sigmoid of beta, so it needs use_beta_sigmoid_in_kernel=True"
            )
        options |= _ops.BETA_LOGIT_DOUBLED
    elif beta_sigmoid:
        options |= _ops.BETA_LOGIT
    if state_v_first:
        options |= _ops.STATE_V_FIRST
    if l2norm:
        options |= _ops.L2NORM
    if not auto_cp:
        options |= _ops.UNCUT
    if batch_invariant:
        options |= _ops.BATCH_INVARIANT
    return options


def _state_layout(state_v_first: bool, transpose_state_layout: bool) -> bool:
    if state_v_first:
        raise ValueError("state_v_first and its older name transpose_state_layout are both given")
    if not torch.compiler.is_compiling():  # which cannot trace a warning
        warnings.warn("transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def _check_hints(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, chunk_indices: Tensor | None) -> None:
    if cu_seqlens_cpu is not None and (cu_seqlens is None or cu_seqlens_cpu.shape != cu_seqlens.shape):
        raise ValueError("cu_seqlens_cpu must be a copy of cu_seqlens, which is absent or has another shape")
    if chunk_indices is not None and (cu_seqlens is None or chunk_indices.dim() != 2 or chunk_indices.shape[1] != 2):
        raise ValueError("chunk_indices must come with cu_seqlens and have shape [number of chunks, 2]")


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _check_gradient(initial_state: Tensor | None, initial_state_indices: Tensor | None) -> None:
    if initial_state_indices is not None and initial_state is not None and initial_state.requires_grad:
        raise ValueError(
            "initial_state requires a gradient, but with initial_state_indices it is a pool, which has none: pass "
            "initial_state=pool[indices] without the indices"
        )


def _final_state_buffer(q, v, cu_seqlens, state_v_first, output_final_state, final_state, final_state_indices):
    if final_state is None and final_state_indices is not None:
        raise ValueError("final_state_indices needs final_state=, the pool to write to")
    if final_state is None and output_final_state:
        return _ops.empty_states(q, v, cu_seqlens, state_v_first)
    return final_state


def _mark_written(*tensors: Tensor | None) -> None:
    """Tells autograd, so that a graph that saved one of these for its backward refuses to use the new contents."""
    if torch.compiler.is_compiling():
        return  # compiled graphs write back with copy_, which does it
    torch.autograd.graph.increment_version([x for x in tensors if x is not None and not x.is_inference()])
