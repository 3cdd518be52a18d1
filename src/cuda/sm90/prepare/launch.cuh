// Launch of the prepare kernel. Declared here alone because its instances belong in one object (forward.cu): the
// backward launches it too.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/params.hpp"

namespace gatedelta::cuda::sm90 {

cudaError_t launch_prepare(const CallParams& p, bool bf16, int device, cudaStream_t stream);

}  // namespace gatedelta::cuda::sm90
