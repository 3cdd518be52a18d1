// Base of the loops over tokens: loads, the state in registers, sums.
//
// A thread has kPerLane key dimensions, four by four, of kColumns adjacent value columns. A sum over key dimensions
// adds eight adjacent lanes. A sum over value columns adds four lanes, then all warps through shared memory, then all
// CTAs of a head (finish.cuh). Every sum has one order, so results repeat bit for bit. Products are fused with sums
// explicitly (fmaf), so that the emulator rounds alike.
#pragma once

#include "cuda/fp32/prepare.cuh"

namespace gatedelta::cuda::fp32 {

template <class ShapeOf, class StageOf>
struct Loop {
  using Shape = ShapeOf;
  using Stage = StageOf;
  static constexpr int kKeys = Shape::kKeys, kPerLane = Shape::kPerLane, kColumns = Shape::kColumns;
  using State = float[kColumns][kPerLane];

  const Params& p;
  const uint32_t smem;
  const int cta, tid, lane, warp, key_lane, column_lane;
  int head, part;
  struct {
    int batch, begin, length;
  } span;
  State S;

  GD_DEVICE Loop(const Params& params, int cta_, int tid_)
      : p(params),
        smem(shared_base()),
        cta(cta_),
        tid(tid_),
        lane(tid_ & 31),
        warp(shuffle(tid_ >> 5, 0)),
        key_lane(tid_ & (kKeyLanes - 1)),
        column_lane((tid_ & 31) / kKeyLanes) {
    const int pair = cta / p.parts;
    head = pair % p.value_heads, part = cta - pair * p.parts;
    const auto [batch, begin, length] = p.sequences[sequence()];
    span = {static_cast<int>(batch), static_cast<int>(begin), static_cast<int>(length)};
  }

  GD_DEVICE int sequence() const { return opaque(cta) / p.parts / p.value_heads; }
  GD_DEVICE int first_column() const { return part * Shape::kCtaColumns; }  // of the CTA
  GD_DEVICE int own_column() const {                                        // of this thread, in the CTA
    return warp * Shape::kWarpColumns + column_lane * kColumns;
  }
  // V is a multiple of 16, so a thread has all of its columns or none. Warps without columns take part in barriers and
  // loads.
  GD_DEVICE bool has_columns() const { return first_column() + own_column() < p.value_dim; }
  GD_DEVICE int busy_warps() const {
    const int columns = p.value_dim - first_column();
    return smaller((columns + Shape::kWarpColumns - 1) / Shape::kWarpColumns, kWarps);
  }
  GD_DEVICE int stages() const { return (span.length + kStageTokens - 1) / kStageTokens; }
  GD_DEVICE int rows_of_stage(int stage) const { return smaller(span.length - stage * kStageTokens, kStageTokens); }
  GD_DEVICE int token_of(int stage, int row) const { return span.begin + stage * kStageTokens + row; }
  // Key dimension of a thread's number i. Four numbers are adjacent, then those of the next of eight lanes.
  GD_DEVICE static int key_of(int i, int key_lane) { return (i / 4 * kKeyLanes + key_lane) * 4 + i % 4; }

  // ---- loads --------------------------------------------------------------------------------------------------------

  GD_DEVICE uint32_t stage_at(int buffer) const { return smem + buffer * Stage::kBytes; }
  // Loads rows of q or k. Columns past K are zero.
  GD_DEVICE void load_keys(uint32_t to, const TokenRows& rows, int stage, int count) const {
    const float* const from = row_of(rows, span.batch, token_of(stage, 0), head / p.group);
#pragma unroll
    for (int i = opaque(tid); i < kStageTokens * kKeys / 4; i += kThreads) {
      const int row = i / (kKeys / 4), column = i % (kKeys / 4) * 4;
      const bool valid = row < count && column < p.key_dim;
      copy_async(to + i * 16, valid ? from + row * rows.token_stride + column : from, valid);
    }
  }
  // Loads the CTA's columns of rows of V numbers. `from`: the stage's first token. Columns past V are zero.
  GD_DEVICE void load_values(uint32_t to, const float* from, int64_t stride, int count) const {
    constexpr int kPackets = Shape::kCtaColumns / 4;
    const int columns = p.value_dim - first_column();
#pragma unroll
    for (int i = opaque(tid); i < kStageTokens * kPackets; i += kThreads) {
      const int row = i / kPackets, column = i % kPackets * 4;
      const bool valid = row < count && column < columns;
      copy_async(to + i * 16, valid ? from + row * stride + column : from, valid);
    }
  }
  GD_DEVICE void load_tensor(uint32_t to, const TokenRows& rows, int stage, int count) const {
    load_values(to, row_of(rows, span.batch, token_of(stage, 0), head) + first_column(), rows.token_stride, count);
  }
  GD_DEVICE int64_t entry_of(int stage, int row) const { return p.entry(span.batch, token_of(stage, row), head); }
  // Loads rows of an array [B T][Hv][V], like p.reads.
  GD_DEVICE void load_entries(uint32_t to, const float* entries, int stage, int count) const {
    load_values(to, entries + entry_of(stage, 0) * p.value_dim + first_column(), int64_t{p.value_heads} * p.value_dim,
                count);
  }
  GD_DEVICE void load_factors(uint32_t to, int stage, int count) const {
    const int row = tid / 2, packet = tid % 2;
    if (row < count)
      copy_async(to + tid * 16, reinterpret_cast<const float4*>(p.factors + entry_of(stage, row)) + packet, true);
  }

