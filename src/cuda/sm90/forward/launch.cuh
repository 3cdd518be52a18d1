// The launches of the forward's kernels.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/sm90/forward/forward_chain.cuh"
#include "cuda/sm90/lists/forward_list.cuh"
#include "cuda/sm90/prepare/kernel.cuh"
#include "cuda/sm90/workspace/forward.hpp"

namespace gatedelta::cuda::sm90 {

static_assert(PrepareSmem::allocated(kMaxGroup) <= kMaxSharedBytes);

template <class Elem>
cudaError_t launch_prepare(const CallParams& p, int device, cudaStream_t stream) {
  const SharedMemory memory(PrepareSmem::allocated(p.group), PrepareSmem::allocated(kMaxGroup));
  return launch_large<prepare_kernel<Elem>>(Pdl::kOff, prepare_blocks(p.sequences, p.key_heads), kPrepareThreads,
                                            memory, device, stream, p);
}

inline cudaError_t launch_schedule(const CallParams& p, cudaStream_t stream) {
  return launch_with_pdl(schedule_kernel, p.saves_list ? 2 : 1, kScheduleThreads, 0, stream, p);
}

template <class Elem>
cudaError_t launch_main(const CallParams& p, int device, cudaStream_t stream) {
  return launch_large<forward_kernel<Elem>>(Pdl::kOn, p.main_blocks(), kChainThreads, ChainSmem::kAllocated, device,
                                            stream, p);
}

}  // namespace gatedelta::cuda::sm90
