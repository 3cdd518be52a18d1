// Launch parameters of the chains and of the kernels of cuts: plain arithmetic that needs no CUDA.
#pragma once

#include <algorithm>

#include "cuda/portable/cut/search.hpp"

namespace gatedelta::cuda::portable {

// Of the transitions of a chain: those of states have more CTAs of a head, for M.
inline Params transition_params(const Params& p, ChainKind kind, bool makes_maps) {
  const int columns = chain_columns(transition_kind(kind));
  Params transitions = p;
  transitions.log_parts = log_parts(p.value_dim, columns);
  transitions.map_column = columns << transitions.log_parts;
  if (makes_maps) transitions.log_parts = log_parts(transitions.map_column + p.key_dim, columns);
  return transitions;
}

// Of the grid of whole sequences, beside one of segments (CutPrices::has_whole_grid). Each of its CTAs sees whether its
// sequence has been cut.
inline Params whole_params(const Params& p, ChainKind kind) {
  Params whole = p;
  whole.segment_chunks = 0;
  whole.segments = whole.gradient_segments = nullptr;
  whole.initial_copy = nullptr;
  whole.log_parts = log_parts(p.value_dim, chain_columns(kind));
  return whole;
}

// How a chain kernel is launched. CTAs that have nothing to do leave too many of the others on some multiprocessors,
// unless no more than `resident` fit there. 0: as many as do, where all have something to do.
struct ChainLaunch {
  ChainKind kind;
  int resident;      // of a multiprocessor
  int shared_bytes;  // likewise: always the device's, because a kernel is allowed its most once for all launches
  ChainLaunch(ChainKind kind_, int resident_, const Multiprocessors& device)
      : kind(kind_), resident(resident_), shared_bytes(device.shared_bytes) {}
  int bytes(int needed) const { return resident > 0 ? std::max(needed, spread_bytes(resident, shared_bytes)) : needed; }
  int most_bytes(int needed) const { return std::max(needed, spread_bytes(1, shared_bytes)); }
};
inline ChainLaunch chain_launch(const Cut& cut, const Params& p, const Multiprocessors& device) {
  const bool has_idle = p.segment_chunks > 0 && p.sequences.offsets && p.sequences.count > 1;
  const float ctas = cut.expected.segments * static_cast<float>(p.value_heads << p.log_parts);
  return {cut.kind, has_idle ? spread(ctas, device.count) : 0, device};
}
inline ChainLaunch whole_launch(const Cut& cut, const Multiprocessors& device) { return {cut.whole_kind, 0, device}; }
inline ChainLaunch transition_launch(const Cut& cut, const Params& transitions, const Multiprocessors& device) {
  const float ctas = CutCosts::kPersistent * cut.expected.boundaries *
                     static_cast<float>(transitions.value_heads << transitions.log_parts);
  return {transition_kind(cut.kind), spread(ctas, device.count), device};
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