  // ---- states -------------------------------------------------------------------------------------------------------

  // Calls f with every number and its distance from the matrix' first one; not with padded ones.
  template <class F>
  GD_DEVICE void each_number(int key_stride, int value_stride, const F& f) {
    if (!has_columns()) return;
    // Opaque: otherwise all distances are in registers at once, even during the loop over tokens.
    int at = opaque(key_lane) * 4 * key_stride + (first_column() + own_column()) * value_stride;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (key_of(i, key_lane) < p.key_dim)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) f(S[c][i], at + c * value_stride);
      at = opaque(at + (i % 4 == 3 ? 4 * kKeyLanes - 3 : 1) * key_stride);
    }
  }
  // Loads the sequence's state, or zeros where it has none.
  GD_DEVICE void load_state(const StateRows& states) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (float& x : S[c]) x = 0;
    const int64_t slot = states.slot(sequence());
    if (slot < 0) return;
    with_stored(states.dtype, [&](auto stored) {
      using Stored = decltype(stored);
      const auto* const from = static_cast<const typename Stored::Word*>(states.data) + states.offset(slot, head);
      each_number(p.key_state_stride, p.value_state_stride, [&](float& x, int i) { x = Stored::widen(from[i]); });
    });
  }
  GD_DEVICE void store_state(const StateRows& states, int64_t slot) {
    with_stored(states.dtype, [&](auto stored) {
      using Stored = decltype(stored);
      auto* const to = static_cast<typename Stored::Word*>(states.data) + states.offset(slot, head);
      each_number(p.key_state_stride, p.value_state_stride, [&](float& x, int i) { to[i] = Stored::narrow(x); });
    });
  }
  // Index of the matrix (span of a stage, head).
  GD_DEVICE int64_t span_entry(int stage) const {
    const int64_t first = p.sequences.first_chunk_index(sequence()) * kSpansPerChunk;
    return (first + stage / (kSpanTokens / kStageTokens)) * p.value_heads + head;
  }
  GD_DEVICE float* gradient_of(int stage) const { return p.gradients + span_entry(stage) * p.key_dim * p.value_dim; }
  GD_DEVICE bool ends_span(int stage) const {
    return (stage + 1) % (kSpanTokens / kStageTokens) == 0 || stage + 1 == stages();
  }

  // ---- tokens -------------------------------------------------------------------------------------------------------

  GD_DEVICE static Factors factors_of(uint32_t stage, int row) {
    const uint32_t from = stage + Stage::kFactors + row * static_cast<int>(sizeof(Factors));
    const float4 x = load_shared4(from);
    return {x.x, x.y, x.z, x.w, load_shared(from + 16), {}};
  }
  // Reads this thread's numbers of a row of q or k.
  GD_DEVICE void read_keys(float (&x)[kPerLane], uint32_t row) const {
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      const float4 four = load_shared4(row + key_of(i, key_lane) * 4);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  }
  // Reads this thread's columns of a row.
  GD_DEVICE void read_columns(float (&x)[kColumns], uint32_t row) const {
    const uint32_t from = row + own_column() * 4;
    if constexpr (kColumns == 2) {
      const float2 two = load_shared2(from);
      x[0] = two.x, x[1] = two.y;
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; c += 4) {
        const float4 four = load_shared4(from + c * 4);
        x[c] = four.x, x[c + 1] = four.y, x[c + 2] = four.z, x[c + 3] = four.w;
      }
    }
  }
  // Stores to a row of V numbers. Lanes with the same columns have the same numbers; one of them stores.
  GD_DEVICE void store_columns(float* row, const float (&x)[kColumns]) const {
    if (key_lane != 0 || !has_columns()) return;
    float* const to = row + first_column() + own_column();
    if constexpr (kColumns == 2) {
      *reinterpret_cast<float2*>(to) = {x[0], x[1]};
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; c += 4) *reinterpret_cast<float4*>(to + c) = {x[c], x[c + 1], x[c + 2], x[c + 3]};
    }
  }

  // ---- sums ---------------------------------------------------------------------------------------------------------

  // S^T x: sums over K, in all lanes of a column.
  GD_DEVICE void read_state(float (&y)[kColumns], const float (&x)[kPerLane]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      y[c] = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) y[c] = fmaf(S[c][i], x[i], y[c]);
    }
    sum_key_lanes(y);
  }
  GD_DEVICE static void sum_key_lanes(float (&y)[kColumns]) {
#pragma unroll
    for (int bit = 1; bit < kKeyLanes; bit *= 2)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) y[c] += shuffle_xor(y[c], bit);
  }
  // S <- gamma S + k w^T.
  GD_DEVICE void advance(float gamma, const float (&k)[kPerLane], const float (&w)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) S[c][i] = fmaf(k[i], w[c], gamma * S[c][i]);
  }

  // Stores S x, summed over the columns of this warp, to `to` [K]. Two exchanges each halve a lane's numbers, so a lane
  // ends with a quarter of them.
  GD_DEVICE void sum_columns(const float (&x)[kColumns], uint32_t to) const {
    constexpr int kHalf = kPerLane / 2, kQuarter = kPerLane / 4;
    float y[kPerLane], half[kHalf];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      y[i] = 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) y[i] = fmaf(S[c][i], x[c], y[i]);
    }
    const bool second = column_lane & 1, last = column_lane & 2;
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
      half[i] = (second ? y[kHalf + i] : y[i]) + shuffle_xor(second ? y[i] : y[kHalf + i], kKeyLanes);
    const int first = (second ? kHalf : 0) + (last ? kQuarter : 0);
