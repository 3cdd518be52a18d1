// Products of a step: with the state, with a step's rows and with N and P.
#pragma once

#include "cuda/portable/chain/chain.cuh"

namespace gatedelta::cuda::portable {

// c += s X^T. X: columns 16 kk .. 16 kk + 15 of a step's rows. At kk = 0 c begins with zero.
template <class Config>
GD_DEVICE void Chain<Config>::multiply_rows(Tokens& c, const uint32_t (&s)[kI][4], uint32_t X, int kk) const {
  const uint32_t own = tile_offset((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
  for (int n = 0; n < kT / 2; ++n) {
    uint32_t x[4];
    load_matrices(x, X + (own ^ (kk % 4 * 2 * kPacketBytes)) + kk / 4 * Config::kTileBytes + n * 16 * kTileRowBytes);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < kI; ++i) {
        float(&to)[4] = c[i][2 * n + m];
        if (kk == 0) {
          mma_first<Elem>(to, s[i][0], s[i][1], s[i][2], s[i][3], x[2 * m], x[2 * m + 1]);
        } else {
          mma<Elem>(to, s[i][0], s[i][1], s[i][2], s[i][3], x[2 * m], x[2 * m + 1]);
        }
      }
  }
}

// S^T += a X, X a step's rows. between(i) is called after every sixteen tokens by sixteen key dimensions.
template <class Config>
template <class Between>
GD_DEVICE void Chain<Config>::add_to_state(const Operand& a, uint32_t X, const Between& between) {
  const uint32_t own = tile_offset(lane & 15, lane >> 4);
#pragma unroll
  for (int J = 0; J < kT / 2; ++J)
#pragma unroll
    for (int kk = 0; kk < kKeyBlocks; ++kk) {
      uint32_t x[4];
      load_matrices_transposed(
          x, X + (own ^ (kk % 4 * 2 * kPacketBytes)) + kk / 4 * Config::kTileBytes + J * 16 * kTileRowBytes);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < kI; ++i)
          mma<Elem>(S[i][2 * kk + n], a[i][J][0], a[i][J][1], a[i][J][2], a[i][J][3], x[2 * n], x[2 * n + 1]);
      between(J * kKeyBlocks + kk);
    }
}

// W = beta o V - beta gamma o (K S), from (K S)^T.
template <class Config>
GD_DEVICE void Chain<Config>::compute_w(Tokens& W, uint32_t prep) const {
  constexpr int kTogether = kWarpColumns == 32 ? 1 : 2;  // tiles of eight tokens in one ldmatrix
#pragma unroll
  for (int n = 0; n < kT; n += kTogether) {
    uint32_t x[4];
    load_matrices_transposed(
        x, own_values() + (kWarpColumns == 32
                               ? values_offset<kWarpColumns>(8 * n + (lane & 7), lane >> 3)
                               : values_offset<kWarpColumns>(8 * n + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1)));
#pragma unroll
    for (int d = 0; d < kTogether; ++d) {
      const float2 gamma = vector2(prep, kReadKey, n + d), beta = vector2(prep, kBeta, n + d);
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 value = unpack<Elem>(x[kWarpColumns == 32 ? 2 * i + h : 2 * d + h]);
          float(&w)[4] = W[i][n + d];
          w[2 * h] = beta.x * value.x - gamma.x * w[2 * h];
          w[2 * h + 1] = beta.y * value.y - gamma.y * w[2 * h + 1];
        }
    }
  }
}

// c += a M, M lower triangular.
template <class Config>
GD_DEVICE void Chain<Config>::multiply_transposed_triangle(Tokens& c, const Operand& a, uint32_t M) const {
#pragma unroll
  for (int I = 0; I < kT / 2; ++I) {
    uint32_t rows[kI][4];
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int part = 0; part < 4; ++part) rows[i][part] = a[i][I][part];
    multiply_transposed_rows(c, rows, M, I);
  }
}

// The same with columns 16 I .. of `a` and rows 16 I .. of M alone. It adds to no later token than these.
template <class Config>
GD_DEVICE void Chain<Config>::multiply_transposed_rows(Tokens& c, const uint32_t (&a)[kI][4], uint32_t M, int I) const {
#pragma unroll
  for (int J = 0; J <= I; ++J) {
    uint32_t x[4];
    load_matrices_transposed(x, M + triangle_block(I, J) + lane * kPacketBytes);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < kI; ++i) mma<Elem>(c[i][2 * J + n], a[i][0], a[i][1], a[i][2], a[i][3], x[n], x[2 + n]);
  }
}

// c += a M^T, M lower triangular.
template <class Config>
GD_DEVICE void Chain<Config>::multiply_triangle(Tokens& c, const Operand& a, uint32_t M) const {
#pragma unroll
  for (int I = 0; I < kT / 2; ++I)
#pragma unroll
    for (int J = 0; J <= I; ++J) {
      uint32_t x[4];
      load_matrices(x, M + triangle_block(I, J) + lane * kPacketBytes);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < kI; ++i)
          mma<Elem>(c[i][2 * I + n], a[i][J][0], a[i][J][1], a[i][J][2], a[i][J][3], x[2 * n], x[2 * n + 1]);
    }
}

// Each token's column by its own factor.
template <class Config>
GD_DEVICE void Chain<Config>::scale(Tokens& c, uint32_t prep, StepVector vector) const {
#pragma unroll
  for (int n = 0; n < kT; ++n) {
    const float2 by = vector2(prep, vector, n);
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        c[i][n][2 * h] *= by.x;
        c[i][n][2 * h + 1] *= by.y;
      }
  }
}

}  // namespace gatedelta::cuda::portable
