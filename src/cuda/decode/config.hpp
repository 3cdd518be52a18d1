// Which decode kernel takes a call, and how its work is split into CTAs: plain arithmetic, shared by the limits, the
// launches, the kernels and host tests.
//
// Eight lanes share the K numbers of a value column, and the four groups of eight in a warp have kColumns columns each.
// Columns are independent of each other, so warps never exchange anything.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda {

constexpr int kLanesPerColumn = 8;
constexpr int kColumnGroups = 4;  // per warp

// Division by a number the host knows: one multiplication on the device. For numerators below 2^31.
struct Divider {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  Divider() = default;
  explicit Divider(uint32_t by) : divisor(by) {
    while ((uint64_t{1} << shift) < by) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - by) << 32) / by) + 1;
  }
  GD_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return (static_cast<uint32_t>(uint64_t{n} * multiplier >> 32) + n) >> shift;
  }
  GD_HOST_DEVICE uint32_t remainder(uint32_t n, uint32_t quotient) const { return n - quotient * divisor; }
};

// Which key head a value head uses.
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

// How a kernel holds a state: kVector neighbouring numbers of K per access, kPerLane numbers of each column per lane.
// The order of a column's sums follows from these two alone.
template <gd_state_layout kLayoutOf, int kVectorOf, int kPerLaneOf, int kColumnsOf, int kWarpsOf>
struct TileConfig {
  static constexpr gd_state_layout kLayout = kLayoutOf;
  static constexpr int kVector = kVectorOf, kPerLane = kPerLaneOf, kColumns = kColumnsOf, kWarps = kWarpsOf;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtaColumns = kWarps * kColumnGroups * kColumns;
  static constexpr int kMaxKeyDim = kLanesPerColumn * kPerLane;
  static constexpr int kCtasPerSm = kPerLane == 16 ? 3 : 2;  // nothing spills at these
};

// `walk`: any problem. Half as many columns where a lane has twice the numbers of K.
template <int kVector, int kPerLane>
struct WalkVk : TileConfig<GD_STATE_VK, kVector, kPerLane, 32 / kPerLane, 4> {};
template <int kPerLane>
struct WalkKv : TileConfig<GD_STATE_KV, 4, kPerLane, 64 / kPerLane, 4> {};

// `step`: one token, K = V = 128, 16-bit inputs. How many columns a lane has, and how many warps a CTA, changes no bit.
constexpr int kStepDim = 128;
template <gd_state_layout kLayout, int kVector, int kColumns, int kWarps>
struct StepTile : TileConfig<kLayout, kVector, kStepDim / kLanesPerColumn, kColumns, kWarps> {
  static constexpr int kParts = kStepDim / StepTile::kCtaColumns;
};
template <int kVector, int kColumns, int kWarps>
using StepVk = StepTile<GD_STATE_VK, kVector, kColumns, kWarps>;
// Many states [K, V]: four warps share the rows of K, so that a warp reads whole lines of memory: 16 lanes lie along V.
template <int kColumnsOf>
struct StepKv {
  static constexpr int kVector = 4, kPerLane = kStepDim / kLanesPerColumn, kColumns = kColumnsOf;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kLanesAlong = 16;
  static constexpr int kCtaColumns = kLanesAlong * kColumns, kParts = kStepDim / kCtaColumns;
  static constexpr int kCtasPerSm = kColumns == 2 ? 5 : 3;  // nothing spills at these
};

// Numbers in 16 bytes of the states a call reads and stores. With states of both sizes, 4: the other kind is then
// accessed 8 bytes at a time.
inline int state_vector(const RecurrentProblem& p) {
  const StateRows& initial = p.in.initial;
  if (!initial && !p.final) return 4;
  return (initial && initial.dtype == GD_F32) || (p.final && p.final.dtype == GD_F32) ? 4 : 8;
}

constexpr int64_t kDecodeAlign = 16;  // bytes of the widest access
inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kDecodeAlign == 0; }
inline bool is_aligned(const TokenRows& rows) {
  const int64_t bytes = dtype_bytes(rows.dtype);
  return !rows || (is_aligned(rows.data) && rows.batch_stride * bytes % kDecodeAlign == 0 &&
                   rows.token_stride * bytes % kDecodeAlign == 0 && rows.head_stride * bytes % kDecodeAlign == 0);
}
inline bool is_aligned(const StateRows& rows) {
  const int64_t bytes = dtype_bytes(rows.dtype);
  return !rows || (is_aligned(rows.data) && rows.slot_stride * bytes % kDecodeAlign == 0 &&
                   rows.head_stride * bytes % kDecodeAlign == 0);
}

// Whether q, k, v and o, and whether all states, allow accesses of 16 bytes.
inline bool rows_aligned(const RecurrentProblem& p) {
  return is_aligned(p.in.q) && is_aligned(p.in.k) && is_aligned(p.in.v) && is_aligned(p.o);
}
inline bool states_aligned(const RecurrentProblem& p) {
  const int64_t bytes = dtype_bytes(p.step_states.dtype);
  return is_aligned(p.in.initial) && is_aligned(p.final) && is_aligned(p.step_states) &&
         p.step_batch_stride * bytes % kDecodeAlign == 0 && p.step_token_stride * bytes % kDecodeAlign == 0;
}

