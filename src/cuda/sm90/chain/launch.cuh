// Launches of the chain kernels with lists that others have made. Declared here alone because their instances belong in
// one object each (forward.cu, backward.cu).
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/params.hpp"

namespace gatedelta::cuda::sm90 {

cudaError_t launch_forward_chain(const CallParams& p, bool bf16, int device, cudaStream_t stream);
cudaError_t launch_grad_chain(const CallParams& p, bool bf16, int device, cudaStream_t stream);

}  // namespace gatedelta::cuda::sm90
