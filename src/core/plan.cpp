#include "core/plan.hpp"

namespace gatedelta {

namespace {
constexpr int64_t kWindowTokens = int64_t{kWindow} * kChunk;
int64_t windows_of(int64_t tokens) { return (tokens + kWindowTokens - 1) / kWindowTokens; }
}  // namespace

ForwardPlan plan_forward(const Layer& layer, int lanes) {
  const int64_t pairs = layer.sequences.count * layer.value_heads;
  const bool split = lanes > 1 && pairs < 2 * int64_t{lanes};
  // Heads of a group share Q K^T, K K^T and the packing of q and k; keep them together while every lane has enough.
  const int64_t grouped = layer.sequences.count * layer.key_heads;
  const int heads = grouped >= 4 * int64_t{lanes} || lanes == 1 ? static_cast<int>(layer.group) : 1;
  return {split, heads, pairs / heads};
}

int64_t first_window(const Layer& layer, int64_t sequence, const SequenceSpan& span) {
  return layer.sequences.offsets ? span.begin / kWindowTokens + sequence : sequence * windows_of(layer.sequences.tokens);
}

int64_t max_windows(const Layer& layer) {
  const Sequences& s = layer.sequences;
  return s.offsets ? s.tokens / kWindowTokens + s.count : s.batch * windows_of(s.tokens);
}

}  // namespace gatedelta
