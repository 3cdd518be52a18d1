// The gradients kernels of a portable backward.
#include "cuda/host/launch.cuh"
#include "cuda/portable/backward/gradients/head.cuh"
#include "cuda/portable/backward/gradients/loads.cuh"
#include "cuda/portable/backward/gradients/output.cuh"
#include "cuda/portable/backward/gradients/pairs.cuh"
#include "cuda/portable/backward/gradients/products.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda::portable {

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    portable_gradients_kernel(const __grid_constant__ BackwardParams p) {
  Gradients<Config>(p, static_cast<int>(threadIdx.x)).run(static_cast<int>(blockIdx.x));
}

template <class Config>
cudaError_t launch(const BackwardParams& p, int64_t ctas, int device, cudaStream_t stream) {
  return launch_large<portable_gradients_kernel<Config>>(Pdl::kOff, ctas, Config::kThreads, Config::Smem::kBytes,
                                                         device, stream, p);
}

}  // namespace

cudaError_t launch_gradients(const BackwardParams& p, int64_t ctas, int device, cudaStream_t stream) {
  if (ctas == 0) return cudaSuccess;
  return with_elem(p, [&](auto elem) {
    using Elem = decltype(elem);
    return part_columns(p.key_dim) == 64 ? launch<GradientsConfig<Elem, 64>>(p, ctas, device, stream)
                                         : launch<GradientsConfig<Elem, 128>>(p, ctas, device, stream);
  });
}

}  // namespace gatedelta::cuda::portable
