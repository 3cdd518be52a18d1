// Launch of the portable prepare kernel, whose instances are an object of their own.
#pragma once

#include <cuda_runtime.h>

#include "cuda/portable/config.hpp"

namespace gatedelta::cuda::portable {

cudaError_t launch_prepare(const Params& p, int64_t ctas, int device, cudaStream_t stream);

}  // namespace gatedelta::cuda::portable
