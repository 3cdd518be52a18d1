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

template <class Elem>
cudaError_t launch_instance(const Params& p, const ChainLaunch& how, int device, cudaStream_t stream) {
  return with_chain<GradientPass, Elem>(how.kind, [&](auto config) {
    using Config = decltype(config);
    constexpr int kBytes = Config::Smem::kBytes;
    const SharedMemory memory(how.bytes(kBytes), how.most_bytes(kBytes));
    return launch_large<portable_grad_chain_kernel<Config>>(Pdl::kOff, chain_ctas(p), Config::kThreads, memory, device,
                                                            stream, p);
  });
}

}  // namespace

cudaError_t launch_grad_chain(const Params& p, const ChainLaunch& how, int device, cudaStream_t stream) {
  if (chain_ctas(p) == 0) return cudaSuccess;
  return p.q.dtype == GD_BF16 ? launch_instance<Bf16>(p, how, device, stream)
                              : launch_instance<Fp16>(p, how, device, stream);
}

}  // namespace gatedelta::cuda::portable
