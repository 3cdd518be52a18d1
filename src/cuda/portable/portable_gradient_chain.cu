// The gradient chain of a portable backward.
#include "cuda/host/launch.cuh"
#include "cuda/portable/gradient_chain.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda::portable {

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    portable_gradient_chain_kernel(const __grid_constant__ Params p) {
  GradientChain<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}

template <class Elem>
cudaError_t launch_instance(const Params& p, ChainKind kind, int64_t ctas, int device, cudaStream_t stream) {
  return with_chain<GradientPass, Elem>(kind, [&](auto config) {
    using Config = decltype(config);
    static std::atomic<uint64_t> allowed{0};
    constexpr auto kernel = portable_gradient_chain_kernel<Config>;
    if (const cudaError_t e = allow_shared_memory(kernel, Config::Smem::kBytes, device, allowed)) return e;
    return launch_kernel(false, kernel, ctas, Config::kThreads, Config::Smem::kBytes, stream, p);
  });
}

}  // namespace

cudaError_t launch_gradient_chain(const Params& p, ChainKind kind, int64_t ctas, int device, cudaStream_t stream) {
  if (ctas == 0) return cudaSuccess;
  return p.q.dtype == GD_BF16 ? launch_instance<Bf16>(p, kind, ctas, device, stream)
                              : launch_instance<Fp16>(p, kind, ctas, device, stream);
}

}  // namespace gatedelta::cuda::portable
