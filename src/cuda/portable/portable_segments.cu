// What runs between prepare and a cut forward: segments, transitions, folds.
#include "cuda/host/launch.cuh"
#include "cuda/portable/launch.hpp"
#include "cuda/portable/segments.cuh"

namespace gatedelta::cuda::portable {

namespace {

__global__ void __launch_bounds__(kSegmentThreads)
    portable_segments_kernel(const __grid_constant__ Params p, const int slots) {
  FindSegments::run(p, static_cast<int>(blockIdx.x), slots, static_cast<int>(threadIdx.x));
}
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    portable_transitions_kernel(const __grid_constant__ Params p) {
  Transitions<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) portable_fold_kernel(const __grid_constant__ Params p) {
  Fold<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}

template <class Elem>
cudaError_t launch_transitions(const Params& p, ChainKind kind, int device, cudaStream_t stream) {
  return with_chain<StatesPass, Elem>(kind, [&](auto config) {
    using Config = decltype(config);
    static std::atomic<uint64_t> allowed{0};
    constexpr auto kernel = portable_transitions_kernel<Config>;
    if (const cudaError_t e = allow_shared_memory(kernel, Config::Smem::kBytes, device, allowed)) return e;
    const Params transitions = transition_params(p, Config::kColumns);
    return launch_kernel(false, kernel, chain_ctas(transitions), Config::kThreads, Config::Smem::kBytes, stream,
                         transitions);
  });
}
template <class Config>
cudaError_t launch_fold(const Params& p, int device, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed{0};
  constexpr auto kernel = portable_fold_kernel<Config>;
  if (const cudaError_t e = allow_shared_memory(kernel, Config::Smem::kBytes, device, allowed)) return e;
  return launch_kernel(false, kernel, fold_ctas(p), Config::kThreads, Config::Smem::kBytes, stream, p);
}

}  // namespace

cudaError_t launch_segments(const Params& p, cudaStream_t stream) {
  const auto slots = static_cast<int>(p.slots().count(p.sequences));
  return launch_kernel(false, portable_segments_kernel, segment_ctas(p), kSegmentThreads, 0, stream, p, slots);
}
cudaError_t launch_transitions(const Params& p, ChainKind kind, int device, cudaStream_t stream) {
  return p.q.dtype == GD_BF16 ? launch_transitions<Bf16>(p, kind, device, stream)
                              : launch_transitions<Fp16>(p, kind, device, stream);
}
cudaError_t launch_folds(const Params& p, int device, cudaStream_t stream) {
  switch (compiled_keys(p.key_dim)) {
    case 64: return launch_fold<FoldConfig<64>>(p, device, stream);
    case 128: return launch_fold<FoldConfig<128>>(p, device, stream);
    default: return launch_fold<FoldConfig<256>>(p, device, stream);
  }
}

}  // namespace gatedelta::cuda::portable
