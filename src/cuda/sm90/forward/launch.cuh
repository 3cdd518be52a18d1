// The launches of the forward's kernels.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/schedule/forward_list.cuh"
#include "cuda/sm90/forward/forward_chain.cuh"
#include "cuda/sm90/prepare/kernel.cuh"
#include "cuda/workspace/forward.hpp"

namespace gatedelta::cuda {

static_assert(PrepareSmem::allocated(kMaxGroup) <= kMaxSharedBytes);

template <class Elem>
cudaError_t launch_prepare(const CallParams& p, int device, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed{0};
  if (const cudaError_t e =
          allow_shared_memory(prepare_kernel<Elem>, PrepareSmem::allocated(kMaxGroup), device, allowed))
    return e;
  const auto blocks = static_cast<unsigned>(prepare_blocks(p.sequences, p.key_heads));
  prepare_kernel<Elem><<<blocks, kPrepareThreads, PrepareSmem::allocated(p.group), stream>>>(p);
  return cudaGetLastError();
}

inline cudaError_t launch_schedule(const CallParams& p, cudaStream_t stream) {
  return launch_early(schedule_kernel, p.saves_list ? 2 : 1, kScheduleThreads, 0, stream, p);
}

template <class Elem>
cudaError_t launch_main(const CallParams& p, int device, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed{0};
  if (const cudaError_t e = allow_shared_memory(forward_kernel<Elem>, ChainSmem::kAllocated, device, allowed)) return e;
  return launch_early(forward_kernel<Elem>, p.main_blocks(), kChainThreads, ChainSmem::kAllocated, stream, p);
}

}  // namespace gatedelta::cuda
