// The gradient chain of a portable backward, and its transitions where sequences are cut.
#include "cuda/host/launch.cuh"
#include "cuda/portable/backward/grad_chain.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda::portable {

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    portable_grad_chain_kernel(const __grid_constant__ Params p) {
  GradChain<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}

}  // namespace

cudaError_t launch_grad_chain(const Params& p, const ChainLaunch& how, int device, cudaStream_t stream) {
  return launch_chain<GradientPass>(p, how, [&](auto config, int64_t ctas, const SharedMemory& memory) {
    using Config = decltype(config);
    return launch_large<portable_grad_chain_kernel<Config>>(Pdl::kOff, ctas, Config::kThreads, memory, device, stream,
                                                            p);
  });
}

}  // namespace gatedelta::cuda::portable