#pragma unroll
    for (int i = 0; i < kQuarter; ++i)
      y[i] = (last ? half[kQuarter + i] : half[i]) + shuffle_xor(last ? half[i] : half[kQuarter + i], 2 * kKeyLanes);
    if constexpr (kQuarter >= 4) {
#pragma unroll
      for (int i = 0; i < kQuarter; i += 4)
        store_shared4(to + key_of(first + i, key_lane) * 4, y[i], y[i + 1], y[i + 2], y[i + 3]);
    } else {
#pragma unroll
      for (int i = 0; i < kQuarter; ++i) store_shared(to + key_of(first + i, key_lane) * 4, y[i]);
    }
  }
  // `products`: of a state and value head, [parts][warps].
  GD_DEVICE void store_product(Product* products, const Product& own) const {
    const Product all = sum_warp(own);
    if (lane == 0) products[part * kWarps + warp] = all;
  }
  // Address of this warp's sums of a token.
  GD_DEVICE uint32_t sums_of(uint32_t sums, int row) const {
    return sums + ((row % kSumTokens) * kWarps + warp) * kKeys * 4;
  }
  // Stores the sums of all warps for tokens first .. first + count - 1 of a stage. kAdds: adds to what is there.
  template <bool kAdds>
  GD_DEVICE void store_sums(uint32_t sums, float* entries, int stage, int first, int count) const {
    const int warps = busy_warps();
#pragma unroll 1
    for (int i = tid; i < count * (kKeys / 4); i += kThreads) {
      const int row = i / (kKeys / 4), key = i % (kKeys / 4) * 4;
      if (key >= p.key_dim) continue;
      const uint32_t from = sums + (row * kWarps * kKeys + key) * 4;
      float4 sum = load_shared4(from);
      for (int w = 1; w < warps; ++w) {
        const float4 x = load_shared4(from + w * kKeys * 4);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
      auto* const to =
          reinterpret_cast<float4*>(entries + (entry_of(stage, first + row) * p.parts + part) * p.key_dim + key);
      if constexpr (kAdds) {
        const float4 x = *to;
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
      *to = sum;
    }
  }
};

}  // namespace gatedelta::cuda::fp32
