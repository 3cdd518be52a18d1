// Numbers in memory, of a type known at run time or before, to and from fp32 registers. Loading and widening are two
// steps: a branch on the type around both would wait for memory before the next load is issued.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

#include "core/tensors.hpp"
#include "cuda/device/ptx.cuh"

namespace gatedelta::cuda {

template <class T>
constexpr gd_dtype kDtype = GD_DTYPE_NONE;
template <>
constexpr gd_dtype kDtype<float> = GD_F32;
template <>
constexpr gd_dtype kDtype<__nv_bfloat16> = GD_BF16;
template <>
constexpr gd_dtype kDtype<__half> = GD_F16;

// Element `at` of a tensor.
GD_DEVICE const char* element(const void* data, gd_dtype dtype, int64_t at) {
  return static_cast<const char*>(data) + at * (dtype == GD_F32 ? 4 : 2);
}

// Calls f with constants for what is known at run time, so that one branch stands around many accesses. Loads differ
// by the size of a number alone.
template <class F>
GD_DEVICE void with_load(gd_dtype dtype, bool aligned, const F& f) {
  if (dtype == GD_F32) {
    aligned ? f(GD_F32, true) : f(GD_F32, false);
  } else {
    aligned ? f(GD_BF16, true) : f(GD_BF16, false);
  }
}
template <class F>
GD_DEVICE void with_dtype(gd_dtype dtype, const F& f) {
  if (dtype == GD_F32) {
    f(GD_F32);
  } else if (dtype == GD_BF16) {
    f(GD_BF16);
  } else {
    f(GD_F16);
  }
}

// kBytes at a multiple of kBytes, or of 16 if that is less.
template <int kBytes>
struct alignas(kBytes < 16 ? kBytes : 16) Packet {
  static_assert(kBytes >= 4);
  uint32_t words[kBytes / 4];
};

// kCount numbers as they lie in memory. Of 16-bit numbers two share a word.
template <int kCount>
struct Raw {
  static constexpr int kPairs = (kCount + 1) / 2;
  uint32_t words[kCount];

  GD_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = 0;
  }

  // `aligned`: `from` is a multiple of 16 bytes, or of the size of all numbers if that is less.
  template <bool kStreaming = false>
  GD_DEVICE void load(const char* from, gd_dtype dtype, bool aligned) {
    if (dtype == GD_F32) {
      if (aligned) return load_packet<4 * kCount, kStreaming>(from);
#pragma unroll
      for (int i = 0; i < kCount; ++i) words[i] = reinterpret_cast<const uint32_t*>(from)[i];
    } else {
      const auto* halves = reinterpret_cast<const uint16_t*>(from);
      if constexpr (kCount == 1) {
        words[0] = halves[0];
      } else {
        if (aligned) return load_packet<2 * kCount, kStreaming>(from);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) words[i] = halves[2 * i] | static_cast<uint32_t>(halves[2 * i + 1]) << 16;
      }
    }
  }

  GD_DEVICE void widen(float* x, gd_dtype dtype) const {
    if (dtype == GD_F32) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = __uint_as_float(words[i]);
    } else if (dtype == GD_BF16) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        x[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16))));
    }
  }

 private:
  template <int kBytes, bool kStreaming>
  GD_DEVICE void load_packet(const char* from) {
    Packet<kBytes> packet;
    if constexpr (kStreaming && kBytes == 16) load_streaming(from, packet.words);
    if constexpr (!kStreaming || kBytes != 16) packet = *reinterpret_cast<const Packet<kBytes>*>(from);
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) words[i] = packet.words[i];
  }
};

// One number of a type known at run time, without branches; none if the type is none. The two loads of which one
// happens have registers of their own: a second load into a register waits for the first.
struct Scalar {
  uint32_t word = 0;
  uint16_t half = 0;

  GD_DEVICE void load(const char* from, gd_dtype dtype) {
    if (dtype == GD_F32) word = *reinterpret_cast<const uint32_t*>(from);
    if (dtype > GD_F32) half = *reinterpret_cast<const uint16_t*>(from);
  }
  GD_DEVICE float value(gd_dtype dtype) const {
    const float wide = __uint_as_float(dtype == GD_F32 ? word : static_cast<uint32_t>(half) << 16);
    return dtype == GD_F16 ? __half2float(__ushort_as_half(half)) : wide;
  }
};

// Element `at` of a tensor of a type known at run time.
GD_DEVICE float load_number(const void* data, gd_dtype dtype, int64_t at) {
  Scalar number;
  number.load(element(data, dtype, at), dtype);
  return number.value(dtype);
}

GD_DEVICE uint32_t narrow_bits(float x, gd_dtype dtype) {
  return dtype == GD_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}

// kStreaming: the write passes through L2 without displacing what is read again soon.
template <int kBytes, bool kStreaming>
GD_DEVICE void store_packet(char* to, const Packet<kBytes>& packet) {
  if constexpr (kStreaming) {
    static_assert(kBytes == 16);
    __stcs(reinterpret_cast<uint4*>(to), {packet.words[0], packet.words[1], packet.words[2], packet.words[3]});
  } else {
    *reinterpret_cast<Packet<kBytes>*>(to) = packet;
  }
}

template <int kCount, bool kStreaming = false>
GD_DEVICE void store_numbers(char* to, gd_dtype dtype, const float* x, bool aligned) {
  if (dtype == GD_F32) {
    constexpr int kStep = kCount < 4 ? kCount : 4;
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kStep) {
      Packet<4 * kStep> packet;
#pragma unroll
      for (int i = 0; i < kStep; ++i) packet.words[i] = __float_as_uint(x[begin + i]);
      if (aligned) {
        store_packet<4 * kStep, kStreaming && kStep == 4>(to + 4 * begin, packet);
      } else {
#pragma unroll
        for (int i = 0; i < kStep; ++i) reinterpret_cast<uint32_t*>(to)[begin + i] = packet.words[i];
      }
    }
  } else {
    auto* halves = reinterpret_cast<uint16_t*>(to);
    uint32_t bits[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] = narrow_bits(x[i], dtype);
    if constexpr (kCount > 1) {
      if (aligned) {
        Packet<2 * kCount> packet;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) packet.words[i] = bits[2 * i] | bits[2 * i + 1] << 16;
        return store_packet < 2 * kCount, kStreaming && kCount == 8 > (to, packet);
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) halves[i] = static_cast<uint16_t>(bits[i]);
  }
}

}  // namespace gatedelta::cuda
