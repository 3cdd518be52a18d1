"""The rule over a group: summaries, their exchange, and the forward or backward from the states that enter."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from .._lib import Saved
from .._operators import arguments, stages
from .agreement import tensor_fields
from .context import Context
from .exchange import Exchange
from .foreign import as_context
from .stages import options_of

FUNCTION = "chunk_gated_delta_rule"
_FLAGS = (
    "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "use_gate_in_kernel",
)  # fmt: skip


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, context, options, recompute, q, k, v, g, beta, A_log, dt_bias):
        options = options._replace(A_log=A_log, dt_bias=dt_bias, cu_seqlens=context.offsets_on(q.device))
        heads, K, V = v.shape[2], k.shape[3], v.shape[3]
        exchange = Exchange(context, k, heads, K, V, options.state_v_first, context.scheme_for(heads, K, V))
        needs_grad = any(ctx.needs_input_grad)
        # A GPU prepares the inputs once, for the summaries and for the forward.
        saved = stages.empty_saved(q, k, v, g, beta, options) if q.is_cuda or (needs_grad and not recompute) else None
        fades = []
        for i, piece in enumerate(context.mine):
            if piece.after:
                row = exchange.rows[i : i + 1]
                summary = stages.summary(
                    k, v, g, beta, options, context.last_sequences[i], 1, exact=context.exact,
                    local_state=exchange.values_of(row), transition=exchange.transitions_of(row), q=q, saved=saved,
                    prepared=bool(fades),
                )  # fmt: skip
                fades.append(summary.fade)
        if context.scheme == "neighbour" and not context.exact and exchange.all_fade(fades):
            exchange.scheme = "neighbour"
        entering = exchange.forward()
        o, saved = stages.forward(
            q, k, v, g, beta, options, entering if entering.shape[0] else None,
            context.entering_rows(q.device) if entering.shape[0] else None, save=False, saved=saved,
            prepared=bool(fades),
        )  # fmt: skip
        if needs_grad:
            exchange.rows = None
            exchange.keep_transitions()
            ctx.context, ctx.options, ctx.exchange = context, options._replace(A_log=None, dt_bias=None), exchange
            keeps = not recompute and saved is not None
            ctx.saved_call = saved.call if keeps else None
            ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, entering, saved.data if keeps else None)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, g, beta, A_log, dt_bias, entering, data = ctx.saved_tensors
        saved = None if data is None else Saved(data, ctx.saved_call)
        context, exchange = ctx.context, ctx.exchange
        with context.agreement.call(f"the backward of {FUNCTION}") as call:
            if call.is_first:
                call.fields = {"cp_context": context.identity, **_sizes(k, v)}
        options = ctx.options._replace(A_log=A_log, dt_bias=dt_bias)
        do = arguments.as_memory(do, 1)
        d_local = torch.zeros(
            context.layout.slots, v.shape[2], *stages.matrix_shape(k.shape[3], v.shape[3], options.state_v_first),
            dtype=torch.float32, device=q.device,
        )  # fmt: skip
        for i, piece in enumerate(context.mine):
            if piece.before:
                stages.backward_summary(
                    q, k, g, beta, do, options, context.first_sequences[i], 1, exact=context.exact, saved=saved,
                    out=d_local[i : i + 1],
                )  # fmt: skip
        leaving = exchange.backward(d_local)
        has_pieces = entering.shape[0] > 0
        gradients = stages.backward(
            q, k, v, g, beta, do, options,
            entering if has_pieces else None, context.entering_rows(q.device) if has_pieces else None,
            leaving if has_pieces else None, context.leaving_rows(q.device) if has_pieces else None,
            saved=saved, wanted=ctx.needs_input_grad[3:],
        )  # fmt: skip
        return None, None, None, *gradients


@torch.compiler.disable
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cp_context: Any,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    recompute: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """o of this rank's tokens, ``[1, T of this rank, Hv, V]``: what ``gatedelta.chunk_gated_delta_rule`` does with
    ``cp_context=``. options: its keywords that say how inputs are meant. cu_seqlens: the context's are used, and are
    refused beside one of ours; FLA's callers pass those of FLA's context once more. Every rank of the group has to call
    it: in the first call with a context ranks compare all but the contents of tensors (docs/context_parallel.md)."""
    context = as_context(cp_context)
    with context.agreement.call(FUNCTION) as call:
        _check_offsets(cu_seqlens, cp_context, call.is_first)
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
        stages.check_tensors(3, **tensors)
        arguments.refuse_gradient("scale", options.get("scale"))
        if arguments.in_transform():
            raise NotImplementedError(arguments.NO_TRANSFORM)
        if q.dim() != 4 or q.shape[0] != 1 or q.shape[1] != context.tokens:
            raise ValueError(
                f"q is {list(q.shape)}, but with this cp_context rank {context.rank} holds {context.tokens} tokens: "
                f"[1, {context.tokens}, Hk, K]"
            )
        if g is None or beta is None:
            g, beta = arguments.with_gates(
                v, g, beta, options.get("use_gate_in_kernel", False), options.get("use_beta_sigmoid_in_kernel", False)
            )
        read = options_of(FUNCTION, None, options)
        # Copied here where need be: once for all stages, and the gradient finds its way back through the copies.
        q, k, v = (arguments.as_memory(x, 1) for x in (q, k, v))
        g, beta, A_log, dt_bias = (arguments.as_memory(x) for x in (g, beta, A_log, dt_bias))
        if call.is_first:
            whole = read._replace(A_log=A_log, dt_bias=dt_bias, cu_seqlens=context.offsets_on(q.device))
            stages.check(q, k, v, g, beta, whole, any(piece.before or piece.after for piece in context.mine))
            call.fields = {
                "cp_context": context.identity,
                **_sizes(k, v),
                "scale": k.shape[3] ** -0.5 if read.scale is None else float(read.scale),
                **{name: bool(getattr(read, name)) for name in _FLAGS},
                "key_head_order": read.key_head_order,
                "recompute": bool(recompute),
                **tensor_fields(q.device, **tensors),
            }
    return _Rule.apply(context, read, recompute, q, k, v, g, beta, A_log, dt_bias)


def _sizes(k: Tensor, v: Tensor) -> dict[str, int]:
    return {"Hk": k.shape[2], "Hv": v.shape[2], "K": k.shape[3], "V": v.shape[3]}


def _check_offsets(cu_seqlens: Tensor | None, cp_context: Any, is_first: bool) -> None:
    """cu_seqlens beside FLA's context are that context's: FLA's callers pass both."""
    if cu_seqlens is None:
        return
    if isinstance(cp_context, Context):
        raise ValueError("cu_seqlens is given with cp_context, which holds the offsets of this rank: leave it out")
    theirs = getattr(cp_context, "cu_seqlens", None)
    if theirs is None:
        theirs = cp_context.cu_seqlens_cpu
    if cu_seqlens is theirs:
        return
    if cu_seqlens.shape != theirs.shape:
        raise ValueError(
            f"cu_seqlens has {cu_seqlens.shape[0]} offsets, but cp_context has {theirs.shape[0]} for this rank: "
            "leave it out"
        )
    if (is_first or not cu_seqlens.is_cuda) and cu_seqlens.tolist() != theirs.tolist():
        raise ValueError("cu_seqlens differs from the offsets that cp_context has for this rank: leave it out")


def tell_refusal(cp_context: Any, error: Exception) -> None:
    """The other ranks learn of a refusal that came before this module was called, if it is of the first call."""
    with contextlib.suppress(TypeError, ValueError):  # cp_context itself may be no context
        call = as_context(cp_context).agreement.call(FUNCTION)
        call.__exit__(type(error), error, None)
