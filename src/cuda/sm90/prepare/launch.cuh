// Launch of the prepare kernel. Declared here alone because its instances belong in one object (forward.cu): the
// backward launches it too.
#pragma once

#include <cuda_runtime.h>

#include "cuda/params.hpp"

namespace gatedelta::cuda {

cudaError_t launch_prepare(const CallParams& p, bool bf16, int device, cudaStream_t stream);

}  // namespace gatedelta::cuda
