// The prepare kernels: the first of the two kernels of a portable forward.
#include "cuda/host/launch.cuh"
#include "cuda/portable/launch.hpp"
#include "cuda/portable/prepare/inverse.cuh"
#include "cuda/portable/prepare/loads.cuh"
#include "cuda/portable/prepare/outputs.cuh"
#include "cuda/portable/prepare/products.cuh"

namespace gatedelta::cuda::portable {

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    portable_prepare_kernel(const __grid_constant__ Params p) {
  Prepare<Config>::run(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}

}  // namespace

cudaError_t launch_prepare(const Params& p, int64_t ctas, int device, cudaStream_t stream) {
  if (ctas == 0) return cudaSuccess;
  return with_elem(p, [&](auto elem) {
    return with_compiled_keys(p.key_dim, [&](auto keys) {
      using Config = PrepareConfig<decltype(elem), decltype(keys)::value>;
      using Smem = typename Config::Smem;
      const SharedMemory memory(Smem::allocated(p.group), Smem::allocated(Config::kHeadsAtOnce));
      return launch_large<portable_prepare_kernel<Config>>(Pdl::kOff, ctas, Config::kThreads, memory, device, stream,
                                                           p);
    });
  });
}

}  // namespace gatedelta::cuda::portable
