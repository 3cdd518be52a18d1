// Tiles, parameters and memory of the portable backward: plain arithmetic that needs no CUDA.
#pragma once

#include "cuda/portable/schedule/cut_search.hpp"

namespace gatedelta::cuda::portable {

// ---- instances ------------------------------------------------------------------------------------------------------

// Key columns of a CTA of the gradients kernel: 64 for K up to 64, else 128. K above 128 is two parts.
GD_HOST_DEVICE constexpr int part_columns(int key_dim) { return key_dim <= 64 ? 64 : 128; }
GD_HOST_DEVICE constexpr int part_count(int key_dim) { return key_dim <= 128 ? 1 : 2; }

// Results of the gradients kernel for dg and dbeta, for a chunk, value head and part of K: sums over its key columns,
// [64] each.
struct Dots {
  static constexpr int kPairs = 0;                      // q . dQ - (k . dK^written - kappa), without the diagonals
  static constexpr int kReads = kPairs + kChunkTokens;  // k . dK^read, without beta in rows stored as Z
  static constexpr int kKappa = kReads + kChunkTokens;
  static constexpr int kSums = 3;                           // of the three above
  static constexpr int kUpdates = kKappa + kChunkTokens;    // <dV, U>, the same in all parts
  static constexpr int kProduct = kUpdates + kChunkTokens;  // <G, S>
  static constexpr int kFloats = kProduct + 4;
};

// Eight warps: each has 32 rows (tokens) by a quarter of the part's key columns.
template <class ElemOf, int kPartOf>
struct GradientsConfig {
  using Elem = ElemOf;
  static constexpr int kPart = kPartOf;
  static constexpr int kThreads = 256, kCtasPerSm = 1;
  static constexpr int kWarpColumns = kPart / 4;
  static constexpr int kValueColumns = 32;  // of a stage
  static constexpr int kTiles = kPart / kTileColumns;
  static constexpr int kTileBytes = kChunkTokens * kTileRowBytes;

  struct Smem {
    // A stage: rows of U, dO and dV, [64][kValueColumns]; snapshots of S and G, [kValueColumns][kPart].
    static constexpr int kRowsBytes = kChunkTokens * kValueColumns * 2;
    static constexpr int kSnapshotBytes = kValueColumns * kPart * 2;
    static constexpr int kU = 0, kOutputs = kRowsBytes, kValues = 2 * kRowsBytes, kStates = 3 * kRowsBytes,
                         kGradients = kStates + kSnapshotBytes;
    static constexpr int kStageBytes = kGradients + kSnapshotBytes;
    // In the memory of a stage: F, E and E without beta. A matrix is its 32 x 32 quadrants (0,0), (1,0), (1,1).
    static constexpr int kQuadrantBytes = kStep * kStep * 2, kMatrixBytes = 3 * kQuadrantBytes;
    static constexpr int kF = 0, kE = kMatrixBytes, kUnscaledE = 2 * kMatrixBytes;
    static_assert(3 * kMatrixBytes <= kStageBytes);

