// Where the backward's scratch memory lies. Pure host arithmetic.
#pragma once

#include "cuda/sm90/workspace/forward.hpp"

namespace gatedelta::cuda::sm90 {

// The forward of the same layer, as far as the backward needs it: prepared chunks, cuts, boundaries.
inline ForwardProblem forward_of(const BackwardProblem& p) {
  ForwardProblem forward;
  forward.in = p.in;
  forward.context_parallel = p.context_parallel;
  forward.batch_invariant = p.batch_invariant;
  forward.segment_chunks = p.segment_chunks;
  forward.saved = p.saved;
  return forward;
}

// One slice, or two with `small_workspace`; the chunk and token counts are those of the larger and size the buffers.
// The second slice's buffers start at index 0 again.
struct Slices {
  int count;
  int64_t recompute_chunks, split, split_token;  // first chunk index and token of the second slice, at the earliest
  int64_t chunks, tokens;
};
inline Slices slices_of(const BackwardProblem& p) {
  const ChunkedSequences s = sequences_of(p.in.sequences);
  const int64_t chunks = s.workspace_chunks(), tokens = s.batch * s.tokens;
  const int64_t piece = recompute_chunks(chunks, s.count, p.in.value_heads);
  const bool has_saved_states = p.saved && is_planned(s.count, p.in.value_heads);
  if (!p.small_workspace || !has_saved_states || chunks < 2 * piece) return {1, piece, chunks, tokens, chunks, tokens};
  const int64_t split = (chunks - piece + 2) / 2,
                end = split + piece - 1;  // the first slice's last item ends before it
  // For a pack, shapes bound the token of a chunk index only roughly: sequences start anywhere within a chunk's worth
  // of tokens.
  const auto token_of = [&](int64_t chunk_index) {
    if (s.offsets) return chunk_index * kChunkTokens;
    const int64_t per_sequence = ChunkedSequences::chunks(s.tokens);
    return chunk_index / per_sequence * s.tokens + chunk_index % per_sequence * kChunkTokens;
  };
  const int64_t early = s.offsets ? (s.count - 1) * kChunkTokens : 0, late = s.offsets ? kChunkTokens : 0;
  const int64_t first = token_of(split) > early ? token_of(split) - early : 0;
  const auto larger = [](int64_t a, int64_t b) { return a > b ? a : b; };
  const int64_t last = token_of(end) + late;
  return {2, piece, split, first, larger(end, chunks - split), larger(last < tokens ? last : tokens, tokens - first)};
}

struct BackwardWorkspace {
  ForwardWorkspace forward;
  Slices slices;
  size_t states = 0;     // [chunks of a slice][Hv][kStateTileBytes], before each chunk
  size_t gradients = 0;  // [chunks][Hv][kStateTileBytes], of the states after it
  size_t u = 0;          // [tokens of a slice, Hv, V], what chunks write
  size_t dv = 0;         // [all tokens, Hv, V], if the caller does not want it: written before the first slice
  size_t head_sums = 0;  // two floats [chunks][Hv], for dA_log and d_dt_bias
  size_t slice1_schedule = 0;
  size_t slice1_work = 0;  // WorkItem [max_entries], of the states of the second slice
  // The gradient chain's list, which may run beside the states'.
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
  const ChunkedSequences sequences = sequences_of(p.in.sequences);
  const int64_t chunks = sequences.workspace_chunks() * p.in.value_heads;
  // Boundaries of the gradient chain. Saved states need none of their own. With slices, the states are written after
  // the gradient chain and reuse its boundaries' memory.
  const int64_t boundary_bytes = w.forward.boundary_count * int64_t{kBoundaryBytes};
  if (is_sliced && boundary_bytes > 0) w.bytes = w.forward.boundaries;
  const int64_t states_bytes = w.slices.chunks * p.in.value_heads * kStateTileBytes;
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

}  // namespace gatedelta::cuda::sm90
