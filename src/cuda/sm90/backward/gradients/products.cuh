// Products of the gradients kernel, and what its row roles share.
#pragma once

#include "cuda/sm90/backward/gradients/gradients.cuh"

namespace gatedelta::cuda::sm90 {

// a [64 x 128] (tiles side by side) times b^T, b alike: 64 x 64.
template <class Elem>
GD_DEVICE void Gradients<Elem>::multiply_rows(float (&to)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < 8; ++step)
    Wgmma<Elem, 64>::template ss<false, false>(
        to, tile_descriptor(a + step / 4 * kTileBytes, step % 4 * kStepContiguous),
        tile_descriptor(b + step / 4 * kTileBytes, step % 4 * kStepContiguous), step > 0);
  mma_commit();
}

// a [64 tokens x 128 v] times a state's transpose.
template <class Elem>
GD_DEVICE void Gradients<Elem>::multiply_state(float (&to)[64], uint32_t a, uint32_t state) {
#pragma unroll
  for (int step = 0; step < 8; ++step)
    Wgmma<Elem, 128>::template ss<false, true>(to,
                                               tile_descriptor(a + step / 4 * kTileBytes, step % 4 * kStepContiguous),
                                               state_descriptor(state + step * kStateStepBytes), step > 0);
  mma_commit();
}

// Adds a [64 x 64], or its transpose, times rows [64 tokens x 128].
template <class Elem>
template <bool kTransposed>
GD_DEVICE void Gradients<Elem>::add_products(float (&to)[64], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    Wgmma<Elem, 128>::template ss<kTransposed, true>(
        to, tile_descriptor(a, step * (kTransposed ? kStepRows : kStepContiguous)),
        wide_descriptor(b, step * kStepRows), true);
  mma_commit();
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::scale_rows(float (&x)[64], float first, float second) {
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] *= i / 2 % 2 ? second : first;
}

// Calls f with the index of two adjacent accumulator elements and the tile elements at their place.
template <class Elem>
template <class F>
GD_DEVICE void Gradients<Elem>::for_rows(uint32_t tiles, const F& f) const {
  uint32_t at = tiles + tile_offset(16 * warp + block_row(lane), block_column(lane));
  // NOTE(ptxas): opaque, so that derived addresses are not kept in registers between calls.
  asm volatile("" : "+r"(at));
#pragma unroll
  for (int J = 0; J < 8; ++J) {
    uint32_t y[4];
    ldmatrix(y, (at + J / 4 * kTileBytes) ^ (J % 4 * 32));
#pragma unroll
    for (int i = 0; i < 4; ++i) f(8 * J + 2 * i, unpack<Elem>(y[i]));
  }
}

// x += factor o y, y in tiles.
template <class Elem>
GD_DEVICE void Gradients<Elem>::add_rows(float (&x)[64], float2 factor, uint32_t tiles) const {
  for_rows(tiles, [&](int i, float2 y) {
    const float of_row = i / 2 % 2 ? factor.y : factor.x;
    x[i] += of_row * y.x;
    x[i + 1] += of_row * y.y;
  });
}

// <x_i, y_i> of this thread's rows, y in tiles; every thread of a row has it.
template <class Elem>
GD_DEVICE float2 Gradients<Elem>::dots(const float (&x)[64], uint32_t tiles) const {
  float2 d = make_float2(0, 0);
  for_rows(tiles, [&](int i, float2 y) { (i / 2 % 2 ? d.y : d.x) += x[i] * y.x + x[i + 1] * y.y; });
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    d.x += __shfl_xor_sync(~0u, d.x, step);
    d.y += __shfl_xor_sync(~0u, d.y, step);
  }
  return d;
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::store_sums(uint32_t to, float2 x) const {
  if ((lane & 3) != 0) return;
  store_shared(to + row(0) * 4, x.x);
  store_shared(to + row(1) * 4, x.y);
}

// x *= Gamma_ij r^k_j strictly below the diagonal; the rest becomes 0 by selection, never by a product.
template <class Elem>
GD_DEVICE void Gradients<Elem>::gate(float (&x)[32], const Cursor& cursor) const {
  const uint32_t log_gamma = vector(cursor, kLogGamma), norms = vector(cursor, kKeyNorm);
  const float b[2] = {of_row(cursor, kLogGamma, 0), of_row(cursor, kLogGamma, 1)};
  const int rows[2] = {row(0), row(1)};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int column = 8 * n + 2 * (lane & 3);
    const float2 c = load_shared2(log_gamma + column * 4), r = load_shared2(norms + column * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* y = x + 4 * n + 2 * i;
      y[0] = column < rows[i] ? y[0] * r.x * exp2_approx(b[i] - c.x) : 0.0f;
      y[1] = column + 1 < rows[i] ? y[1] * r.y * exp2_approx(b[i] - c.y) : 0.0f;
    }
  }
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::store_tile(uint32_t tile, const float (&x)[32], float first, float second) const {
  const uint32_t to = tile + tile_offset(16 * warp + block_row(lane), block_column(lane));
#pragma unroll
  for (int J = 0; J < 4; ++J) {
    const float* c = x + 8 * J;
    stmatrix(to ^ (J * 32), pack<Elem>(first * c[0], first * c[1]), pack<Elem>(second * c[2], second * c[3]),
             pack<Elem>(first * c[4], first * c[5]), pack<Elem>(second * c[6], second * c[7]));
  }
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::clear(float (&x)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] = 0;
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::add(float (&x)[64], const float (&y)[64], float2 factor) {
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] += y[i] * (i / 2 % 2 ? factor.y : factor.x);
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::publish_head(Cursor& cursor) const {
  warp_arrive(sum_pipe.full(cursor.row.stage));
  warp_arrive(row_pipe.empty(cursor.row.stage));
  cursor.next_head();
}

}  // namespace gatedelta::cuda::sm90
