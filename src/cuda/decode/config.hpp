// Which decode kernel takes a call, how its work is split into CTAs, and the kernels' parameters: plain arithmetic,
// shared by the limits, the launches, the kernels and host tests.
//
// Eight lanes share the K numbers of a value column, and the four groups of eight in a warp have kColumns columns each.
// Columns are independent of each other, so warps exchange nothing, except in `one_token_kv`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/device/divider.hpp"
#include "cuda/device/host_device.hpp"
#include "cuda/device/pdl.hpp"
#include "cuda/device/rows32.hpp"

namespace gatedelta::cuda {

constexpr int kLanesPerColumn = 8;
constexpr int kColumnGroups = 4;  // per warp

// Maps a value head to its key head.
struct KeyHeads : private Divider {  // by Hv / Hk, or with tiled key heads by Hk
  KeyHeads() = default;
  explicit KeyHeads(const Layer& in) : Divider(static_cast<uint32_t>(in.tiled ? in.key_heads : in.group)) {
    if (!in.tiled) divisor = 0;  // the quotient is the key head, no remainder is taken
  }
  GD_HOST_DEVICE uint32_t of(uint32_t head) const {
    const uint32_t q = quotient(head);
    return divisor ? remainder(head, q) : q;
  }
};

// How a warp holds a state in registers: kVector neighbouring numbers of K per access, kPerLane numbers of each column
// per lane. The order of a column's sums follows from these two alone.
template <gd_state_layout kLayoutOf, int kVectorOf, int kPerLaneOf, int kColumnsOf, int kWarpsOf>
struct TileConfig {
  static constexpr gd_state_layout kLayout = kLayoutOf;
  static constexpr int kVector = kVectorOf, kPerLane = kPerLaneOf, kColumns = kColumnsOf, kWarps = kWarpsOf;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtaColumns = kWarps * kColumnGroups * kColumns;
  static constexpr int kMaxKeyDim = kLanesPerColumn * kPerLane;
  static constexpr int kCtasPerSm = kPerLane == 16 ? 3 : 2;  // nothing spills at these
};

// `generic`: any problem. Where a lane has twice the numbers of K, it has half as many columns. kVector is 8 only for
// K <= 128 and 16-bit states, so that such a state's bits are those of `one_token` and `sequential_128`.
template <int kVector, int kPerLane>
struct GenericVk : TileConfig<GD_STATE_VK, kVector, kPerLane, 32 / kPerLane, 4> {};
template <int kPerLane>
struct GenericKv : TileConfig<GD_STATE_KV, 4, kPerLane, 64 / kPerLane, 4> {};

// `one_token` and `sequential_128`: K = V = 128, 16-bit inputs. The columns of a lane and the warps of a CTA change no
// bit.
constexpr int kDecodeDim = 128;
template <gd_state_layout kLayout, int kVector, int kColumns, int kWarps>
struct Tile128 : TileConfig<kLayout, kVector, kDecodeDim / kLanesPerColumn, kColumns, kWarps> {
  static constexpr int kParts = kDecodeDim / Tile128::kCtaColumns;
};
template <int kVector, int kColumns, int kWarps>
using Vk128 = Tile128<GD_STATE_VK, kVector, kColumns, kWarps>;
// `one_token_kv`: four warps share the rows of K, and 16 lanes of a warp lie along V, so a warp reads whole lines of
// memory.
template <int kColumnsOf>
struct OneTokenKv {
  static constexpr int kVector = 4, kPerLane = kDecodeDim / kLanesPerColumn, kColumns = kColumnsOf;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kLanesAlong = 16;
  static constexpr int kCtaColumns = kLanesAlong * kColumns, kParts = kDecodeDim / kCtaColumns;
  static constexpr int kCtasPerSm = kColumns == 2 ? 5 : 3;  // nothing spills at these
};

// Numbers in 16 bytes of the states a call reads and stores. With states of both sizes it is 4: an access to a 16-bit
// state then has 8 bytes.
inline int state_vector(const RecurrentProblem& p) {
  const StateRows& initial = p.in.initial;
  if (!initial && !p.final) return 4;
  return (initial && initial.dtype == GD_F32) || (p.final && p.final.dtype == GD_F32) ? 4 : 8;
}

// Whether q, k, v and o allow accesses of 16 bytes; whether all states do.
inline bool rows_aligned(const RecurrentProblem& p) {
  return is_aligned(p.in.q) && is_aligned(p.in.k) && is_aligned(p.in.v) && is_aligned(p.o);
}
inline bool states_aligned(const RecurrentProblem& p) {
  const int64_t bytes = dtype_bytes(p.step_states.dtype);
  return is_aligned(p.in.initial) && is_aligned(p.final) && is_aligned(p.step_states) &&
         p.step_batch_stride * bytes % kAccessAlign == 0 && p.step_token_stride * bytes % kAccessAlign == 0;
}

inline bool rows_fit_32bit(const RecurrentProblem& p) {
  const Layer& in = p.in;
  return fits_32bit(in.q) && fits_32bit(in.k) && fits_32bit(in.v) && fits_32bit(in.g) && fits_32bit(in.beta) &&
         fits_32bit(p.o) && fits_32bit(in.A_log.stride, 4) && fits_32bit(in.dt_bias.stride, 4) &&
         fits_32bit(in.initial) && fits_32bit(p.final) && fits_32bit(p.accept_lengths) &&
         fits_32bit(p.previous_accept_lengths);
}

// Whether the kernels for K = V = 128 support the call's types, sizes, alignment and strides.
inline bool supports_128(const RecurrentProblem& p) {
  const Layer& in = p.in;
  const bool one_type = !in.initial || !p.final || in.initial.dtype == p.final.dtype;
  return in.q.dtype != GD_F32 && in.key_dim == kDecodeDim && in.value_dim == kDecodeDim && one_type &&
         (in.initial || p.final) && rows_aligned(p) && states_aligned(p) && rows_fit_32bit(p);
}

inline gd_dtype state_dtype(const RecurrentProblem& p) { return p.in.initial ? p.in.initial.dtype : p.final.dtype; }

// `one_token` is bitwise equal to `generic`.
inline bool supports_one_token(const RecurrentProblem& p) {
  return p.in.sequences.tokens == 1 && !p.in.sequences.offsets && !p.step_states && !p.accept_lengths &&
         !p.previous_accept_lengths && supports_128(p);
}

// The part of a problem that `one_token` needs. Every line of it is a cold miss of each launch, so it is small, and the
// arguments of the first state's address come first: kernel arguments begin 48 bytes before a line of constant memory.
struct OneTokenParams {
  States32 initial;
  uint32_t sequences = 0;
  bool l2norm = false, pads_by_read_index = false;
  Pdl pdl = Pdl::kOff;  // of `one_token` [V, K]
  Rows32 k, q, v, g, beta, A_log, dt_bias;
  KeyHeads key_heads;
  float scale = 0;
  gd_gate gate = GD_GATE_LOG;
  gd_beta beta_kind = GD_BETA_VALUE;
  States32 final;
  Rows32 o;
};
static_assert(offsetof(OneTokenParams, k) == 48);
inline OneTokenParams one_token_params(const RecurrentProblem& p) {
  const Layer& in = p.in;
  OneTokenParams s;
  s.initial = States32(in.initial), s.final = States32(p.final);
  s.q = Rows32(in.q), s.k = Rows32(in.k), s.v = Rows32(in.v), s.o = Rows32(p.o);
  s.g = Rows32(in.g), s.beta = Rows32(in.beta);
  if (in.gate == GD_GATE_RAW) s.A_log = Rows32(in.A_log), s.dt_bias = Rows32(in.dt_bias);
  s.key_heads = KeyHeads(in);
  s.sequences = static_cast<uint32_t>(in.sequences.count);
  s.scale = in.scale, s.gate = in.gate, s.beta_kind = in.beta_kind;
  s.l2norm = in.l2norm, s.pads_by_read_index = p.pads_by_read_index;
  return s;
}

// `window_mma`: [V, K], K = V = 128, 16-bit inputs, kTokens tokens at once, one state stored. A warp has 16 rows of V.
enum class WindowKind {
  last,  // at most kTokens tokens
  any    // any number of tokens
};
template <class StateOf, class InputOf, WindowKind kKindOf, int kTokensOf>
struct WindowMmaConfig {
  using State = StateOf;
  using Input = InputOf;
  static constexpr WindowKind kKind = kKindOf;
  static constexpr int kTokens = kTokensOf, kWarps = 2, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16, kParts = kDecodeDim / (kWarpRows * kWarps);
  static constexpr bool kStreaming = kKind == WindowKind::last;  // stores of states
};
// A pack with no more tokens than sequences is most likely one of single tokens: `sequential_128`.
inline bool supports_window_mma(const RecurrentProblem& p) {
  const Sequences& sequences = p.in.sequences;
  return !p.batch_invariant && !p.step_states && p.in.layout == GD_STATE_VK && sequences.tokens > 1 &&
         (!sequences.offsets || sequences.tokens > sequences.count) && sequences.tokens <= INT32_MAX && supports_128(p);
}
// `sequential_128` runs what `one_token` and `window_mma` do not support, and is bitwise equal to `generic`.
inline bool supports_sequential_128(const RecurrentProblem& p) {
  return p.in.sequences.tokens <= INT32_MAX && supports_128(p) &&
         (!p.step_states || p.step_states.dtype == state_dtype(p));
}
struct ManyTokenParams : OneTokenParams {
  IndexVector offsets;
  Indices32 accept_lengths, previous_accept_lengths;
  uint32_t columns = 0, column_stride = 0;  // of initial.indices
  uint32_t tokens = 0;                      // T
  bool steps_by_token = false;
  StateRows step_states;
  int64_t step_batch_stride = 0, step_token_stride = 0;
};
inline ManyTokenParams many_token_params(const RecurrentProblem& p) {
  ManyTokenParams f;
  static_cast<OneTokenParams&>(f) = one_token_params(p);
  const IndexRows& indices = p.in.initial.indices;
  f.offsets = p.in.sequences.offsets;
  f.accept_lengths = Indices32(p.accept_lengths), f.previous_accept_lengths = Indices32(p.previous_accept_lengths);
  f.columns = static_cast<uint32_t>(indices.columns);
  f.column_stride = static_cast<uint32_t>(indices.column_stride * (indices.is_int64 ? 8 : 4));
  f.tokens = static_cast<uint32_t>(p.in.sequences.tokens);
  f.steps_by_token = p.steps_by_token, f.step_states = p.step_states;
  f.step_batch_stride = p.step_batch_stride, f.step_token_stride = p.step_token_stride;
  return f;
}

// Pairs of sequence and value head, counting the tokens past the last offset as one more sequence.
inline int64_t decode_pairs(const Layer& in) {
  return (in.sequences.count + (in.sequences.offsets ? 1 : 0)) * in.value_heads;
}
// The grid of the kernels for K = V = 128: x = value heads and parts of their columns, y and z = sequences. y * z may
// exceed the number of sequences.
struct DecodeGrid {
  uint32_t x, y, z;
};
inline DecodeGrid grid_of(const RecurrentProblem& p, int parts) {
  constexpr int64_t kMost = 65535;  // of y and of z
  const int64_t sequences = p.in.sequences.count + (p.in.sequences.offsets ? 1 : 0),
                z = (sequences + kMost - 1) / kMost;
  return {static_cast<uint32_t>(p.in.value_heads * parts), static_cast<uint32_t>(z ? (sequences + z - 1) / z : 0),
          static_cast<uint32_t>(z)};
}
// A grid has fewer than 2^31 CTAs.
constexpr int kMaxParts = 16;
constexpr int64_t kMaxDecodePairs = (int64_t{1} << 31) / kMaxParts - 1;
static_assert(256 / GenericVk<4, 32>::kCtaColumns <= kMaxParts);

// Parameters of `generic`. All of them are kernel arguments: a captured call depends on no memory of the host.
struct DecodeParams {
  RecurrentProblem problem;
  Divider parts, heads;  // CTAs per pair; value heads
  KeyHeads key_heads;
  bool rows_aligned, states_aligned;
};
inline DecodeParams decode_params(const RecurrentProblem& p, int cta_columns) {
  const auto parts = static_cast<uint32_t>((p.in.value_dim + cta_columns - 1) / cta_columns);
  return {p,
          Divider(parts),
          Divider(static_cast<uint32_t>(p.in.value_heads)),
          KeyHeads(p.in),
          rows_aligned(p),
          states_aligned(p)};
}

}  // namespace gatedelta::cuda