// Strides that are 31 bits wide in bytes, and slots that are.
inline bool is_near(int64_t stride, int64_t bytes) { return stride >= 0 && stride <= INT32_MAX / bytes; }
inline bool is_near(const TokenRows& rows) {
  const int64_t bytes = rows ? dtype_bytes(rows.dtype) : 1;
  return is_near(rows.batch_stride, bytes) && is_near(rows.token_stride, bytes) && is_near(rows.head_stride, bytes);
}
inline bool is_near(const IndexRows& rows) { return is_near(rows.stride, 8) && is_near(rows.column_stride, 8); }
inline bool is_near(const StateRows& rows) {
  const int64_t bytes = rows ? dtype_bytes(rows.dtype) : 1;
  return is_near(rows.slot_stride, bytes) && is_near(rows.head_stride, bytes) && is_near(rows.indices) &&
         rows.slots <= INT32_MAX && is_near(rows.first_slot, 1);
}
inline bool rows_near(const RecurrentProblem& p) {
  const Layer& in = p.in;
  return is_near(in.q) && is_near(in.k) && is_near(in.v) && is_near(in.g) && is_near(in.beta) && is_near(p.o) &&
         is_near(in.A_log.stride, 4) && is_near(in.dt_bias.stride, 4) && is_near(in.initial) && is_near(p.final) &&
         is_near(p.accept_lengths) && is_near(p.previous_accept_lengths);
}

// What `step`, `fold` and `march` are made for.
inline bool is_common(const RecurrentProblem& p) {
  const Layer& in = p.in;
  const bool one_type = !in.initial || !p.final || in.initial.dtype == p.final.dtype;
  return in.q.dtype != GD_F32 && in.key_dim == kStepDim && in.value_dim == kStepDim && one_type &&
         (in.initial || p.final) && rows_aligned(p) && states_aligned(p) && rows_near(p);
}

inline gd_dtype state_dtype(const RecurrentProblem& p) { return p.in.initial ? p.in.initial.dtype : p.final.dtype; }

// Whether `step` takes the call; it has the bits of `walk`.
inline bool takes_step(const RecurrentProblem& p) {
  return p.in.sequences.tokens == 1 && !p.in.sequences.offsets && !p.step_states && !p.accept_lengths &&
         !p.previous_accept_lengths && is_common(p);
}

// A tensor as they see it: strides in bytes.
struct NearRows {
  char* data = nullptr;
  uint32_t batch_stride = 0, token_stride = 0, head_stride = 0;
  gd_dtype dtype = GD_DTYPE_NONE;

  NearRows() = default;
  explicit NearRows(const TokenRows& rows)
      : data(static_cast<char*>(rows.data)),
        batch_stride(static_cast<uint32_t>(rows.batch_stride * dtype_bytes(rows.dtype))),
        token_stride(static_cast<uint32_t>(rows.token_stride * dtype_bytes(rows.dtype))),
        head_stride(static_cast<uint32_t>(rows.head_stride * dtype_bytes(rows.dtype))),
        dtype(rows.dtype) {}
  explicit NearRows(const HeadVector& vector)
      : data(static_cast<char*>(vector.data)),
        head_stride(static_cast<uint32_t>(vector.stride * dtype_bytes(vector.dtype))),
        dtype(vector.dtype) {}
  GD_HOST_DEVICE char* at(uint32_t batch, uint32_t token, uint32_t head) const {
    return data + uint64_t{batch} * batch_stride + uint64_t{token} * token_stride + uint64_t{head} * head_stride;
  }
  GD_HOST_DEVICE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
};

// Indices as they see them.
struct NearIndices {
  const char* data = nullptr;
  uint32_t stride = 0;
  bool present = false, is_int64 = false;

  NearIndices() = default;
  explicit NearIndices(const IndexRows& rows)
      : data(static_cast<const char*>(rows.data)),
        stride(static_cast<uint32_t>(rows.stride * (rows.is_int64 ? 8 : 4))),
        present(rows.present),
        is_int64(rows.is_int64) {}
};

// A pool of states as they see it, of a type known at compile time.
struct NearStates {
  NearIndices indices;  // absent = sequence n has slot n
  char* data = nullptr;
  uint32_t slot_stride = 0, head_stride = 0;
  int32_t first_slot = 0;  // indices below it are nobody
  bool present = false;

  NearStates() = default;
  explicit NearStates(const StateRows& rows)
      : indices(rows.indices),
        data(static_cast<char*>(rows.data)),
        slot_stride(static_cast<uint32_t>(rows.slot_stride * dtype_bytes(rows.dtype))),
        head_stride(static_cast<uint32_t>(rows.head_stride * dtype_bytes(rows.dtype))),
        first_slot(rows.indices ? static_cast<int32_t>(rows.first_slot) : 0),
        present(static_cast<bool>(rows)) {}
  GD_HOST_DEVICE char* at(int32_t slot, uint32_t head) const {
    return data + uint64_t{static_cast<uint32_t>(slot)} * slot_stride + uint64_t{head} * head_stride;
  }
};

