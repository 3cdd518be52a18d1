#include "core/plan.hpp"

namespace gatedelta {

namespace {
constexpr int64_t kWindowTokens = int64_t{kWindow} * kChunk;
int64_t windows_of(int64_t tokens) { return (tokens + kWindowTokens - 1) / kWindowTokens; }
}  // namespace

ForwardPlan plan_forward(const Layer& layer, int lanes) {
  const int64_t pairs = layer.sequences.count * layer.value_heads;
  if (lanes > 1 && pairs < 2 * int64_t{lanes}) return {true, 1, pairs};
  // Heads that share an item share the pages their rows lie in (the rows of all heads of a token are neighbours), and
  // those of a group share Q K^T, K K^T and the packing of q and k. As many as leave every lane its share.
  for (int heads = kMaxHeadsPerItem; heads > 1; --heads) {
    const bool whole_groups = heads % layer.group == 0 || layer.group % heads == 0;
    if (layer.value_heads % heads || !whole_groups) continue;
    const int64_t items = pairs / heads;
    if (items >= 4 * int64_t{lanes} || items % lanes == 0) return {false, heads, items};
  }
  return {false, 1, pairs};
}

bool backward_splits_groups(const Layer& layer, int lanes) {
  return lanes > 1 && layer.group > 1 && layer.sequences.count * layer.key_heads < 2 * int64_t{lanes};
}

int64_t first_window(const Layer& layer, int64_t sequence, const SequenceSpan& span) {
  return layer.sequences.offsets ? span.begin / kWindowTokens + sequence
                                 : sequence * windows_of(layer.sequences.tokens);
}

int64_t max_windows(const Layer& layer) {
  const Sequences& s = layer.sequences;
  return s.offsets ? s.tokens / kWindowTokens + s.count : s.batch * windows_of(s.tokens);
}

}  // namespace gatedelta
