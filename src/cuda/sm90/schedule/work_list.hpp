// The work list of a cut: which entries a (sequence, head) pair has and where they stand.
#pragma once

#include "cuda/device/decay.hpp"
#include "cuda/sm90/schedule/cut.hpp"

namespace gatedelta::cuda::sm90 {

// Entries of one or many (sequence, head) pairs by their place in the list: kFirst, which others wait for; kFree, which
// wait for nothing; kMerges; and kBoundaries, each with per_head waiting entries behind it. 16 bits each: one addition
// adds all.
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

// Segments of a sequence's persistent or decaying heads.
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

// Whether the list fits. If not, the cut is coarsened: more heads are persistent than the search assumed, or the
// lengths within a class differ too much. Uncut, it always fits.
GD_HOST_DEVICE inline bool fits(Cut& cut, const EntryCounts& total, const Limits& limits) {
  if (total[EntryCounts::kBoundaries] <= limits.boundaries && total.entries(cut.halves ? 2 : 1) <= limits.entries)
    return true;
  if (!cut.decaying && !cut.persistent) return true;
  if (!cut.persistent) cut.decaying = 0;
  cut.persistent = 0;
  return false;
}

// What is the same for all (sequence, head) pairs.
struct ListPlan {
  Cut cut;
  EntryCounts total;
  int blocks;
  bool longest_first;  // see is_longer_than_chain
  int value_heads;
  bool in_place;  // a final state may overwrite an initial one
};

// Writes every lanes-th entry of a (sequence, head) pair by put(place in the list, item). `whole` is the item of all
// its chunks in forward order; `before` counts the entries of earlier pairs; warmups[i] is the warm-up length of
// boundary i + 1 of a decaying head. All kinds share one loop: the lanes of a warp write different kinds at the same
// time.
template <Pass kPass, class Put>
GD_HOST_DEVICE void list_seq_head(const ListPlan& plan, const WorkItem& whole, int seq_head, int chunks, int segments,
                                  bool persists, const EntryCounts& before, const uint8_t* warmups, int lane, int lanes,
                                  const Put& put) {
  if (chunks == 0) return;
  const Cut& cut = plan.cut;
  const int per_head = cut.halves ? 2 : 1;
  const int boundary = before[EntryCounts::kBoundaries];
  const int firsts = plan.total[EntryCounts::kFirst], frees = plan.total[EntryCounts::kFree],
            merges = plan.total[EntryCounts::kMerges];
  // Merges stand where the transitions they wait for may be ready; free entries fill the time until then. If free
  // entries are longer than the whole chain of merges, they go first.
  const int idle = plan.blocks > firsts ? plan.blocks - firsts : 0;
  const int frees_first = plan.longest_first || frees < idle ? frees : idle;
  const int first = (plan.longest_first ? frees : 0) + before[EntryCounts::kFirst];
  const int waiting = firsts + frees + merges + per_head * boundary;

  const bool is_merged = persists && segments > 2;
  const Borders begins = persists ? persistent_borders<kPass>(chunks, segments) : Borders(chunks, segments, 0);
  const int outputs = per_head * segments, transitions = is_merged ? 2 * (segments - 2) : 0;
  GD_NO_UNROLL for (int i = lane; i < outputs + transitions + (is_merged ? 2 : 0); i += lanes) {
    const int more = i - outputs;  // from here on: transitions, two per segment, then two merges
    WorkItem item = whole;
    if (more >= transitions) {
      item.kind = kMerge;
      item.half = kNoValues;
      item.key_head = more - transitions;
      item.tokens = item.warmup_tokens = kMergeTiles * kChunkTokens * (segments - 2);
      item.from = boundary;
      item.to = boundary + 1;
      item.prepared = (boundary + 1) * kBoundaryTiles;
      put(firsts + frees_first + before[EntryCounts::kMerges] + more - transitions, item);
      continue;
    }
    const bool is_output = more < 0;
    const int segment = is_output ? i >> (per_head - 1) : 1 + (more >> 1), begin = begins[segment];
    const bool has_warmup = !is_merged && segment > 0;
    const int warmup = !has_warmup ? 0 : persists ? begin : warmups[segment - 1];
    cut_item<kPass>(item, begin - warmup, begins[segment + 1], chunks, plan.value_heads);
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
      item.warmup_tokens = warmup * kChunkTokens;
      item.from = warmup < begin ? kFromZero : item.from;
      item.seq_head = seq_head;
      if (segment == segments - 1 && segment > 0 && plan.in_place) {
        item.readers = 2;
        GD_NO_UNROLL for (int other = 1; other < segment && begins[other] <= warmup_limit<kPass>(cut.decaying); ++other)
            item.readers += warmups[other - 1] == begins[other] ? 2 : 0;
      }
      const int free = before[EntryCounts::kFree] + i;
      at = plan.longest_first ? free : firsts + free + (free < frees_first ? 0 : merges);
    }
    put(at, item);
  }
}

}  // namespace gatedelta::cuda::sm90
