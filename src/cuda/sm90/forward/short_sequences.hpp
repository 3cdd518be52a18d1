// Launch of the kernel for short sequences.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/workspace/short_sequences.hpp"

namespace gatedelta::cuda::sm90 {

// Computes the sequences that `plan` names, empty and padded ones included. With PDL it runs beside the forward kernel,
// which must be the previous one in the stream.
cudaError_t launch_short_sequences(const ForwardProblem& problem, const ShortPlan& plan, Pdl pdl, cudaStream_t stream);

}  // namespace gatedelta::cuda::sm90
