// The forward kernels of calls that cut sequences.
#include "cuda/host/launch.cuh"
#include "cuda/portable/forward.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda::portable {

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    portable_cut_forward_kernel(const __grid_constant__ Params p) {
  Forward<Config, true>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}

template <class Elem>
cudaError_t launch_instance(const Params& p, ChainKind kind, int device, cudaStream_t stream) {
  return with_chain<ForwardPass, Elem>(kind, [&](auto config) {
    using Config = decltype(config);
    static std::atomic<uint64_t> allowed{0};
    constexpr auto kernel = portable_cut_forward_kernel<Config>;
    if (const cudaError_t e = allow_shared_memory(kernel, Config::Smem::kBytes, device, allowed)) return e;
    return launch_kernel(false, kernel, chain_ctas(p), Config::kThreads, Config::Smem::kBytes, stream, p);
  });
}

}  // namespace

cudaError_t launch_cut_forward(const Params& p, ChainKind kind, int device, cudaStream_t stream) {
  return p.q.dtype == GD_BF16 ? launch_instance<Bf16>(p, kind, device, stream)
                              : launch_instance<Fp16>(p, kind, device, stream);
}

}  // namespace gatedelta::cuda::portable
