// Loads and stores of tensors.
#pragma once

#include "cuda/conv1d/config.hpp"
#include "cuda/conv1d/window.cuh"

namespace gatedelta::cuda {

// Two numbers in the 16-bit type, the first in the lower half.
GD_DEVICE uint32_t narrow_pair(float low, float high, gd_dtype type) {
  if (type == GD_BF16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// kVector numbers as in memory, aligned as a whole: 16-bit numbers share registers.
template <int kVector, gd_dtype kType>
struct Numbers {
  static constexpr int kWords = kType == GD_F32 ? kVector : kVector / 2;
  Packet<4 * kWords> packet;

  GD_DEVICE void load(const char* from, gd_dtype) { packet = *reinterpret_cast<const Packet<4 * kWords>*>(from); }
  GD_DEVICE void clear() { packet = {}; }
  GD_DEVICE void widen(float* x, gd_dtype) const {
    Raw<kVector> raw;
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw.words[i] = packet.words[i];
    raw.widen(x, kType);
  }
  GD_DEVICE static void store(char* to, gd_dtype, const float* x) {
    Numbers numbers;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      numbers.packet.words[i] =
          kType == GD_F32 ? __float_as_uint(x[i]) : narrow_pair(x[2 * i], x[kType == GD_F32 ? 0 : 2 * i + 1], kType);
    *reinterpret_cast<Packet<4 * kWords>*>(to) = numbers.packet;
  }
};
GD_DEVICE float load_state(const ConvStates& states, int64_t slot, int64_t channel, int64_t column) {
  return load_number(states.data, states.dtype, states.offset(slot, channel, column));
}
// Input `position` of a sequence in one channel; negative ones are columns before `history_end` of its state, or 0. The
// address is chosen without branches, so that several of these loads overlap.
GD_DEVICE float load_input(const Conv1dInputs& in, const SequenceSpan& span, int64_t position, int64_t channel,
                           int64_t slot, int64_t history_end) {
  const ConvStates& states = in.initial;
  const bool is_new = position >= 0;
  const int64_t column = history_end + position;
  const int64_t at =
      is_new ? in.x.offset(span.batch, span.begin + position, channel) : states.offset(slot, channel, column);
  const gd_dtype old_type = slot >= 0 && column >= 0 ? states.dtype : GD_DTYPE_NONE;
  return load_number(is_new ? in.x.data : states.data, is_new ? in.x.dtype : old_type, at);
}
GD_DEVICE void store_state(const ConvStates& states, int64_t slot, int64_t channel, int64_t column, float x) {
  const char* const to = element(states.data, states.dtype, states.offset(slot, channel, column));
  store_numbers<1>(const_cast<char*>(to), states.dtype, &x, true);
}

// A token's address, and the bytes from one token to the next. kType = none: it is known at run time.
template <gd_dtype kType = GD_DTYPE_NONE>
struct TokenCursor {
  char* at;
  int64_t step;
  gd_dtype type;

  GD_DEVICE TokenCursor(const TokenRows& rows, int64_t batch, int64_t token, int64_t channel)
      : type(kType == GD_DTYPE_NONE ? rows.dtype : kType) {
    const int size = type == GD_F32 ? 4 : 2;
    at = static_cast<char*>(rows.data) + rows.offset(batch, token, channel) * size;
    step = rows.token_stride * size;
  }
};

// The number of first taps that a filter lacks.
GD_DEVICE int skipped_taps(const Conv1dInputs& in) { return kMaxTaps - in.taps; }

// The filter of one channel, of any strides and taps.
GD_DEVICE void load_filter(Filter& filter, const Conv1dInputs& in, int64_t channel) {
  const TapWeights& w = in.weight;
  const int skip = skipped_taps(in);
#pragma unroll
  for (int i = 0; i < kMaxTaps; ++i) {
    const int64_t at = channel * w.channel_stride + (i - skip) * w.tap_stride;
    filter.weight[i] = i >= skip ? load_number(w.data, w.dtype, at) : 0.0f;
  }
  filter.bias = in.bias ? load_number(in.bias.data, in.bias.dtype, channel * in.bias.stride) : 0.0f;
}
// Filters of neighbouring channels with packed taps.
template <int kVector>
GD_DEVICE void load_packed_filters(Filter (&filter)[kVector], const Conv1dInputs& in, int64_t channel) {
  const TapWeights& w = in.weight;
  const HeadVector& b = in.bias;
  Raw<kMaxTaps> raw[kVector];
  Scalar bias[kVector];
  // NOTE: each side of this branch has its own address arithmetic, which keeps it a branch. As predicated loads the
  // two sides would share registers, and the second one would wait for the first.
  with_load(w.dtype, true, [&](gd_dtype type, bool aligned) {
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      raw[v].load(element(w.data, type, (channel + v) * w.channel_stride), type, aligned);
  });
  if (b) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) bias[v].load(element(b.data, b.dtype, (channel + v) * b.stride), b.dtype);
  }
  with_dtype(w.dtype, [&](gd_dtype type) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) raw[v].widen(filter[v].weight, type);
  });
#pragma unroll
  for (int v = 0; v < kVector; ++v) filter[v].bias = bias[v].value(b.dtype);
}

}  // namespace gatedelta::cuda
