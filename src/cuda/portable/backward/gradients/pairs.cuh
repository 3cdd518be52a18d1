// F and E: from pairs of tokens to shared memory, and their products with K and Q.
#pragma once

#include "cuda/portable/backward/gradients/gradients.cuh"

namespace gatedelta::cuda::portable {

// Multiplies by Gamma and norms, and stores without the diagonal. Above it e^{b_i - b_j} may be infinite: zeros by
// selection.
template <class Config>
GD_DEVICE void Gradients<Config>::store_pairs(uint32_t matrices) const {
  const float first_end = of_row(Smem::kLogs, kStep - 1);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = 16 * pair_tile + 8 * h + g;
    const float log = of_row(Smem::kLogs, r), pending = of_row(Smem::kPending, r);
    const float by = is_update ? -of_row(Smem::kKeyNorm, r) : p.scale * of_row(Smem::kQueryNorm, r);
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      if (J > pair_tile) break;
      const float shift = pair_tile >= 2 && J < 2 ? first_end : 0.0f;  // from the first step to the second
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = 16 * J + 8 * n + 2 * t;
        const float2 logs = load_shared2(vector(Smem::kLogs) + c * 4),
                     norms = load_shared2(vector(Smem::kKeyNorm) + c * 4);
        const float x = pairs[J][n][2 * h], y = pairs[J][n][2 * h + 1];
        if (c == r || c + 1 == r) store_diagonal(r, c == r ? x : y, by * (c == r ? norms.x : norms.y));
        const float first = c < r ? x * by * norms.x * exp2_approx(log + (shift - logs.x)) : 0.0f,
                    second = c + 1 < r ? y * by * norms.y * exp2_approx(log + (shift - logs.y)) : 0.0f;
        const uint32_t at = quadrant(pair_tile / 2, J / 2) + values_offset<kStep>(r % kStep, (2 * J + n) % 4) + 4 * t;
        if (is_update) {
          store_shared_word(matrices + Smem::kUnscaledE + at, pack<Elem>(first, second));
          store_shared_word(matrices + Smem::kE + at, pack<Elem>(pending * first, pending * second));
        } else {
          store_shared_word(matrices + Smem::kF + at, pack<Elem>(first, second));
        }
      }
    }
  }
}

template <class Config>
GD_DEVICE void Gradients<Config>::store_diagonal(int r, float x, float by) const {
  if (is_update) {
    store_shared(vector(Smem::kUpdate) + r * 4, x);
  } else {
    const uint32_t at = vector(Smem::kDiagonal) + r * 4;
    store_shared(at, load_shared(at) + by * x);
  }
}

// c += M X for a quadrant M of 32 x 32 whose columns are 32 rows of X, K or Q.
template <class Config>
template <bool kDiagonal>
GD_DEVICE void Gradients<Config>::multiply_quadrant(Rows& c, uint32_t matrix, int I, int J, uint32_t X) const {
#pragma unroll
  for (int kk = 0; kk < 2; ++kk) {
    uint32_t x[kN / 2][4], a[4];
    load_key_operand(x, X, 32 * J + 16 * kk);
#pragma unroll
    for (int i = kDiagonal ? kk : 0; i < 2; ++i) {
      load_matrices(a, matrix + quadrant(I, J) + values_offset<kStep>(16 * i + (lane & 15), 2 * kk + (lane >> 4)));
      multiply(c[i], a, x);
    }
  }
}

// c += M^T X.
template <class Config>
template <bool kDiagonal>
GD_DEVICE void Gradients<Config>::multiply_transposed_quadrant(Rows& c, uint32_t matrix, int I, int J,
                                                               uint32_t X) const {
#pragma unroll
  for (int kk = 0; kk < 2; ++kk) {
    uint32_t x[kN / 2][4], a[4];
    load_key_operand(x, X, 32 * I + 16 * kk);
#pragma unroll
    for (int j = 0; j < (kDiagonal ? kk + 1 : 2); ++j) {
      load_matrices_transposed(
          a, matrix + quadrant(I, J) +
                 values_offset<kStep>(16 * kk + (lane & 7) + (lane >> 4) * 8, 2 * j + (lane >> 3 & 1)));
      multiply(c[j], a, x);
    }
  }
}

template <class Config>
GD_DEVICE void Gradients<Config>::load_key_operand(uint32_t (&x)[kN / 2][4], uint32_t X, int first_row) const {
#pragma unroll
  for (int n = 0; n < kN / 2; ++n) {
    const int first = column + 16 * n;
    load_matrices_transposed(x[n], X + first / kTileColumns * Config::kTileBytes +
                                       tile_offset(first_row + (lane & 15), first % kTileColumns / 8 + (lane >> 4)));
  }
}

template <class Config>
GD_DEVICE void Gradients<Config>::multiply(float (&c)[kN][4], const uint32_t (&a)[4], const uint32_t (&x)[kN / 2][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) mma<Elem>(c[n], a[0], a[1], a[2], a[3], x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
}

}  // namespace gatedelta::cuda::portable
