// Shapes, parameters and memory of the fp32 kernels: plain arithmetic that needs no CUDA, shared by the limits, the
// launches, the kernels and the tests that run the kernels on a CPU.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/device/host_device.hpp"
#include "cuda/device/instances.hpp"
#include "cuda/device/sequences.hpp"

namespace gatedelta::cuda::fp32 {

// ---- how a CTA holds a state ----------------------------------------------------------------------------------------

// A warp has all key dimensions of some value columns: eight lanes along K, four along V, 64 numbers of the state each.
constexpr int kKeyLanes = 8, kColumnLanes = 4;
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kStateNumbers = 64;  // of a thread

constexpr int kStageTokens = 8;  // tokens of one load to shared memory
constexpr int kSumTokens = 4;    // tokens whose sums over value columns are in shared memory at a time
constexpr int kStages = 2;
// Tokens of a span. The inner product of the state and its gradient is computed at both ends of a span, so errors of
// the gates' gradients do not accumulate past a span. More spans take more memory.
constexpr int kSpanTokens = 32, kSpansPerChunk = kChunkTokens / kSpanTokens;
static_assert(kStageTokens % kSumTokens == 0 && kSpanTokens % kStageTokens == 0 && kChunkTokens % kSpanTokens == 0);

// kKeys: from compiled_keys. A smaller K is padded with zeros inside the kernel.
template <int kKeysOf>
struct Shape {
  static constexpr int kKeys = kKeysOf;
  static constexpr int kCtasPerSm = kKeys == 256 ? 2 : 3;            // without spills
  static constexpr int kPerLane = kKeys / kKeyLanes;                 // key dimensions of a thread
  static constexpr int kColumns = kStateNumbers / kPerLane;          // value columns of a thread
  static constexpr int kWarpColumns = kColumnLanes * kColumns;       // 32, 16 or 8
  static constexpr int kCtaColumns = kWarps * kWarpColumns;          // 128, 64 or 32
  static constexpr int kSumBytes = kSumTokens * kWarps * kKeys * 4;  // [token][warp][K], one sum over columns
};
inline int cta_columns(int key_dim) { return 8192 / compiled_keys(key_dim); }
static_assert(Shape<64>::kCtaColumns == 8192 / 64 && Shape<256>::kCtaColumns == 8192 / 256);
inline int parts_of(const Layer& in) {  // CTAs of a head
  return (in.value_dim + cta_columns(in.key_dim) - 1) / cta_columns(in.key_dim);
}

// Prepare's results for a token and value head. Without l2norm r_k and r_q are 1.
struct Factors {
  float gamma, beta, r_k, r_q;
  float qk;  // s times the product of q and k, both normalised
  float unused[3];
};
static_assert(sizeof(Factors) == 2 * kPacketBytes);

// An inner product: the sum of its terms, and the sum of their squares, in proportion to which errors are distributed.
struct Product {
  float sum, squares;
};

// Results of finish.cuh for a token and value head.
struct TokenSums {
  Product difference;  // D_t - D_(t+1)
  float e_du;
};

// A stage in shared memory: rows [token][kKeys], rows [token][kCtaColumns], factors [token].
template <class Shape, int kKeyRows, int kValueRows>
struct Stage {
  static constexpr int kKeyBytes = kStageTokens * Shape::kKeys * 4;
  static constexpr int kValueBytes = kStageTokens * Shape::kCtaColumns * 4;
  static constexpr int kValues = kKeyRows * kKeyBytes;
  static constexpr int kFactors = kValues + kValueRows * kValueBytes;
  static constexpr int kBytes = kFactors + kStageTokens * static_cast<int>(sizeof(Factors));
};

// ---- instances ------------------------------------------------------------------------------------------------------

constexpr int kMostShared = 99 << 10;  // what a CTA can have on every device from 8.0 on

template <int kKeys, bool kOutputsOf>
struct ForwardConfig {
  using Shape = fp32::Shape<kKeys>;
  static constexpr bool kOutputs = kOutputsOf;
  using Stage = fp32::Stage<Shape, kOutputs ? 2 : 1, 1>;
  static constexpr int kBytes = kStages * Stage::kBytes;
  static_assert(kBytes <= kMostShared);
};

template <int kKeys>
struct GradientConfig {
  using Shape = fp32::Shape<kKeys>;
  using Stage = fp32::Stage<Shape, 2, 3>;  // k, q; do, v, reads
  static constexpr int kSums = kStages * Stage::kBytes;
  static constexpr int kBytes = kSums + Shape::kSumBytes;
  static_assert(kBytes <= kMostShared);
};

template <int kKeys>
struct KeyConfig {
  using Shape = fp32::Shape<kKeys>;
  using Stage = fp32::Stage<Shape, 1, 4>;  // k; do, v, reads, later
  static constexpr int kQuerySums = kStages * Stage::kBytes;
  static constexpr int kKeySums = kQuerySums + Shape::kSumBytes;
  static constexpr int kBytes = kKeySums + Shape::kSumBytes;
  static_assert(kBytes <= kMostShared);
};

// ---- kernel parameters ----------------------------------------------------------------------------------------------

// Passed by value: a graph that captures a call holds all of it.
struct Params {
  TokenRows q, k, v, o, g, beta;
  HeadVector A_log, dt_bias;
  ChunkedSequences sequences;
  int key_heads, value_heads, group, key_dim, value_dim, parts;
  gd_gate gate;
  gd_beta beta_kind;
  bool l2norm;
  float scale;
  StateRows initial, final, checkpoints;
  int key_state_stride, value_state_stride;  // inside a matrix
  int64_t checkpoint_every;                  // tokens; 0 = none
  IndexRows checkpoint_offsets;
  int64_t* first_checkpoint;  // [N] index of a packed sequence's first checkpoint
  Factors* factors;           // [B T][Hv]
  float* reads;               // [B T][Hv][V], gamma S^T k of each token; null in a forward that saves nothing

