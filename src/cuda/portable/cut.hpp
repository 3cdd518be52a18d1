// Which cut of a call's sequences is taken: plain arithmetic on the host, from shapes and the number of
// multiprocessors. Lengths and gates are on the device; what a segment begins with is found there (segments.cuh).
#pragma once

#include <initializer_list>

#include "cuda/portable/config.hpp"

namespace gatedelta::cuda::portable {

// Microseconds, on an H200.
struct ChainCosts {
  float chunk;   // of the forward, with outputs, of a CTA that is alone on its multiprocessor
  float beside;  // more of it for every other CTA there
  int resident;  // CTAs of a multiprocessor
};
// A chain kernel of a call, against the forward's.
struct ChainWork {
  float chunk;      // with outputs
  float silent;     // of a warm-up or a transition
  float warmup;     // chunks of a usual one
  bool makes_maps;  // its transitions have columns for M, too
};
struct CutCosts {
  static constexpr ChainCosts chain(ChainKind kind) {
    switch (kind) {
      case ChainKind::k64: return {1.6f, 0.4f, 4};
      case ChainKind::k128: return {3.2f, 1.8f, 2};
      case ChainKind::k128Half: return {2.15f, 1.07f, 3};
      case ChainKind::k128Quarter: return {1.9f, 0.6f, 4};
      case ChainKind::k256: break;
    }
    return {5.1f, 0.0f, 1};
  }
  static constexpr ChainWork kForward = {1.0f, 0.65f, 6, true}, kStates = {1.12f, 0.7f, 6, true},
                             kGradients = {1.28f, 1.15f, 11, false};
  // What kernels take besides their chunks and steps, each with its launch.
  static constexpr float kSegments = 7, kTransitions = 15, kFolds = 5;
  static constexpr float kFoldStep = 3.0f;
  static constexpr float kPersistent = 0.25f;  // the share of heads taken for persistent
  // A cut is taken where its estimate is below this share of the time without one.
  static constexpr float kGain = 0.87f;
};

// The time of a chain kernel: rounds of as many CTAs as are resident, the last one with fewer.
inline float chain_time(ChainKind kind, int64_t ctas, float chunks, int multiprocessors) {
  const ChainCosts costs = CutCosts::chain(kind);
  const auto round = [&](int64_t beside) {
    return chunks * (costs.chunk + costs.beside * static_cast<float>(beside - 1));
  };
  const int64_t together = int64_t{costs.resident} * multiprocessors, rest = ctas % together;
  const float last = rest > 0 ? round((rest + multiprocessors - 1) / multiprocessors) : 0;
  const int64_t whole_rounds = ctas / together;
  return static_cast<float>(whole_rounds) * round(costs.resident) + last;
}

// The cut of a call whose chains run one after the other, by the same segments; entries and maps have room for so many
// slots. forced: chunks of a segment, or 0.
inline Cut choose_cut(const Layer& in, std::initializer_list<ChainWork> chains, int64_t entry_slots, int64_t forced,
                      int multiprocessors) {
  Cut best;
  best.kind = chain_kind(in, multiprocessors);
  if (entry_slots == 0) return best;
  const ChunkedSequences sequences = sequences_of(in);
  const int64_t heads = in.value_heads;
  // Of packed sequences the lengths are not known: they count as equal.
  const int64_t tokens = in.sequences.offsets ? in.sequences.tokens / in.sequences.count : in.sequences.tokens;
  const int64_t chunks = ChunkedSequences::chunks(tokens);
  const auto parts = [](ChainKind kind, int columns) { return int64_t{1} << log_parts(columns, chain_columns(kind)); };
  float whole = 0;
  for (const ChainWork& chain : chains)
    whole += chain_time(best.kind, in.sequences.count * heads * parts(best.kind, in.value_dim),
                        chain.chunk * static_cast<float>(chunks), multiprocessors);
  float least = forced ? -1.0f : CutCosts::kGain * whole;
  const auto consider = [&](ChainKind kind, int64_t length) {
    const int64_t slots = SegmentSlots{length * kChunkTokens}.count(sequences), items = slots * heads;
    if (slots > entry_slots) return;
    const int64_t ctas = items * parts(kind, in.value_dim);
    const auto L = static_cast<float>(length);
    const int64_t steps = (chunks + length - 1) / length - 2;  // of a fold
    const ChainKind narrow = transition_kind(kind);
    float cost = CutCosts::kSegments + CutCosts::kFolds;
    if (steps > 0) cost += CutCosts::kFoldStep * static_cast<float>(steps);
    for (const ChainWork& chain : chains) {
      const int64_t wide = items * parts(narrow, in.value_dim + (chain.makes_maps ? in.key_dim : 0));
      const auto persistent = static_cast<int64_t>(CutCosts::kPersistent * static_cast<float>(wide)) + 1;
      cost += CutCosts::kTransitions + chain_time(narrow, persistent, L * chain.silent, multiprocessors);
      cost += chain_time(kind, ctas, L * chain.chunk + chain.warmup * chain.silent, multiprocessors);
    }
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
  if (forced) {
    if (forced * kChunkTokens < in.sequences.tokens) consider_kinds(forced);
    return best;
  }
  // The host's time counts: beyond eight segments not every number of them is tried, and none that would fill the
  // device several times.
  const int64_t most = 4 * multiprocessors / (in.sequences.count * heads) + 1;
  for (int64_t segments = 2; segments <= chunks / kLeastSegment && segments <= most; segments += 1 + segments / 9)
    consider_kinds((chunks + segments - 1) / segments);
  return best;
}
inline Cut choose_cut(const ForwardProblem& p, const ForwardWorkspace& layout, int multiprocessors) {
  return choose_cut(p.in, {CutCosts::kForward}, layout.entry_slots, p.segment_chunks, multiprocessors);
}

// ---- launches ------------------------------------------------------------------------------------------------------

// Of the transitions of a chain: those of states have more CTAs of a head, for M.
inline Params transition_params(const Params& p, ChainKind kind, bool makes_maps) {
  const int columns = chain_columns(transition_kind(kind));
  Params transitions = p;
  transitions.log_parts = log_parts(p.value_dim, columns);
  transitions.map_column = columns << transitions.log_parts;
  if (makes_maps) transitions.log_parts = log_parts(transitions.map_column + p.key_dim, columns);
  return transitions;
}

inline int64_t chain_ctas(const Params& p) {
  const int64_t items = p.summaries ? p.summaries : p.segment_chunks ? p.slots().count(p.sequences) : p.sequences.count;
  return (items * p.value_heads) << p.log_parts;
}
inline int64_t segment_ctas(const Params& p) {
  const int64_t copies = p.initial_copy ? int64_t{p.sequences.count} * p.value_heads : 0;
  return p.slots().count(p.sequences) + copies;
}
// Both chains of a backward fold at the same time.
inline int64_t fold_ctas(const Params& p) {
  const int chains = p.gradient_segments ? 2 : 1;
  return int64_t{chains} * p.sequences.count * p.value_heads * (p.value_dim / kFoldColumns);
}

}  // namespace gatedelta::cuda::portable
