// Writes the work list between prepare, which knows the gates, and the chain kernel. One CTA finds out which heads are
// decaying and writes the list. Everything that depends on lengths alone is done during prepare (cut_search.cuh).
#pragma once

#include "cuda/device/warp.cuh"
#include "cuda/sm90/lists/uncut_list.cuh"
#include "cuda/sm90/schedule/cost_model.hpp"
#include "cuda/sm90/schedule/work_list.hpp"

namespace gatedelta::cuda::sm90 {

constexpr int kScheduleThreads = 256;  // 512 are no faster (docs/experiments.md)
constexpr int kScheduleBlocks = 64;

struct ScheduleSmem {
  WorkItem items[kMaxPlannedSequences];  // by rank: the item of the whole sequence, first head
  int chunks[kMaxPlannedSequences], first_chunk[kMaxPlannedSequences];  // by rank: number of chunks, first chunk index
  int first_warmup[kMaxPlannedSequences];
  int segments[2][kMaxPlannedSequences];  // of decaying heads, of persistent heads
  CutCost cuts[kShares * kCutBlocks];
  int persistent, warmup_count;
  uint32_t per_head;  // 2^32 / heads, rounded up
  bool longest_first;
  uint8_t persists[kMaxPlannedSeqHeads];      // guessed from the chunk in the middle of the sequence
  uint8_t lacks_warmup[kMaxPlannedSeqHeads];  // has a boundary without a warm-up length
  uint8_t warmups[kMaxPlannedEntries];
  unsigned long long entry_sums[kScheduleThreads / 32];
  EntryCounts before[kMaxPlannedSeqHeads];  // entries of all pairs before this one
};

// CTA-wide exclusive prefix sum; `total` is the sum over all threads.
GD_DEVICE unsigned long long sum_before(unsigned long long mine, unsigned long long (&sums)[kScheduleThreads / 32],
                                        unsigned long long& total) {
  const int lane = threadIdx.x & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const unsigned long long sum = warp_inclusive_sum(mine, lane);
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  unsigned long long others = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kScheduleThreads / 32; ++i) {
    if (i == warp) others = total;
    total += sums[i];
  }
  return others + sum - mine;
}

// Ranks the sequences, longest first. Reads only the caller's tensors, so it runs while prepare still does. Valid for
// all threads after the next barrier.
GD_DEVICE void rank_sequences(const CallParams& p, ScheduleSmem& s) {
  const int tid = threadIdx.x, count = p.sequences.count;
  if (tid == 0) {
    s.persistent = 0;
    s.per_head = ~0u / p.value_heads + 1;
  }
  for (int seq_head = tid; seq_head < count * p.value_heads; seq_head += kScheduleThreads) s.lacks_warmup[seq_head] = 0;
  WorkItem item{};
  if (tid < count) {
    item = whole_item(p, tid);
    s.first_chunk[tid] = item.tokens;
  }
  __syncthreads();
  int rank = 0;
#pragma unroll 1
  for (int n = 0; n < count; ++n)
    rank += s.first_chunk[n] > item.tokens || (s.first_chunk[n] == item.tokens && n < tid);
  __syncthreads();
  if (tid >= count) return;
  s.items[rank] = item;
  s.chunks[rank] = static_cast<int>(ChunkedSequences::chunks(item.tokens));
  s.first_chunk[rank] = floor_div(item.prepared, p.value_heads);
}

// Writes one work list, with all threads of a CTA.
template <Pass kPass>
struct Scheduler {
  const CallParams& p;
  ScheduleSmem& s;
  Schedule* schedule;
  WorkItem* work;
  int room;  // entries; a longer list is not written (only a saved list may be left out)