    static constexpr int kK = 2 * kStageBytes;
    static constexpr int kQ = kK + kTiles * kTileBytes;
    static constexpr int kVectorBytes = kChunkTokens * 4;
    enum Vector {
      kLogs,       // of gamma, which begins with each step
      kQueryRow,   // s gamma r^q
      kReadRow,    // -gamma r^k
      kWriteRow,   // delta r^k
      kPending,    // beta for rows stored as Z, whose products still need it; 1 for the others
      kKeyNorm,    // r^k, of the rows in shared memory
      kQueryNorm,  // r^q
      kKeyPower,   // power of two by which rows of K are scaled there; in fp16
      kQueryPower,
      kDiagonal,  // s r^q r^k <dO, U>, summed over the heads of the group
      kUpdate,    // <dV, U>
      kVectorCount
    };
    static constexpr int kVectors = kQ + kTiles * kTileBytes;
    // [sum][quarter of the part's columns][64]
    static constexpr int kSums = kVectors + kVectorCount * kVectorBytes;
    static constexpr int kProducts = kSums + Dots::kSums * 4 * kVectorBytes;  // [warp]
    static constexpr int kPosition = kProducts + kThreads / 32 * 4;           // of the chunk: Gradients::spill_position
    static constexpr int kBytes = kPosition + 32;
    static_assert(kBytes <= 99 << 10);  // what a CTA can have on every device from 8.0 on
  };
};

// ---- kernel parameters ----------------------------------------------------------------------------------------------

struct BackwardParams : Params {
  TokenRows d_o, u, dq, dk, dv, dg, dbeta;
  HeadVector dA_log, d_dt_bias;
  StateRows d_final, d_initial;
  uint8_t *states, *gradients;  // snapshots: S before each chunk, G after it
  float* dots;                  // [chunks][value_heads][parts][Dots::kFloats]
  float* key_sums;   // [chunks][key_heads][2][64][K]: dq and dk before l2norm's projection; null = not needed
  float* head_sums;  // [chunks][value_heads][2], of dA_log and d_dt_bias; null = not wanted
  int parts;
  uint32_t u_stride, d_o_stride, dv_stride;

