// Launch parameters of the chains and of the kernels of cuts: plain arithmetic that needs no CUDA.
#pragma once

#include <algorithm>

#include "cuda/portable/schedule/cut_search.hpp"

namespace gatedelta::cuda::portable {

// Parameters of a chain's transitions. Those of states have more CTAs per head, for M.
inline Params transition_params(const Params& p, ChainKind kind, bool makes_transitions) {
  const int columns = chain_columns(transition_kind(kind));
  Params transitions = p;
  transitions.log2_ctas_per_head = log2_ctas_per_head(p.value_dim, columns);
  transitions.first_transition_column = columns << transitions.log2_ctas_per_head;
  if (makes_transitions)
    transitions.log2_ctas_per_head = log2_ctas_per_head(transitions.first_transition_column + p.key_dim, columns);
  return transitions;
}

// Parameters of the grid for whole sequences, next to one for segments (CutCost::has_whole_grid). A CTA returns at once
// if its sequence is cut.
inline Params whole_params(const Params& p, ChainKind kind) {
  Params whole = p;
  whole.segment_chunks = 0;
  whole.segments = whole.gradient_segments = nullptr;
  whole.initial_copy = nullptr;
  whole.log2_ctas_per_head = log2_ctas_per_head(p.value_dim, chain_columns(kind));
  return whole;
}

// Launch of a chain kernel. Idle CTAs unbalance the grid, so occupancy is capped through the shared-memory size:
// ctas_per_sm, or 0 where all CTAs are busy.
struct ChainLaunch {
  ChainKind kind;
  int ctas_per_sm;
  int shared_bytes;  // of an SM. Always the device's: the kernel's maximum is set once for all launches
  ChainLaunch(ChainKind kind_, int ctas_per_sm_, const DeviceLimits& device)
      : kind(kind_), ctas_per_sm(ctas_per_sm_), shared_bytes(device.shared_bytes) {}
  int bytes(int needed) const {
    return ctas_per_sm > 0 ? std::max(needed, shared_bytes_for(ctas_per_sm, shared_bytes)) : needed;
  }
  int most_bytes(int needed) const { return std::max(needed, shared_bytes_for(1, shared_bytes)); }
};
inline ChainLaunch chain_launch(const Cut& cut, const Params& p, const DeviceLimits& device) {
  const bool has_idle = p.segment_chunks > 0 && p.sequences.offsets && p.sequences.count > 1;
  const float ctas = cut.expected.segments * static_cast<float>(p.value_heads << p.log2_ctas_per_head);
  return {cut.kind, has_idle ? even_ctas_per_sm(ctas, device.sm_count) : 0, device};
}
inline ChainLaunch whole_launch(const Cut& cut, const DeviceLimits& device) { return {cut.whole_kind, 0, device}; }
inline ChainLaunch transition_launch(const Cut& cut, const Params& transitions, const DeviceLimits& device) {
  const float ctas = FixedCosts::kPersistent * cut.expected.boundaries *
                     static_cast<float>(transitions.value_heads << transitions.log2_ctas_per_head);
  return {transition_kind(cut.kind), even_ctas_per_sm(ctas, device.sm_count), device};
}

inline int64_t chain_ctas(const Params& p) {
  const int64_t items = p.summaries        ? p.summaries
                        : p.segment_chunks ? p.segment_length().most_segments(p.sequences)
                                           : p.sequences.count;
  return (items * p.value_heads) << p.log2_ctas_per_head;
}
inline int64_t segment_ctas(const Params& p) {
  const int64_t copies = p.initial_copy ? int64_t{p.sequences.count} * p.value_heads : 0;
  return p.segment_length().most_segments(p.sequences) + copies;
}
// Both chains of a backward merge in one launch.
inline int64_t merge_ctas(const Params& p) {
  const int chains = p.gradient_segments ? 2 : 1;
  return int64_t{chains} * p.sequences.count * p.value_heads * (p.value_dim / kMergeColumns);
}

}  // namespace gatedelta::cuda::portable
