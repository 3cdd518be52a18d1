// The lists of work of the backward: one of the states, one of their gradients, where chunks are walked through from
// the last to the first. What depends on lengths alone is as in the forward (cuda/forward/schedule.cuh).
#pragma once

#include "cuda/backward/params.hpp"
#include "cuda/forward/schedule.cuh"

namespace gatedelta::cuda {

constexpr int kPlannedLists = 2;  // a block makes each

// Both lists where nothing is cut; that of the states may be there already.
GD_DEVICE void list_both(const BackwardParams& p) {
  const int thread = static_cast<int>(blockIdx.x) * kScheduleThreads + static_cast<int>(threadIdx.x);
  const int stride = static_cast<int>(gridDim.x) * kScheduleThreads;
  const bool is_listed = p.list != kSortedList;
  const int entries = is_listed ? p.schedule->count : p.sequences.count * p.value_heads;
  for (int i = thread; i < entries; i += stride) {
    const int rank = i / p.value_heads;
    if (!is_listed) p.work[i] = whole_item(p, p.order[rank], i - rank * p.value_heads);
    p.back_work[i] = mirrored(p.work[i], p.value_heads);
  }
  if (thread != 0) return;
  if (!is_listed) *p.schedule = {entries, 0, p.main_blocks()};
  *p.back_schedule = {entries, 0, p.main_blocks()};
}

__global__ void __launch_bounds__(kScheduleThreads, 1) backward_lists_kernel(const __grid_constant__ BackwardParams p) {
  __shared__ ScheduleSmem smem;
  allow_next_kernel();
  wait_for_previous_kernel();
  if (p.list != kPlannedList || p.cuts[0].number == kIsListed) return list_both(p);
  if (blockIdx.x == 0) return Scheduler<Pass::kStates>{p, smem, p.schedule, p.work}.plan();
  for (int i = threadIdx.x; i < p.limits.boundaries; i += kScheduleThreads) p.back_boundary_ready[i] = 0;
  Scheduler<Pass::kBackward>{p, smem, p.back_schedule, p.back_work}.plan();
}

}  // namespace gatedelta::cuda
