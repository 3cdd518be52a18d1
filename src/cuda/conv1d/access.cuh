// What a thread of the walking kernels has of tensors: kVector neighbouring channels, or one of any tensor.
#pragma once

#include "cuda/conv1d/config.hpp"
#include "cuda/conv1d/window.cuh"

namespace gatedelta::cuda {

// kVector numbers as they lie in memory, in as few registers as their type allows: copies of a Raw would keep words
// that 16-bit numbers leave unused. kType: GD_DTYPE_NONE where the type is known at run time alone.
template <int kVector, gd_dtype kType>
struct Numbers {
  static constexpr int kWords = kType == GD_BF16 || kType == GD_F16 ? (kVector + 1) / 2 : kVector;
  uint32_t words[kWords];

  GD_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }
  GD_DEVICE void load(const char* from, gd_dtype type) {
    Raw<kVector> raw;
    raw.load(from, kType == GD_DTYPE_NONE ? type : kType, kVector > 1);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = raw.words[i];
  }
  GD_DEVICE void widen(float* x, gd_dtype type) const {
    Raw<kVector> raw;
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw.words[i] = words[i];
    raw.widen(x, kType == GD_DTYPE_NONE ? type : kType);
  }
};

template <int kVector>
struct ChannelVector {
  int64_t channel;  // the first

  template <gd_dtype kType>
  GD_DEVICE void load(Numbers<kVector, kType>& numbers, const TokenRows& rows, int64_t batch, int64_t token) const {
    const gd_dtype type = kType == GD_DTYPE_NONE ? rows.dtype : kType;
    numbers.load(element(rows.data, type, rows.offset(batch, token, channel)), type);
  }
  template <gd_dtype kType>
  GD_DEVICE void store(const TokenRows& rows, int64_t batch, int64_t token, const float (&x)[kVector]) const {
    const gd_dtype type = kType == GD_DTYPE_NONE ? rows.dtype : kType;
    char* const to = const_cast<char*>(element(rows.data, type, rows.offset(batch, token, channel)));
    store_numbers<kVector>(to, type, x, kVector > 1);
  }

  // A column of a state. `vectors`: the channels of a column are neighbours, aligned to 16 bytes.
  GD_DEVICE void load(float (&x)[kVector], const ConvStates& states, int64_t slot, int64_t column, bool vectors) const {
    const char* const from = element(states.data, states.dtype, states.offset(slot, channel, column));
    if (kVector > 1 && vectors) {
      Raw<kVector> raw;
      raw.load(from, states.dtype, true);
      with_dtype(states.dtype, [&](gd_dtype type) { raw.widen(x, type); });
      return;
    }
    Raw<1> raw[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      raw[v].load(element(from, states.dtype, v * states.channel_stride), states.dtype, true);
#pragma unroll
    for (int v = 0; v < kVector; ++v) raw[v].widen(x + v, states.dtype);
  }
  GD_DEVICE void store(const ConvStates& states, int64_t slot, int64_t column, const float (&x)[kVector],
                       bool vectors) const {
    char* const to = const_cast<char*>(element(states.data, states.dtype, states.offset(slot, channel, column)));
    if (kVector > 1 && vectors) return store_numbers<kVector>(to, states.dtype, x, true);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      char* const place = const_cast<char*>(element(to, states.dtype, v * states.channel_stride));
      store_numbers<1>(place, states.dtype, x + v, true);
    }
  }

  // `packed`: the taps of neighbouring channels follow each other, aligned as a whole.
  template <int kTaps>
  GD_DEVICE void load(Filter<kTaps> (&filter)[kVector], const Conv1dInputs& in, bool packed) const {
    constexpr bool kPackable = kTaps != 3;  // a power of two
    const TapWeights& w = in.weight;
    const char* const from = element(w.data, w.dtype, channel * w.channel_stride);
    if (kPackable && packed) {
      if constexpr (kPackable) {
        Raw<kVector * kTaps> raw;
        float x[kVector * kTaps];
        raw.load(from, w.dtype, true);
        with_dtype(w.dtype, [&](gd_dtype type) { raw.widen(x, type); });
#pragma unroll
        for (int i = 0; i < kVector * kTaps; ++i) filter[i / kTaps].weight[i % kTaps] = x[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector * kTaps; ++i) {
        const int64_t at = i / kTaps * w.channel_stride + i % kTaps * w.tap_stride;
        filter[i / kTaps].weight[i % kTaps] = load_number(from, w.dtype, at);
      }
    }
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      filter[v].bias = in.bias ? load_number(in.bias.data, in.bias.dtype, (channel + v) * in.bias.stride) : 0.0f;
    }
  }
};

}  // namespace gatedelta::cuda