  // Of the backward.
  TokenRows d_o, dq, dk, dv, dg, dbeta;
  HeadVector dA_log, d_dt_bias;
  StateRows d_final, d_initial;
  float* later;              // [B T][Hv][V], the share of later tokens in du
  float *dq_sums, *dk_sums;  // [B T][Hv][parts][K], over the value columns of a CTA; for normalised q and k
  TokenSums* token_sums;     // [B T][Hv]
  float* gradients;          // [chunks][spans][Hv][K][V], G of the state after the span
  Product* products;         // [chunks][spans][Hv][parts][warps], <G, S> there
  Product* first_products;   // [N][Hv][parts][warps], <G, S> of the initial state
  float* head_sums;          // [chunks][Hv][2], for dA_log and d_dt_bias; null = not wanted

  GD_HOST_DEVICE bool is_padding(int n) const {
    if (n == sequences.count) return true;
    return initial.indices && final.indices && initial.slot(n) < 0 && final.slot(n) < 0;
  }
  // Index of (token, value head) in arrays [B T][Hv].
  GD_HOST_DEVICE int64_t entry(int64_t batch, int64_t token, int head) const {
    return (batch * sequences.tokens + token) * value_heads + head;
  }
};

// ---- memory ---------------------------------------------------------------------------------------------------------

inline bool counts_checkpoints(const ForwardProblem& p) { return p.checkpoint_every && p.in.sequences.offsets; }
// CTAs of prepare, and of the last kernels of the backward: a chunk and key head each.
constexpr int64_t kMaxCtas = INT_MAX;           // of one launch
constexpr int64_t kMaxSeqHeads = INT_MAX / 16;  // N * Hv: the narrowest CTAs are 8 a head
inline int64_t chunk_ctas(const Layer& in) { return sequences_of(in.sequences).workspace_chunks() * in.key_heads; }
inline int64_t token_heads(const Layer& in) { return in.sequences.batch * in.sequences.tokens * in.value_heads; }

struct Memory {
  static constexpr size_t kAlign = 64;
  size_t bytes = 0;

