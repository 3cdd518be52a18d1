// End of a value head: adds its dQ and dK to those of the group, and writes the terms of dg and dbeta.
#pragma once

#include "cuda/portable/backward/gradients/gradients.cuh"

namespace gatedelta::cuda::portable {

template <class Config>
GD_DEVICE void Gradients<Config>::finish_head(uint32_t matrices) {
  scale_rows(queries, Smem::kQueryRow);
  scale_rows(reads, Smem::kReadRow);
  scale_rows(writes, Smem::kWriteRow);
  const uint32_t K = smem + Smem::kK, Q = smem + Smem::kQ;
  float kappa[4], written[4], of_pairs[4], read[4];
  find_dots(kappa, writes, K);
  // The quadrant on the diagonal, then the one below it: the second half of the rows reads it, the first half writes.
  multiply_quadrant<true>(queries, matrices + Smem::kF, half, half, K);
  multiply_quadrant<true>(reads, matrices + Smem::kUnscaledE, half, half, K);
  multiply_transposed_quadrant<true>(writes, matrices + Smem::kF, half, half, Q);
  multiply_transposed_quadrant<true>(writes, matrices + Smem::kE, half, half, K);
  if (half == 1) {
    multiply_quadrant<false>(queries, matrices + Smem::kF, 1, 0, K);
    multiply_quadrant<false>(reads, matrices + Smem::kUnscaledE, 1, 0, K);
  } else {
    multiply_transposed_quadrant<false>(writes, matrices + Smem::kF, 1, 0, Q);
    multiply_transposed_quadrant<false>(writes, matrices + Smem::kE, 1, 0, K);
  }
  find_dots(of_pairs, queries, Q);
  find_dots(read, reads, K);
  find_dots(written, writes, K);
#pragma unroll
  for (int i = 0; i < 4; ++i) of_pairs[i] -= written[i] - kappa[i];
  store_sums(of_pairs, 0);
  store_sums(read, 1);
  store_sums(kappa, 2);
#pragma unroll
  for (int by = 16; by > 0; by /= 2) product += shuffle_xor(product, by);
  if (lane == 0) store_shared(smem + Smem::kProducts + warp * 4, product);
  scale_rows(reads, Smem::kPending);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dq[i][n][e] += queries[i][n][e];
        dk[i][n][e] += reads[i][n][e] + writes[i][n][e];
      }
}

template <class Config>
GD_DEVICE void Gradients<Config>::scale_rows(Rows& x, typename Smem::Vector by) const {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = of_row(by, row(i, h));
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        x[i][n][2 * h] *= factor;
        x[i][n][2 * h + 1] *= factor;
      }
    }
}

// Products of each row with the same row of K or Q, over the thread's columns; [2 i + h].
template <class Config>
GD_DEVICE void Gradients<Config>::find_dots(float (&to)[4], const Rows& x, uint32_t X) const {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 y = unpack<Elem>(load_shared_word(keys_at(X, i, h, n)));
        sum += x[i][n][2 * h] * y.x + x[i][n][2 * h + 1] * y.y;
      }
      to[2 * i + h] = sum;
    }
}

template <class Config>
GD_DEVICE void Gradients<Config>::store_sums(float (&x)[4], int which) const {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] += shuffle_xor(x[i], 1);
    x[i] += shuffle_xor(x[i], 2);
    if (t == 0) store_shared(sums_at(which, warp >> 1) + row(i / 2, i % 2) * 4, x[i]);
  }
}

template <class Config>
GD_DEVICE float Gradients<Config>::sum_of(int which, int r) const {
  const auto quarter = [&](int i) { return load_shared(sums_at(which, i) + r * 4); };
  return quarter(0) + quarter(1) + (quarter(2) + quarter(3));
}

template <class Config>
GD_DEVICE void Gradients<Config>::store_dots(int v) const {
  float* const to = p.dots_of(chunk_index, key_head * p.group + v, part);
  if (tid < Dots::kSums * kChunkTokens) {
    to[tid] = sum_of(tid / kChunkTokens, tid % kChunkTokens);
  } else {
    to[tid] = of_row(Smem::kUpdate, tid % kChunkTokens);
  }
  if (tid == 0) {
    float all = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) all += load_shared(smem + Smem::kProducts + i * 4);
    to[Dots::kProduct] = all;
  }
}

}  // namespace gatedelta::cuda::portable
