// Vectors of floats on the compiler's vector extension; width and instruction set come from the including ISA file,
// which defines GD_ISA (its namespace) and GD_VECTOR_BYTES. Everything here is compiled once per ISA, in that
// namespace, so that no function of one instruction set can be linked into another.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "core/problem.hpp"
#include "cpu/dtype.hpp"

#define GD_RESTRICT __restrict__

namespace gatedelta::cpu::GD_ISA {

constexpr int kVector = GD_VECTOR_BYTES / 4;  // floats per vector
using Vec = float __attribute__((vector_size(GD_VECTOR_BYTES)));
using IntVec = int32_t __attribute__((vector_size(GD_VECTOR_BYTES)));

GD_ALWAYS_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
GD_ALWAYS_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
GD_ALWAYS_INLINE Vec splat(float x) { return x - Vec{}; }

GD_ALWAYS_INLINE IntVec iota() {
  IntVec v;
  for (int i = 0; i < kVector; ++i) v[i] = i;
  return v;
}

GD_ALWAYS_INLINE float sum(Vec v) {
  // Pairwise, in a fixed order.
  float lane[kVector];
  std::memcpy(lane, &v, sizeof v);
  for (int width = kVector / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

// e^x, within 2 units in the last place; 0 below -87.3, the largest finite value above 88.7, NaN for NaN.
GD_ALWAYS_INLINE Vec exp(Vec x) {
  const Vec lo = splat(-87.33654f), hi = splat(88.72283f);
  const IntVec underflow = x < lo;
  x = x < lo ? lo : x;
  x = x > hi ? hi : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x * 1.44269504088896341f + magic) - magic;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 as a sum; n times the first term is exact
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two steps, because n reaches 128.
  const IntVec half = __builtin_convertvector(n, IntVec) >> 1;
  const IntVec rest = __builtin_convertvector(n, IntVec) - half;
  const Vec scale_a = reinterpret_cast<Vec>((half + 127) << 23), scale_b = reinterpret_cast<Vec>((rest + 127) << 23);
  const Vec value = (p * scale_a) * scale_b;
  return underflow ? Vec{} : value;
}

// --- rows of any input dtype to and from float; n is a multiple of 16 ------------------------------------------------

using HalfVec = uint16_t __attribute__((vector_size(GD_VECTOR_BYTES / 2)));
using WordVec = uint32_t __attribute__((vector_size(GD_VECTOR_BYTES)));

GD_ALWAYS_INLINE HalfVec load_halves(const uint16_t* p) {
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
  return half;
}
GD_ALWAYS_INLINE void store_halves(uint16_t* p, HalfVec half) { std::memcpy(p, &half, sizeof half); }

// GCC 12 converts 8-byte vectors element by element; Arm has an instruction for each direction.
GD_ALWAYS_INLINE WordVec widen(HalfVec x) {
#if defined(__aarch64__)
  return vmovl_u16(x);
#else
  return __builtin_convertvector(x, WordVec);
#endif
}
GD_ALWAYS_INLINE HalfVec narrow(WordVec x) {
#if defined(__aarch64__)
  return vmovn_u32(x);
#else
  return __builtin_convertvector(x, HalfVec);
#endif
}

// cpu/dtype.hpp's conversions, a vector at a time.
GD_ALWAYS_INLINE Vec widen_bf16(HalfVec x) { return reinterpret_cast<Vec>(widen(x) << 16); }
GD_ALWAYS_INLINE HalfVec round_bf16(Vec x) {
#if defined(__AVX512BF16__)
  // One instruction; unlike the other conversions it flushes subnormal inputs to 0.
  return reinterpret_cast<HalfVec>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return reinterpret_cast<HalfVec>(vcvt_bf16_f32(x));
#else
  const WordVec bits = reinterpret_cast<WordVec>(x);
  const WordVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return narrow((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
#endif
}

GD_ALWAYS_INLINE void load_row(float* GD_RESTRICT dst, const void* src, gd_dtype dtype, int64_t offset, int n) {
  if (dtype == GD_F32) {
    const float* p = static_cast<const float*>(src) + offset;
    for (int i = 0; i < n; i += kVector) store(dst + i, load(p + i));
  } else if (dtype == GD_BF16) {
    const uint16_t* p = static_cast<const uint16_t*>(src) + offset;
    for (int i = 0; i < n; i += kVector) store(dst + i, widen_bf16(load_halves(p + i)));
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(src) + offset;
    for (int i = 0; i < n; ++i) dst[i] = f16_to_f32(p[i]);
  }
}

GD_ALWAYS_INLINE void store_row(void* dst, gd_dtype dtype, int64_t offset, const float* GD_RESTRICT src, int n) {
  if (dtype == GD_F32) {
    float* p = static_cast<float*>(dst) + offset;
    for (int i = 0; i < n; i += kVector) store(p + i, load(src + i));
  } else if (dtype == GD_BF16) {
    uint16_t* p = static_cast<uint16_t*>(dst) + offset;
    for (int i = 0; i < n; i += kVector) store_halves(p + i, round_bf16(load(src + i)));
  } else {
    uint16_t* p = static_cast<uint16_t*>(dst) + offset;
    for (int i = 0; i < n; ++i) p[i] = f32_to_f16(src[i]);
  }
}

GD_ALWAYS_INLINE float load_scalar(const void* src, gd_dtype dtype, int64_t offset) {
  if (dtype == GD_F32) return static_cast<const float*>(src)[offset];
  const uint16_t bits = static_cast<const uint16_t*>(src)[offset];
  return dtype == GD_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

GD_ALWAYS_INLINE void store_scalar(void* dst, gd_dtype dtype, int64_t offset, float x) {
  if (dtype == GD_F32) {
    static_cast<float*>(dst)[offset] = x;
  } else {
    static_cast<uint16_t*>(dst)[offset] = dtype == GD_BF16 ? f32_to_bf16(x) : f32_to_f16(x);
  }
}

// --- transposition ---------------------------------------------------------------------------------------------------

// Swaps the off-diagonal halves of all 2d x 2d blocks of a square of kVector rows.
template <int d, int... i>
GD_ALWAYS_INLINE void exchange_halves(Vec* rows, std::integer_sequence<int, i...>) {
  for (int r = 0; r < kVector; ++r) {
    if (r & d) continue;
    const Vec a = rows[r], b = rows[r + d];
    rows[r] = __builtin_shufflevector(a, b, ((i & d) ? kVector + i - d : i)...);
    rows[r + d] = __builtin_shufflevector(a, b, ((i & d) ? kVector + i : i + d)...);
  }
  if constexpr (d > 1) exchange_halves<d / 2>(rows, std::integer_sequence<int, i...>{});
}

// Lane r of the result is the sum of rows[r].
GD_ALWAYS_INLINE Vec sum_rows(Vec* rows) {
  exchange_halves<kVector / 2>(rows, std::make_integer_sequence<int, kVector>{});
  for (int width = kVector / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) rows[i] += rows[i + width];
  return rows[0];
}

// dst [cols][rows] = src [rows][cols]^T; rows and cols are multiples of 16.
inline void transpose(float* GD_RESTRICT dst, int dst_ld, const float* GD_RESTRICT src, int src_ld, int rows,
                      int cols) {
  for (int i = 0; i < rows; i += kVector)
    for (int j = 0; j < cols; j += kVector) {
      Vec block[kVector];
      for (int r = 0; r < kVector; ++r) block[r] = load(src + (i + r) * src_ld + j);
      exchange_halves<kVector / 2>(block, std::make_integer_sequence<int, kVector>{});
      for (int r = 0; r < kVector; ++r) store(dst + (j + r) * dst_ld + i, block[r]);
    }
}

}  // namespace gatedelta::cpu::GD_ISA
