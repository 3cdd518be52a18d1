// The list of work, made between prepare, which has seen the gates, and main. One block finds out which heads fade, and
// writes the list. What depends on lengths alone is done during prepare: which cut is the fastest, for each share of
// heads that may turn out to last; and where nothing is to be cut anyway, all of the list.
#pragma once

#include "cuda/forward/params.hpp"
#include "cuda/ptx.cuh"

namespace gatedelta::cuda {

constexpr int kScheduleThreads = 256;  // more would be in each other's way
constexpr int kScheduleBlocks = 64;

// Entries by when they come in the list, of a pair or of many: what others wait for, what waits for nothing, joins; and
// boundaries, behind each of which a head waits. Sixteen bits each, so that one number adds them up.
struct EntryCounts {
  unsigned long long all;
  enum Class { kFirst, kFree, kJoins, kBoundaries };
  GD_DEVICE void add(Class c, int n) { all += static_cast<unsigned long long>(n) << (16 * c); }
  GD_DEVICE int operator[](Class c) const { return static_cast<int>(all >> (16 * c) & 0xffff); }
  GD_DEVICE int entries(int per_head) const {
    return (*this)[kFirst] + (*this)[kFree] + (*this)[kJoins] + per_head * (*this)[kBoundaries];
  }
};
static_assert(kMaxPlannedEntries < 1 << 16);

struct ScheduleSmem {
  WorkItem items[kMaxPlannedSequences];  // by rank: of the whole sequence and its first head
  int chunks[kMaxPlannedSequences], first_chunk[kMaxPlannedSequences];  // their number, and the first one's slot
  int first_window[kMaxPlannedSequences];
  int lasting, windows_count;
  uint8_t lasts[kMaxPlannedPairs];
  uint8_t windows[kMaxPlannedEntries];
  unsigned long long entry_sums[kScheduleThreads / 32];
  EntryCounts before[kMaxPlannedPairs];  // entries of the pairs before
};

GD_DEVICE WorkItem whole_item(const ForwardParams& p, int n, int head) {
  const Span span = p.sequences[n];
  WorkItem item{};
  item.kind = kOutputs;
  item.sequence = n;
  item.head = head;
  item.key_head = head / p.group;
  item.half = kWhole;
  item.batch = span.batch;
  item.token = item.origin = static_cast<int>(span.begin);
  item.rows = p.is_nobody(n) ? 0 : static_cast<int>(span.length);
  item.prepared = static_cast<int>(p.sequences.first_slot(n)) * p.value_heads + head;
  item.from = kFromInitial;
  item.to = kToFinal;
  return item;
}

// The list of work where nothing is cut, or a part of it: each of `stride` threads calls this.
template <class SequenceAt>
GD_DEVICE void list_all(const ForwardParams& p, int thread, int stride, const SequenceAt& sequence_at) {
  const int pairs = p.sequences.count * p.value_heads;
  for (int i = thread; i < pairs; i += stride) {
    const int rank = i / p.value_heads;
    p.work[i] = whole_item(p, sequence_at(rank), i - rank * p.value_heads);
  }
  if (thread == 0) *p.schedule = {pairs, 0, p.main_blocks()};
}

// ---- during prepare ------------------------------------------------------------------------------------------------

// Rank of a sequence = how many are longer, or as long and before it.
template <int kThreads>
GD_DEVICE void sort_sequences(const ForwardParams& p) {
  const int count = p.sequences.count;
  for (int n = threadIdx.x; n < count; n += kThreads) {
    int rank = n;
    if (p.sequences.offsets.data && count <= kMaxSorted) {
      const int64_t length = p.sequences[n].length;
      rank = 0;
      for (int m = 0; m < count; ++m) {
        const int64_t other = p.sequences[m].length;
        rank += other > length || (other == length && m < n);
      }
    }
    p.order[rank] = n;
    if (p.list == kPlannedList) p.sequence_items[rank] = whole_item(p, n, 0);
  }
  if (p.checkpoint_every && threadIdx.x == 0) {
    int64_t total = 0;
    for (int n = 0; n < count; ++n) {
      p.first_checkpoint[n] = total;
      total += p.sequences[n].length / p.checkpoint_every;
    }
  }
  if (p.list != kPlannedList) return;
  for (int i = threadIdx.x; i < p.limits.boundaries; i += kThreads) p.boundary_ready[i] = 0;
  for (int i = threadIdx.x; i < count * p.value_heads; i += kThreads) p.initial_read[i] = 0;
}

struct CutSmem {
  int chunks[kMaxPlannedSequences];
  LengthClass classes[kMaxClasses + 1];
  int class_count;
  bool is_even;
  ClassPieces memory[kCuts / kCutParts][kMaxClasses];
  unsigned long long best;
};

// The fastest of a part of the cuts, if `share` of kShares - 1 parts of all heads last. Or, if sequences keep the card
// busy as they are, a part of the list of work, which then is complete: all blocks come to the same conclusion.
template <int kThreads>
GD_DEVICE void choose_cut(const ForwardParams& p, int helper, CutSmem& s) {
  const int tid = threadIdx.x, count = p.sequences.count, share = helper / kCutParts, part = helper % kCutParts;
  if (tid < count) s.chunks[tid] = p.is_nobody(tid) ? 0 : static_cast<int>(Sequences::chunks(p.sequences[tid].length));
  __syncthreads();
  if (tid == 0) {
    s.class_count = length_classes(s.chunks, count, p.value_heads, share, s.classes);
    s.is_even = !p.forced.fading && keeps_busy(s.classes, s.class_count, p.limits.blocks);
    s.best = ~0ull;
  }
  __syncthreads();
  PricedCut& best = p.cuts[helper];
  if (s.is_even) {
    list_all(p, helper * kThreads + tid, kShares * kCutParts * kThreads, [](int rank) { return rank; });
    if (tid == 0) best.number = kIsListed;
    return;
  }
  unsigned long long mine = ~0ull;
  const int number = part + tid * kCutParts;
  if (number < (p.may_cut ? kCuts : 2) && tid < kCuts / kCutParts) {
    const float price = price_of(number, s.classes, s.class_count, p.limits, s.memory[tid]);
    mine = static_cast<unsigned long long>(__float_as_uint(price)) << 32 | static_cast<unsigned>(number);
  }
  atomicMin(&s.best, mine);
  __syncthreads();
  if (tid == 0) best = {__uint_as_float(static_cast<uint32_t>(s.best >> 32)), static_cast<int>(s.best & 0xffffffff)};
}

// ---- between prepare and main --------------------------------------------------------------------------------------

// What the threads before this one have, all together; and the sum of all.
GD_DEVICE unsigned long long sum_before(unsigned long long mine, unsigned long long (&sums)[kScheduleThreads / 32],
                                        unsigned long long& total) {
  const int lane = threadIdx.x & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  unsigned long long sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned long long before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
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

struct Scheduler {
  const ForwardParams& p;
  ScheduleSmem& s;

  GD_DEVICE int pairs() const { return p.sequences.count * p.value_heads; }
  GD_DEVICE const ChunkDecay* decays_of(int rank, int head) const {
    return p.decays + head * p.sequences.slots() + s.first_chunk[rank];
  }
  // Of an item of a whole sequence, the chunks from `start` to `end`.
  GD_DEVICE void cut_item(WorkItem& item, int start, int end, int chunks) const {
    item.token += start * kChunkTokens;
    item.rows = (end == chunks ? item.rows : end * kChunkTokens) - start * kChunkTokens;
    item.prepared += start * p.value_heads;
    if (end != chunks) item.to = kToNowhere;
  }

  GD_DEVICE void plan() const {
    const int tid = threadIdx.x;
    if (tid < p.sequences.count) {
      s.items[tid] = p.sequence_items[tid];
      s.chunks[tid] = static_cast<int>(Sequences::chunks(s.items[tid].rows));
      s.first_chunk[tid] = quotient(s.items[tid].prepared, p.value_heads);
    }
    if (tid == 0) s.lasting = 0;
    for (int pair = tid; pair < pairs(); pair += kScheduleThreads) s.lasts[pair] = 0;
    __syncthreads();
    Cut cut = p.forced;
    if (!cut.fading) cut = best_cut(p.may_cut ? lasting_share() : 0);
    find_windows(cut);
    write(cut);
  }

  GD_DEVICE Cut best_cut(int share) const {
    PricedCut best = p.cuts[share * kCutParts];
#pragma unroll
    for (int part = 1; part < kCutParts; ++part) {
      const PricedCut other = p.cuts[share * kCutParts + part];
      if (other.price < best.price || (other.price == best.price && other.number < best.number)) best = other;
    }
    return cut_number(best.number);
  }

  // How many of the heads last, about: by the chunk in the middle of the sequence.
  static constexpr int kUsualWindow = 12;
  GD_DEVICE int lasting_share() const {
    for (int pair = threadIdx.x; pair < pairs(); pair += kScheduleThreads) {
      const int rank = quotient(pair, p.value_heads);
      if (s.chunks[rank] == 0 ||
          decays_of(rank, pair - rank * p.value_heads)[s.chunks[rank] / 2].fade <= kForgottenLog / kUsualWindow)
        continue;
      s.lasts[pair] = 1;
      atomicAdd(&s.lasting, 1);
    }
    __syncthreads();
    return quotient(s.lasting * (kShares - 1) + pairs() / 2, pairs());
  }

  // For every boundary of a cut for heads that fade; a head that has one without a window is none of them. Where such
  // heads are not cut, what was found in the middle of the sequence is as good.
  GD_DEVICE void find_windows(const Cut& cut) const {
    const int tid = threadIdx.x;
    if (tid == 0) {
      int at = 0;
      for (int rank = 0; rank < p.sequences.count; ++rank) {
        s.first_window[rank] = at;
        at += p.value_heads * (segments_of(s.chunks[rank], cut.fading) - 1);
      }
      s.windows_count = at;
    }
    for (int pair = tid; pair < pairs(); pair += kScheduleThreads)
      if (segments_of(s.chunks[quotient(pair, p.value_heads)], cut.fading) > 1) s.lasts[pair] = 0;
    __syncthreads();
    for (int i = tid; i < s.windows_count; i += kScheduleThreads) {
      int rank = 0;
      while (rank + 1 < p.sequences.count && s.first_window[rank + 1] <= i) ++rank;
      const int chunks = s.chunks[rank], segments = segments_of(chunks, cut.fading);
      const int within = i - s.first_window[rank], head = quotient(within, segments - 1);
      const int boundary = fading_begin(chunks, segments, within - head * (segments - 1) + 1);
      const ChunkDecay* decays = decays_of(rank, head);
      const int window = window_before(boundary, window_limit(cut.fading), [&](int chunk) { return decays[chunk]; });
      s.windows[i] = static_cast<uint8_t>(window == kNoWindow ? 0 : window);
      if (window == kNoWindow) s.lasts[rank * p.value_heads + head] = 1;
    }
    __syncthreads();
  }

  GD_DEVICE EntryCounts count_pair(int pair, const Cut& cut) const {
    const int per_head = cut.halves ? 2 : 1, chunks = s.chunks[quotient(pair, p.value_heads)];
    const bool lasts = s.lasts[pair] != 0;
    const int segments = segments_of(chunks, lasts ? cut.lasting : cut.fading);
    EntryCounts counts{0};
    if (lasts && segments > 2) {
      counts.add(EntryCounts::kFirst, per_head + 2 * (segments - 2));
      counts.add(EntryCounts::kJoins, 2);
      counts.add(EntryCounts::kBoundaries, segments - 1);
    } else if (chunks > 0) {
      counts.add(EntryCounts::kFree, per_head * segments);
    }
    return counts;
  }

  GD_DEVICE void write(Cut cut) const {
    const int tid = threadIdx.x;
    const int each = rounds_of(pairs(), kScheduleThreads), begin = tid * each, end = min(begin + each, pairs());
    EntryCounts total{0};
    for (;;) {
      EntryCounts mine{0}, before{0};
      for (int pair = begin; pair < end; ++pair) mine.all += count_pair(pair, cut).all;
      before.all = sum_before(mine.all, s.entry_sums, total.all);
      for (int pair = begin; pair < end; ++pair) {
        s.before[pair] = before;
        before.all += count_pair(pair, cut).all;
      }
      if (total[EntryCounts::kBoundaries] <= p.limits.boundaries) break;
      cut.lasting = 0;  // more heads last than the choice of the cut knew of, and there is no room for that
      __syncthreads();
    }
    // Pieces may wait for others: a block that is not on the card yet must not have one of those.
    const bool is_cut = cut.fading || cut.lasting;
    if (tid == 0) *p.schedule = {total.entries(cut.halves ? 2 : 1), 0, is_cut ? 0 : p.main_blocks()};
    __syncthreads();
    int log_lanes = 5;  // threads a pair gets
    while (log_lanes > 0 && pairs() << log_lanes > kScheduleThreads) --log_lanes;
#pragma unroll 1
    for (int i = tid; i < pairs() << log_lanes; i += kScheduleThreads)
      write_pair(i >> log_lanes, i & ((1 << log_lanes) - 1), 1 << log_lanes, cut, total);
  }

  GD_DEVICE void write_pair(int pair, int lane, int lanes, const Cut& cut, const EntryCounts& total) const {
    const int rank = quotient(pair, p.value_heads), head = pair - rank * p.value_heads;
    const int chunks = s.chunks[rank], per_head = cut.halves ? 2 : 1;
    if (chunks == 0) return;
    const auto item_of = [&](int half) {
      WorkItem item = s.items[rank];
      item.head = head;
      item.key_head = quotient(head, p.group);
      item.half = half;
      item.prepared += head;
      return item;
    };
    const bool lasts = s.lasts[pair] != 0;
    const int segments = segments_of(chunks, lasts ? cut.lasting : cut.fading);
    const EntryCounts before = s.before[pair];
    const int boundary = before[EntryCounts::kBoundaries];
    const int firsts = total[EntryCounts::kFirst], frees = total[EntryCounts::kFree],
              joins = total[EntryCounts::kJoins];
    // Joins come when the first of what they wait for may have ended; until then there is other work. Where that is
    // long, it comes before all.
    const bool longest_first = is_longer_than_chain(cut, s.chunks[0]);
    const int frees_first = longest_first ? frees : min(frees, max(0, p.limits.blocks - firsts));
    const int first_at = longest_first ? frees : 0;
    const auto put_free = [&](int i, const WorkItem& item) {
      const int at = before[EntryCounts::kFree] + i;
      p.work[longest_first ? at : firsts + at + (at < frees_first ? 0 : joins)] = item;
    };
    if (lasts && segments > 2) {
      const int first = first_at + before[EntryCounts::kFirst], waiting = firsts + frees + joins + per_head * boundary;
      for (int i = lane; i < per_head * segments; i += lanes) {
        const int segment = i >> (per_head - 1);
        WorkItem item = item_of(cut.halves ? i % 2 : kWhole);
        cut_item(item, lasting_begin(chunks, segments, segment), lasting_begin(chunks, segments, segment + 1), chunks);
        if (segment == 0) {
          item.to = boundary;
          p.work[first + i] = item;
        } else {
          item.from = boundary + segment - 1;
          p.work[waiting + i - per_head] = item;
        }
      }
      for (int i = lane; i < 2 * (segments - 2); i += lanes) {
        const int segment = 1 + i / 2, begin = lasting_begin(chunks, segments, segment);
        WorkItem item = item_of(i % 2);
        item.kind = kFactors;
        cut_item(item, begin, lasting_begin(chunks, segments, segment + 1), chunks);
        item.silent = item.rows;
        item.from = kFromZero;
        item.to = boundary + segment;
        p.work[first + per_head + i] = item;
      }
      for (int i = lane; i < 2; i += lanes) {
        WorkItem item = item_of(kNoValues);
        item.kind = kJoin;
        item.key_head = i;
        item.rows = item.silent = kJoinImages * kChunkTokens * (segments - 2);
        item.from = boundary;
        item.to = boundary + 1;
        item.prepared = (boundary + 1) * kBoundaryImages;
        p.work[firsts + frees_first + before[EntryCounts::kJoins] + i] = item;
      }
      return;
    }
    const uint8_t* windows = s.windows + s.first_window[rank] + head * (segments_of(chunks, cut.fading) - 1) - 1;
    const auto begin_of = [&](int i) {
      return lasts ? lasting_begin(chunks, segments, i) : fading_begin(chunks, segments, i);
    };
    for (int i = lane; i < per_head * segments; i += lanes) {
      const int segment = i >> (per_head - 1), begin = begin_of(segment);
      const int window = segment == 0 ? 0 : lasts ? begin : windows[segment];
      WorkItem item = item_of(cut.halves ? i % 2 : kWhole);
      cut_item(item, begin - window, begin_of(segment + 1), chunks);
      item.silent = window * kChunkTokens;
      if (window < begin) item.from = kFromZero;
      item.pair = pair;
      // A final state may come in the initial one's place.
      if (segment == segments - 1 && segment > 0 && p.initial.data && p.final.data) {
        item.readers = 2;
        for (int other = 1; other < segment; ++other) item.readers += windows[other] == begin_of(other) ? 2 : 0;
      }
      put_free(i, item);
    }
  }
};

__global__ void __launch_bounds__(kScheduleThreads, 1) schedule_kernel(const __grid_constant__ ForwardParams p) {
  __shared__ ScheduleSmem smem;
  allow_next_kernel();
  wait_for_previous_kernel();
  if (p.list == kSortedList)
    return list_all(p, static_cast<int>(blockIdx.x) * kScheduleThreads + static_cast<int>(threadIdx.x),
                    static_cast<int>(gridDim.x) * kScheduleThreads, [&](int rank) { return p.order[rank]; });
  if (p.cuts[0].number == kIsListed) return;
  Scheduler{p, smem}.plan();
}

}  // namespace gatedelta::cuda
