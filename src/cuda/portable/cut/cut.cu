// The kernels of cuts that are no chains: segments and folds.
#include "cuda/host/launch.cuh"
#include "cuda/portable/cut/merge.cuh"
#include "cuda/portable/cut/segments.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda::portable {

namespace {

__global__ void __launch_bounds__(kSegmentThreads)
    portable_segments_kernel(const __grid_constant__ Params p, const __grid_constant__ CutPrices prices,
                             const int slots) {
  FindSegments::run(p, prices, static_cast<int>(blockIdx.x), slots, static_cast<int>(threadIdx.x));
}
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) portable_fold_kernel(const __grid_constant__ Params p) {
  Fold<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}

template <class Config>
cudaError_t launch_fold(const Params& p, int device, cudaStream_t stream) {
  return launch_large<portable_fold_kernel<Config>>(Pdl::kOff, fold_ctas(p), Config::kThreads, Config::Smem::kBytes,
                                                    device, stream, p);
}

}  // namespace

cudaError_t launch_segments(const Params& p, const CutPrices& prices, cudaStream_t stream) {
  const auto slots = static_cast<int>(p.slots().count(p.sequences));
  return launch_kernel(Pdl::kOff, portable_segments_kernel, segment_ctas(p), kSegmentThreads, 0, stream, p, prices,
                       slots);
}
cudaError_t launch_folds(const Params& p, int device, cudaStream_t stream) {
  switch (compiled_keys(p.key_dim)) {
    case 64: return launch_fold<FoldConfig<64>>(p, device, stream);
    case 128: return launch_fold<FoldConfig<128>>(p, device, stream);
    default: return launch_fold<FoldConfig<256>>(p, device, stream);
  }
}

}  // namespace gatedelta::cuda::portable
