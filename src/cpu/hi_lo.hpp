// Products of operands split into high and low parts, and of triangles.
#pragma once

#include "cpu/engine_f32.hpp"
#include "cpu/plan.hpp"

namespace gatedelta::cpu::GD_ISA {

constexpr int C = kChunk;

// An operand as high + low, each exact in the engine's element type. A product of two such operands has a relative
// error of about 2^-16 instead of 2^-9. Engines that keep fp32 have no low part.
template <class Elem>
struct HiLo {
  Elem *high, *low;
};

template <class E>
HiLo<typename E::Elem> take_hi_lo(Carver& carve, int64_t size) {
  using Elem = typename E::Elem;
  Elem* high = carve.take<Elem>(size);
  return {high, carve.take<Elem>(E::kExact ? 0 : size)};
}

// Truncation makes the high part exact; the remainder is rounded once.
GD_ALWAYS_INLINE Vec high_part(Vec x) { return reinterpret_cast<Vec>(reinterpret_cast<WordVec>(x) & 0xffff0000u); }

// The bf16 number nearest to x, as the engines' packing rounds it.
GD_ALWAYS_INLINE Vec nearest_bf16(Vec x) {
  const WordVec bits = reinterpret_cast<WordVec>(x);
  return reinterpret_cast<Vec>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// What rounding x [n] to bf16 leaves.
inline void rounding_errors(float* rest, const float* x, int n) {
  for (int j = 0; j < n; j += kVector) store(rest + j, load(x + j) - nearest_bf16(load(x + j)));
}

template <class E>
void store_a_hi_lo(const HiLo<typename E::Elem>& a, int k, int m, const float* row) {
  if constexpr (E::kExact) {
    E::store_a_row(a.high, k, m, row);
  } else {
    float high[C], low[C];
    for (int j = 0; j < k; j += kVector) {
      const Vec x = load(row + j), h = high_part(x);
      store(high + j, h);
      store(low + j, x - h);
    }
    E::store_a_row(a.high, k, m, high);
    E::store_a_row(a.low, k, m, low);
  }
}

// B form of scale_r src_r, src [rows][32].
template <class E>
void store_b_hi_lo(const HiLo<typename E::Elem>& b, int rows, const float* src, const float* scale) {
  if constexpr (E::kExact) {
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < kPanel; j += kVector) store(b.high + r * kPanel + j, scale[r] * load(src + r * kPanel + j));
  } else {
    E::store_b_hi_lo(b.high, b.low, rows, rows, src, scale);
  }
}

// c [m][32] (+)= A (B high + B low), for an A that is exact: packed inputs.
template <class E, bool kAccumulate = false>
void multiply_hi_lo(const typename E::Elem* a, const HiLo<typename E::Elem>& b, int k, int m, float* c) {
  if constexpr (E::kExact) {
    E::template multiply<kAccumulate>({{a, b.high}}, k, 0, m, 0, k, c, kPanel);
  } else {
    E::template multiply<kAccumulate>({{a, b.high}, {a, b.low}}, k, 0, m, 0, k, c, kPanel);
  }
}

// c [64][32] (+)= sum of A B for lower or upper triangular A [64 x 64]: no products of a row block with zeros.
template <class E, bool kAccumulate, int n>
void multiply_lower(const Term<typename E::Elem> (&terms)[n], float* c) {
  constexpr int kRows = E::kTriangleRows;
  for (int m = 0; m < C; m += kRows) E::template multiply<kAccumulate>(terms, C, m, m + kRows, 0, m + kRows, c, kPanel);
}
template <class E, bool kAccumulate, int n>
void multiply_upper(const Term<typename E::Elem> (&terms)[n], float* c) {
  constexpr int kRows = E::kTriangleRows;
  for (int m = 0; m < C; m += kRows) E::template multiply<kAccumulate>(terms, C, m, m + kRows, m, C, c, kPanel);
}

// The terms of (A high + A low) (B high + B low) without A low B low, which is below the rounding.
template <class E>
struct HiLoTerms {
  using Elem = typename E::Elem;
  Term<Elem> terms[E::kExact ? 1 : 3];
  HiLoTerms(const HiLo<Elem>& a, const HiLo<Elem>& b) {
    terms[0] = {a.high, b.high};
    if constexpr (!E::kExact) {
      terms[1] = {a.high, b.low};
      terms[2] = {a.low, b.high};
    }
  }
};

// c [64][32] (+)= A B, lower triangular A; with `split` of both parts of A and B, otherwise of their high parts.
template <class E, bool kAccumulate>
void multiply_lower_parts(const HiLo<typename E::Elem>& a, const HiLo<typename E::Elem>& b, bool split, float* c) {
  if (split) return multiply_lower<E, kAccumulate>(HiLoTerms<E>(a, b).terms, c);
  multiply_lower<E, kAccumulate>({{a.high, b.high}}, c);
}

}  // namespace gatedelta::cpu::GD_ISA
