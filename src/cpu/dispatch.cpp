// The backend's tables for the API layer, and the choice of an instruction set's kernels.
#include <cinttypes>
#include <initializer_list>

#include "core/thread_pool.hpp"
#include "cpu/kernels.hpp"
#include "cpu/plan.hpp"

namespace gatedelta::cpu {

namespace {

const Kernels& kernels_of(gd_isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case GD_ISA_AVX2: return avx2::kernels;
    case GD_ISA_AVX512: return avx512::kernels;
    case GD_ISA_AVX512_BF16: return avx512_bf16::kernels;
    case GD_ISA_AMX: return amx::kernels;
#elif defined(__aarch64__)
    case GD_ISA_NEON: return neon::kernels;
    case GD_ISA_NEON_BF16: return neon_bf16::kernels;
#endif
    default: return generic::kernels;
  }
}

gd_isa choose_best_isa() {
  // VDPBF16PS pays where it does twice the work of an FMA in the same time (AMD). Intel's runs at half that rate: plain
  // AVX-512 is faster there and exact, and processors with AMX do not need it.
  const int usable = usable_isas() & ~(bf16_dot_is_slow() ? 1 << GD_ISA_AVX512_BF16 : 0);
  for (const gd_isa isa : {GD_ISA_AMX, GD_ISA_AVX512_BF16, GD_ISA_AVX512, GD_ISA_AVX2, GD_ISA_NEON_BF16, GD_ISA_NEON})
    if (usable & (1 << isa)) return isa;
  return GD_ISA_GENERIC;
}

Context context_of(const gd_exec& exec, char* workspace = nullptr) {
  Context context;
  context.isa = exec.isa == GD_ISA_AUTO ? best_isa() : static_cast<gd_isa>(exec.isa);
  context.lanes = exec.num_threads ? exec.num_threads : exec.parallel_for ? cpu_count() : 1;
  context.parallel_for = exec.parallel_for;
  context.parallel_for_context = exec.parallel_for_context;
  context.workspace = workspace;
  return context;
}

Outcome check_isa(const gd_exec& exec) {
  if (exec.isa == GD_ISA_AUTO) return {};
  const int bit = 1 << exec.isa;
  if (!(compiled_isas() & bit))
    return refusal(GD_UNSUPPORTED, "isa is %s, which is not in this build", gd_isa_name(exec.isa));
  if (!(usable_isas() & bit))
    return refusal(GD_UNSUPPORTED, "isa is %s, which this machine cannot run", gd_isa_name(exec.isa));
  return {};
}

// The chunked operations. The CPU backend never cuts a sequence.
template <class Problem>
Outcome check_chunked(const Problem& problem, const gd_exec& exec) {
  if (problem.segment_chunks)
    return refusal(GD_UNSUPPORTED, "segment_chunks is %" PRId64 ": sequences are cut on CUDA only, it must be 0",
                   problem.segment_chunks);
  return check_isa(exec);
}

size_t saved_bytes(const Layer& in) {
  return sizeof(float) * static_cast<size_t>(max_saved_states(in) * in.value_heads * padded_dims(in).state_size());
}

}  // namespace

gd_isa best_isa() {
  static const gd_isa best = choose_best_isa();  // a fact of the machine, read once: CPUID is slow under a hypervisor
  return best;
}

const Backend<ForwardProblem> forward_backend = {
    GD_CPU,
    check_chunked<ForwardProblem>,
    [](const ForwardProblem& p, const gd_exec& exec) {
      const Context context = context_of(exec);
      return kernels_of(context.isa).forward_workspace(p, context);
    },
    [](const ForwardProblem& p, const gd_exec&) { return saved_bytes(p.in); },
    [](const ForwardProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).forward(p, context);
      return Outcome{};
    },
};

const Backend<BackwardProblem> backward_backend = {
    GD_CPU,
    check_chunked<BackwardProblem>,
    [](const BackwardProblem& p, const gd_exec& exec) {
      const Context context = context_of(exec);
      return kernels_of(context.isa).backward_workspace(p, context);
    },
    [](const BackwardProblem& p, const gd_exec&) { return saved_bytes(p.in); },
    [](const BackwardProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).backward(p, context);
      return Outcome{};
    },
};

