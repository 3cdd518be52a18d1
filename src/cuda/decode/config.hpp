// Which decode kernel takes a call, and how its work is split into CTAs: plain arithmetic, shared by the limits, the
// launches, the kernels and host tests.
//
// Eight lanes share the K numbers of a value column, and the four groups of eight in a warp have kColumns columns each.
// Columns are independent of each other, so warps never exchange anything.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/host_device.hpp"

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

// How a kernel holds a state: kVector neighbouring numbers of K per access, kPerLane numbers of each column per lane.
// The order of a column's sums follows from these two alone.
template <gd_state_layout kLayoutOf, int kVectorOf, int kPerLaneOf, int kColumnsOf, int kWarpsOf>
struct TileConfig {
  static constexpr gd_state_layout kLayout = kLayoutOf;
  static constexpr int kVector = kVectorOf, kPerLane = kPerLaneOf, kColumns = kColumnsOf, kWarps = kWarpsOf;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtaColumns = kWarps * kColumnGroups * kColumns;
  static constexpr int kMaxKeyDim = kLanesPerColumn * kPerLane;
  // Where registers allow it, the next token is requested before one is computed, elsewhere after that.
  static constexpr bool kPrefetch = kLayout == GD_STATE_VK && kPerLane == 16;
  static constexpr int kCtasPerSm = kPerLane == 16 ? 3 : 2;  // nothing spills at these
};

// `walk`: any problem. Half as many columns where a lane has twice the numbers of K.
template <int kVector, int kPerLane>
struct WalkVk : TileConfig<GD_STATE_VK, kVector, kPerLane, 32 / kPerLane, 4> {};
template <int kPerLane>
struct WalkKv : TileConfig<GD_STATE_KV, 4, kPerLane, 64 / kPerLane, 4> {};

// `step`: one token, K = V = 128, [V, K], 16-bit inputs. fp32 states are bound by memory: one column per lane keeps the
// most loads in flight. 16-bit states are bound by instructions: four columns share the work on q, k and the gates.
constexpr int kStepDim = 128;
template <int kVector>
struct StepVk
    : TileConfig<GD_STATE_VK, kVector, kStepDim / kLanesPerColumn, kVector == 4 ? 1 : 4, kVector == 4 ? 2 : 1> {};
template <class State>
using StepOf = StepVk<16 / sizeof(State)>;

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

// Whether `step` takes the call; it has the bits of `walk`.
inline bool takes_step(const RecurrentProblem& p) {
  const Layer& in = p.in;
  if (in.q.dtype == GD_F32) return false;
  const bool one_type = !in.initial || !p.final || in.initial.dtype == p.final.dtype;
  return in.sequences.tokens == 1 && !in.sequences.offsets && in.key_dim == kStepDim && in.value_dim == kStepDim &&
         in.layout == GD_STATE_VK && one_type && (in.initial || p.final) && !p.step_states && !p.accept_lengths &&
         !p.previous_accept_lengths && rows_aligned(p) && states_aligned(p);
}

// Pairs of sequence and value head, counting the tokens past the last offset as one more sequence.
inline int64_t decode_pairs(const Layer& in) {
  return (in.sequences.count + (in.sequences.offsets ? 1 : 0)) * in.value_heads;
}
// A grid has fewer than 2^31 CTAs.
constexpr int kMaxParts = 16;
constexpr int64_t kMaxDecodePairs = (int64_t{1} << 31) / kMaxParts - 1;
static_assert(kStepDim / StepVk<4>::kCtaColumns <= kMaxParts && 256 / WalkVk<4, 32>::kCtaColumns <= kMaxParts);

// Everything a kernel needs. All of it is a kernel argument: a captured call depends on no memory of the host.
struct DecodeParams {
  RecurrentProblem problem;
  Divider parts, heads, group;  // CTAs per pair; value heads; value heads per key head
  bool rows_aligned, states_aligned;
};
inline DecodeParams decode_params(const RecurrentProblem& p, int cta_columns) {
  const auto parts = static_cast<uint32_t>((p.in.value_dim + cta_columns - 1) / cta_columns);
  return {p,
          Divider(parts),
          Divider(static_cast<uint32_t>(p.in.value_heads)),
          Divider(static_cast<uint32_t>(p.in.group)),
          rows_aligned(p),
          states_aligned(p)};
}

}  // namespace gatedelta::cuda
