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
// wait for nothing. They go from the last chunk to the first, all heads of some chunks and then those before them: the
// gradients begin with the first chunk, and what is written last they find in the second-level cache. What is left of
// a sequence, less than a piece, comes at the end, so that all blocks are done at about the same time.
struct WindowPieces {
  int rank_of[kMaxPlannedSequences];     // a sequence
  int first[kMaxPlannedSequences];       // piece of a sequence, from the first chunk on
  int first_rest[kMaxPlannedSequences];  // by rank
  int length, count, count_with_rests;   // length in chunks

  GD_DEVICE void find(const BackwardParams& p, const ScheduleSmem& s) {
    constexpr int kRounds = 6;  // of all blocks
    const int sequences = p.sequences.count;
    int windows = 0;
    for (int rank = 0; rank < sequences; ++rank) {
      windows += rounds_of(s.chunks[rank], kWindowChunks) * p.value_heads;
      rank_of[s.items[rank].sequence] = rank;
    }
    length = max(1, windows / (kRounds * p.limits.blocks)) * kWindowChunks;
    int pieces = 0;
    for (int n = 0; n < sequences; ++n) {
      first[n] = pieces;
      pieces += quotient(s.chunks[rank_of[n]], length) * p.value_heads;
    }
    count = pieces;
    for (int rank = 0; rank < sequences; ++rank) {
      first_rest[rank] = pieces;
      if (s.chunks[rank] % length != 0) pieces += p.value_heads;
    }
    count_with_rests = pieces;
  }
  struct Piece {
    int rank, head, begin;
  };
  GD_DEVICE Piece piece(const BackwardParams& p, const ScheduleSmem& s, int i) const {
    int at = 0;
    if (i >= count) {
      while (at + 1 < p.sequences.count && first_rest[at + 1] <= i) ++at;
      return {at, i - first_rest[at], quotient(s.chunks[at], length) * length};
    }
    const int from_first = count - 1 - i;
    while (at + 1 < p.sequences.count && first[at + 1] <= from_first) ++at;
    const int within = from_first - first[at], number = quotient(within, p.value_heads);
    return {rank_of[at], within - number * p.value_heads, number * length};
  }
};

// After rank_sequences.
GD_DEVICE void list_windows(const BackwardParams& p, const ScheduleSmem& s) {
  __shared__ WindowPieces pieces;
  __syncthreads();
  if (threadIdx.x == 0) {
    pieces.find(p, s);
    *p.schedule = {pieces.count_with_rests, 0, p.main_blocks()};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < pieces.count_with_rests; i += kScheduleThreads) {
    const auto [rank, head, begin] = pieces.piece(p, s, i);
    const int chunks = s.chunks[rank];
    WorkItem item = s.items[rank];
    item.head = head;
    item.key_head = quotient(head, p.group);
    item.prepared += head;
    cut_item<Pass::kStates>(item, begin, min(begin + pieces.length, chunks), chunks, p.value_heads);
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
