// Limits, memory and parameters of a forward: plain arithmetic that needs no CUDA, shared by the limits, the launches
// and the tests that run the kernels on a CPU.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "cuda/portable/cost.hpp"
#include "cuda/portable/instances.hpp"
#include "cuda/portable/params.hpp"

namespace gatedelta::cuda::portable {

// Limits of the kernels' 32-bit arithmetic; validation enforces them.
constexpr int64_t kMaxCtas = INT_MAX;           // of one launch
constexpr int64_t kMaxSeqHeads = INT_MAX / 16;  // N * Hv: the narrowest CTAs are 8 a head
// Chunks times Hv: a chain indexes prepare's results by 32 bits, in packets. That is 64 GiB.
constexpr int64_t kMaxChunkHeads = UINT32_MAX / (kStepsPerChunk * Prepared::kBytes / kPacketBytes);
constexpr int64_t kMaxTokenStride = (int64_t{1} << 31) / kChunkTokens;  // elements: offsets in a chunk fit 32 bits
constexpr int64_t kMaxSorted = 1024;  // sequences that are sorted by length; more of them balance without it

inline bool is_sorted(const Layer& in) { return in.sequences.offsets && in.sequences.count <= kMaxSorted; }
inline bool counts_checkpoints(const ForwardProblem& p) { return p.checkpoint_every && p.in.sequences.offsets; }
// The first CTAs of prepare are helpers: they rank packed sequences by length and count their checkpoints. Each of the
// others has a chunk and key head.
inline int64_t prepare_helpers(const ForwardProblem& p) {
  const int64_t rankers = is_sorted(p.in) ? (p.in.sequences.count + kRanksPerCta - 1) / kRanksPerCta : 0;
  return rankers > 0 ? rankers : counts_checkpoints(p) ? 1 : 0;
}
inline int64_t prepare_ctas(const ForwardProblem& p) {
  if (p.prepared && !p.in.sequences.offsets) return 0;
  return sequences_of(p.in.sequences).workspace_chunks() * p.in.key_heads + prepare_helpers(p);
}

// Whether the sequences of a call may be cut on some device. schedule/cut_search.hpp chooses the cut where the device
// is known, within the memory that this function's answer provides.
constexpr int64_t kMostCutHeads = 512;  // N * Hv: this many fill every GPU
constexpr int kLeastSegment = 8;        // chunks
inline bool supports_cut(const ForwardProblem& p) {
  if (!p.context_parallel || p.batch_invariant) return false;
  const Sequences& s = p.in.sequences;
  if (p.segment_chunks) return s.count > 0 && s.tokens > 0;
  return s.count > 0 && s.tokens > 2 * kLeastSegment * kChunkTokens && s.count <= kMostCutHeads / p.in.value_heads;
}
// Segments that a call has at most: those of the shortest segments that a cut may choose.
inline int64_t most_segments(const ForwardProblem& p) {
  const int64_t chunks = p.segment_chunks ? p.segment_chunks : kLeastSegment;
  return SegmentLength{chunks * kChunkTokens}.most_segments(sequences_of(p.in.sequences));
}

// Documented bound of a forward's workspace: bytes per token and value head, plus a constant. Boundary states and
// transitions get what is left below it, or what a forced segment length needs. A backward has both for each of its
// chains, and no other bound.
constexpr int64_t kBytesPerToken = 192, kFixedBytes = int64_t{32} << 20;
constexpr int64_t kMostBoundaryBytes = int64_t{48} << 20;  // of a chain

struct ForwardWorkspace {
  static constexpr size_t kAlign = 64;  // of every part, and of the memory itself
  size_t prepared = 0, first_checkpoint = 0;
  size_t decays = 0, segment_ranges = 0, segments = 0, initial_copy = 0, boundary_states = 0, transitions = 0;
  int64_t segment_capacity = 0;  // segments that the memory holds; 0: no sequence may be cut
  size_t bytes = 0;
};
// Appends a part to memory of so many bytes; returns where it begins.
inline size_t take_bytes(size_t& bytes, int64_t more) {
  constexpr size_t kAlign = ForwardWorkspace::kAlign;
  const size_t at = bytes;
  bytes += (static_cast<size_t>(more) + kAlign - 1) / kAlign * kAlign;
  return at;
}
// Prepare's results. With `saved` they are in that memory, and the backward of the same inputs runs no prepare.
struct PreparedLayout {
  size_t prepared = 0, longest_first = 0, vectors = 0, norms = 0, decays = 0, bytes = 0;
};
inline int64_t decay_bytes(const Layer& in) {
  return sequences_of(in.sequences).workspace_chunks() * in.value_heads * kStepsPerChunk * int64_t{sizeof(ChunkDecay)};
}
inline PreparedLayout prepared_layout(const Layer& in, bool for_backward) {
  PreparedLayout w;
  const auto take = [&](int64_t bytes) { return take_bytes(w.bytes, bytes); };
  const int64_t chunks = sequences_of(in.sequences).workspace_chunks();
  w.prepared = take(chunks * in.value_heads * kStepsPerChunk * int64_t{Prepared::kBytes});
  w.longest_first = take(is_sorted(in) ? in.sequences.count * int64_t{sizeof(int)} : 0);
  if (!for_backward) return w;
  w.vectors = take(chunks * in.value_heads * kChunkVectors * kChunkTokens * int64_t{sizeof(float)});
  w.norms = take(chunks * in.key_heads * 2 * kChunkTokens * int64_t{sizeof(float)});
  w.decays = take(decay_bytes(in));
  return w;
}
inline size_t saved_bytes(const Layer& in) { return prepared_layout(in, true).bytes; }
// Sizes for this many segments of a chain that is cut.
inline int64_t segment_bytes(const Layer& in, int64_t segments) {
  return segments * in.value_heads * int64_t{sizeof(Segment)};
}
inline int64_t boundary_bytes(const Layer& in, int64_t segments) {
  return segments * in.value_heads * in.key_dim * in.value_dim * int64_t{sizeof(float)};
}
inline int64_t transition_bytes(const Layer& in, int64_t segments) {
  return segments * in.value_heads * in.key_dim * in.key_dim * int64_t{sizeof(float)};
}
// for_backward: prepare writes in addition what a backward needs, as it does with `saved`.
inline ForwardWorkspace forward_layout(const ForwardProblem& p, bool for_backward = false) {
  ForwardWorkspace w;
  const bool saves_all = for_backward || p.saved;
  w.prepared = take_bytes(w.bytes, p.saved ? 0 : static_cast<int64_t>(prepared_layout(p.in, for_backward).bytes));
  w.first_checkpoint = take_bytes(w.bytes, counts_checkpoints(p) ? p.in.sequences.count * int64_t{sizeof(int64_t)} : 0);
  if (!supports_cut(p)) return w;
  const Layer& in = p.in;
  ForwardWorkspace cut = w;
  const auto take = [&](int64_t bytes) { return take_bytes(cut.bytes, bytes); };
  const int64_t heads = in.value_heads, matrix = int64_t{in.key_dim} * in.value_dim;
  const int64_t segments = most_segments(p);
  cut.decays = take(saves_all ? 0 : decay_bytes(in));
  cut.segment_ranges = take(in.sequences.count * int64_t{sizeof(SegmentRange)});
  const bool may_overwrite = in.initial && !for_backward;
  cut.initial_copy = take(may_overwrite ? in.sequences.count * heads * matrix * dtype_bytes(in.initial.dtype) : 0);
  const int64_t promised = kBytesPerToken * in.sequences.batch * in.sequences.tokens * heads + kFixedBytes;
  const int64_t left = promised - static_cast<int64_t>(cut.bytes) - 3 * int64_t{ForwardWorkspace::kAlign};
  const int64_t room = for_backward || left > kMostBoundaryBytes ? kMostBoundaryBytes : left;
  const int64_t fitting = room / (segment_bytes(in, 1) + boundary_bytes(in, 1) + transition_bytes(in, 1));
  // Each sequence has a segment, and one that is cut in two has one more.
  if (!p.segment_chunks && fitting <= in.sequences.count) return w;
  cut.segment_capacity = p.segment_chunks || fitting > segments ? segments : fitting;
  cut.segments = take(segment_bytes(in, cut.segment_capacity));
  cut.boundary_states = take(boundary_bytes(in, cut.segment_capacity));
  cut.transitions = take(transition_bytes(in, cut.segment_capacity));
  return cut;
}

// Whether the memory of two tensors of states overlaps, so that the call may overwrite states before it reads them.
inline bool overlap(const StateRows& a, const StateRows& b, const Layer& in) {
  if (!a || !b) return false;
  const auto last = [&](const StateRows& x) {
    const int64_t numbers =
        (x.slots - 1) * x.slot_stride + (in.value_heads - 1) * x.head_stride + int64_t{in.key_dim} * in.value_dim;
    return reinterpret_cast<uintptr_t>(x.data) + static_cast<uintptr_t>(numbers * dtype_bytes(x.dtype));
  };
  return reinterpret_cast<uintptr_t>(a.data) < last(b) && reinterpret_cast<uintptr_t>(b.data) < last(a);
}

// A cut of sequences, chosen by schedule/cut_search.hpp.
struct Cut {
  int chunks = 0;                         // of a segment; 0 = no sequence is cut
  ChainKind kind = ChainKind::k64;        // of segments, and of whole sequences that have no other grid
  ChainKind whole_kind = ChainKind::k64;  // of the grid for whole sequences (CutCost::has_whole_grid)
  CutCost cost = {};                      // of a pack, for the device's choice of lengths; otherwise of no chain
  SegmentSums expected = {};              // in a pack a guess
};

// layout: forward_layout(problem).
inline Params params_of(const ForwardProblem& problem, const ForwardWorkspace& layout, char* workspace, const Cut& cut,
                        bool for_backward = false) {
  const Layer& in = problem.in;
  const bool saves_all = for_backward || problem.saved;
  const PreparedLayout parts = prepared_layout(in, saves_all);
  char* const saved = problem.saved ? static_cast<char*>(problem.saved.data) : workspace + layout.prepared;
  Params p{};
  p.q = in.q, p.k = in.k, p.v = in.v, p.o = problem.o;
  p.g = in.g, p.beta = in.beta;
  p.A_log = in.A_log, p.dt_bias = in.dt_bias;
  p.sequences = sequences_of(in.sequences);
  p.key_heads = static_cast<int>(in.key_heads);
  p.value_heads = static_cast<int>(in.value_heads);
  p.group = static_cast<int>(in.group);
  p.key_dim = in.key_dim, p.value_dim = in.value_dim;
  p.prepare_helpers = static_cast<int>(prepare_helpers(problem));
  p.has_prepared = problem.prepared;
  p.log2_ctas_per_head = log2_ctas_per_head(in.value_dim, chain_columns(cut.kind));
  p.q_stride = static_cast<uint32_t>(in.q.token_stride), p.k_stride = static_cast<uint32_t>(in.k.token_stride);
  p.v_stride = static_cast<uint32_t>(in.v.token_stride), p.o_stride = static_cast<uint32_t>(problem.o.token_stride);
  p.gate = in.gate, p.beta_kind = in.beta_kind;
  p.l2norm = in.l2norm, p.scale = in.scale;
  p.initial = in.initial, p.final = problem.final, p.checkpoints = problem.checkpoints;
  p.key_state_stride = in.layout == GD_STATE_KV ? in.value_dim : 1;
  p.value_state_stride = in.layout == GD_STATE_KV ? 1 : in.key_dim;
  p.checkpoint_every = problem.checkpoint_every;
  p.checkpoint_offsets = problem.checkpoint_offsets;
  p.prepared_heads = p.value_heads, p.prepared_key_heads = p.key_heads;
  p.prepared = reinterpret_cast<uint8_t*>(saved + parts.prepared);
  if (is_sorted(in)) p.longest_first = reinterpret_cast<int*>(saved + parts.longest_first);
  if (saves_all) p.vectors = reinterpret_cast<float*>(saved + parts.vectors);
  if (saves_all) p.norms = reinterpret_cast<float*>(saved + parts.norms);
  if (saves_all) p.decays = reinterpret_cast<ChunkDecay*>(saved + parts.decays);
  if (counts_checkpoints(problem)) p.first_checkpoint = reinterpret_cast<int64_t*>(workspace + layout.first_checkpoint);
  if (cut.chunks == 0) return p;
  p.segment_chunks = cut.chunks;
  p.segment_ranges = reinterpret_cast<SegmentRange*>(workspace + layout.segment_ranges);
  p.segments = reinterpret_cast<Segment*>(workspace + layout.segments);
  if (!saves_all) p.decays = reinterpret_cast<ChunkDecay*>(workspace + layout.decays);
  if (overlap(p.initial, p.final, in) || overlap(p.initial, p.checkpoints, in))
    p.initial_copy = workspace + layout.initial_copy;
  p.boundary_states = reinterpret_cast<float*>(workspace + layout.boundary_states);
  p.transitions = reinterpret_cast<float*>(workspace + layout.transitions);
  return p;
}

}  // namespace gatedelta::cuda::portable