const Backend<SummaryProblem> summary_backend = {
    GD_CPU,
    [](const SummaryProblem&, const gd_exec& exec) { return check_isa(exec); },
    [](const SummaryProblem& p, const gd_exec& exec) {
      const Context context = context_of(exec);
      return kernels_of(context.isa).summary_workspace(p, context);
    },
    [](const SummaryProblem&, const gd_exec&) { return size_t{0}; },
    [](const SummaryProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).summary(p, context);
      return Outcome{};
    },
};

const Backend<BackwardSummaryProblem> backward_summary_backend = {
    GD_CPU,
    [](const BackwardSummaryProblem&, const gd_exec& exec) { return check_isa(exec); },
    [](const BackwardSummaryProblem& p, const gd_exec& exec) {
      const Context context = context_of(exec);
      return kernels_of(context.isa).backward_summary_workspace(p, context);
    },
    [](const BackwardSummaryProblem&, const gd_exec&) { return size_t{0}; },
    [](const BackwardSummaryProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).backward_summary(p, context);
      return Outcome{};
    },
};

const Backend<MergeProblem> merge_backend = {
    GD_CPU,
    [](const MergeProblem&, const gd_exec& exec) { return check_isa(exec); },
    [](const MergeProblem& p, const gd_exec& exec) {
      const Context context = context_of(exec);
      return kernels_of(context.isa).merge_workspace(p, context);
    },
    nullptr,
    [](const MergeProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).merge(p, context);
      return Outcome{};
    },
};

const Backend<Conv1dProblem> conv1d_backend = {
    GD_CPU,
    [](const Conv1dProblem&, const gd_exec& exec) { return check_isa(exec); },
    [](const Conv1dProblem& p, const gd_exec& exec) {
      const Context context = context_of(exec);
      return kernels_of(context.isa).conv1d_workspace(p, context);
    },
    nullptr,
    [](const Conv1dProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).conv1d(p, context);
      return Outcome{};
    },
};

const Backend<Conv1dBackwardProblem> conv1d_backward_backend = {
    GD_CPU,
    [](const Conv1dBackwardProblem&, const gd_exec& exec) { return check_isa(exec); },
    [](const Conv1dBackwardProblem& p, const gd_exec& exec) {
      const Context context = context_of(exec);
      return kernels_of(context.isa).conv1d_backward_workspace(p, context);
    },
    nullptr,
    [](const Conv1dBackwardProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).conv1d_backward(p, context);
      return Outcome{};
    },
};

const Backend<RecurrentProblem> recurrent_backend = {
    GD_CPU,
    [](const RecurrentProblem&, const gd_exec& exec) { return check_isa(exec); },
    [](const RecurrentProblem& p, const gd_exec& exec) {
      const Context context = context_of(exec);
      return kernels_of(context.isa).recurrent_workspace(p, context);
    },
    nullptr,
    [](const RecurrentProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).recurrent(p, context);
      return Outcome{};
    },
};

const Backend<GatedNormProblem> gated_norm_backend = {
    GD_CPU,
    [](const GatedNormProblem&, const gd_exec& exec) { return check_isa(exec); },
    [](const GatedNormProblem&, const gd_exec&) { return size_t{0}; },
    nullptr,
    [](const GatedNormProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).gated_norm(p, context);
      return Outcome{};
    },
};

const Backend<GatedNormBackwardProblem> gated_norm_backward_backend = {
    GD_CPU,
    [](const GatedNormBackwardProblem&, const gd_exec& exec) { return check_isa(exec); },
    [](const GatedNormBackwardProblem& p, const gd_exec& exec) {
      const Context context = context_of(exec);
      return kernels_of(context.isa).gated_norm_backward_workspace(p, context);
    },
    nullptr,
    [](const GatedNormBackwardProblem& p, const gd_exec& exec, char* workspace) {
      const Context context = context_of(exec, workspace);
      kernels_of(context.isa).gated_norm_backward(p, context);
      return Outcome{};
    },
};

}  // namespace gatedelta::cpu
