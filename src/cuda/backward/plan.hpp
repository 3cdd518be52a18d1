// Where the backward's scratch memory lies. Pure host arithmetic.
#pragma once

#include "cuda/forward/plan.hpp"

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

struct BackwardWorkspace {
  ForwardWorkspace forward;
  size_t states = 0;     // [slots][Hv][kImageBytes], before each chunk
  size_t gradients = 0;  // likewise, of the states after it
  size_t u = 0;          // [B, T, Hv, V], what chunks write
  size_t dv = 0;         // likewise, if the caller does not want it
  size_t head_sums = 0;  // two floats [slots][Hv], for dA_log and d_dt_bias
  // Of the second list of work, that of gradients of states, which may be begun before the first is done.
  size_t back_schedule = 0;
  size_t back_work = 0;            // WorkItem [max_entries]
  size_t back_boundary_ready = 0;  // int [boundary_count]
  size_t back_boundaries = 0;      // [boundary_count][kBoundaryBytes]
  size_t bytes = 0;
};

inline BackwardWorkspace backward_layout(const BackwardProblem& p) {
  BackwardWorkspace w;
  const ForwardProblem forward = forward_of(p);
  w.forward = forward_layout(forward, kBackwardPreparedBytes);
  w.bytes = w.forward.bytes;
  const auto take = [&](int64_t bytes) {
    const size_t at = w.bytes =
        (w.bytes + ForwardWorkspace::kAlign - 1) / ForwardWorkspace::kAlign * ForwardWorkspace::kAlign;
    w.bytes += static_cast<size_t>(bytes);
    return at;
  };
  const Sequences sequences = sequences_of(p.in.sequences);
  const int64_t chunks = sequences.slots() * p.in.value_heads;
  w.states = take(chunks * kImageBytes);
  w.gradients = take(chunks * kImageBytes);
  const int64_t rows_bytes = p.in.sequences.batch * p.in.sequences.tokens * p.in.value_heads * kHeadDim * 2;
  w.u = take(rows_bytes);
  if (!p.dv) w.dv = take(rows_bytes);
  if (p.dA_log || p.d_dt_bias) w.head_sums = take(chunks * 8);
  w.back_schedule = take(sizeof(Schedule));
  w.back_work = take(max_entries(forward) * int64_t{sizeof(WorkItem)});
  w.back_boundary_ready = take(w.forward.boundary_count * int64_t{sizeof(int)});
  w.back_boundaries = take(w.forward.boundary_count * int64_t{kBoundaryBytes});
  w.bytes += ForwardWorkspace::kAlign;
  return w;
}

}  // namespace gatedelta::cuda
