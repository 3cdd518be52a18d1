// Kernel parameters of a call.
#pragma once

#include "cuda/sm90/params.hpp"
#include "cuda/sm90/workspace/forward.hpp"

namespace gatedelta::cuda::sm90 {

inline CallParams call_params(const ForwardProblem& problem, char* workspace, int multiprocessors,
                              int prepared_bytes = kPreparedBytes) {
  constexpr uintptr_t kAlign = ForwardWorkspace::kAlign;
  const Layer& in = problem.in;
  const ForwardWorkspace layout = forward_layout(problem, prepared_bytes);
  char* const base = workspace + (kAlign - reinterpret_cast<uintptr_t>(workspace) % kAlign) % kAlign;
  CallParams p{};
  p.q = in.q;
  p.k = in.k;
  p.v = in.v;
  p.o = problem.o;
  p.g = in.g;
  p.beta = in.beta;
  p.A_log = in.A_log;
  p.dt_bias = in.dt_bias;
  p.sequences = sequences_of(in.sequences);
  p.key_heads = static_cast<int>(in.key_heads);
  p.value_heads = static_cast<int>(in.value_heads);
  p.group = static_cast<int>(in.group);
  p.gate = in.gate;
  p.beta_kind = in.beta_kind;
  p.l2norm = in.l2norm;
  p.state_value_first = in.layout == GD_STATE_VK;
  p.scale = in.scale;
  p.initial = in.initial;
  p.final = problem.final;
  p.checkpoints = problem.checkpoints;
  p.short_tokens = CallParams::kNoneShort;
  p.checkpoint_every = problem.checkpoint_every;
  p.checkpoint_offsets = problem.checkpoint_offsets;
  p.prepared = reinterpret_cast<uint8_t*>(base + layout.prepared);
  p.prepared_bytes = prepared_bytes;
  p.is_prepared = problem.prepared;
  p.decays = reinterpret_cast<ChunkDecay*>(base + layout.decays);
  p.first_checkpoint = reinterpret_cast<int64_t*>(base + layout.first_checkpoint);
  p.cuts = reinterpret_cast<CutCost*>(base + layout.cuts);
  if (problem.saved) {
    const SavedLayout parts = saved_layout(in);
    char* const saved = static_cast<char*>(problem.saved.data);
    p.prepared = reinterpret_cast<uint8_t*>(saved + parts.prepared);
    p.prepared_bytes = kBackwardPreparedBytes;
    p.decays = reinterpret_cast<ChunkDecay*>(saved + parts.decays);
    p.order = reinterpret_cast<int*>(saved + parts.order);
    p.first_checkpoint = reinterpret_cast<int64_t*>(saved + parts.first_checkpoint);
    p.cuts = reinterpret_cast<CutCost*>(saved + parts.cuts);
    p.saved_list = reinterpret_cast<SavedList*>(saved + parts.list);
    p.checkpoints = {saved + parts.states, GD_F32, 0, in.value_heads * kStateBytes / 4, kStateBytes / 4, {}};
    p.checkpoint_every = kSaveIntervalTokens;
  }
  p.schedule = reinterpret_cast<Schedule*>(base + layout.schedule);
  p.work = reinterpret_cast<WorkItem*>(base + layout.work);
  p.initial_read = reinterpret_cast<int*>(base + layout.initial_read);
  p.boundary_ready = reinterpret_cast<int*>(base + layout.boundary_ready);
  p.boundaries = reinterpret_cast<uint8_t*>(base + layout.boundaries);
  p.list = list_mode(problem, multiprocessors);
  p.even_parts = even_parts(problem, multiprocessors);
  p.supports_cut = supports_cut(problem);
  if (p.supports_cut) p.forced = forced_cut(problem);
  p.saves_list = p.saved_list && p.list == kPlannedList && p.supports_cut && !p.forced.decaying;
  const int entries = static_cast<int>(list_entries(problem, multiprocessors));
  p.limits = {multiprocessors, entries, layout.boundary_count};
  return p;
}

}  // namespace gatedelta::cuda::sm90
