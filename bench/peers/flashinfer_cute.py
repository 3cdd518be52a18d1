"""FlashInfer's kernels for decode, draft verification and prefill (CuTe DSL)."""

from __future__ import annotations

import os
from importlib.metadata import version as installed

os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "warning")

import torch
from flashinfer.gdn_decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.jit.cute_dsl_core import JitSpecCuteDsl

NAME = "flashinfer"


def version() -> str:
    return installed("flashinfer-python")


def name() -> str:
    return f"flashinfer {version().partition('.post')[0]}"


def decode_calls(problem) -> dict:
    store = problem.row["store"]
    common = {
        "q": problem.q, "k": problem.k, "v": problem.v, "A_log": problem.A_log, "a": problem.a,
        "dt_bias": problem.dt_bias, "b": problem.b, "output": problem.out, "use_qk_l2norm": True,
    }  # fmt: skip

    def in_place(node: int):
        gated_delta_rule_decode(**common, state=problem.states(node))
        return problem.out, None

    def from_pool(node: int):
        steps = problem.steps[node] if store == "steps" else None
        gated_delta_rule_decode_pretranspose(
            **common, state=None, initial_state=problem.pool, initial_state_indices=problem.indices(node),
            intermediate_states_buffer=steps, disable_state_update=store != "final",
        )  # fmt: skip
        return problem.out, steps

    if store == "accept" or (not problem.is_v_first and (problem.tokens > 1 or problem.dtype != torch.float32)):
        return {}
    return {name(): from_pool if problem.is_v_first else in_place}


def pack_calls(pack) -> dict:
    """With its own choice of context parallelism, and without."""

    def caller(use_cp):
        def call(node: int):
            chunk_gated_delta_rule(
                pack.q, pack.k, pack.v, pack.alpha, pack.beta, initial_state=pack.pool, output_final_state=True,
                cu_seqlens=pack.cu_seqlens, output=pack.out, output_state=pack.pool,
                state_indices=pack.indices(node), use_cp=use_cp, max_seqlen=pack.longest,
            )  # fmt: skip
            return pack.out, None

        return call

    return {name(): caller("auto"), f"{name()} use_cp=False": caller(False)}


def compile_in_parallel() -> None:
    """A process holds the lock of a whole family of kernels while it compiles one, unless it builds this way."""

    def build(self):
        kernel = self.try_load()
        if kernel is None:
            self.compile_and_persist()
            kernel = self.load()
        return kernel

    JitSpecCuteDsl.build_and_load = build
