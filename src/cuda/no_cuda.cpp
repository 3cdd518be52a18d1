// Launches of a build without CUDA: every one is refused.
#include "cuda/kernels.hpp"

namespace gatedelta::cuda {

namespace {
Outcome not_compiled() { return refusal(GD_UNSUPPORTED, "device is cuda, but this build has no CUDA backend"); }
}  // namespace

bool is_compiled() { return false; }
int usable_devices() { return 0; }
Outcome find_capability(int, Capability&) { return not_compiled(); }

namespace sm90 {
Outcome launch(const ForwardProblem&, const Context&) { return not_compiled(); }
Outcome launch(const BackwardProblem&, const Context&) { return not_compiled(); }
Outcome launch(const SummaryProblem&, const Context&) { return not_compiled(); }
Outcome launch(const BackwardSummaryProblem&, const Context&) { return not_compiled(); }
}  // namespace sm90
namespace portable {
Outcome launch(const ForwardProblem&, const Context&) { return not_compiled(); }
Outcome launch(const BackwardProblem&, const Context&) { return not_compiled(); }
Outcome launch(const SummaryProblem&, const Context&) { return not_compiled(); }
Outcome launch(const BackwardSummaryProblem&, const Context&) { return not_compiled(); }
}  // namespace portable
namespace fp32 {
Outcome launch(const ForwardProblem&, const Context&) { return not_compiled(); }
Outcome launch(const BackwardProblem&, const Context&) { return not_compiled(); }
}  // namespace fp32

Outcome launch(const RecurrentProblem&, const Context&) { return not_compiled(); }
Outcome launch(const MergeProblem&, const Context&) { return not_compiled(); }
Outcome launch(const Conv1dProblem&, const Context&) { return not_compiled(); }
Outcome launch(const Conv1dBackwardProblem&, const Context&) { return not_compiled(); }
Outcome launch(const GatedNormProblem&, const Context&) { return not_compiled(); }
Outcome launch(const GatedNormBackwardProblem&, const Context&) { return not_compiled(); }
Outcome layer_step(const Conv1dProblem&, const RecurrentProblem&, const GatedNormProblem&, const Context&) {
  return not_compiled();
}

}  // namespace gatedelta::cuda