  GD_DEVICE int seq_heads() const { return p.sequences.count * p.value_heads; }
  GD_DEVICE int rank_of(int seq_head) const {
    return p.value_heads == 1 ? seq_head : static_cast<int>(__umulhi(static_cast<uint32_t>(seq_head), s.per_head));
  }
  // NOTE: volatile, so that all loads are issued here. The compiler otherwise places each load behind the exits of the
  // loop before it, and their latencies add up.
  GD_DEVICE static ChunkDecay load_decay(const ChunkDecay* from) {
    ChunkDecay decay;
    asm volatile("ld.global.v2.f32 {%0,%1}, [%2];" : "=f"(decay.log2_left), "=f"(decay.written) : "l"(from));
    return decay;
  }
  GD_DEVICE const ChunkDecay* decays_of(int rank, int head) const {
    return p.decays + head * p.sequences.workspace_chunks() + s.first_chunk[rank];
  }
  // Where decaying heads are cut, their warm-up lengths decide; elsewhere the middle chunk is good enough.
  GD_DEVICE bool persists(int seq_head, int rank) const {
    return (s.segments[0][rank] > 1 ? s.lacks_warmup : s.persists)[seq_head] != 0;
  }

  // Call after rank_sequences. Returns false if prepare already found that nothing is cut.
  GD_DEVICE bool plan() const {
    __syncthreads();
    classify_heads();
    const int tid = threadIdx.x;
    const int with_chunks = __syncthreads_count(tid < p.sequences.count && s.chunks[tid] > 0) * p.value_heads;
    Cut cut = p.forced;
    if (!cut.decaying && s.cuts[0].number < 0) return false;
    // Saved estimates may be for cuts that this backward must not make.
    if (!cut.decaying && (p.supports_cut || !p.has_saved)) cut = best_cut(with_chunks);
    find_segments(cut);
    __syncthreads();
    find_order(cut);
    find_warmups(cut);
    __syncthreads();
    write(cut);
    return true;
  }

  // Reads, in one trip to memory, the estimated cuts and the decay records of the middle chunks, which tell roughly how
  // many heads are persistent.
  GD_DEVICE void classify_heads() const {
    const int tid = threadIdx.x;
    if (tid < kShares * kCutBlocks) s.cuts[tid] = p.cuts[tid];
#pragma unroll 1
    for (int seq_head = tid; seq_head < seq_heads(); seq_head += kScheduleThreads) {
      const int rank = rank_of(seq_head), chunks = s.chunks[rank];
      const bool persists = chunks > 0 && decays_of(rank, seq_head - rank * p.value_heads)[chunks / 2].log2_left >
                                              usual_log2_left<kPass>();
      s.persists[seq_head] = persists;
      if (persists) atomicAdd(&s.persistent, 1);
    }
  }

  // Every warp computes it; with_chunks: pairs of sequence and head that have any. Costs are positive, so their bits
  // compare as unsigned integers.
  GD_DEVICE Cut best_cut(int with_chunks) const {
    const int share =
        p.supports_cut && with_chunks > 0 ? floor_div(s.persistent * (kShares - 1) + with_chunks / 2, with_chunks) : 0;
    static_assert(kCutBlocks <= 32);
    const int lane = threadIdx.x & 31;
    const CutCost mine = s.cuts[share * kCutBlocks + lane % kCutBlocks];
    const uint32_t cost = __float_as_uint(mine.cost), best = __reduce_min_sync(~0u, cost);
    const int number = __reduce_min_sync(~0u, cost == best ? mine.number : kCuts);
    return cut_number(number, length_scale(s.chunks[0]));
  }

  // Segments of every sequence and the offset of its warm-up lengths; by the first warp.
  GD_DEVICE void find_segments(const Cut& cut) const {
    const int lane = threadIdx.x;
    if (lane >= 32) return;
    int at = 0;
#pragma unroll 1
    for (int first = 0; first < p.sequences.count; first += 32) {
      const int rank = first + lane;
      int mine = 0;
      if (rank < p.sequences.count) {
        const int segments = s.segments[0][rank] = segments_of<kPass>(cut, s.chunks[rank], false);
        s.segments[1][rank] = segments_of<kPass>(cut, s.chunks[rank], true);
        mine = p.value_heads * (segments - 1);
      }
      const int sum = warp_inclusive_sum(mine, lane);
      if (rank < p.sequences.count) s.first_warmup[rank] = at + sum - mine;
      at += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) s.warmup_count = at;
  }

  // By the last thread, which rarely has a warm-up length to find.
  GD_DEVICE void find_order(const Cut& cut) const {
    if (threadIdx.x == kScheduleThreads - 1) s.longest_first = is_longer_than_chain(cut, s.chunks[0]);
  }