  size_t take(int64_t wanted) {
    const size_t at = bytes;
    bytes += (static_cast<size_t>(wanted) + kAlign - 1) / kAlign * kAlign;
    return at;
  }
};
// Memory that a forward saves for its backward.
struct SavedLayout {
  size_t factors = 0, reads = 0, bytes = 0;
};
inline SavedLayout saved_layout(const Layer& in) {
  Memory memory;
  SavedLayout s;
  s.factors = memory.take(token_heads(in) * int64_t{sizeof(Factors)});
  s.reads = memory.take(token_heads(in) * in.value_dim * 4);
  s.bytes = memory.bytes;
  return s;
}
struct ForwardWorkspace {
  size_t factors = 0, first_checkpoint = 0, bytes = 0;
};
inline ForwardWorkspace forward_layout(const ForwardProblem& p) {
  Memory memory;
  ForwardWorkspace w;
  w.factors = memory.take(p.saved ? 0 : token_heads(p.in) * int64_t{sizeof(Factors)});
  w.first_checkpoint = memory.take(counts_checkpoints(p) ? p.in.sequences.count * int64_t{sizeof(int64_t)} : 0);
  w.bytes = memory.bytes;
  return w;
}
struct BackwardWorkspace {
  SavedLayout recomputed;  // of a backward without `saved`
  size_t later = 0, dq_sums = 0, dk_sums = 0, token_sums = 0, gradients = 0, products = 0, first_products = 0,
         head_sums = 0, bytes = 0;
};
inline BackwardWorkspace backward_layout(const BackwardProblem& p) {
  const Layer& in = p.in;
  const int64_t entries = token_heads(in), chunks = sequences_of(in.sequences).workspace_chunks() * in.value_heads;
  Memory memory;
  BackwardWorkspace w;
  w.recomputed = saved_layout(in);
  if (!p.saved) memory.bytes = w.recomputed.bytes;
  w.later = memory.take(entries * in.value_dim * 4);
  w.dq_sums = memory.take(entries * parts_of(in) * in.key_dim * 4);
  w.dk_sums = memory.take(entries * parts_of(in) * in.key_dim * 4);
  w.token_sums = memory.take(entries * int64_t{sizeof(TokenSums)});
  w.gradients = memory.take(chunks * kSpansPerChunk * in.key_dim * in.value_dim * 4);
  const int64_t products = int64_t{parts_of(in)} * kWarps * int64_t{sizeof(Product)};
  w.products = memory.take(chunks * kSpansPerChunk * products);
  w.first_products = memory.take(in.sequences.count * in.value_heads * products);
  w.head_sums = memory.take(p.dA_log || p.d_dt_bias ? chunks * 8 : 0);
  w.bytes = memory.bytes;
  return w;
}

inline Params params_of(const Layer& in) {
  Params p{};
  p.q = in.q, p.k = in.k, p.v = in.v, p.g = in.g, p.beta = in.beta;
  p.A_log = in.A_log, p.dt_bias = in.dt_bias;
  p.sequences = sequences_of(in.sequences);
  p.key_heads = static_cast<int>(in.key_heads), p.value_heads = static_cast<int>(in.value_heads);
  p.group = static_cast<int>(in.group);
  p.key_dim = in.key_dim, p.value_dim = in.value_dim, p.parts = parts_of(in);
  p.gate = in.gate, p.beta_kind = in.beta_kind;
  p.l2norm = in.l2norm, p.scale = in.scale;
  p.initial = in.initial;
  p.key_state_stride = in.layout == GD_STATE_KV ? in.value_dim : 1;
  p.value_state_stride = in.layout == GD_STATE_KV ? 1 : in.key_dim;
  return p;
}
inline void set_saved(Params& p, const Layer& in, char* memory) {
  const SavedLayout parts = saved_layout(in);
  p.factors = reinterpret_cast<Factors*>(memory + parts.factors);
  p.reads = reinterpret_cast<float*>(memory + parts.reads);
}
inline Params params_of(const ForwardProblem& problem, char* workspace) {
  const ForwardWorkspace layout = forward_layout(problem);
  Params p = params_of(problem.in);
  p.o = problem.o, p.final = problem.final, p.checkpoints = problem.checkpoints;
  p.checkpoint_every = problem.checkpoint_every;
  p.checkpoint_offsets = problem.checkpoint_offsets;
  if (counts_checkpoints(problem)) p.first_checkpoint = reinterpret_cast<int64_t*>(workspace + layout.first_checkpoint);
  p.factors = reinterpret_cast<Factors*>(workspace + layout.factors);
  if (problem.saved) set_saved(p, problem.in, static_cast<char*>(problem.saved.data));
  return p;
}
inline Params params_of(const BackwardProblem& problem, char* workspace) {
  const BackwardWorkspace layout = backward_layout(problem);
  const auto at = [&](size_t offset) { return reinterpret_cast<float*>(workspace + offset); };
  Params p = params_of(problem.in);
  set_saved(p, problem.in, problem.saved ? static_cast<char*>(problem.saved.data) : workspace);
  p.d_o = problem.d_o, p.dq = problem.dq, p.dk = problem.dk, p.dv = problem.dv;
  p.dg = problem.dg, p.dbeta = problem.dbeta, p.dA_log = problem.dA_log, p.d_dt_bias = problem.d_dt_bias;
  p.d_final = problem.d_final, p.d_initial = problem.d_initial;
  p.later = at(layout.later), p.dq_sums = at(layout.dq_sums), p.dk_sums = at(layout.dk_sums);
  p.token_sums = reinterpret_cast<TokenSums*>(workspace + layout.token_sums);
  p.gradients = at(layout.gradients);
  p.products = reinterpret_cast<Product*>(workspace + layout.products);
  p.first_products = reinterpret_cast<Product*>(workspace + layout.first_products);
  if (problem.dA_log || problem.d_dt_bias) p.head_sums = at(layout.head_sums);
  return p;
}

}  // namespace gatedelta::cuda::fp32
