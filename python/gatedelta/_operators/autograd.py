"""Gradients in reverse mode: those of the gated delta rule, and what all backward operators share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import arguments, ops

# Positions of the inputs that have gradients among the arguments of GatedDeltaRule, in the order of chunk_bwd's
# results: q, k, v, g, beta, A_log, dt_bias, initial_state.
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
            raise NotImplementedError(f"the gradients of {of} cannot be differentiated again (double backward)")

        @staticmethod
        def vmap(info, in_dims, *args):
            raise NotImplementedError(arguments.NO_VMAP)

    def call(*args):
        # Compiled graphs refuse a double backward themselves.
        record = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return (Gradients.apply if record else operator)(*args)

    return call


_chunk_bwd = once(ops.chunk_bwd, "the gated delta rule")


class GatedDeltaRule(torch.autograd.Function):
    """o, the final state, and what the forward saves. The backward of both forms is the chunked one."""

    @staticmethod
    def forward(
        q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_state_indices, chunked,
        recompute,
    ):  # fmt: skip
        options &= ~ops.SMALL_WORKSPACE  # of the backward alone
        inputs = (q, k, v, g, beta, options, cu_seqlens, initial_state, scale, A_log, dt_bias, initial_state_indices)
        if not recompute:
            return ops.chunk_fwd_save(*inputs)
        forward = ops.chunk_fwd if chunked else ops.recurrent
        return *forward(*inputs), q.new_empty((0,), dtype=torch.uint8)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, g, beta, options, cu_seqlens, initial_state, ctx.scale, A_log, dt_bias, indices, _, recompute = inputs
        ctx.has_final_state, ctx.recompute = bool(options & ops.FINAL_STATE), recompute
        ctx.options = options & ~ops.FINAL_STATE
        _, states, saved = output
        ctx.save_for_backward(q, k, v, g, beta, cu_seqlens, initial_state, A_log, dt_bias, indices, saved)
        ctx.mark_non_differentiable(*((saved,) if ctx.has_final_state else (states, saved)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_o, dht, _):
        q, k, v, g, beta, cu_seqlens, initial_state, A_log, dt_bias, indices, saved = ctx.saved_tensors
        arguments.refuse_tangents(d_o, dht)
        if d_o is None:
            d_o = q.new_zeros(v.shape)
        if not ctx.has_final_state:
            dht = None  # compiled graphs pass one of the empty tensor
        needs = ctx.needs_input_grad
        wanted = sum(1 << bit for bit, position in enumerate(_POSITIONS) if needs[position])
        results = _chunk_bwd(
            q, k, v, g, beta, ctx.options, cu_seqlens, initial_state, ctx.scale, A_log, dt_bias, indices, d_o,
            dht, None if ctx.recompute else saved, wanted,
        )  # fmt: skip
        gradients = [None] * 14
        for bit, position in enumerate(_POSITIONS):
            if needs[position]:
                gradients[position] = results[bit]
        return tuple(gradients)

    @staticmethod
    def vmap(info, in_dims, *args):
        raise NotImplementedError(arguments.NO_VMAP)
