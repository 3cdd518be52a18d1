// What the kernels cannot do: rules about problems that are valid otherwise, each with its message. They need no
// CUDA, so a build without it gives the same answers.
#pragma once

#include "core/backend.hpp"

namespace gatedelta::cuda {

Outcome check_limits(const ForwardProblem& problem);  // of Hopper's kernels
Outcome check_portable_limits(const ForwardProblem& problem);
Outcome check_limits(const BackwardProblem& problem);
Outcome check_portable_limits(const BackwardProblem& problem);
// Whether Hopper's kernels are those of this layer. What is saved is the same kernels', so with `saved` a forward and
// its backward must be told by the layer alone.
bool is_hoppers(const Layer& in);
Outcome check_fp32_limits(const ForwardProblem& problem);  // of kernels for fp32 q, k, v
Outcome check_fp32_limits(const BackwardProblem& problem);
Outcome check_limits(const SummaryProblem& problem);
Outcome check_portable_limits(const SummaryProblem& problem);
Outcome check_limits(const BackwardSummaryProblem& problem);
Outcome check_portable_limits(const BackwardSummaryProblem& problem);
Outcome check_limits(const RecurrentProblem& problem);
Outcome check_limits(const GatedNorm& in);

}  // namespace gatedelta::cuda
