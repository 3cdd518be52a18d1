// Kernel parameters of a call.
#pragma once

#include "cuda/params.hpp"
#include "cuda/workspace/forward.hpp"

namespace gatedelta::cuda {

inline Rows rows_of(const TokenRows& t) { return {t.data, t.batch_stride, t.token_stride, t.head_stride, t.dtype}; }
inline HeadScalars scalars_of(const HeadVector& v) { return {v.data, v.stride, v.dtype}; }
// Kernels test the pointer for presence. A state pool without slots may have a null pointer: `present` stands in.
inline States states_of(const StateRows& s, const IndexVector& indices, void* present) {
  return {!s       ? nullptr
          : s.data ? s.data
                   : present,
          s.slot_stride,
          s.head_stride,
          s.dtype,
          {indices.data, indices.is_int64}};
}

inline CallParams call_params(const ForwardProblem& problem, char* workspace, int multiprocessors,
                              int prepared_bytes = kPreparedBytes) {
  constexpr uintptr_t kAlign = ForwardWorkspace::kAlign;
  const Layer& in = problem.in;
  const ForwardWorkspace layout = forward_layout(problem, prepared_bytes);
  char* const base = workspace + (kAlign - reinterpret_cast<uintptr_t>(workspace) % kAlign) % kAlign;
  CallParams p{};
  p.q = rows_of(in.q);
  p.k = rows_of(in.k);
  p.v = rows_of(in.v);
  p.o = rows_of(problem.o);
  p.g = rows_of(in.g);
  p.beta = rows_of(in.beta);
  p.A_log = scalars_of(in.A_log);
  p.dt_bias = scalars_of(in.dt_bias);
  p.sequences = sequences_of(in.sequences);
  p.key_heads = static_cast<int>(in.key_heads);
  p.value_heads = static_cast<int>(in.value_heads);
  p.group = static_cast<int>(in.group);
  p.gate = in.gate;
  p.beta_kind = in.beta_kind;
  p.l2norm = in.l2norm;
  p.state_value_first = in.layout == GD_STATE_VK;
  p.scale = in.scale;
  p.initial = states_of(in.initial, in.initial_indices, base);
  p.final = states_of(problem.final, problem.final_indices, base);
  p.checkpoints = states_of(problem.checkpoints, problem.checkpoint_indices, base);
  p.checkpoint_every = problem.checkpoint_every;
  p.prepared = reinterpret_cast<uint8_t*>(base + layout.prepared);
  p.prepared_bytes = prepared_bytes;
  p.decays = reinterpret_cast<ChunkDecay*>(base + layout.decays);
  p.order = reinterpret_cast<int*>(base + layout.order);
  p.first_checkpoint = reinterpret_cast<int64_t*>(base + layout.first_checkpoint);
  p.cuts = reinterpret_cast<CutCost*>(base + layout.cuts);
  if (problem.saved) {
    const SavedLayout saved_list = saved_layout(in);
    char* const saved = static_cast<char*>(problem.saved.data);
    p.prepared = reinterpret_cast<uint8_t*>(saved + saved_list.prepared);
    p.prepared_bytes = kBackwardPreparedBytes;
    p.decays = reinterpret_cast<ChunkDecay*>(saved + saved_list.decays);
    p.order = reinterpret_cast<int*>(saved + saved_list.order);
    p.first_checkpoint = reinterpret_cast<int64_t*>(saved + saved_list.first_checkpoint);
    p.cuts = reinterpret_cast<CutCost*>(saved + saved_list.cuts);
    p.saved_list = reinterpret_cast<SavedList*>(saved + saved_list.list);
    p.checkpoints = {saved + saved_list.states, in.value_heads * kStateBytes / 4, kStateBytes / 4, GD_F32, {}};
    p.checkpoint_every = kSaveIntervalTokens;
  }
  p.schedule = reinterpret_cast<Schedule*>(base + layout.schedule);
  p.work = reinterpret_cast<WorkItem*>(base + layout.work);
  p.initial_read = reinterpret_cast<int*>(base + layout.initial_read);
  p.boundary_ready = reinterpret_cast<int*>(base + layout.boundary_ready);
  p.boundaries = reinterpret_cast<uint8_t*>(base + layout.boundaries);
  p.list = list_mode(problem, multiprocessors);
  p.even_parts = even_parts(problem, multiprocessors);
  p.may_cut = may_cut(problem);
  if (p.may_cut) p.forced = {static_cast<int>(problem.segment_chunks), static_cast<int>(problem.segment_chunks), false};
  p.saves_list = p.saved_list && p.list == kPlannedList && p.may_cut && !p.forced.decaying;
  const int entries = static_cast<int>(list_entries(problem, multiprocessors));
  p.limits = {multiprocessors, entries, layout.boundary_count};
  return p;
}

}  // namespace gatedelta::cuda
