// Where the backward's scratch memory lies. Pure host arithmetic.
#pragma once

#include "cuda/workspace/forward.hpp"

namespace gatedelta::cuda {

// The forward of the same layer, as far as the backward needs it: prepared chunks, cuts, boundaries.
inline ForwardProblem forward_of(const BackwardProblem& p) {
  ForwardProblem forward;
  forward.in = p.in;
  forward.context_parallel = p.context_parallel;
  forward.batch_invariant = p.batch_invariant;
  forward.segment_chunks = p.segment_chunks;
  forward.saved = const_cast<void*>(p.saved);
  return forward;
}

// Whether a backward makes states in slices, which takes less memory, and what is the most that is there of one. The
// second one's lie where those of the first were: its first slot at slot 0, its first token at token 0.
struct Slices {
  int count;
  int64_t recompute_chunks, split, split_token;  // where the second begins, at the earliest
  int64_t slots, tokens;
};
inline Slices slices_of(const BackwardProblem& p) {
  const Sequences s = sequences_of(p.in.sequences);
  const int64_t slots = s.workspace_chunks(), tokens = s.batch * s.tokens;
  const int64_t piece = recompute_chunks(slots, s.count, p.in.value_heads);
  const bool has_saved_states = p.saved && is_planned(s.count, p.in.value_heads);
  if (!p.small_workspace || !has_saved_states || slots < 2 * piece) return {1, piece, slots, tokens, slots, tokens};
  const int64_t split = (slots - piece + 2) / 2, end = split + piece - 1;  // the last piece of the first ends before
  // Of tokens and slots of a pack shapes tell little: a sequence may begin anywhere in a chunk's worth of tokens.
  const auto token_of = [&](int64_t slot) {
    if (s.offsets.data) return slot * kChunkTokens;
    const int64_t chunks = Sequences::chunks(s.tokens);
    return slot / chunks * s.tokens + slot % chunks * kChunkTokens;
  };
  const int64_t early = s.offsets.data ? (s.count - 1) * kChunkTokens : 0, late = s.offsets.data ? kChunkTokens : 0;
  const int64_t first = token_of(split) > early ? token_of(split) - early : 0;
  const auto larger = [](int64_t a, int64_t b) { return a > b ? a : b; };
  const int64_t last = token_of(end) + late;
  return {2, piece, split, first, larger(end, slots - split), larger(last < tokens ? last : tokens, tokens - first)};
}

struct BackwardWorkspace {
  ForwardWorkspace forward;
  Slices slices;
  size_t states = 0;     // [slots of a slice][Hv][kImageBytes], before each chunk
  size_t gradients = 0;  // [slots][Hv][kImageBytes], of the states after it
  size_t u = 0;          // [tokens of a slice, Hv, V], what chunks write
  size_t dv = 0;         // likewise, if the caller does not want it
  size_t head_sums = 0;  // two floats [slots][Hv], for dA_log and d_dt_bias
  size_t slice1_schedule = 0;
  size_t slice1_work = 0;  // WorkItem [max_entries], of the states of the second slice
  // Of the second list of work, that of gradients of states, which may be begun before the first is done.
  size_t grad_schedule = 0;
  size_t grad_work = 0;            // WorkItem [max_entries]
  size_t grad_boundary_ready = 0;  // int [boundary_count]
  size_t grad_boundaries = 0;      // [boundary_count][kBoundaryBytes]
  size_t bytes = 0;
};

inline BackwardWorkspace backward_layout(const BackwardProblem& p) {
  BackwardWorkspace w;
  const ForwardProblem forward = forward_of(p);
  w.forward = forward_layout(forward, kBackwardPreparedBytes);
  w.slices = slices_of(p);
  const bool is_sliced = w.slices.count > 1;
  w.bytes = w.forward.bytes;
  const auto take = [&](int64_t bytes) {
    const size_t at = w.bytes =
        (w.bytes + ForwardWorkspace::kAlign - 1) / ForwardWorkspace::kAlign * ForwardWorkspace::kAlign;
    w.bytes += static_cast<size_t>(bytes);
    return at;
  };
  const Sequences sequences = sequences_of(p.in.sequences);
  const int64_t chunks = sequences.workspace_chunks() * p.in.value_heads;
  // The boundaries of the gradients' chain: states that the forward has kept need none themselves. In slices, states
  // come when that chain is done, and lie where its boundaries were.
  const int64_t boundary_bytes = w.forward.boundary_count * int64_t{kBoundaryBytes};
  if (is_sliced && boundary_bytes > 0) w.bytes = w.forward.boundaries;
  const int64_t states_bytes = w.slices.slots * p.in.value_heads * kStateTileBytes;
  w.states = take(is_sliced && boundary_bytes > states_bytes ? boundary_bytes : states_bytes);
  w.gradients = take(chunks * kStateTileBytes);
  const int64_t row_bytes = p.in.value_heads * kHeadDim * 2;
  w.u = take(w.slices.tokens * row_bytes);
  if (!p.dv) w.dv = take(p.in.sequences.batch * p.in.sequences.tokens * row_bytes);
  if (p.dA_log || p.d_dt_bias) w.head_sums = take(chunks * 8);
  if (is_sliced) {
    w.slice1_schedule = take(sizeof(Schedule));
    w.slice1_work = take(max_entries(forward) * int64_t{sizeof(WorkItem)});
  }
  w.grad_schedule = take(sizeof(Schedule));
  w.grad_work = take(max_entries(forward) * int64_t{sizeof(WorkItem)});
  w.grad_boundary_ready = take(w.forward.boundary_count * int64_t{sizeof(int)});
  w.grad_boundaries = p.saved ? w.forward.boundaries : take(boundary_bytes);
  w.bytes += ForwardWorkspace::kAlign;
  return w;
}

}  // namespace gatedelta::cuda
