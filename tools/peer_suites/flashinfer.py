"""FlashInfer's tests of the gated delta rule, its functions replaced by those of gatedelta.flashinfer.

FlashInfer itself need not be installed: the modules that the tests import are stand-ins with our functions. Tests of
its private kernels, for bfloat16 states and for sequences that are cut, go through adapters here.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType

from . import Rule, Suite, stand_in

_LARGE = "too large for a CPU"
_KERNELS = Rule(
    "a part of FlashInfer's kernels, which no public function is",
    (
        "*::test_cp_delta_rule_t_precompute*",
        "*::test_cp_delta_rule_mn_precompute*",
        "*::test_cp_delta_rule_fixup*",
        "*::test_cp_delta_rule_prefill_varlen*",
        "*::test_cp_delta_rule_kernel_chain*",
    ),
)

SUITES = (
    Suite(
        name="flashinfer_prefill",
        repository="flashinfer",
        files=(
            "tests/gdn/test_prefill_delta_rule.py",
            "tests/gdn/test_prefill_state_indices.py",
            "tests/gdn/test_prefill_cp_delta_rule.py",
        ),
        packages=(),
        foreign=(_KERNELS, Rule(_LARGE, ("*::test_cp_delta_rule_e2e[*-seq_lens3-*",), ("cpu",))),
        differences=(Rule("states of 8 bits are refused", ("*-state_dtype2-*", "*-state_dtype3-*")),),
    ),
    Suite(
        name="flashinfer_decode",
        repository="flashinfer",
        files=(
            "tests/gdn/test_decode_delta_rule.py",
            "tests/gdn/test_decode_pretranspose_bf16_padded_pool.py",
            "tests/gdn/test_decode_pretranspose_noncontiguous_pool.py",
        ),
        packages=(),
        foreign=(
            Rule(
                "FlashInfer's compiler and its cache",
                ("*::*_reuses_compile_*", "*::test_decode_pretranspose_pool_cache_keeps_inner_strides_static"),
            ),
            Rule(
                "what FlashInfer's kernels cannot take",
                (
                    "*::test_decode_pretranspose_pool_rejects_misaligned_slot_stride",
                    "*::test_gdn_decode_bf16_state_fla_scatter_validation",
                ),
            ),
            Rule(
                _LARGE,
                (
                    "*[bfloat16-512-*",
                    "*[bfloat16-256-*",
                    "*[bfloat16-128-64-*",
                    "*[bfloat16-128-16-16-64-64-*",
                    "*[bfloat16-128-16-16-64-256-*",
                    "*::test_gdn_decode_fp32_state_fla_scatter_vs_dense[64-*",
                    "*::test_gdn_decode_fp32_state_fla_scatter_vs_dense[128-*",
                ),
                ("cpu",),
            ),
        ),
        differences=(
            Rule(
                "a padded row does not overwrite slot 0 of a bfloat16 pool",
                ("*::test_decode_kernel_bf16_padding_indices[*",),
            ),
        ),
    ),
)


def prefill(*args, **kwargs):
    """The suite is of a version whose use_qk_l2norm_in_kernel had no effect: it passes True, and expects nothing."""
    from gatedelta.flashinfer import chunk_gated_delta_rule

    kwargs.pop("use_qk_l2norm_in_kernel", None)
    return (
        chunk_gated_delta_rule(*args[:9], False, *args[10:], **kwargs)
        if len(args) > 9
        else (chunk_gated_delta_rule(*args, **kwargs))
    )


def prefill_cut(o, state, q, k, v, alpha, beta, cu_seqlens, scale, initial_state=None, **hints):
    """FlashInfer's kernel of sequences that are cut, in the arguments of the public function."""
    from gatedelta.flashinfer import chunk_gated_delta_rule

    chunk_gated_delta_rule(
        q, k, v, alpha, beta, scale, initial_state, True, cu_seqlens, output=o, output_state=state, use_cp=True,
        max_seqlen=hints.get("max_seqlen"), _cp_chunk_len=hints.get("cp_chunk_len"),
    )  # fmt: skip


