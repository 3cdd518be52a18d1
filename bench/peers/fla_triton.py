"""FLA's recurrent kernel (Triton). It has no pool: states are read where they are, and written to new tensors."""

from __future__ import annotations

from importlib.metadata import version as installed

import torch
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

NAME = "fla"


def version() -> str:
    return installed("fla-core")


def decode_calls(problem) -> dict:
    if problem.dtype != torch.float32 or problem.row["store"] != "final":
        return {}  # its final states are float32

    def call(node: int):
        return fused_recurrent_gated_delta_rule(
            problem.q, problem.k, problem.v, g=problem.a, beta=problem.b, initial_state=problem.states(node),
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=problem.A_log,
            dt_bias=problem.dt_bias, use_beta_sigmoid_in_kernel=True, state_v_first=problem.is_v_first,
        )  # fmt: skip

    return {f"fla {version()}": call}


def pack_calls(pack) -> dict:
    return {}


def compile_in_parallel() -> None:
    pass  # Triton's cache takes care of it
