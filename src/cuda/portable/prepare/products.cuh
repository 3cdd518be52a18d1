// K K^T and Q K^T of a step, which the heads of a group share.
#pragma once

#include "cuda/portable/prepare/prepare.cuh"

namespace gatedelta::cuda::portable {

// The 32 x 32 block on the diagonal of K K^T without its lower left 16 x 16, or of Q K^T without its upper right. K K^T
// is symmetric: the block above its diagonal is, as it lies in registers, an operand of the inverse.
template <class Config>
GD_DEVICE void Prepare<Config>::multiply(float (&c)[2][4][4], uint32_t smem, int step, bool is_query, int lane) {
  const uint32_t rows = step * kStep * kTileRowBytes;
  const uint32_t left = smem + (is_query ? Smem::kQ : Smem::kK) + rows, right = smem + Smem::kK + rows;
  const uint32_t a_at = tile_offset(lane & 15, lane >> 4);
  const uint32_t b_at = tile_offset((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
  for (int kk = 0; kk < Config::kKeys / 16; ++kk) {
    const uint32_t tile = kk / 4 * Config::kTileBytes, packets = kk % 4 * 2 * kPacketBytes;
    uint32_t a[2][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(a[i], left + tile + (a_at ^ packets) + i * 16 * kTileRowBytes);
      load_matrices(b[i], right + tile + (b_at ^ packets) + i * 16 * kTileRowBytes);
    }
    const auto product = [&](int i, int j) {
      const uint32_t b0 = b[j / 2][j % 2 * 2], b1 = b[j / 2][j % 2 * 2 + 1];
      if (kk == 0) {
        mma_first<Elem>(c[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b0, b1);
      } else {
        mma<Elem>(c[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b0, b1);
      }
    };
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      product(0, j);
      product(1, 2 + j);
      if (is_query) {
        product(1, j);
      } else {
        product(0, 2 + j);
      }
    }
  }
}

// Decides from K K^T whether the step needs error feedback (chain/rounding.cuh): some keys resemble each other, and
// none is more than twice as long as another, because a short key's error does not cancel a long one's.
template <class Config>
GD_DEVICE void Prepare<Config>::needs_error_feedback(const float (&c)[2][4][4], int rows, uint32_t to, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float least = 3e38f, most = 0, alike = 0;  // squares of lengths; the largest product of two keys
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 2 * i; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 16 * i + e / 2 * 8 + g, column = 8 * j + 2 * t + e % 2;
        if (row != column) {
          alike = fmaxf(alike, c[i][j][e]);
        } else if (row < rows) {
          least = fminf(least, c[i][j][e]);
          most = fmaxf(most, c[i][j][e]);
        }
      }
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    least = fminf(least, shuffle_xor(least, by));
    most = fmaxf(most, shuffle_xor(most, by));
    alike = fmaxf(alike, shuffle_xor(alike, by));
  }
  if (lane == 0) store_shared(to, most <= 4 * least && alike > 0.75f * least ? 1.0f : 0.0f);
}

template <class Config>
GD_DEVICE void Prepare<Config>::normalise(float (&c)[2][4][4], uint32_t smem, int step, bool is_query, int lane) {
  const uint32_t rows = norms_of(smem, is_query, step), columns = norms_of(smem, false, step);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 16 * i + (lane >> 2);
    const float upper = load_shared(rows + row * 4), lower = load_shared(rows + (row + 8) * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 by = load_shared2(columns + (8 * j + 2 * (lane & 3)) * 4);
      c[i][j][0] *= upper * by.x;
      c[i][j][1] *= upper * by.y;
      c[i][j][2] *= lower * by.x;
      c[i][j][3] *= lower * by.y;
    }
  }
}

template <class Config>
GD_DEVICE void Prepare<Config>::store_scores(const float (&c)[2][4][4], uint32_t to, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2 + 2 * i; ++j)
      store_shared4(to + ((2 * i + j) * 32 + lane) * kPacketBytes, c[i][j][0], c[i][j][1], c[i][j][2], c[i][j][3]);
}

template <class Config>
GD_DEVICE void Prepare<Config>::store_products(const float (&c)[2][4][4], uint32_t smem, int step, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const auto two = [&](int i, int j, int h) {
    return pack_half(kProductScale * c[i][j][2 * h], kProductScale * c[i][j][2 * h + 1]);
  };
  const uint32_t operands = smem + Smem::kOperands + step * Smem::kOperandBytes + lane * kPacketBytes;
  store_shared_words(operands, two(0, 2, 0), two(0, 3, 0), two(0, 2, 1), two(0, 3, 1));
  store_shared_words(operands + 32 * kPacketBytes, two(0, 0, 1), two(1, 2, 1), 0, 0);
  // Row g of an 8 x 8 block has g numbers below the diagonal.
  const uint32_t below = smem + Smem::kTriangles + step * 4 * Smem::kBelowBytes + (g * (g - 1) / 2 + 2 * t) * 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float(&x)[4] = c[r / 2][r];
    if (2 * t < g) store_shared(below + r * Smem::kBelowBytes, x[r % 2 * 2]);
    if (2 * t + 1 < g) store_shared(below + r * Smem::kBelowBytes + 4, x[r % 2 * 2 + 1]);
    if (t == g / 2)
      store_shared(smem + Smem::kLengths + (step * kStep + 8 * r + g) * 4, g % 2 ? x[r % 2 * 2 + 1] : x[r % 2 * 2]);
  }
}

template <class Config>
GD_DEVICE void Prepare<Config>::load_operands(Operands& o, uint32_t smem, int step, int lane) {
  const uint32_t scores = smem + Smem::kScores + step * Smem::kScoreBytes + lane * kPacketBytes;
#pragma unroll
  for (int i = 0; i < 6; ++i) load_four(o.qk[i / 2] + i % 2 * 4, scores + i * 32 * kPacketBytes);
  const uint32_t operands = smem + Smem::kOperands + step * Smem::kOperandBytes + lane * kPacketBytes;
  const uint4 a = load_shared_words(operands), b = load_shared_words(operands + 32 * kPacketBytes);
  o.above[0] = a.x;
  o.above[1] = a.y;
  o.above[2] = a.z;
  o.above[3] = a.w;
  o.below[0] = b.x;
  o.below[1] = b.y;
}

}  // namespace gatedelta::cuda::portable