// The part of a problem that `step` needs. Every line of it is a cold miss of each launch, so it is small, and what
// the first state's address takes comes first: kernel arguments begin 48 bytes before a line of constant memory.
struct StepParams {
  NearStates initial;
  uint32_t sequences = 0;
  bool l2norm = false, pads_by_read_index = false;
  bool pdl = false;  // launched with it; of `step` [V, K]
  NearRows k, q, v, g, beta, A_log, dt_bias;
  KeyHeads key_heads;
  float scale = 0;
  gd_gate gate = GD_GATE_LOG;
  gd_beta beta_kind = GD_BETA_VALUE;
  NearStates final;
  NearRows o;
};
static_assert(offsetof(StepParams, k) == 48);
inline StepParams step_params(const RecurrentProblem& p) {
  const Layer& in = p.in;
  StepParams s;
  s.initial = NearStates(in.initial), s.final = NearStates(p.final);
  s.q = NearRows(in.q), s.k = NearRows(in.k), s.v = NearRows(in.v), s.o = NearRows(p.o);
  s.g = NearRows(in.g), s.beta = NearRows(in.beta);
  if (in.gate == GD_GATE_RAW) s.A_log = NearRows(in.A_log), s.dt_bias = NearRows(in.dt_bias);
  s.key_heads = KeyHeads(in);
  s.sequences = static_cast<uint32_t>(in.sequences.count);
  s.scale = in.scale, s.gate = in.gate, s.beta_kind = in.beta_kind;
  s.l2norm = in.l2norm, s.pads_by_read_index = p.pads_by_read_index;
  return s;
}

// `fold`: [V, K], K = V = 128, 16-bit inputs, kTokens tokens at once, one state stored. A warp has 16 rows of V.
enum class FoldKind {
  last,  // at most kTokens tokens
  any    // any number of tokens
};
template <class StateOf, class InputOf, FoldKind kKindOf, int kTokensOf, int kWarpsOf, bool kStreamingOf>
struct FoldConfig {
  using State = StateOf;
  using Input = InputOf;
  static constexpr FoldKind kKind = kKindOf;
  static constexpr int kTokens = kTokensOf, kWarps = kWarpsOf, kThreads = 32 * kWarps;
  static constexpr int kRows = 16, kParts = kStepDim / (kRows * kWarps);
  static constexpr bool kStreaming = kStreamingOf;
};
inline bool takes_fold(const RecurrentProblem& p) {
  const Sequences& sequences = p.in.sequences;
  return !p.batch_invariant && !p.step_states && p.in.layout == GD_STATE_VK && sequences.tokens > 1 &&
         (!sequences.offsets || sequences.tokens > sequences.count) && sequences.tokens <= INT32_MAX && is_common(p);
}
// Whether `march` takes what neither of them does; it has the bits of `walk`. A pack with no more tokens than sequences
// is most likely one of single tokens.
inline bool takes_march(const RecurrentProblem& p) {
  return p.in.sequences.tokens <= INT32_MAX && is_common(p) &&
         (!p.step_states || p.step_states.dtype == state_dtype(p));
}
struct FoldParams : StepParams {
  IndexVector offsets;
  NearIndices accept_lengths, previous_accept_lengths;
  uint32_t columns = 0, column_stride = 0;  // of initial.indices
  uint32_t tokens = 0;                      // T
  bool steps_by_token = false;
  StateRows step_states;
  int64_t step_batch_stride = 0, step_token_stride = 0;
};
inline FoldParams fold_params(const RecurrentProblem& p) {
  FoldParams f;
  static_cast<StepParams&>(f) = step_params(p);
  const IndexRows& indices = p.in.initial.indices;
  f.offsets = p.in.sequences.offsets;
  f.accept_lengths = NearIndices(p.accept_lengths), f.previous_accept_lengths = NearIndices(p.previous_accept_lengths);
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
// The grid of `step`, `fold` and `march`: x = value heads and parts of their columns, y and z = sequences, perhaps some
// too many.
struct NearGrid {
  uint32_t x, y, z;
};
inline NearGrid near_grid(const RecurrentProblem& p, int parts) {
  constexpr int64_t kMost = 65535;  // of y and of z
  const int64_t sequences = p.in.sequences.count + (p.in.sequences.offsets ? 1 : 0),
                z = (sequences + kMost - 1) / kMost;
  return {static_cast<uint32_t>(p.in.value_heads * parts), static_cast<uint32_t>(z ? (sequences + z - 1) / z : 0),
          static_cast<uint32_t>(z)};
}
// A grid has fewer than 2^31 CTAs.
constexpr int kMaxParts = 16;
constexpr int64_t kMaxDecodePairs = (int64_t{1} << 31) / kMaxParts - 1;
static_assert(256 / WalkVk<4, 32>::kCtaColumns <= kMaxParts);

// Everything a kernel needs. All of it is a kernel argument: a captured call depends on no memory of the host.
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
