// Parameters and memory of the portable summaries: plain arithmetic that needs no CUDA.
#pragma once

#include "cuda/portable/schedule/launches.hpp"

namespace gatedelta::cuda::portable {

// A forward of the same layer that cuts nothing; summaries need its prepare alone.
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
  size_t decays = 0, segments = 0;
  size_t bytes = 0;
};
template <class Problem>
SummaryWorkspace summary_layout(const Problem& p) {
  SummaryWorkspace w;
  w.forward = forward_layout(prepared_forward(p));
  w.bytes = w.forward.bytes;
  w.decays = take_bytes(w.bytes, p.saved ? 0 : decay_bytes(p.in));
  w.segments = take_bytes(w.bytes, segment_bytes(p.in, p.count));
  return w;
}

// Further parameters of the kernel that writes a summary's records.
struct SummaryRange {
  int first;  // sequence
  bool skip_faded;
  TokenRows fade;
};

// Row 0 of the results belongs to sequence `first`, and chains index rows by sequence: moves the base.
inline StateRows rows_by_sequence(StateRows rows, int64_t first) {
  if (rows) rows.data = static_cast<char*>(rows.data) - first * rows.slot_stride * dtype_bytes(rows.dtype);
  return rows;
}

// columns: of a head, those of V and of M.
template <class Problem>
ChainKind summary_kind(const Problem& p, int columns, int sm_count) {
  Layer summarised = p.in;
  summarised.sequences.count = p.count, summarised.value_dim = columns;
  return chain_kind(summarised, sm_count);
}

// layout: summary_layout(problem).
template <class Problem>
Params summary_params(const Problem& problem, const SummaryWorkspace& layout, char* workspace, ChainKind kind) {
  Params p = params_of(prepared_forward(problem), layout.forward, workspace, {0, kind});
  if (!problem.saved) p.decays = reinterpret_cast<ChunkDecay*>(workspace + layout.decays);
  p.summaries = static_cast<int>(problem.count);
  p.segments = reinterpret_cast<Segment*>(workspace + layout.segments);
  return p;
}
// The chain of states.
struct SummaryChain {
  Params p;  // of prepare, and of the kernel that writes records
  Params transitions;
  ChainKind kind;
  SummaryRange range;
};
inline SummaryChain chain_of(const SummaryProblem& problem, const SummaryWorkspace& layout, char* workspace,
                             int sm_count) {
  const Layer& in = problem.in;
  const ChainKind kind =
      transition_kind(summary_kind(problem, in.value_dim + (problem.transition ? in.key_dim : 0), sm_count));
  Params p = summary_params(problem, layout, workspace, kind);
  p.final = rows_by_sequence(problem.local, problem.first);
  p.transition = rows_by_sequence(problem.transition, problem.first);
  return {p,
          transition_params(p, kind, static_cast<bool>(problem.transition)),
          kind,
          {static_cast<int>(problem.first), problem.skip_faded, problem.fade}};
}
// The gradient chain. No step has outputs.
inline SummaryChain chain_of(const BackwardSummaryProblem& problem, const SummaryWorkspace& layout, char* workspace,
                             int sm_count) {
  const ChainKind kind = summary_kind(problem, problem.in.value_dim, sm_count);
  Params p = summary_params(problem, layout, workspace, kind);
  p.v = problem.d_o, p.v_stride = static_cast<uint32_t>(problem.d_o.token_stride);
  p.final = rows_by_sequence(problem.d_local, problem.first);
  return {p, p, kind, {static_cast<int>(problem.first), problem.skip_faded, {}}};
}

// ---- launches -------------------------------------------------------------------------------------------------------

// CTAs of the kernel that writes records: a thread has a sequence and head.
inline int64_t summary_ctas(const Params& p) {
  return (int64_t{p.summaries} * p.value_heads + kSegmentThreads - 1) / kSegmentThreads;
}

}  // namespace gatedelta::cuda::portable