def decode_bf16(
    A_log, a, dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=None, k=None, v=None, b=None,
    initial_state_source=None, initial_state_indices=None, output_state_indices=None, intermediate_states_buffer=None,
    accepted_steps=None, ssm_state_indices=None, disable_state_update=False, use_qk_l2norm_in_kernel=True, scale=None,
    output=None, disable_output=False, recovery_steps=0, tile_v=None,
):  # fmt: skip
    """FlashInfer's private kernels over a bfloat16 pool. accepted_steps counts from 0; the state after the accepted
    tokens is the one that is kept."""
    import torch
    from gatedelta import fused_recurrent_gated_delta_rule

    assert (softplus_beta, softplus_threshold) == (1.0, 20.0)
    pool, scatter = initial_state_source, ssm_state_indices is not None
    q, k, v, a, b = (x.bfloat16() for x in (q, k, v, a, b))
    final = None if disable_state_update or (scatter and output_state_indices is None) else pool
    accept = None if accepted_steps is None else accepted_steps + 1
    if recovery_steps:
        accept = torch.full_like(initial_state_indices, recovery_steps)
    if scatter and accept is not None:
        late = torch.arange(q.shape[1], device=q.device) >= accept[:, None]
        ssm_state_indices = ssm_state_indices.masked_fill(late, -1)
    write = initial_state_indices if output_state_indices is None else output_state_indices
    steps = pool if scatter else intermediate_states_buffer
    if steps is not None and not scatter:
        steps = steps[: q.shape[0], : q.shape[1]]
    o, _ = fused_recurrent_gated_delta_rule(
        q, k, v, a, beta=b, scale=scale, initial_state=pool, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, state_v_first=True,
        output_o=not disable_output, out=output, initial_state_indices=initial_state_indices, final_state=final,
        final_state_indices=None if final is None else write, accept_lengths=None if final is None else accept,
        step_states=steps, step_indices=ssm_state_indices,
    )  # fmt: skip
    return o


def install(device: str) -> None:
    import gatedelta.flashinfer as ours

    if device == "cpu":
        from . import cuda_on_cpu

        cuda_on_cpu.install()
    sys.modules["tests.conftest"] = ModuleType("tests.conftest")  # FlashInfer's, about its other functions
    stand_in("flashinfer")
    stand_in(
        "flashinfer.utils",
        get_compute_capability=lambda device: (9, 0),
        is_sm90a_supported=lambda device: True,
        is_sm100a_supported=lambda device: False,
        is_sm12x_supported=lambda device: False,
    )
    stand_in("flashinfer.cute_dsl")
    stand_in("flashinfer.cute_dsl.utils", is_cute_dsl_arch_supported=lambda *capability: True)
    stand_in("flashinfer.gdn_prefill", chunk_gated_delta_rule=prefill)
    stand_in(
        "flashinfer.gdn_decode",
        gated_delta_rule_decode_pretranspose=ours.gated_delta_rule_decode_pretranspose,
        gated_delta_rule_decode=ours.gated_delta_rule_decode,
        gated_delta_rule_mtp=ours.gated_delta_rule_mtp,
    )
    stand_in("flashinfer.gdn_kernels")
    stand_in(
        "flashinfer.gdn_kernels.gdn_decode_bf16_state",
        gated_delta_rule=decode_bf16,
        gated_delta_rule_mtp=decode_bf16,
        gated_delta_rule_mtp_wide_vec=decode_bf16,
    )
    stand_in(
        "flashinfer.gdn_kernels.gdn_decode_bf16_wy_output_only",
        gated_delta_rule_mtp=functools.partial(decode_bf16, disable_state_update=True),
    )
    stand_in("flashinfer.gdn_kernels.delta_rule_dsl")
    stand_in(
        "flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_cp_sm90",
        cp_delta_rule_dsl_sm90=prefill_cut,
        cp_delta_rule_fixup_dsl_sm90=None,
        cp_delta_rule_mn_precompute_dsl_sm90=None,
        cp_delta_rule_prefill_dsl_sm90=None,
        cp_delta_rule_t_precompute_dsl_sm90=None,
    )
    stand_in(
        "flashinfer.gdn_kernels.delta_rule_dsl.varlen_helper", chunk_bound_host=None, workspace_num_chunks_host=None
    )
