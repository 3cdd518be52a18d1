// From a resolved ISA to its kernels.
#include <initializer_list>

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

size_t saved_bytes(const Layer& in) {
  return sizeof(float) * static_cast<size_t>(max_saved_states(in) * in.value_heads * padded_dims(in).state_size());
}

}  // namespace

gd_isa best_isa() {
  static const gd_isa best = choose_best_isa();  // a fact of the machine, read once: CPUID is slow under a hypervisor
  return best;
}

size_t forward_workspace(const ForwardProblem& problem, const Context& context) {
  return kernels_of(context.isa).forward_workspace(problem, context);
}
size_t forward_saved(const ForwardProblem& problem, const Context&) { return saved_bytes(problem.in); }
void forward(const ForwardProblem& problem, const Context& context) {
  kernels_of(context.isa).forward(problem, context);
}

size_t backward_workspace(const BackwardProblem& problem, const Context& context) {
  return kernels_of(context.isa).backward_workspace(problem, context);
}
size_t backward_saved(const BackwardProblem& problem, const Context&) { return saved_bytes(problem.in); }
void backward(const BackwardProblem& problem, const Context& context) {
  kernels_of(context.isa).backward(problem, context);
}

size_t recurrent_workspace(const RecurrentProblem& problem, const Context& context) {
  return kernels_of(context.isa).recurrent_workspace(problem, context);
}
void recurrent(const RecurrentProblem& problem, const Context& context) {
  kernels_of(context.isa).recurrent(problem, context);
}

}  // namespace gatedelta::cpu
