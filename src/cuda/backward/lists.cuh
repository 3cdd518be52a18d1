// The lists of work of the backward: one of the states, one of their gradients, where chunks are walked through from
// the last to the first. What depends on lengths alone is as in the forward (cuda/forward/schedule.cuh).
#pragma once

#include "cuda/backward/params.hpp"
#include "cuda/forward/schedule.cuh"

namespace gatedelta::cuda {

constexpr int kPlannedLists = 2;  // a block makes each

// Both lists where nothing is cut; that of the states may be there already, from prepare.
GD_DEVICE void list_both(const BackwardParams& p) {
  const int thread = static_cast<int>(blockIdx.x) * kScheduleThreads + static_cast<int>(threadIdx.x);
  const int stride = static_cast<int>(gridDim.x) * kScheduleThreads;
  const bool is_listed = p.list != kSortedList && !p.is_prepared;
  const int parts = p.list == kEvenList ? p.even_parts : p.list == kPlannedList ? -p.cuts[0].number : 1;
  const int entries = p.sequences.count * p.value_heads * parts;
  for (int i = thread; i < entries; i += stride) {
    if (!is_listed) p.work[i] = uncut_item(p, i, parts, [&](int rank) { return p.order[rank]; });
    p.back_work[i] = mirrored(p.work[i], p.value_heads);
  }
  if (thread != 0) return;
  if (!is_listed) *p.schedule = {entries, 0, p.main_blocks()};
  *p.back_schedule = {entries, 0, p.main_blocks()};
}

// The list of the states where the forward has kept those at the ends of windows: pieces of some windows each, which
// wait for nothing. After rank_sequences.
GD_DEVICE void list_windows(const BackwardParams& p, ScheduleSmem& s) {
  constexpr int kRounds = 3;  // of all blocks
  const int tid = threadIdx.x, count = p.sequences.count;
  __syncthreads();
  if (tid == 0) {
    int all = 0;
    for (int rank = 0; rank < count; ++rank) all += rounds_of(s.chunks[rank], kWindowChunks) * p.value_heads;
    s.lasting = max(1, all / (kRounds * p.limits.blocks)) * kWindowChunks;  // chunks of a piece
    all = 0;
    for (int rank = 0; rank < count; ++rank) {
      s.first_window[rank] = all;
      all += rounds_of(s.chunks[rank], s.lasting) * p.value_heads;
    }
    s.windows_count = all;
    *p.schedule = {all, 0, p.main_blocks()};
  }
  __syncthreads();
  const int length = s.lasting;
  for (int i = tid; i < s.windows_count; i += kScheduleThreads) {
    int rank = 0;
    while (rank + 1 < count && s.first_window[rank + 1] <= i) ++rank;
    const int within = i - s.first_window[rank], pieces = rounds_of(s.chunks[rank], length);
    const int head = quotient(within, pieces), begin = (within - head * pieces) * length;
    WorkItem item = s.items[rank];
    item.head = head;
    item.key_head = quotient(head, p.group);
    item.prepared += head;
    cut_item<Pass::kStates>(item, begin, min(begin + length, s.chunks[rank]), s.chunks[rank], p.value_heads);
    if (begin > 0) {
      item.from = kFromWindow;
      item.pair = static_cast<int>(p.first_checkpoint[item.sequence]) + begin / kWindowChunks - 1;
    }
    p.work[i] = item;
  }
}

// The list of the gradients of states, if the forward has made it for what is asked for now.
GD_DEVICE bool take_kept_list(const BackwardParams& p) {
  if (!p.keeps_list) return false;
  const Schedule kept = p.kept->schedule;
  const Limits limits = p.kept->limits;
  if (kept.count == KeptList::kNone || !(limits == p.limits)) return false;
  const auto* from = reinterpret_cast<const uint4*>(p.kept->items());
  auto* to = reinterpret_cast<uint4*>(p.back_work);
  for (int i = threadIdx.x; i < kept.count * static_cast<int>(sizeof(WorkItem) / 16); i += kScheduleThreads)
    to[i] = from[i];
  if (threadIdx.x == 0) *p.back_schedule = {kept.count, 0, kept.dealt};
  return true;
}

__global__ void __launch_bounds__(kScheduleThreads, 1) backward_lists_kernel(const __grid_constant__ BackwardParams p) {
  __shared__ ScheduleSmem smem;
  allow_next_kernel();
  if (p.list == kPlannedList && blockIdx.x == 1) {
    for (int i = threadIdx.x; i < p.limits.boundaries; i += kScheduleThreads) p.back_boundary_ready[i] = 0;
    if (p.is_prepared)
      for (int i = threadIdx.x; i < p.sequences.count * p.value_heads; i += kScheduleThreads) p.initial_read[i] = 0;
    if (take_kept_list(p)) return;
  }
  const bool is_uncut = p.is_prepared && !p.forced.fading && p.cuts[0].number < 0;  // on its way meanwhile
  if (p.list == kPlannedList) rank_sequences(p, smem);
  wait_for_previous_kernel();
  if (p.list != kPlannedList) return list_both(p);
  if (blockIdx.x == 0 && p.is_prepared) return is_uncut ? list_both(p) : list_windows(p, smem);
  if (blockIdx.x == 0) {
    if (!Scheduler<Pass::kStates>{p, smem, p.schedule, p.work, p.limits.entries}.plan()) list_both(p);
    return;
  }
  if (!Scheduler<Pass::kBackward>{p, smem, p.back_schedule, p.back_work, p.limits.entries}.plan()) list_both(p);
}

}  // namespace gatedelta::cuda
