// Which cut of a call's sequences is taken: plain arithmetic on the host, from shapes and the number of
// multiprocessors. Lengths and gates are on the device; what a segment begins with is found there (segments.cuh).
#pragma once

#include "cuda/portable/config.hpp"

namespace gatedelta::cuda::portable {

struct Cut {
  int chunks = 0;  // of a segment; 0 = no sequence is cut
  ChainKind kind = ChainKind::k64;
};

// Microseconds, on an H200.
struct ChainCosts {
  float chunk;   // with outputs, of a CTA that is alone on its multiprocessor
  float beside;  // more of it for every other CTA there
  int resident;  // CTAs of a multiprocessor
};
struct CutCosts {
  static constexpr ChainCosts chain(ChainKind kind) {
    switch (kind) {
      case ChainKind::k64: return {1.6f, 0.4f, 4};
      case ChainKind::k128: return {3.2f, 1.8f, 2};
      case ChainKind::k128Half: return {2.4f, 0.9f, 3};
      case ChainKind::k128Quarter: return {2.0f, 0.5f, 4};
      case ChainKind::k256: break;
    }
    return {5.1f, 0.0f, 1};
  }
  static constexpr float kWithoutOutputs = 0.65f;  // such a chunk, against one with outputs
  static constexpr float kWarmup = 6;              // chunks of a usual warm-up
  static constexpr float kSegments = 5;            // the kernel that finds segments
  static constexpr float kFolds = 6;               // the launches of transitions and folds
  static constexpr float kFoldStep = 2.5f;
  static constexpr float kPersistent = 0.25f;  // the share of heads taken for persistent
  // A cut is taken where its estimate is below this share of the time without one. Measured cuts take about 1.75 times
  // their estimate: 0.91 of the uncut time where the estimate is 0.54 of it.
  static constexpr float kGain = 0.55f;
};

// The time of a chain kernel: rounds of as many CTAs as are resident, the last one with fewer.
inline float chain_time(ChainKind kind, int64_t ctas, float chunks, int multiprocessors) {
  const ChainCosts costs = CutCosts::chain(kind);
  const auto round = [&](int64_t beside) {
    return chunks * (costs.chunk + costs.beside * static_cast<float>(beside - 1));
  };
  const int64_t together = int64_t{costs.resident} * multiprocessors, rest = ctas % together;
  const float last = rest > 0 ? round((rest + multiprocessors - 1) / multiprocessors) : 0;
  return static_cast<float>(ctas / together) * round(costs.resident) + last;
}

inline Cut choose_cut(const ForwardProblem& p, int multiprocessors) {
  const Layer& in = p.in;
  Cut best;
  best.kind = chain_kind(in, multiprocessors);
  const ForwardWorkspace room = forward_layout(p);
  if (!may_cut(p) || room.entry_slots == 0) return best;
  const ChunkedSequences sequences = sequences_of(in);
  const int64_t heads = in.value_heads;
  // Of packed sequences the lengths are not known: they count as equal.
  const int64_t tokens = in.sequences.offsets ? in.sequences.tokens / in.sequences.count : in.sequences.tokens;
  const int64_t chunks = ChunkedSequences::chunks(tokens);
  const auto parts = [](ChainKind kind, int columns) { return int64_t{1} << log_parts(columns, chain_columns(kind)); };
  const float whole = chain_time(best.kind, in.sequences.count * heads * parts(best.kind, in.value_dim),
                                 static_cast<float>(chunks), multiprocessors);
  float least = p.segment_chunks ? -1.0f : CutCosts::kGain * whole;
  const auto consider = [&](ChainKind kind, int64_t length) {
    const int64_t slots = SegmentSlots{length * kChunkTokens}.count(sequences), items = slots * heads;
    if (slots > room.entry_slots) return;
    const int64_t ctas = items * parts(kind, in.value_dim);
    const auto time = [&](int64_t count, float of) { return chain_time(kind, count, of, multiprocessors); };
    const auto L = static_cast<float>(length);
    const float outputs = time(ctas, L), faded = time(ctas, L + CutCosts::kWarmup * CutCosts::kWithoutOutputs);
    const int64_t wide = items * parts(kind, in.value_dim + in.key_dim);
    const float steps = static_cast<float>((chunks + length - 1) / length);
    const float persistent = time(wide, L * CutCosts::kWithoutOutputs) + CutCosts::kFoldStep * steps + outputs;
    const float cost = CutCosts::kSegments + CutCosts::kFolds + (1 - CutCosts::kPersistent) * faded +
                       CutCosts::kPersistent * persistent;
    if (least >= 0 && cost >= least) return;
    least = cost;
    best = {static_cast<int>(length), kind};
  };
  const auto consider_kinds = [&](int64_t length) {
    if (compiled_keys(in.key_dim) != 128) return consider(best.kind, length);
    if (in.value_dim > 64) consider(ChainKind::k128, length);
    consider(ChainKind::k128Half, length);
    consider(ChainKind::k128Quarter, length);
  };
  if (p.segment_chunks) {
    if (p.segment_chunks * kChunkTokens < in.sequences.tokens) consider_kinds(p.segment_chunks);
    return best;
  }
  // The host's time counts: beyond eight segments not every number of them is tried, and none that would fill the
  // device several times.
  const int64_t most = 4 * multiprocessors / (in.sequences.count * heads) + 1;
  for (int64_t segments = 2; segments <= chunks / kLeastSegment && segments <= most; segments += 1 + segments / 9)
    consider_kinds((chunks + segments - 1) / segments);
  return best;
}

// ---- launches ------------------------------------------------------------------------------------------------------

// Whether states that are read may be overwritten in the same call.
inline bool overlap(const StateRows& a, const StateRows& b, const Layer& in) {
  if (!a || !b) return false;
  const auto last = [&](const StateRows& x) {
    const int64_t numbers =
        (x.slots - 1) * x.slot_stride + (in.value_heads - 1) * x.head_stride + int64_t{in.key_dim} * in.value_dim;
    return reinterpret_cast<uintptr_t>(x.data) + static_cast<uintptr_t>(numbers * dtype_bytes(x.dtype));
  };
  return reinterpret_cast<uintptr_t>(a.data) < last(b) && reinterpret_cast<uintptr_t>(b.data) < last(a);
}
inline Params params_of(const ForwardProblem& problem, char* workspace, int cta_columns, const Cut& cut) {
  Params p = params_of(problem, workspace, cta_columns);
  if (cut.chunks == 0) return p;
  const ForwardWorkspace layout = forward_layout(problem);
  p.segment_chunks = cut.chunks;
  p.segments = reinterpret_cast<Segment*>(workspace + layout.segments);
  p.decays = reinterpret_cast<ChunkDecay*>(workspace + layout.decays);
  if (overlap(p.initial, p.final, problem.in) || overlap(p.initial, p.checkpoints, problem.in))
    p.initial_copy = workspace + layout.initial_copy;
  p.entries = reinterpret_cast<float*>(workspace + layout.entries);
  p.maps = reinterpret_cast<float*>(workspace + layout.maps);
  return p;
}
// The transitions kernel has the forward's CTAs of a head, and more for M.
inline Params transition_params(const Params& p, int cta_columns) {
  Params transitions = p;
  transitions.map_column = cta_columns << p.log_parts;
  transitions.log_parts = log_parts(transitions.map_column + p.key_dim, cta_columns);
  return transitions;
}

inline int64_t chain_ctas(const Params& p) {
  const int64_t items = p.segment_chunks ? p.slots().count(p.sequences) : p.sequences.count;
  return (items * p.value_heads) << p.log_parts;
}
inline int64_t segment_ctas(const Params& p) {
  const int64_t copies = p.initial_copy ? int64_t{p.sequences.count} * p.value_heads : 0;
  return p.slots().count(p.sequences) + copies;
}
inline int64_t fold_ctas(const Params& p) {
  return int64_t{p.sequences.count} * p.value_heads * (p.value_dim / kFoldColumns);
}

}  // namespace gatedelta::cuda::portable
