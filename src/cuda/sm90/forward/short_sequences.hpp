// Launch of the walk of short sequences. Declared here alone: its code is that of the decode kernels, which share names
// with the chunked ones.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/workspace/short_sequences.hpp"

namespace gatedelta::cuda::sm90 {

// Walks the sequences that `plan` says, empty and padded ones included. With PDL, beside the forward
// kernel, which must be the previous one in the stream.
cudaError_t launch_short_walk(const ForwardProblem& problem, const WalkPlan& plan, Pdl pdl, cudaStream_t stream);

}  // namespace gatedelta::cuda::sm90
