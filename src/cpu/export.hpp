// The last line of every ISA file: this ISA's kernels as a table. GD_BF16_ENGINE multiplies bf16 inputs; fp32 and fp16
// inputs are computed in fp32.
#pragma once

#include "cpu/backward.hpp"
#include "cpu/conv1d.hpp"
#include "cpu/conv1d_backward.hpp"
#include "cpu/forward.hpp"
#include "cpu/gated_norm.hpp"
#include "cpu/kernels.hpp"
#include "cpu/recurrent.hpp"
#include "cpu/summary.hpp"

namespace gatedelta::cpu::GD_ISA {

// Calls use(Kernel<engine>) with the engine for these inputs.
template <template <class> class Kernel, class Problem, class Use>
auto with_engine(const Problem& problem, const Context& context, const Use& use) {
  if (problem.in.q.dtype == GD_BF16) return use(Kernel<GD_BF16_ENGINE>(problem, context));
  return use(Kernel<F32Engine>(problem, context));
}

extern const Kernels kernels;
const Kernels kernels = {
    [](const ForwardProblem& p, const Context& c) {
      return with_engine<Forward>(p, c, [](auto&& kernel) { return kernel.workspace(); });
    },
    [](const ForwardProblem& p, const Context& c) { with_engine<Forward>(p, c, [](auto&& kernel) { kernel.run(); }); },
    [](const BackwardProblem& p, const Context& c) {
      return with_engine<Backward>(p, c, [](auto&& kernel) { return kernel.workspace(); });
    },
    [](const BackwardProblem& p, const Context& c) {
      with_engine<Backward>(p, c, [](auto&& kernel) { kernel.run(); });
    },
    [](const SummaryProblem& p, const Context& c) {
      return with_engine<Summary>(p, c, [](auto&& kernel) { return kernel.workspace(); });
    },
    [](const SummaryProblem& p, const Context& c) { with_engine<Summary>(p, c, [](auto&& kernel) { kernel.run(); }); },
    [](const BackwardSummaryProblem& p, const Context& c) {
      return with_engine<BackwardSummary>(p, c, [](auto&& kernel) { return kernel.workspace(); });
    },
    [](const BackwardSummaryProblem& p, const Context& c) {
      with_engine<BackwardSummary>(p, c, [](auto&& kernel) { kernel.run(); });
    },
    [](const MergeProblem& p, const Context& c) { return Merge(p, c).workspace(); },
    [](const MergeProblem& p, const Context& c) { Merge(p, c).run(); },
    [](const Conv1dProblem& p, const Context& c) { return Conv1d(p, c).workspace(); },
    [](const Conv1dProblem& p, const Context& c) { Conv1d(p, c).run(); },
    [](const Conv1dBackwardProblem& p, const Context& c) { return Conv1dBackward(p, c).workspace(); },
    [](const Conv1dBackwardProblem& p, const Context& c) { Conv1dBackward(p, c).run(); },
    [](const RecurrentProblem& p, const Context& c) { return Recurrent(p, c).workspace(); },
    [](const RecurrentProblem& p, const Context& c) { Recurrent(p, c).run(); },
    [](const GatedNormProblem& p, const Context& c) { GatedNormForward(p, c).run(); },
    [](const GatedNormBackwardProblem& p, const Context& c) { return GatedNormBackward(p, c).workspace(); },
    [](const GatedNormBackwardProblem& p, const Context& c) { GatedNormBackward(p, c).run(); },
};

}  // namespace gatedelta::cpu::GD_ISA
