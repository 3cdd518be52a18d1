// Work lists where nothing is cut.
#pragma once

#include "cuda/sm90/params.hpp"
#include "cuda/sm90/ptx.cuh"

namespace gatedelta::cuda::sm90 {

// The item of a whole sequence and its first head; no tokens if another kernel takes care of it.
GD_DEVICE WorkItem whole_item(const CallParams& p, int n) {
  const SequenceSpan span = p.sequences[n];
  WorkItem item{};
  item.kind = kOutputs;
  item.sequence = n;
  item.half = kWhole;
  item.batch = static_cast<int>(span.batch);
  item.token = item.origin = static_cast<int>(span.begin);
  item.tokens = p.is_padding(n) || p.is_short(span.length) ? 0 : static_cast<int>(span.length);
  item.prepared = static_cast<int>(p.sequences.first_chunk_index(n)) * p.value_heads;
  item.from = kFromInitial;
  item.to = kToFinal;
  item.initial_slot = static_cast<int>(p.initial.slot(n));
  return item;
}
GD_DEVICE WorkItem item_of_head(const CallParams& p, const WorkItem& whole, int head) {
  WorkItem item = whole;
  item.head = head;
  item.key_head = floor_div(head, p.group);
  item.prepared += head;
  return item;
}

// How many of the sequences before `end` are listed: all but the short ones. By a warp.
GD_DEVICE int count_listed(const CallParams& p, int end, int lane) {
  if (p.short_tokens == CallParams::kNoneShort) return end;
  int mine = 0;
  for (int n = lane; n < end; n += 32) mine += !p.is_short(p.sequences[n].length);
  return __reduce_add_sync(~0u, mine);
}
// The number of longer sequences, plus equally long ones before it. By a warp.
GD_DEVICE int rank_by_length(const CallParams& p, int n, int lane) {
  const int64_t length = p.sequences[n].length;
  int mine = 0;
  for (int m = lane; m < p.sequences.count; m += 32) {
    const int64_t other = p.sequences[m].length;
    mine += other > length || (other == length && m < n);
  }
  return __reduce_add_sync(~0u, mine);
}

// Writes an uncut list with `warps` warps, each of which calls this: longest first, if there are not too many to rank.
GD_DEVICE void list_uncut(const CallParams& p, int warp, int warps, int lane, int parts) {
  const int count = p.sequences.count, per_sequence = p.value_heads * parts;
  const int each = ceil_div(count, warps), begin = min(warp * each, count), end = min(begin + each, count);
  const bool is_ranked = p.sequences.offsets && count <= kMaxSorted;
  int rank = is_ranked ? 0 : count_listed(p, begin, lane);
  for (int n = begin; n < end; ++n) {
    const WorkItem whole = whole_item(p, n);
    if (p.is_short(p.sequences[n].length)) continue;
    if (is_ranked) rank = rank_by_length(p, n, lane);
    WorkItem* const to = p.work + rank * per_sequence;
    for (int i = lane; i < per_sequence; i += 32) {
      WorkItem item = item_of_head(p, whole, parts == 2 ? i / 2 : i);
      if (parts == 2) item.half = i % 2;
      to[i] = item;
    }
    ++rank;
  }
  if (warp != 0) return;
  const int entries = count_listed(p, count, lane) * per_sequence;
  if (lane == 0) *p.schedule = {entries, 0, p.main_blocks()};
}

}  // namespace gatedelta::cuda::sm90