  // The warm-up length at every boundary of the decaying heads' cut.
  GD_DEVICE void find_warmups(const Cut& cut) const {
    const int limit = warmup_limit<kPass>(cut.decaying);
#pragma unroll 1
    for (int i = threadIdx.x; i < s.warmup_count; i += kScheduleThreads) {
      int rank = 0;
#pragma unroll 1
      while (rank + 1 < p.sequences.count && s.first_warmup[rank + 1] <= i) ++rank;
      const int chunks = s.chunks[rank], segments = s.segments[0][rank];
      const int within = i - s.first_warmup[rank], head = floor_div(within, segments - 1);
      const int boundary = decaying_begin(chunks, segments, within - head * (segments - 1) + 1);
      const ChunkDecay* decays = decays_of(rank, head);
      const int warmup = warmup_length<kPass>(boundary, limit, [&](int chunk) {
        return load_decay(decays + (kPass == Pass::kBackward ? chunks - 1 - chunk : chunk));
      });
      s.warmups[i] = static_cast<uint8_t>(warmup == kNoWarmup ? 0 : warmup);
      if (warmup == kNoWarmup) s.lacks_warmup[rank * p.value_heads + head] = 1;
    }
  }

  GD_DEVICE EntryCounts count_seq_head(int seq_head, const Cut& cut) const {
    const int rank = rank_of(seq_head);
    const bool persistent = persists(seq_head, rank);
    return entries_of(s.segments[persistent][rank], s.chunks[rank], persistent, cut.halves ? 2 : 1);
  }

  GD_DEVICE void write(Cut cut) const {
    const int tid = threadIdx.x;
    const int each = ceil_div(seq_heads(), kScheduleThreads), begin = tid * each, end = min(begin + each, seq_heads());
    EntryCounts total{0};
    for (;;) {
      EntryCounts mine{0}, before{0};
#pragma unroll 1
      for (int seq_head = begin; seq_head < end; ++seq_head) mine.all += count_seq_head(seq_head, cut).all;
      before.all = sum_before(mine.all, s.entry_sums, total.all);
#pragma unroll 1
      for (int seq_head = begin; seq_head < end; ++seq_head) {
        s.before[seq_head] = before;
        before.all += count_seq_head(seq_head, cut).all;
      }
      if (fits(cut, total, p.limits)) break;
      __syncthreads();
      find_segments(cut);
      find_order(cut);
      __syncthreads();
    }
    const int entries = total.entries(cut.halves ? 2 : 1);
    if (entries > room) return;
    // Items of a cut may wait for others, so a CTA that is not running yet must not own one: no static items.
    const bool is_cut = cut.decaying || cut.persistent;
    if (tid == 0) *schedule = {entries, 0, is_cut ? 0 : p.main_blocks()};
    __syncthreads();
    // State gradients never overwrite their input.
    const bool in_place = kPass != Pass::kBackward && p.initial && p.final;
    const ListPlan list{cut, total, p.limits.blocks, s.longest_first, p.value_heads, in_place};
    int log_lanes = 5;  // log2 of the threads per (sequence, head) pair
    while (log_lanes > 0 && seq_heads() << log_lanes > kScheduleThreads) --log_lanes;
#pragma unroll 1
    for (int i = tid; i < seq_heads() << log_lanes; i += kScheduleThreads)
      write_seq_head(list, i >> log_lanes, i & ((1 << log_lanes) - 1), 1 << log_lanes);
  }

  GD_DEVICE void write_seq_head(const ListPlan& list, int seq_head, int lane, int lanes) const {
    const int rank = rank_of(seq_head), head = seq_head - rank * p.value_heads, chunks = s.chunks[rank];
    const bool persistent = persists(seq_head, rank);
    const WorkItem whole = item_of_head(p, s.items[rank], head);
    list_seq_head<kPass>(list, whole, seq_head, chunks, s.segments[persistent][rank], persistent, s.before[seq_head],
                         s.warmups + s.first_warmup[rank] + head * (s.segments[0][rank] - 1), lane, lanes,
                         [&](int i, const WorkItem& item) { work[i] = item; });
  }
};

}  // namespace gatedelta::cuda::sm90
