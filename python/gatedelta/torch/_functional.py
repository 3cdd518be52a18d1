"""The public functions: what the arguments mean, and which operator a call takes."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _lib
from .._lib import Saved
from .._operators import arguments, ops
from .._operators import saved as saved_calls
from .._operators.autograd import GatedDeltaRule
from . import _direct

_CHUNK_TENSORS = (
    "q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias", "initial_state_indices", "out",
    "final_state", "final_state_indices", "checkpoints", "checkpoint_indices", "checkpoint_offsets",
)  # fmt: skip
_RECURRENT_TENSORS = (
    *_CHUNK_TENSORS[:13], "accept_lengths", "step_states", "step_indices", "previous_accept_lengths",
)  # fmt: skip
_FWD_TENSORS = _CHUNK_TENSORS[:7]
_BWD_TENSORS = ("q", "k", "v", "do", "g", "beta", "initial_state", "cu_seqlens", "saved", "dht")


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
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
    auto_cp: bool = True,
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
    checkpoint_offsets: Tensor | None = None,
    null_index: int = -1,
    key_head_order: str = "grouped",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over whole sequences, for training and prefill. Returns (o, final_state or None).

    o has q's dtype; the final state is float32, or of the dtype of the ``final_state`` buffer. Gradients reach q, k, v,
    g, beta, A_log, dt_bias and initial_state, from o and from the final state.

    As in FLA and FlashQLA:
        g, beta: None for g means no decay, None for beta means 1; neither has a gradient then. (FLA and FlashQLA
            require both; FlashInfer allows None.)
        scale: factor on q; None means ``K ** -0.5``.
        initial_state: the states that sequences start from; None means 0.
        output_final_state: return the states at the ends, too; a ``final_state`` buffer is returned in any case.
        use_qk_l2norm_in_kernel: q and k are divided by ``sqrt(sum of squares + 1e-6)`` first.
        use_beta_sigmoid_in_kernel: beta holds logits; ``sigmoid(beta)`` is used, twice that with allow_neg_eigval.
        use_gate_in_kernel: g holds raw ``a``; the decay is ``-exp(A_log) * softplus(a + dt_bias)``, A_log and dt_bias
            ``[Hv]``, dt_bias optional.
        cu_seqlens: offsets ``[N + 1]`` of packed sequences, int32 or int64.
        cu_seqlens_cpu, chunk_indices: other kernels need these, derived from cu_seqlens. The call ignores their
            contents and checks their shapes against cu_seqlens.
        chunk_size: None or 64. The chunk size changes the result by rounding alone.
        cp_context: of ``gatedelta.context_parallel.build_context``, FLA's or FlashQLA's: the pack is shared out to
            the ranks of a group, and these are this rank's tokens (docs/context_parallel.md). Without states and
            buffers; cu_seqlens is the context's.
        transpose_state_layout: FLA's older name for state_v_first.
        auto_cp: whether one sequence may be cut into segments that run in parallel on one GPU.

    Beyond them:
        recompute: save the inputs alone for the backward, which then computes the rest again. Where sequences are cut
            (CUDA, auto_cp), gradients may differ in the last bits from those without recompute; they are the same
            where none is cut (auto_cp=False or batch_invariant=True).
        batch_invariant: a sequence's bits do not depend on its neighbours (always so on the CPU).
        small_workspace: the backward takes less memory and more time, for the same bits (CUDA). Not with recompute.
        out: buffer for o.
        initial_state_indices ``[N]``: initial_state is a pool ``[slots, Hv, ...]``, and each sequence starts from the
            slot given here; a negative entry starts from zero.
        final_state, final_state_indices: buffer, or pool with slots ``[N]``, the final states go to; a negative entry
            stores nothing. It may be initial_state itself (in place). A sequence whose slots are both negative is a
            padded row: the call skips it, and its outputs are 0.
        checkpoints, checkpoint_indices, checkpoint_every: buffer ``[C, Hv, ...]``, or pool with slots ``[C]``, for the
            state after every ``checkpoint_every`` tokens (a multiple of 64) of each sequence, packed sequence by
            sequence: ``floor(length / checkpoint_every)`` entries each. A negative checkpoint_indices entry stores
            nothing.
        checkpoint_offsets ``[N]``: instead of checkpoint_every, one state of each sequence, the one after so many of
            its tokens (a multiple of 64; 0 or less: none). checkpoints is then ``[N, Hv, ...]``, or a pool with slots
            ``[N]``.
        null_index: indices up to this one are null slots, as negative ones are: engines whose block 0 is null pass 0.
        key_head_order: "grouped", value head h uses key head ``h // (Hv // Hk)``, or "tiled", ``h % Hk`` as in ggml
            (not on CUDA, where only recurrent steps take it).
        Index tensors may have any strides: a column of a block table is taken as it is.
        Buffers that are written to have no gradient: with them, no other argument may require one, and neither may
        they.
    """
    # FlashQLA's contexts may be of one card alone.
    is_shared = cp_context is not None and getattr(cp_context, "is_inter", True)
    try:
        arguments.check_tensors(
            _CHUNK_TENSORS, q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, initial_state_indices, out,
            final_state, final_state_indices, checkpoints, checkpoint_indices, checkpoint_offsets, required=3,
        )  # fmt: skip
        if scale is not None:
            arguments.refuse_gradient("scale", scale)
        if chunk_size is not None and chunk_size != _lib.CHUNK:
            raise ValueError(f"chunk_size is {chunk_size}, but the kernels work in chunks of {_lib.CHUNK} tokens")
        if cu_seqlens_cpu is not None or chunk_indices is not None:
            arguments.check_hints(cu_seqlens, cu_seqlens_cpu, chunk_indices)
        if transpose_state_layout is not None:
            state_v_first = arguments.state_layout(state_v_first, transpose_state_layout)
        if is_shared:
            _refuse_with_context(
                initial_state=initial_state, output_final_state=output_final_state or None, out=out,
                initial_state_indices=initial_state_indices, final_state=final_state,
                final_state_indices=final_state_indices, checkpoints=checkpoints, checkpoint_indices=checkpoint_indices,
                checkpoint_every=checkpoint_every or None, checkpoint_offsets=checkpoint_offsets,
                null_index=None if null_index == -1 else null_index, small_workspace=small_workspace or None,
            )  # fmt: skip
    except Exception as error:
        if is_shared:
            from ..context_parallel.rule import tell_refusal

            tell_refusal(cp_context, error)
        raise
    if is_shared:
        from .. import context_parallel  # here, because it imports torch.distributed

        o = context_parallel.chunk_gated_delta_rule(
            q, k, v, g, beta, cp_context, A_log=A_log, dt_bias=dt_bias, recompute=recompute, scale=scale,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, use_gate_in_kernel=use_gate_in_kernel,
            key_head_order=key_head_order, auto_cp=auto_cp, batch_invariant=batch_invariant, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return o, None
    if g is None or beta is None:
        g, beta = arguments.with_gates(v, g, beta, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    options = arguments.pack_options(
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, use_qk_l2norm_in_kernel,
        auto_cp, batch_invariant, key_head_order,
    )  # fmt: skip
    options |= arguments.first_slot_option(null_index, initial_state_indices, final_state_indices, checkpoint_indices)
    if small_workspace and recompute:
        raise ValueError("small_workspace needs what the forward saves, and with recompute it saves nothing")
    needs_grad = arguments.needs_graph(q, k, v, g, beta, A_log, dt_bias, initial_state)

    if (
        out is not None
        or final_state is not None
        or final_state_indices is not None
        or checkpoints is not None
        or checkpoint_indices is not None
        or checkpoint_every
        or checkpoint_offsets is not None
    ):
        if needs_grad:
            raise ValueError(arguments.NO_GRADIENT)
        arguments.check_written(("out", "final_state", "checkpoints"), out, final_state, checkpoints)
        if out is None:
            out = q.new_empty(v.shape)
        final_state = arguments.final_state_buffer(
            q, v, cu_seqlens, state_v_first, output_final_state, final_state, final_state_indices
        )
        in_place = final_state is not None and final_state is initial_state
        ops.chunk_fwd_out(q, k, v, g, beta, options, cu_seqlens, None if in_place else initial_state, scale, A_log,
                           dt_bias, initial_state_indices, out, final_state, final_state_indices, in_place,
                           checkpoints, checkpoint_indices, checkpoint_every, checkpoint_offsets)  # fmt: skip
        arguments.mark_written(out, final_state, checkpoints)
        return out, final_state

    if output_final_state:
        options |= ops.FINAL_STATE
    if needs_grad:
        arguments.check_gradient(initial_state, initial_state_indices)
        if small_workspace:
            options |= ops.SMALL_WORKSPACE
        o, states, _ = GatedDeltaRule.apply(q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log,
                                            dt_bias, initial_state_indices, True, recompute)  # fmt: skip
    elif scale is None and A_log is None and dt_bias is None and initial_state_indices is None:
        o, states = ops.chunk_fwd(q, k, v, g, beta, options, cu_seqlens, initial_state)  # faster without Nones
    else:
        o, states = ops.chunk_fwd(q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias,
                                   initial_state_indices)  # fmt: skip
    return o, states if output_final_state else None


def _refuse_with_context(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is given with cp_context: states that enter and leave are the context's, and its calls write "
                "to no buffers"
            )


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
    previous_accept_lengths: Tensor | None = None,
    null_index: int = -1,
    batch_invariant: bool = False,
    key_head_order: str = "grouped",
) -> tuple[Tensor | None, Tensor | None]:
    """Gated delta rule token by token, for decode (T = 1) and draft verification. Returns (o, final_state or None).

    Arguments are those of FLA's function and mean what they mean in ``chunk_gated_delta_rule``; gk and gv (decays per
    channel) are refused. Gradients work and cost a chunked backward; on CUDA that needs key heads in
    grouped order.

    Beyond FLA:
        out, initial_state_indices, final_state, final_state_indices: as in ``chunk_gated_delta_rule``; an engine
            decodes with ``initial_state=pool, final_state=pool`` and the same slots for both. In a call that stores no
            states (no final state, no step_states), a negative initial_state_indices entry alone marks a padded row;
            such a call has no gradient.
        accept_lengths ``[N]``: the final state is the one after so many tokens of the sequence (0 = the initial state);
            o covers all tokens.
        step_states: buffer ``[B, T, Hv, ...]`` for the state after each token, or a pool ``[slots, Hv, ...]`` with
            slots ``step_indices [B, T]``; a negative entry stores nothing. Of packed sequences they may be ``[N, S]``,
            a row for each sequence with the slots of its tokens.
        previous_accept_lengths ``[N]``: initial_state_indices is ``[N, S]``, and a sequence starts from the slot in
            column ``previous_accept_lengths - 1`` (the nearest one there is): that of the last token it accepted of its
            last draft, whose states went to these slots. Such a call has no gradient.
        null_index, key_head_order: as in ``chunk_gated_delta_rule``; on CUDA gradients need grouped heads.
        batch_invariant: a sequence's bits depend neither on its neighbours nor, with fp32 states, on how its tokens are
            spread over calls: verification has the bits of plain decode (always so on the CPU; slower on CUDA).
        output_o: False computes and returns no o: only the states move (commit of accepted tokens).
        Buffers that are written to have no gradient: with them, no other argument may require one, and neither may
        they.
    """
    if _direct.recurrent is not None and not torch.compiler.is_dynamo_compiling():
        results = _direct.recurrent(
            q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
            transpose_state_layout, output_o, out, initial_state_indices, final_state, final_state_indices,
            accept_lengths, step_states, step_indices, previous_accept_lengths, null_index, batch_invariant,
            key_head_order,
        )  # fmt: skip
        if results is not None:
            return results
    arguments.check_tensors(
        _RECURRENT_TENSORS, q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, initial_state_indices, out,
        final_state, final_state_indices, accept_lengths, step_states, step_indices, previous_accept_lengths,
        required=3,
    )  # fmt: skip
    if scale is not None:
        arguments.refuse_gradient("scale", scale)
    if gk is not None or gv is not None:
        raise NotImplementedError("gk and gv (decays per key or value channel) are not supported: GDN has one per head")
    if g is None or beta is None:
        g, beta = arguments.with_gates(v, g, beta, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    if transpose_state_layout is not None:
        state_v_first = arguments.state_layout(state_v_first, transpose_state_layout)
    options = arguments.pack_options(
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, use_qk_l2norm_in_kernel,
        batch_invariant=batch_invariant, key_head_order=key_head_order,
    )  # fmt: skip
    options |= arguments.first_slot_option(null_index, initial_state_indices, final_state_indices, step_indices)
    needs_grad = arguments.needs_graph(q, k, v, g, beta, A_log, dt_bias, initial_state)
    if needs_grad and previous_accept_lengths is not None:
        raise ValueError(
            "previous_accept_lengths picks states of a pool, which has no gradient, but an input requires one: call it "
            "under torch.no_grad()"
        )

    if (
        out is not None
        or final_state is not None
        or final_state_indices is not None
        or accept_lengths is not None
        or step_states is not None
        or step_indices is not None
        or previous_accept_lengths is not None
        or not output_o
    ):
        if needs_grad:
            raise ValueError(arguments.NO_GRADIENT)
        arguments.check_written(("out", "final_state", "step_states"), out, final_state, step_states)
        if not output_o:
            if out is not None:
                raise ValueError("out= is given, but output_o=False computes no o")
            if final_state is None and step_states is None and not output_final_state:
                raise ValueError("output_o=False leaves nothing to compute: give final_state= or step_states=")
        if out is None and output_o:
            out = q.new_empty(v.shape)
        final_state = arguments.final_state_buffer(
            q, v, cu_seqlens, state_v_first, output_final_state, final_state, final_state_indices
        )
        in_place = final_state is not None and final_state is initial_state
        ops.recurrent_out(q, k, v, g, beta, options, cu_seqlens, None if in_place else initial_state, scale, A_log,
                           dt_bias, initial_state_indices, out, final_state, final_state_indices, in_place,
                           accept_lengths, step_states, step_indices, previous_accept_lengths)  # fmt: skip
        arguments.mark_written(out, final_state, step_states)
        return out, final_state

    if output_final_state:
        options |= ops.FINAL_STATE
    if not needs_grad:
        o, states = ops.recurrent(q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias,
                                   initial_state_indices)  # fmt: skip
    else:
        arguments.check_gradient(initial_state, initial_state_indices)
        if initial_state_indices is not None and not output_final_state:
            raise ValueError(
                "initial_state_indices marks padded rows in a call that stores no states, and the backward knows none: "
                "pass initial_state=pool[indices] without the indices, or output_final_state=True"
            )
        o, states, _ = GatedDeltaRule.apply(q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log,
                                            dt_bias, initial_state_indices, False, True)  # fmt: skip
    return o, states if output_final_state else None


recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule


def chunk_gated_delta_rule_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    auto_cp: bool = True,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None, Saved]:
    """The forward alone. Returns (o, final_state or None, saved), saved being for ``chunk_gated_delta_rule_bwd``.

    Arguments are those of ``chunk_gated_delta_rule``. No gradient is recorded. ``gatedelta.flash_qla`` has the function
    with FlashQLA's arguments and results.
    """
    arguments.check_tensors(_FWD_TENSORS, q, k, v, g, beta, initial_state, cu_seqlens, required=3)
    arguments.check_number("scale", scale)
    g, beta = arguments.with_gates(v, g, beta, False, False)
    options = arguments.pack_options(state_v_first=state_v_first, auto_cp=auto_cp)
    if output_final_state:
        options |= ops.FINAL_STATE
    with torch.no_grad():
        o, states, data = ops.chunk_fwd_save(q, k, v, g, beta, options, cu_seqlens, initial_state, scale)
    call = saved_calls.call_of(q, v, options, cu_seqlens, initial_state, scale)
    return o, states if output_final_state else None, Saved(data, call)


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    saved: Saved | None,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    *,
    small_workspace: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The backward alone, with FlashQLA's results. Returns (dq, dk, dv, dbeta, dg, dh0).

    Where FlashQLA takes g_cumsum and A, this takes g itself and ``saved`` of the forward; saved None computes it again.
    What a forward of other shapes or options saved is refused; other contents of the same shapes cannot be told.
    Each gradient has the dtype of its input, and is None where dbeta's, dg's or dh0's input is None. small_workspace:
    less memory, more time, the same bits (CUDA, with ``saved``).
    """
    data = saved.data if isinstance(saved, Saved) else None
    arguments.check_tensors(_BWD_TENSORS, q, k, v, do, g, beta, initial_state, cu_seqlens, data, dht, required=4)
    if small_workspace and saved is None and q.is_cuda:
        raise ValueError("small_workspace needs what the forward saves, but saved is None")
    # Bits in the order of chunk_bwd's results: q, k, v, g, beta, A_log, dt_bias, initial_state.
    wanted = 0b111 | (g is not None) << 3 | (beta is not None) << 4 | (initial_state is not None) << 7
    g, beta = arguments.with_gates(v, g, beta, False, False)
    options = arguments.pack_options(state_v_first=state_v_first, auto_cp=auto_cp)
    if small_workspace:
        options |= ops.SMALL_WORKSPACE
    arguments.check_number("scale", scale)
    if saved is not None:
        saved_calls.check(saved, q, v, options, cu_seqlens, initial_state, scale)
    with torch.no_grad():
        results = ops.chunk_bwd(
            q, k, v, g, beta, options, cu_seqlens, initial_state, scale, None, None, None, do, dht, data, wanted
        )
    dq, dk, dv, dg, dbeta, _, _, dh0 = (x if wanted >> i & 1 else None for i, x in enumerate(results))
    return dq, dk, dv, dbeta, dg, dh0


def cu_seqlens_from_positions(position_ids: Tensor) -> Tensor:
    """Offsets of packed sequences, int32 ``[N + 1]``, from their position ids ``[T]`` or ``[B, T]``.

    A sequence starts wherever a position does not continue the one before (``p[t] != p[t - 1] + 1``) and at every row
    of a batch; rows are taken one after the other, as ``x.flatten(0, 1).unsqueeze(0)`` lays out their tokens. Packed
    training without these offsets leaks the state of one sample into the next. The number of sequences depends on the
    data, so on a GPU this waits for it.
    """
    arguments.check_tensors(("position_ids",), position_ids, required=1)
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
