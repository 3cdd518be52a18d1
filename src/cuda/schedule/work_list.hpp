// The work list of a cut: which entries a (sequence, head) pair has and where they stand.
#pragma once

#include "cuda/schedule/cut.hpp"
#include "cuda/schedule/warmup.hpp"

namespace gatedelta::cuda {

// Entries by when they come in the list, of a pair of sequence and head or of many: what others wait for, what waits
// for nothing, joins; and boundaries, behind each of which a head waits. Sixteen bits each, so that one number adds
// them up.
struct EntryCounts {
  unsigned long long all;
  enum Class { kFirst, kFree, kMerges, kBoundaries };
  GD_HOST_DEVICE void add(Class c, int n) { all += static_cast<unsigned long long>(n) << (16 * c); }
  GD_HOST_DEVICE int operator[](Class c) const { return static_cast<int>(all >> (16 * c) & 0xffff); }
  GD_HOST_DEVICE int entries(int per_head) const {
    return (*this)[kFirst] + (*this)[kFree] + (*this)[kMerges] + per_head * (*this)[kBoundaries];
  }
};
static_assert(kMaxPlannedEntries < 1 << 16);

// Segments of a sequence's heads that last or fade.
template <Pass kPass>
GD_HOST_DEVICE int segments_of(const Cut& cut, int chunks, bool persists) {
  return persists ? persistent_segments<kPass>(chunks, cut.persistent) : segments_of(chunks, cut.decaying);
}
GD_HOST_DEVICE inline EntryCounts entries_of(int segments, int chunks, bool persists, int per_head) {
  EntryCounts counts{0};
  if (persists && segments > 2) {
    counts.add(EntryCounts::kFirst, per_head + 2 * (segments - 2));
    counts.add(EntryCounts::kMerges, 2);
    counts.add(EntryCounts::kBoundaries, segments - 1);
  } else if (chunks > 0) {
    counts.add(EntryCounts::kFree, per_head * segments);
  }
  return counts;
}

// Whether there is room for a list; if not, less is cut: more heads last than the choice of the cut knew of, or lengths
// that share a class are too different. Not cut at all, it always fits.
GD_HOST_DEVICE inline bool fits(Cut& cut, const EntryCounts& total, const Limits& limits) {
  if (total[EntryCounts::kBoundaries] <= limits.boundaries && total.entries(cut.halves ? 2 : 1) <= limits.entries)
    return true;
  if (!cut.decaying && !cut.persistent) return true;
  if (!cut.persistent) cut.decaying = 0;
  cut.persistent = 0;
  return false;
}

// What is the same for all pairs.
struct ListPlan {
  Cut cut;
  EntryCounts total;
  int blocks;
  bool longest_first;  // see is_longer_than_chain
  int value_heads;
  bool in_place;  // a final state may come in the initial one's place
};

// The entries of a pair, of which a thread puts every `lanes`th: put(number in the list, item). `whole` is the item of
// all of its chunks, in the forward's order; `before` are entries of the pairs before it; windows[i] is that of
// boundary i + 1, if the head fades. All kinds in one loop, so that threads have different ones at the same time.
template <Pass kPass, class Put>
GD_HOST_DEVICE void list_seq_head(const ListPlan& plan, const WorkItem& whole, int seq_head, int chunks, int segments,
                                  bool persists, const EntryCounts& before, const uint8_t* windows, int lane, int lanes,
                                  const Put& put) {
  if (chunks == 0) return;
  const Cut& cut = plan.cut;
  const int per_head = cut.halves ? 2 : 1;
  const int boundary = before[EntryCounts::kBoundaries];
  const int firsts = plan.total[EntryCounts::kFirst], frees = plan.total[EntryCounts::kFree],
            joins = plan.total[EntryCounts::kMerges];
  // Joins come when the first of what they wait for may have ended; until then there is other work. Where that is
  // long, it comes before all.
  const int idle = plan.blocks > firsts ? plan.blocks - firsts : 0;
  const int frees_first = plan.longest_first || frees < idle ? frees : idle;
  const int first = (plan.longest_first ? frees : 0) + before[EntryCounts::kFirst];
  const int waiting = firsts + frees + joins + per_head * boundary;

  const bool is_merged = persists && segments > 2;
  const Borders begins = persists ? persistent_borders<kPass>(chunks, segments) : Borders(chunks, segments, 0);
  const int outputs = per_head * segments, factors = is_merged ? 2 * (segments - 2) : 0;
  GD_NO_UNROLL for (int i = lane; i < outputs + factors + (is_merged ? 2 : 0); i += lanes) {
    const int more = i - outputs;  // from here on: factors, two of each segment, then joins, two
    WorkItem item = whole;
    if (more >= factors) {
      item.kind = kMerge;
      item.half = kNoValues;
      item.key_head = more - factors;
      item.tokens = item.warmup_tokens = kMergeTiles * kChunkTokens * (segments - 2);
      item.from = boundary;
      item.to = boundary + 1;
      item.prepared = (boundary + 1) * kBoundaryTiles;
      put(firsts + frees_first + before[EntryCounts::kMerges] + more - factors, item);
      continue;
    }
    const bool is_output = more < 0;
    const int segment = is_output ? i >> (per_head - 1) : 1 + (more >> 1), begin = begins[segment];
    const bool has_warmup = !is_merged && segment > 0;
    const int window = !has_warmup ? 0 : persists ? begin : windows[segment - 1];
    cut_item<kPass>(item, begin - window, begins[segment + 1], chunks, plan.value_heads);
    item.half = !is_output ? more & 1 : cut.halves ? i & 1 : kWhole;
    int at;
    if (!is_output) {
      item.kind = kTransition;
      item.warmup_tokens = item.tokens;
      item.from = kFromZero;
      item.to = boundary + segment;
      at = first + per_head + more;
    } else if (is_merged) {
      item.from = segment > 0 ? boundary + segment - 1 : item.from;
      item.to = segment > 0 ? item.to : boundary;
      at = segment > 0 ? waiting + i - per_head : first + i;
    } else {
      item.warmup_tokens = window * kChunkTokens;
      item.from = window < begin ? kFromZero : item.from;
      item.seq_head = seq_head;
      if (segment == segments - 1 && segment > 0 && plan.in_place) {
        item.readers = 2;
        GD_NO_UNROLL for (int other = 1; other < segment && begins[other] <= warmup_limit<kPass>(cut.decaying); ++other)
            item.readers += windows[other - 1] == begins[other] ? 2 : 0;
      }
      const int free = before[EntryCounts::kFree] + i;
      at = plan.longest_first ? free : firsts + free + (free < frees_first ? 0 : joins);
    }
    put(at, item);
  }
}

}  // namespace gatedelta::cuda
