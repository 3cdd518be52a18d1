// `update_vec`: the filters of a thread's channels.
#pragma once

#include "cuda/conv1d/access.cuh"
#include "cuda/conv1d/update_vec.hpp"

namespace gatedelta::cuda {

// Loads kWords words, kStep at a time.
template <int kWords, int kStep = kUpdateVecBytes / 4>
GD_DEVICE void load_words(uint32_t (&words)[kWords], const char* from) {
#pragma unroll
  for (int begin = 0; begin < kWords; begin += kStep) {
    const auto packet = *reinterpret_cast<const Packet<4 * kStep>*>(from + 4 * begin);
#pragma unroll
    for (int i = 0; i < kStep; ++i) words[begin + i] = packet.words[i];
  }
}

// Filters of a thread's channels, as loaded. 16-bit filters use half of the words.
template <gd_dtype kType>
struct RawFilters {
  static constexpr int kVector = vec_channels(kType), kTaps = kMaxTaps * kVector;
  uint32_t taps[kTaps], bias[kVector];

  GD_DEVICE void request(const UpdateVecParams& p, int64_t channel) {
    if (kType == GD_F32 || p.wide_filters) {
      load_words<kTaps, 4>(taps, p.weight + channel * (kMaxTaps * 4));
      if (p.has_bias) load_words(bias, p.bias + channel * 4);
    } else {
      load_words<kTaps / 2, 4>(reinterpret_cast<uint32_t(&)[kTaps / 2]>(taps), p.weight + channel * (kMaxTaps * 2));
      if (p.has_bias) load_words(reinterpret_cast<uint32_t(&)[kVector / 2]>(bias), p.bias + channel * 2);
    }
  }
  template <gd_dtype kFrom>
  GD_DEVICE void widen_as(Filter (&filter)[kVector], bool has_bias) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
#pragma unroll
      for (int i = 0; i < kMaxTaps; ++i) filter[v].weight[i] = number<kFrom>(taps, v * kMaxTaps + i);
      filter[v].bias = has_bias ? number<kFrom>(bias, v) : 0.0f;
    }
  }
  GD_DEVICE void widen(Filter (&filter)[kVector], const UpdateVecParams& p) const {
    if (kType == GD_F32 || p.wide_filters) {
      widen_as<GD_F32>(filter, p.has_bias);
    } else {
      widen_as<kType>(filter, p.has_bias);
    }
  }

 private:
  template <gd_dtype kFrom>
  GD_DEVICE static float number(const uint32_t* words, int i) {
    if constexpr (kFrom == GD_F32) return __uint_as_float(words[i]);
    if constexpr (kFrom == GD_BF16) return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16))));
  }
};

}  // namespace gatedelta::cuda