  GD_HOST_DEVICE float* dots_of(int64_t chunk_index, int head, int part) const {
    return dots + ((chunk_index * value_heads + head) * parts + part) * Dots::kFloats;
  }
  GD_HOST_DEVICE float* key_sums_of(int64_t chunk_index, int key_head, int which) const {
    return key_sums + ((chunk_index * key_heads + key_head) * 2 + which) * kChunkTokens * int64_t{key_dim};
  }
};

// ---- memory ---------------------------------------------------------------------------------------------------------

inline ForwardProblem forward_of(const BackwardProblem& p) {
  ForwardProblem forward;
  forward.in = p.in;
  forward.saved = p.saved;
  forward.context_parallel = p.context_parallel, forward.batch_invariant = p.batch_invariant;
  forward.segment_chunks = p.segment_chunks;
  return forward;
}

// With `small_workspace` the call runs in two passes over half of the key heads, reusing the memory. The cut is chosen
// for all heads together, so no bit changes.
inline int slice_count(const BackwardProblem& p) { return p.small_workspace ? 2 : 1; }
struct HeadRange {
  int64_t first, count;  // key heads
};
inline HeadRange heads_of_slice(const BackwardProblem& p, int slice) {
  const int64_t larger = (p.in.key_heads + slice_count(p) - 1) / slice_count(p), first = slice * larger;
  return {first, slice == 0 ? larger : p.in.key_heads - first};
}
inline BackwardProblem slice_of(const BackwardProblem& p, int slice) {
  const HeadRange keys = heads_of_slice(p, slice);
  const int64_t first_value = keys.first * p.in.group;
  BackwardProblem s = p;
  Layer& in = s.in;
  in.key_heads = keys.count, in.value_heads = keys.count * in.group;
  const auto move = [](auto& tensor, int64_t numbers) {
    if (tensor) tensor.data = static_cast<char*>(tensor.data) + numbers * dtype_bytes(tensor.dtype);
  };
  for (TokenRows* rows : {&in.q, &in.k, &s.dq, &s.dk}) move(*rows, keys.first * rows->head_stride);
  for (TokenRows* rows : {&in.v, &in.g, &in.beta, &s.d_o, &s.dv, &s.dg, &s.dbeta})
    move(*rows, first_value * rows->head_stride);
  for (HeadVector* vector : {&in.A_log, &in.dt_bias, &s.dA_log, &s.d_dt_bias})
    move(*vector, first_value * vector->stride);
  for (StateRows* states : {&in.initial, &s.d_final, &s.d_initial}) move(*states, first_value * states->head_stride);
  return s;
}

// Memory of the largest slice.
struct BackwardWorkspace {
  ForwardWorkspace forward;  // prepare's results, and the segments of states
  size_t gradient_segments = 0, gradient_boundary_states = 0, gradient_transitions = 0;
  size_t states = 0, gradients = 0, u = 0, dv = 0, dots = 0, key_sums = 0, head_sums = 0;
  size_t bytes = 0;
};
inline BackwardWorkspace backward_layout(const BackwardProblem& whole) {
  const BackwardProblem p = slice_of(whole, 0);
  const Layer& in = p.in;
  BackwardWorkspace w;
  w.forward = forward_layout(forward_of(whole), true);
  w.bytes = w.forward.bytes;
  const auto take = [&](int64_t bytes) { return take_bytes(w.bytes, bytes); };
  if (const int64_t segments = w.forward.segment_capacity; segments > 0 && slice_count(whole) > 1) {
    w.bytes = w.forward.segments;
    w.forward.segments = take(segment_bytes(in, segments));
    w.forward.boundary_states = take(boundary_bytes(in, segments));
    w.forward.transitions = take(transition_bytes(in, segments));
  }
  if (const int64_t segments = w.forward.segment_capacity; segments > 0) {
    w.gradient_segments = take(segment_bytes(in, segments));
    w.gradient_boundary_states = take(boundary_bytes(in, segments));
    w.gradient_transitions = take(transition_bytes(in, segments));
  }
  const int64_t chunks = sequences_of(in.sequences).workspace_chunks(), chunk_heads = chunks * in.value_heads,
                rows = in.sequences.batch * in.sequences.tokens * in.value_heads * in.value_dim;
  w.states = take(chunk_heads * in.key_dim * in.value_dim * 2);
  w.gradients = take(chunk_heads * in.key_dim * in.value_dim * 2);
  w.u = take(rows * 2);
  w.dv = take(p.dv ? 0 : rows * 2);
  w.dots = take(chunk_heads * part_count(in.key_dim) * Dots::kFloats * 4);
  if (in.l2norm && part_count(in.key_dim) > 1)
    w.key_sums = take(chunks * in.key_heads * 2 * kChunkTokens * in.key_dim * 4);
  if (p.dA_log || p.d_dt_bias) w.head_sums = take(chunk_heads * 8);
  return w;
}

inline Cut choose_cut(const BackwardProblem& p, const BackwardWorkspace& layout, const DeviceLimits& device) {
  Cut cut = choose_cut(p.in, {kStatesWork, kGradientsWork}, layout.forward.segment_capacity, p.segment_chunks, device);
  // An instance for half of the heads: it changes no bit.
  if (cut.chunks == 0 && slice_count(p) > 1) cut.kind = chain_kind(slice_of(p, 0).in, device.sm_count);
  return cut;
}

// Points to some heads' part of what a forward has saved for all heads.
inline void find_saved(Params& p, const BackwardProblem& whole, const HeadRange& keys) {
  const PreparedLayout parts = prepared_layout(whole.in, true);
  char* const saved = static_cast<char*>(whole.saved.data);
  const int64_t first = keys.first * whole.in.group;
  p.prepared_heads = static_cast<int>(whole.in.value_heads);
  p.prepared_key_heads = static_cast<int>(whole.in.key_heads);
  p.prepared = reinterpret_cast<uint8_t*>(saved + parts.prepared);
  p.prepared = p.prepared_step(0, static_cast<int>(first), 0);
  if (p.longest_first) p.longest_first = reinterpret_cast<int*>(saved + parts.longest_first);
  p.vectors = reinterpret_cast<float*>(saved + parts.vectors);
  p.vectors = p.chunk_vectors(0, static_cast<int>(first));
  p.norms = reinterpret_cast<float*>(saved + parts.norms);
  p.norms = p.chunk_norms(0, static_cast<int>(keys.first));
  p.decays = reinterpret_cast<ChunkDecay*>(saved + parts.decays);
  p.decays = p.step_decays(0, static_cast<int>(first));
}

// Parameters of a slice; layout and cut: those of the whole problem.
inline BackwardParams params_of(const BackwardProblem& whole, const BackwardWorkspace& layout, char* workspace,
                                const Cut& cut, int slice) {
  const BackwardProblem problem = slice_of(whole, slice);
  const Layer& in = problem.in;
  BackwardParams p{};
  static_cast<Params&>(p) = params_of(forward_of(problem), layout.forward, workspace, cut, true);
  if (whole.saved) find_saved(p, whole, heads_of_slice(whole, slice));
  const int64_t row = in.value_heads * in.value_dim;
  const auto rows_at = [&](size_t at) -> TokenRows {
    return {workspace + at, in.q.dtype, in.sequences.tokens * row, row, in.value_dim};
  };
  p.d_o = problem.d_o, p.u = rows_at(layout.u);
  p.dq = problem.dq, p.dk = problem.dk, p.dg = problem.dg, p.dbeta = problem.dbeta;
  p.dv = problem.dv ? problem.dv : rows_at(layout.dv);
  p.dA_log = problem.dA_log, p.d_dt_bias = problem.d_dt_bias;
  p.d_final = problem.d_final, p.d_initial = problem.d_initial;
  p.states = reinterpret_cast<uint8_t*>(workspace + layout.states);
  p.gradients = reinterpret_cast<uint8_t*>(workspace + layout.gradients);
  p.dots = reinterpret_cast<float*>(workspace + layout.dots);
  p.parts = part_count(in.key_dim);
  if (in.l2norm && p.parts > 1) p.key_sums = reinterpret_cast<float*>(workspace + layout.key_sums);
  if (problem.dA_log || problem.d_dt_bias) p.head_sums = reinterpret_cast<float*>(workspace + layout.head_sums);
  p.u_stride = static_cast<uint32_t>(p.u.token_stride), p.d_o_stride = static_cast<uint32_t>(p.d_o.token_stride);
  p.dv_stride = static_cast<uint32_t>(p.dv.token_stride);
  if (cut.chunks == 0) return p;
  p.gradient_segments = reinterpret_cast<Segment*>(workspace + layout.gradient_segments);
  p.gradient_boundary_states = reinterpret_cast<float*>(workspace + layout.gradient_boundary_states);
  p.gradient_transitions = reinterpret_cast<float*>(workspace + layout.gradient_transitions);
  return p;
}

// The passes over a sequence's steps use the forward's parameters with other tensors: in the gradient chain v is dO, o
// is dV, and the initial state is the gradient of the final state.
inline Params states_params(const BackwardParams& p) {
  Params states = p;
  states.o = p.u, states.o_stride = p.u_stride;
  states.snapshots = p.states;
  return states;
}
inline Params gradient_pass_params(const BackwardParams& p) {
  Params chain = p;
  chain.v = p.d_o, chain.v_stride = p.d_o_stride;
  chain.o = p.dv, chain.o_stride = p.dv_stride;
  chain.initial = p.d_final, chain.final = p.d_initial;
  chain.snapshots = p.gradients;
  chain.segments = p.gradient_segments, chain.boundary_states = p.gradient_boundary_states;
  return chain;
}

// ---- launches -------------------------------------------------------------------------------------------------------

inline int64_t gradient_ctas(const BackwardProblem& p) {
  return sequences_of(p.in.sequences).workspace_chunks() * p.in.key_heads * part_count(p.in.key_dim);
}
// A warp has a chunk of a value head.
constexpr int kGateThreads = 128;
inline int64_t gate_ctas(const BackwardProblem& p) {
  return (sequences_of(p.in.sequences).workspace_chunks() * p.in.value_heads + kGateThreads / 32 - 1) /
         (kGateThreads / 32);
}
constexpr int kHeadSumThreads = 32;  // of a CTA, which has a value head
constexpr int kProjectThreads = 128;
inline int64_t project_ctas(const BackwardProblem& p) {
  return sequences_of(p.in.sequences).workspace_chunks() * p.in.key_heads;
}

}  // namespace gatedelta::cuda::portable
