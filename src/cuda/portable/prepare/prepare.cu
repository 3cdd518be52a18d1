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

template <class Config>
cudaError_t launch(const Params& p, int64_t ctas, int device, cudaStream_t stream) {
  using Smem = typename Config::Smem;
  const SharedMemory memory(Smem::allocated(p.group), Smem::allocated(Config::kHeadsAtOnce));
  return launch_large<portable_prepare_kernel<Config>>(Pdl::kOff, ctas, Config::kThreads, memory, device, stream, p);
}
template <class Elem>
cudaError_t launch_instance(const Params& p, int64_t ctas, int device, cudaStream_t stream) {
  switch (compiled_keys(p.key_dim)) {
    case 64: return launch<PrepareConfig<Elem, 64>>(p, ctas, device, stream);
    case 128: return launch<PrepareConfig<Elem, 128>>(p, ctas, device, stream);
    default: return launch<PrepareConfig<Elem, 256>>(p, ctas, device, stream);
  }
}

}  // namespace

cudaError_t launch_prepare(const Params& p, int64_t ctas, int device, cudaStream_t stream) {
  if (ctas == 0) return cudaSuccess;
  return p.q.dtype == GD_BF16 ? launch_instance<Bf16>(p, ctas, device, stream)
                              : launch_instance<Fp16>(p, ctas, device, stream);
}

}  // namespace gatedelta::cuda::portable
