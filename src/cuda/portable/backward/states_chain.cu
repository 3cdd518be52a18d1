// The states kernels: the first pass of a portable backward, and the transitions of states where sequences are cut.
#include "cuda/host/launch.cuh"
#include "cuda/portable/backward/states_chain.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda::portable {

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    portable_states_kernel(const __grid_constant__ Params p) {
  States<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}

}  // namespace

cudaError_t launch_states(const Params& p, const ChainLaunch& how, int device, cudaStream_t stream) {
  return launch_chain<StatesPass>(p, how, [&](auto config, int64_t ctas, const SharedMemory& memory) {
    using Config = decltype(config);
    return launch_large<portable_states_kernel<Config>>(Pdl::kOff, ctas, Config::kThreads, memory, device, stream, p);
  });
}

}  // namespace gatedelta::cuda::portable
