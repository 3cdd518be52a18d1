// The kernels of cuts that are no chains: segments and merges.
#include "cuda/host/launch.cuh"
#include "cuda/portable/cut/merge.cuh"
#include "cuda/portable/cut/segments.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda::portable {

namespace {

__global__ void __launch_bounds__(kSegmentThreads)
    portable_segments_kernel(const __grid_constant__ Params p, const __grid_constant__ CutCost cost,
                             const int most_segments) {
  FindSegments::run(p, cost, static_cast<int>(blockIdx.x), most_segments, static_cast<int>(threadIdx.x));
}
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) portable_merge_kernel(const __grid_constant__ Params p) {
  Merge<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}

}  // namespace

cudaError_t launch_segments(const Params& p, const CutCost& cost, cudaStream_t stream) {
  const auto most_segments = static_cast<int>(p.segment_length().most_segments(p.sequences));
  return launch_kernel(Pdl::kOff, portable_segments_kernel, segment_ctas(p), kSegmentThreads, 0, stream, p, cost,
                       most_segments);
}
cudaError_t launch_merges(const Params& p, int device, cudaStream_t stream) {
  return with_compiled_keys(p.key_dim, [&](auto keys) {
    using Config = MergeConfig<decltype(keys)::value>;
    return launch_large<portable_merge_kernel<Config>>(Pdl::kOff, merge_ctas(p), Config::kThreads, Config::Smem::kBytes,
                                                       device, stream, p);
  });
}

}  // namespace gatedelta::cuda::portable
