// What helper CTAs of the prepare kernel plan from lengths alone: uncut lists and the best cuts.
#pragma once

#include "cuda/sm90/lists/balanced_list.cuh"
#include "cuda/sm90/lists/uncut_list.cuh"
#include "cuda/sm90/schedule/cost_model.hpp"

namespace gatedelta::cuda::sm90 {

// What a forward with `saved` and one with checkpoints need of the lengths, and counters that begin at 0.
template <int kThreads>
GD_DEVICE void init_from_lengths(const CallParams& p) {
  const int count = p.sequences.count;
  for (int n = threadIdx.x; n < count && p.order; n += kThreads) {
    int rank = n;
    if (p.sequences.offsets && count <= kMaxSorted) {
      const int64_t length = p.sequences[n].length;
      rank = 0;
      for (int m = 0; m < count; ++m) {
        const int64_t other = p.sequences[m].length;
        rank += other > length || (other == length && m < n);
      }
    }
    p.order[rank] = n;
  }
  if (p.checkpoint_every && threadIdx.x == 0) {
    int64_t total = 0;
    for (int n = 0; n < count; ++n) {
      p.first_checkpoint[n] = total;
      total += p.sequences[n].length / p.checkpoint_every;
    }
  }
  for (int n = threadIdx.x; n < count && p.checkpoint_offsets; n += kThreads) {
    const int64_t offset = p.checkpoint_offsets[n];
    p.first_checkpoint[n] = offset > 0 ? offset : 0;
  }
  if (p.saved_list && !p.has_saved && threadIdx.x == 0) p.saved_list->schedule.count = SavedList::kNone;
  if (p.list != kPlannedList) return;
  for (int i = threadIdx.x; i < p.limits.boundaries; i += kThreads) p.boundary_ready[i] = 0;
  for (int i = threadIdx.x; i < count * p.value_heads; i += kThreads) p.initial_read[i] = 0;
}

struct CutSmem {
  int chunks[kMaxPlannedSequences];
  Lengths lengths;
  LengthClass classes[kMaxClasses];
  int class_count;
  int parts;  // an UncutList
  BalancedSmem balanced;
  ClassPieces pieces[kCuts / kCutBlocks][kMaxClasses];
  unsigned long long best;
};

// Groups the sequences into length classes. Valid for all threads after the next barrier.
GD_DEVICE void find_classes(const CallParams& p, int share, CutSmem& s) {
  const int tid = threadIdx.x, count = p.sequences.count;
  const int chunks = tid < count ? static_cast<int>(ChunkedSequences::chunks(whole_item(p, tid).tokens)) : 0;
  if (tid < count) s.chunks[tid] = chunks;
  if (tid == 0) s.lengths = {};
  __syncthreads();
  if (chunks > 0) {
    atomicMax(&s.lengths.longest, chunks);
    if (is_first_of_its_length(s.chunks, tid)) {
      const int at = atomicAdd(&s.lengths.count, 1);
      if (at < kMaxClasses) s.lengths.different[at] = chunks;
    }
  }
  __syncthreads();
  if (chunks > 0) {
    const int mine = s.lengths.class_of(chunks);
    atomicAdd(&s.lengths.chunks[mine], chunks);
    atomicAdd(&s.lengths.sequences[mine], 1);
  }
  __syncthreads();
  if (tid != 0) return;
  s.class_count = s.lengths.classes(p.value_heads, share, s.classes);
  s.parts = p.forced.decaying ? 0 : busy_parts(s.classes, s.class_count, p.limits.blocks);
  // NOTE: behind a parameter: few heads must not fetch instructions for this, their calls wait for the search.
  if (p.may_balance && s.parts == 0 && is_balanced(s.lengths, p.value_heads, p.limits.blocks)) s.parts = kBalancedHeads;
  s.best = ~0ull;
}

// Finds the fastest of one CTA's share of the candidates, assuming that `share` / (kShares - 1) of the heads are
// persistent. If lengths alone decide, writes the final list instead, or a share of it; all CTAs reach the same
// decision.
template <int kThreads>
GD_DEVICE void choose_cut(const CallParams& p, int helper, CutSmem& s) {
  const int tid = threadIdx.x, share = helper / kCutBlocks, block = helper % kCutBlocks;
  find_classes(p, share, s);
  __syncthreads();
  CutCost& best = p.cuts[helper];
  if (s.parts > 0) {
    if (s.parts != kBalancedHeads)
      list_uncut(p, (helper * kThreads + tid) / 32, kShares * kCutBlocks * kThreads / 32, tid % 32, s.parts);
    else if (helper == 0)
      list_balanced<kThreads>(p, s.balanced);
    if (tid == 0) best.number = -s.parts;
    return;
  }
  // Four threads estimate one cut: each computes the items of one class, then all do the same. A warp gets few, similar
  // cuts, because it takes as long as all the different paths of its threads together.
  constexpr int kEach = kCuts / kCutBlocks;
  static_assert(kMaxClasses == 4 && kEach * kMaxClasses <= kThreads);
  const int index = tid / kMaxClasses, number = block * kEach + index;
  const bool is_candidate = index < kEach && number < (p.supports_cut ? kCuts : 2);
  const int longest = s.lengths.longest;
  const Cut cut = cut_number(number, length_scale(longest));
  if (is_candidate && tid % kMaxClasses < s.class_count)
    s.pieces[index][tid % kMaxClasses] = pieces_of(cut, s.classes[tid % kMaxClasses]);
  __syncwarp();
  unsigned long long mine = ~0ull;
  if (is_candidate) {
    const float cost = cost_of(cut, s.pieces[index], s.class_count, longest, p.limits);
    mine = static_cast<unsigned long long>(__float_as_uint(cost)) << 32 | static_cast<unsigned>(number);
  }
  atomicMin(&s.best, mine);
  __syncthreads();
  if (tid == 0) best = {__uint_as_float(static_cast<uint32_t>(s.best >> 32)), static_cast<int>(s.best & 0xffffffff)};
}

}  // namespace gatedelta::cuda::sm90
