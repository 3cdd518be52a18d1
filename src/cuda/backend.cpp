// The parts of the CUDA backend that need no CUDA: sizes, and the refusals of a build without it.
#include "cuda/backend.hpp"

#include "cuda/workspace/backward.hpp"

namespace gatedelta::cuda {

size_t forward_workspace(const ForwardProblem& problem) { return forward_layout(problem).bytes; }
size_t saved_bytes(const Layer& layer) { return saved_layout(layer).bytes; }
size_t backward_workspace(const BackwardProblem& problem) { return backward_layout(problem).bytes; }

#if !GD_CUDA_COMPILED
bool is_compiled() { return false; }
int usable_devices() { return 0; }
Outcome forward(const ForwardProblem&, const Context&) { return {GD_UNSUPPORTED, "this build has no CUDA backend"}; }
Outcome backward(const BackwardProblem&, const Context&) { return {GD_UNSUPPORTED, "this build has no CUDA backend"}; }
#endif

}  // namespace gatedelta::cuda
