// Writes a balanced list (balanced_list.hpp) with the threads of one CTA.
#pragma once

#include "cuda/sm90/lists/uncut_list.cuh"
#include "cuda/sm90/schedule/balanced_list.hpp"

namespace gatedelta::cuda::sm90 {

struct BalancedSmem {
  int sequence[kMaxPlannedSequences], chunks[kMaxPlannedSequences];  // by rank
  int begin[kMaxPlannedSequences];                                   // of its first head on the line
  int seq_heads, line_chunks;                                        // heads that have chunks, and theirs together
  int cut;                                                           // heads in two parts
  int tails[kMostBorders], before[kMostBorders];                     // by border, see BalancedCuts
};

template <int kThreads>
GD_DEVICE void list_balanced(const CallParams& p, BalancedSmem& s) {
  static_assert(kMaxPlannedSequences <= kThreads);
  const int tid = threadIdx.x, count = p.sequences.count, heads = p.value_heads;
  const auto chunks_of = [&](int n) { return static_cast<int>(ChunkedSequences::chunks(whole_item(p, n).tokens)); };
  const int mine = tid < count ? chunks_of(tid) : 0;
  if (tid < count) s.begin[tid] = mine;  // for a moment by sequence
  __syncthreads();
  if (tid < count) {
    int rank = 0, before = 0, all = 0, with_chunks = 0;
    for (int n = 0; n < count; ++n) {
      const int other = s.begin[n];
      const bool is_before = other > mine || (other == mine && n < tid);
      rank += is_before;
      before += is_before ? other : 0;
      all += other;
      with_chunks += other > 0;
    }
    s.sequence[rank] = tid;
    s.chunks[rank] = mine;
    s.tails[rank] = before * heads;  // likewise: s.begin is still read
    s.seq_heads = with_chunks * heads;
    s.line_chunks = all * heads;
  }
  __syncthreads();
  if (tid < count) s.begin[tid] = s.tails[tid];
  __syncthreads();
  const BalancedLine line(s.line_chunks, s.chunks[0], p.limits.blocks);
  const auto rank_at = [&](int position) {
    int rank = 0;
    while (rank + 1 < count && s.begin[rank + 1] <= position && s.chunks[rank + 1] > 0) ++rank;
    return rank;
  };
  for (int i = tid; i < line.borders(); i += kThreads) {
    const int at = line.border(i), rank = rank_at(at), chunks = s.chunks[rank];
    const int begin = s.begin[rank] + floor_div(at - s.begin[rank], chunks) * chunks;
    s.tails[i] = line.tail(i, begin, chunks);
  }
  __syncthreads();
  for (int i = tid; i < line.borders(); i += kThreads) {
    int before = 0;
    for (int other = 0; other < i; ++other) before += s.tails[other] > 0;
    s.before[i] = before;
    if (i == line.borders() - 1) s.cut = before + (s.tails[i] > 0);
  }
  if (line.borders() == 0) s.cut = 0;
  __syncthreads();
  // A second part waits for a first one, so a CTA that is not running yet must not own an item: no static items.
  if (tid == 0) *p.schedule = {s.seq_heads + s.cut, 0, 0};
  const BalancedCuts cuts{s.tails, s.before, s.cut};
  for (int seq_head = tid; seq_head < s.seq_heads; seq_head += kThreads) {
    const int rank = floor_div(seq_head, heads), head = seq_head - rank * heads, chunks = s.chunks[rank];
    const WorkItem whole = item_of_head(p, whole_item(p, s.sequence[rank]), head);
    list_balanced_head(line, cuts, whole, seq_head, s.seq_heads, s.begin[rank] + head * chunks, chunks, heads,
                       [&](int i, const WorkItem& item) { p.work[i] = item; });
  }
}

}  // namespace gatedelta::cuda::sm90
