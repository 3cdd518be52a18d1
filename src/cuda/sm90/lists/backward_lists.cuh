// The backward's two work lists: states, and the gradient chain, which runs from the last chunk to the first. What
// depends on lengths alone is shared with the forward (scheduler.cuh).
#pragma once

#include "cuda/sm90/lists/scheduler.cuh"
#include "cuda/sm90/schedule/recompute.hpp"

namespace gatedelta::cuda::sm90 {

constexpr int kPlannedLists = 2;  // one CTA writes each

// Entry i of an uncut list, in the order that the forward saved.
GD_DEVICE WorkItem saved_item(const BackwardParams& p, int i, int parts) {
  const int seq_head = parts == 2 ? i / 2 : i, rank = seq_head / p.value_heads;
  WorkItem item = item_of_head(p, whole_item(p, p.order[rank]), seq_head - rank * p.value_heads);
  if (parts == 2) item.half = i % 2;
  return item;
}

// Both lists where nothing is cut. Prepare may have written the states' list already; with slices it is a different
// list.
GD_DEVICE void list_both_uncut(const BackwardParams& p) {
  const int thread = static_cast<int>(blockIdx.x) * kScheduleThreads + static_cast<int>(threadIdx.x);
  const int stride = static_cast<int>(gridDim.x) * kScheduleThreads;
  const bool is_listed = !p.has_saved, is_sliced = p.slice1_work != nullptr;
  const int parts = p.list == kEvenList ? p.even_parts : p.list == kPlannedList ? -p.cuts[0].number : 1;
  const int entries = p.sequences.count * p.value_heads * parts;
  for (int i = thread; i < entries; i += stride) {
    const WorkItem item = is_listed ? p.work[i] : saved_item(p, i, parts);
    if (!is_listed && !is_sliced) p.work[i] = item;
    p.grad_work[i] = mirrored(item, p.value_heads);
  }
  if (thread != 0) return;
  if (!is_listed && !is_sliced) *p.schedule = {entries, 0, p.main_blocks()};
  *p.grad_schedule = {entries, 0, p.main_blocks()};
}

// The states' list where the forward saved states. Call after rank_sequences.
GD_DEVICE void list_recompute(const BackwardParams& p, const ScheduleSmem& s) {
  __shared__ RecomputePieces pieces;
  const auto chunks = [&](int rank) { return s.chunks[rank]; };
  __syncthreads();
  if (threadIdx.x == 0) {
    pieces.find(
        p.sequences.count, p.value_heads, p.recompute_chunks, p.split, chunks,
        [&](int rank) { return s.items[rank].sequence; }, [&](int rank) { return s.first_chunk[rank]; });
    *p.schedule = {pieces.count[0], 0, p.main_blocks()};
    if (p.slice1_schedule) *p.slice1_schedule = {pieces.count[1], 0, p.main_blocks()};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < pieces.numbers(); i += kScheduleThreads) {
    const auto [rank, head, begin, slice, place] = pieces.piece(i, chunks);
    if (place < 0) continue;
    WorkItem item = item_of_head(p, s.items[rank], head);
    cut_item<Pass::kStates>(item, begin, min(begin + pieces.length, chunks(rank)), chunks(rank), p.value_heads);
    if (begin > 0) {
      item.from = kFromSaved;
      item.seq_head = static_cast<int>(p.first_checkpoint[item.sequence]) + begin / kSaveInterval - 1;
    }
    (slice == 0 ? p.work : p.slice1_work)[place] = item;
  }
}

// Copies the gradient chain's list that the forward saved, if it was made for the same limits.
GD_DEVICE bool take_saved_list(const BackwardParams& p) {
  if (!p.saves_list) return false;
  const Schedule saved_list = p.saved_list->schedule;
  const Limits limits = p.saved_list->limits;
  if (saved_list.count == SavedList::kNone || !(limits == p.limits)) return false;
  const auto* from = reinterpret_cast<const uint4*>(p.saved_list->items());
  auto* to = reinterpret_cast<uint4*>(p.grad_work);
  for (int i = threadIdx.x; i < saved_list.count * static_cast<int>(sizeof(WorkItem) / 16); i += kScheduleThreads)
    to[i] = from[i];
  if (threadIdx.x == 0) *p.grad_schedule = {saved_list.count, 0, saved_list.static_items};
  return true;
}

__global__ void __launch_bounds__(kScheduleThreads, 1) backward_lists_kernel(const __grid_constant__ BackwardParams p) {
  __shared__ ScheduleSmem smem;
  allow_next_kernel();
  if (p.list == kPlannedList && blockIdx.x == 1) {
    for (int i = threadIdx.x; i < p.limits.boundaries; i += kScheduleThreads) p.grad_boundary_ready[i] = 0;
    if (p.has_saved)
      for (int i = threadIdx.x; i < p.sequences.count * p.value_heads; i += kScheduleThreads) p.initial_read[i] = 0;
    if (take_saved_list(p)) return;
  }
  const bool is_uncut = p.has_saved && !p.forced.decaying && p.cuts[0].number < 0;  // the load overlaps rank_sequences
  const bool has_saved_states = p.slice1_work || (p.has_saved && p.list == kPlannedList && !is_uncut);
  const bool lists_recompute = has_saved_states && blockIdx.x == 0;
  if (p.list == kPlannedList || lists_recompute) rank_sequences(p, smem);
  wait_for_previous_kernel();
  if (lists_recompute) list_recompute(p, smem);
  if (p.list != kPlannedList) return list_both_uncut(p);
  if (blockIdx.x == 0 && p.has_saved) {
    if (is_uncut) list_both_uncut(p);
    return;
  }
  if (blockIdx.x == 0) {
    if (!Scheduler<Pass::kStates>{p, smem, p.schedule, p.work, p.limits.entries}.plan()) list_both_uncut(p);
    return;
  }
  if (!Scheduler<Pass::kBackward>{p, smem, p.grad_schedule, p.grad_work, p.limits.entries}.plan()) list_both_uncut(p);
}

}  // namespace gatedelta::cuda::sm90
