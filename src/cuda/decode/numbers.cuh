// Numbers in memory, of a type known at run time or before, to and from fp32 registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

#include "core/tensors.hpp"

#define GD_DEVICE __device__ __forceinline__

namespace gatedelta::cuda {

// The compiler cannot tell what x is from here on.
GD_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

GD_DEVICE float widen(float x) { return x; }
GD_DEVICE float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
GD_DEVICE float widen(__half x) { return __half2float(x); }

GD_DEVICE void narrow(float& to, float x) { to = x; }
GD_DEVICE void narrow(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
GD_DEVICE void narrow(__half& to, float x) { to = __float2half_rn(x); }

// kCount numbers as they lie in memory: at most 16 bytes.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Packet {
  static_assert(kCount * sizeof(T) <= 16);
  T x[kCount];
};

// Writes that pass through L2 without displacing what is read again soon.
template <class T, int kCount>
GD_DEVICE void store_streaming(Packet<T, kCount>* to, const Packet<T, kCount>& packet) {
  static_assert(sizeof packet == 16);
  __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&packet));
}

// `aligned`: `from` is a multiple of 16 bytes, or of the size of what is loaded if that is less.
template <int kCount, class T>
GD_DEVICE void load_numbers(float* x, const T* from, bool aligned) {
  constexpr int kPacket = kCount * sizeof(T) <= 16 ? kCount : 16 / sizeof(T);
#pragma unroll
  for (int begin = 0; begin < kCount; begin += kPacket) {
    Packet<T, kPacket> packet;
    if (aligned) {
      packet = *reinterpret_cast<const Packet<T, kPacket>*>(from + begin);
    } else {
#pragma unroll
      for (int i = 0; i < kPacket; ++i) packet.x[i] = from[begin + i];
    }
#pragma unroll
    for (int i = 0; i < kPacket; ++i) x[begin + i] = widen(packet.x[i]);
  }
}

template <int kCount, bool kStreaming = false, class T>
GD_DEVICE void store_numbers(T* to, const float* x, bool aligned) {
  constexpr int kPacket = kCount * sizeof(T) <= 16 ? kCount : 16 / sizeof(T);
#pragma unroll
  for (int begin = 0; begin < kCount; begin += kPacket) {
    Packet<T, kPacket> packet;
#pragma unroll
    for (int i = 0; i < kPacket; ++i) narrow(packet.x[i], x[begin + i]);
    if constexpr (kStreaming) {
      store_streaming(reinterpret_cast<Packet<T, kPacket>*>(to + begin), packet);
    } else if (aligned) {
      *reinterpret_cast<Packet<T, kPacket>*>(to + begin) = packet;
    } else {
#pragma unroll
      for (int i = 0; i < kPacket; ++i) to[begin + i] = packet.x[i];
    }
  }
}

// Calls f with a typed pointer to element `at`.
template <class F>
GD_DEVICE void with_elements(void* data, gd_dtype dtype, int64_t at, const F& f) {
  if (dtype == GD_F32) {
    f(static_cast<float*>(data) + at);
  } else if (dtype == GD_BF16) {
    f(static_cast<__nv_bfloat16*>(data) + at);
  } else {
    f(static_cast<__half*>(data) + at);
  }
}

GD_DEVICE float load_number(void* data, gd_dtype dtype, int64_t at) {
  float x = 0;
  with_elements(data, dtype, at, [&](const auto* from) { x = widen(*from); });
  return x;
}

}  // namespace gatedelta::cuda
