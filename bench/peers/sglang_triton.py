"""SGLang's kernels for decode and draft verification (Triton), called as its GDN backend calls them: tokens of all
sequences in one row, packed qkv for decode.
"""

from __future__ import annotations

from importlib.metadata import version as installed

import torch
from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import fused_sigmoid_gating_delta_rule_update

NAME = "sglang"


def version() -> str:
    return installed("sglang")


def packed_decode(problem):
    mixed = torch.cat([x.flatten(1) for x in (problem.q, problem.k, problem.v)], 1)
    a, b = problem.a[:, 0].contiguous(), problem.b[:, 0].contiguous()

    def call(node: int):
        fused_recurrent_gated_delta_rule_packed_decode(
            mixed, a, b, problem.A_log, problem.dt_bias, problem.q.shape[-1] ** -0.5, problem.pool, problem.out,
            problem.indices(node), use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return problem.out, None

    return call


def sigmoid_gating(problem):
    store = problem.row["store"]
    q, k, v = (x.flatten(0, 1)[None] for x in (problem.q, problem.k, problem.v))
    a, b = problem.a.flatten(0, 1), problem.b.flatten(0, 1)
    places = torch.arange(problem.batch + 1, dtype=torch.int32, device=q.device)
    offsets = places * problem.tokens

    def call(node: int):
        steps = problem.steps[node] if store == "steps" else None
        o = fused_sigmoid_gating_delta_rule_update(
            A_log=problem.A_log, a=a, dt_bias=problem.dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=q, k=k,
            v=v, b=b, initial_state_source=problem.pool, initial_state_indices=problem.indices(node),
            use_qk_l2norm_in_kernel=True, cu_seqlens=offsets, disable_state_update=store != "final",
            intermediate_states_buffer=steps, intermediate_state_indices=places[:-1] if steps is not None else None,
            cache_steps=problem.tokens if steps is not None else None,
        )  # fmt: skip
        return o.reshape(problem.v.shape), steps

    return call


def decode_calls(problem) -> dict:
    if not problem.is_v_first or problem.row["store"] == "accept":
        return {}
    calls = {"sglang sigmoid gating": sigmoid_gating(problem)}
    if problem.tokens == 1:
        calls["sglang packed decode"] = packed_decode(problem)
    return calls


def pack_calls(pack) -> dict:
    return {}


def compile_in_parallel() -> None:
    pass  # Triton's cache takes care of it
