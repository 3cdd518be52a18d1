// Where the scratch memory of summaries lies. Pure host arithmetic.
#pragma once

#include "cuda/sm90/workspace/forward.hpp"

namespace gatedelta::cuda::sm90 {

// The forward of the same layer that cuts nothing, as far as summaries need it: prepared chunks and decay records.
template <class Problem>
ForwardProblem prepared_forward(const Problem& p) {
  ForwardProblem forward;
  forward.in = p.in;
  forward.context_parallel = false;
  forward.saved = p.saved;
  if constexpr (requires { p.prepared; }) forward.prepared = p.prepared;
  return forward;
}

struct SummaryWorkspace {
  ForwardWorkspace forward;
  int64_t seq_heads = 0;  // (sequence, head) pairs that are summarised
  size_t schedule = 0;
  size_t work = 0;        // WorkItem [seq_heads][2]
  size_t faded = 0;       // uint8_t [seq_heads]
  size_t rows = 0;        // int [N]: row of the result that a sequence has; -1: none
  size_t ready = 0;       // int [seq_heads]
  size_t boundaries = 0;  // [seq_heads][kBoundaryBytes]: M and S_loc
  size_t bytes = 0;
};

template <class Problem>
SummaryWorkspace summary_layout(const Problem& p, bool has_boundaries, int prepared_bytes) {
  SummaryWorkspace w;
  w.forward = forward_layout(prepared_forward(p), prepared_bytes);
  w.seq_heads = p.count * p.in.value_heads;
  w.bytes = w.forward.bytes;
  const auto take = [&](int64_t bytes) {
    const size_t at = w.bytes =
        (w.bytes + ForwardWorkspace::kAlign - 1) / ForwardWorkspace::kAlign * ForwardWorkspace::kAlign;
    w.bytes += static_cast<size_t>(bytes);
    return at;
  };
  w.schedule = take(sizeof(Schedule));
  w.work = take(2 * w.seq_heads * int64_t{sizeof(WorkItem)});
  w.faded = take(w.seq_heads);
  w.rows = take(p.in.sequences.count * int64_t{sizeof(int)});
  w.ready = take(has_boundaries ? w.seq_heads * int64_t{sizeof(int)} : 0);
  w.boundaries = take(has_boundaries ? w.seq_heads * kBoundaryBytes : 0);
  w.bytes += ForwardWorkspace::kAlign;
  return w;
}

}  // namespace gatedelta::cuda::sm90
