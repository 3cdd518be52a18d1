#include "cpu/plan.hpp"

namespace gatedelta::cpu {

namespace {
constexpr int64_t kSaveIntervalTokens = int64_t{kSaveInterval} * kChunk;
int64_t states_of(int64_t tokens) { return (tokens + kSaveIntervalTokens - 1) / kSaveIntervalTokens; }
}  // namespace

ForwardPlan plan_forward(const Layer& layer, int lanes) {
  const int64_t pairs = layer.sequences.count * layer.value_heads;
  if (lanes > 1 && pairs < 2 * int64_t{lanes}) return {true, 1, pairs};
  // Heads of one item share the pages their rows lie in, because a token's rows of all heads are neighbours. Heads of
  // one group also share Q K^T, K K^T and the packed q and k. Take as many heads as leave every lane its share.
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

int64_t first_saved_state(const Layer& layer, int64_t sequence, const SequenceSpan& span) {
  return layer.sequences.offsets ? span.begin / kSaveIntervalTokens + sequence
                                 : sequence * states_of(layer.sequences.tokens);
}

int64_t max_saved_states(const Layer& layer) {
  const Sequences& s = layer.sequences;
  return s.offsets ? s.tokens / kSaveIntervalTokens + s.count : s.batch * states_of(s.tokens);
}

}  // namespace gatedelta::cpu
