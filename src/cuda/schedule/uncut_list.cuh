// Work lists where nothing is cut.
#pragma once

#include "cuda/params.hpp"
#include "cuda/sm90/ptx.cuh"

namespace gatedelta::cuda {

GD_DEVICE WorkItem whole_item(const CallParams& p, int n, int head) {
  const SequenceSpan span = p.sequences[n];
  WorkItem item{};
  item.kind = kOutputs;
  item.sequence = n;
  item.head = head;
  item.key_head = head / p.group;
  item.half = kWhole;
  item.batch = static_cast<int>(span.batch);
  item.token = item.origin = static_cast<int>(span.begin);
  item.tokens = p.is_padding(n) ? 0 : static_cast<int>(span.length);
  item.prepared = static_cast<int>(p.sequences.first_chunk_index(n)) * p.value_heads + head;
  item.from = kFromInitial;
  item.to = kToFinal;
  return item;
}

// Entry i of an uncut list.
template <class SequenceAt>
GD_DEVICE WorkItem uncut_item(const CallParams& p, int i, int parts, const SequenceAt& sequence_at) {
  const int seq_head = parts == 2 ? i / 2 : i, rank = seq_head / p.value_heads;
  WorkItem item = whole_item(p, sequence_at(rank), seq_head - rank * p.value_heads);
  if (parts == 2) item.half = i % 2;
  return item;
}
// Writes an uncut list with `stride` threads, each of which calls this.
template <class SequenceAt>
GD_DEVICE void list_uncut(const CallParams& p, int thread, int stride, int parts, const SequenceAt& sequence_at) {
  const int entries = p.sequences.count * p.value_heads * parts;
  for (int i = thread; i < entries; i += stride) p.work[i] = uncut_item(p, i, parts, sequence_at);
  if (thread == 0) *p.schedule = {entries, 0, p.main_blocks()};
}

}  // namespace gatedelta::cuda
