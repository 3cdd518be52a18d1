"""FLA's kernels (Triton). They have no pool: states are read where they are, and written to new tensors."""

from __future__ import annotations

import os
from importlib.metadata import version as installed

os.environ["FLA_FLASH_QLA"] = "0"  # FLA calls FlashQLA otherwise, if that is installed

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

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


def forward_calls(inputs: dict) -> dict:
    arguments = inputs | {"cu_seqlens": inputs["cu_seqlens"].long()}
    return {f"fla {version()}": lambda: chunk_gated_delta_rule(**arguments, output_final_state=True)}


def backward_calls(inputs: dict, gradients: dict, leaves: tuple[str, ...]) -> dict:
    """The backward alone, through autograd, which runs it on the stream of the first call."""
    arguments = {name: x.detach().requires_grad_(name in leaves) for name, x in inputs.items()}
    arguments["cu_seqlens"] = inputs["cu_seqlens"].long()
    outputs = []

    def call():
        if not outputs:
            with torch.enable_grad():
                outputs.extend(chunk_gated_delta_rule(**arguments, output_final_state=True))
        return torch.autograd.grad(outputs, [arguments[name] for name in leaves], list(gradients.values()),
                                   retain_graph=True)  # fmt: skip

    return {f"fla {version()}": call}


def compile_in_parallel() -> None:
    pass  # Triton's cache takes care of it
