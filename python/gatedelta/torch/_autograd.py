"""Gradients in reverse mode: those of the gated delta rule, and what all backward operators share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import _arguments, _ops

# Where the inputs that have gradients stand among the arguments of GatedDeltaRule, in the order of chunk_bwd's results:
# q, k, v, g, beta, A_log, dt_bias, initial_state.
_POSITIONS = (0, 1, 2, 3, 4, 9, 10, 7)


def once(operator: Callable, of: str) -> Callable:
    """A backward operator for a caller who may differentiate its results again: that is refused."""

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return operator(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *gradients):
            raise RuntimeError(f"the gradients of {of} cannot be differentiated again (double backward)")

        @staticmethod
        def vmap(info, in_dims, *args):
            raise NotImplementedError(_arguments.NO_VMAP)

    def call(*args):
        # Compiled graphs refuse a double backward themselves.
        record = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return (Gradients.apply if record else operator)(*args)

    return call


_chunk_bwd = once(_ops.chunk_bwd, "the gated delta rule")


class GatedDeltaRule(torch.autograd.Function):
    """o, the final state, and what the forward saves. The backward of both forms is the chunked one."""

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
        _arguments.refuse_tangents(d_o, d_final_state)
        if d_o is None:
            d_o = q.new_zeros(v.shape)
        if not ctx.has_final_state:
            d_final_state = None  # compiled graphs pass one of the empty tensor
        needs = ctx.needs_input_grad
        wanted = sum(1 << bit for bit, position in enumerate(_POSITIONS) if needs[position])
        results = _chunk_bwd(
            q, k, v, g, beta, ctx.options, cu_seqlens, initial_state, ctx.scale, A_log, dt_bias, indices, d_o,
            d_final_state, None if ctx.recompute else saved, wanted,
        )  # fmt: skip
        gradients = [None] * 14
        for bit, position in enumerate(_POSITIONS):
            if needs[position]:
                gradients[position] = results[bit]
        return tuple(gradients)

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError(_arguments.NO_VMAP)
