// The schedule kernel. A separate file because it is no template and must be in one object only.
#pragma once

#include "cuda/sm90/lists/scheduler.cuh"

namespace gatedelta::cuda::sm90 {

__global__ void __launch_bounds__(kScheduleThreads, 1) schedule_kernel(const __grid_constant__ CallParams p) {
  __shared__ ScheduleSmem smem;
  allow_next_kernel();
  rank_sequences(p, smem);
  wait_for_previous_kernel();
  if (blockIdx.x == 0) {
    Scheduler<Pass::kForward>{p, smem, p.schedule, p.work, p.limits.entries}.plan();
  } else {
    Scheduler<Pass::kBackward>{p, smem, &p.saved_list->schedule, p.saved_list->items(), SavedList::kEntries}.plan();
    if (threadIdx.x == 0) p.saved_list->limits = p.limits;
  }
}

}  // namespace gatedelta::cuda::sm90
