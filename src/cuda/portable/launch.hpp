// Launches: those of kernels whose instances are objects of their own, and what their files share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/portable/schedule/launches.hpp"

namespace gatedelta::cuda::portable {

struct BackwardParams;

inline DeviceLimits limits_of(const DeviceFacts& facts) { return {facts.multiprocessors, facts.shared_kib * 1024}; }

// Calls run(elem) with the type of q.
template <class Run>
cudaError_t with_elem(const Params& p, const Run& run) {
  return p.q.dtype == GD_BF16 ? run(Bf16{}) : run(Fp16{});
}
// Calls launch(config, ctas, memory) with the instance of a chain kernel; not for an empty grid.
template <class Pass, class Launch>
cudaError_t launch_chain(const Params& p, const ChainLaunch& how, const Launch& launch) {
  const int64_t ctas = chain_ctas(p);
  if (ctas == 0) return cudaSuccess;
  return with_elem(p, [&](auto elem) {
    return with_chain<Pass, decltype(elem)>(how.kind, [&](auto config) {
      constexpr int kBytes = decltype(config)::Smem::kBytes;
      return launch(config, ctas, SharedMemory(how.bytes(kBytes), how.most_bytes(kBytes)));
    });
  });
}

cudaError_t launch_prepare(const Params& p, int64_t ctas, int device, cudaStream_t stream);
// Where sequences are cut: the segments of all chains, their transitions (by launch_states and launch_grad_chain), then
// the merges of all chains.
cudaError_t launch_segments(const Params& p, const CutCost& cost, cudaStream_t stream);
cudaError_t launch_merges(const Params& p, int device, cudaStream_t stream);
cudaError_t launch_states(const Params& p, const ChainLaunch& how, int device, cudaStream_t stream);
cudaError_t launch_grad_chain(const Params& p, const ChainLaunch& how, int device, cudaStream_t stream);
cudaError_t launch_gradients(const BackwardParams& p, int64_t ctas, int device, cudaStream_t stream);

}  // namespace gatedelta::cuda::portable
