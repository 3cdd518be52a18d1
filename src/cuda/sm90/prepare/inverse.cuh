// The inverse T of a chunk.
#pragma once

#include "cuda/sm90/device.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/prepare/config.hpp"

namespace gatedelta::cuda::sm90 {

GD_DEVICE uint32_t pack_half(float first, float second) { return pack<__half>(first, second); }
GD_DEVICE constexpr uint32_t off_diagonal_offset(int I, int J) {
  return static_cast<uint32_t>(I * (I - 1) / 2 + J) * kBlockBytes;
}

// K K^T is stored in fp16, scaled by 1/8: unnormalised keys may be long, and so may D beta.
constexpr float kProductScale = 1.0f / 8;

// Stores a warp's 16 rows of the normalised K K^T for the substitutions and for the warps below. Returns the lower left
// quarter of the diagonal block.
template <int I>
GD_DEVICE uint32_t store_products(float (&kk)[32], bool normalise, uint32_t smem, int lane) {
  const int g = lane >> 2, t = lane & 3, row = 16 * I + g;
  const uint32_t norms = smem + PrepareSmem::kNorms;
  if (normalise) {
    const float r0 = load_shared(norms + row * 4), r1 = load_shared(norms + (row + 8) * 4);
#pragma unroll
    for (int n = 2 * I; n < 8; ++n) {
      const float2 c = load_shared2(norms + (8 * n + 2 * t) * 4);
      kk[4 * n] *= r0 * c.x;
      kk[4 * n + 1] *= r0 * c.y;
      kk[4 * n + 2] *= r1 * c.x;
      kk[4 * n + 3] *= r1 * c.y;
    }
  }
  const uint32_t products = smem + PrepareSmem::kProducts + lane * 16;
#pragma unroll
  for (int J = I + 1; J < 4; ++J) {
    const auto two = [&](int i) { return pack_half(kProductScale * kk[8 * J + i], kProductScale * kk[8 * J + i + 1]); };
    store_shared_words(products + off_diagonal_offset(J, I), make_uint4(two(0), two(4), two(2), two(6)));
  }
  const float* const own = kk + 8 * I;
  const uint32_t triangle =
      smem + PrepareSmem::kTriangles + 2 * I * PrepareSmem::kBelowBytes + (g * (g - 1) / 2 + 2 * t) * 4;
  if (2 * t < g) {
    store_shared(triangle, own[0]);
    store_shared(triangle + PrepareSmem::kBelowBytes, own[6]);
  }
  if (2 * t + 1 < g) {
    store_shared(triangle + 4, own[1]);
    store_shared(triangle + PrepareSmem::kBelowBytes + 4, own[7]);
  }
  if (t == g / 2) {
    store_shared(smem + PrepareSmem::kLengths + row * 4, g & 1 ? own[1] : own[0]);
    store_shared(smem + PrepareSmem::kLengths + (row + 8) * 4, g & 1 ? own[7] : own[6]);
  }
  return pack_half(kProductScale * own[2], kProductScale * own[3]);
}

GD_DEVICE void load_four(float* to, uint32_t from) {
  const float4 v = load_shared4(from);
  to[0] = v.x;
  to[1] = v.y;
  to[2] = v.z;
  to[3] = v.w;
}
GD_DEVICE void store_column(uint32_t to, const float (&x)[8]) {
  store_shared_words(
      to, make_uint4(pack_half(x[0], x[1]), pack_half(x[2], x[3]), pack_half(x[4], x[5]), pack_half(x[6], x[7])));
}

// The 8 x 8 inverses on the diagonal, of two heads at once: each lane has a head, one of two blocks and a column.
// `betas` are those of the lane's head.
template <int I>
GD_DEVICE void substitute(uint32_t smem, uint32_t betas, int lane) {
  const int column = lane & 7, corner = lane >> 3 & 1;
  const uint32_t triangle = smem + PrepareSmem::kTriangles + (2 * I + corner) * PrepareSmem::kBelowBytes;
  const uint32_t own_betas = betas + (16 * I + 8 * corner) * 4;
  float products[28], beta[4], x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i % 4 == 0) load_four(beta, own_betas + i * 4);
    const int first = i * (i - 1) / 2;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < i; ++j) {
      if ((first + j) % 4 == 0) load_four(products + first + j, triangle + (first + j) * 4);
      sum += products[first + j] * x[j];
    }
    x[i] = (i == column ? 1.0f : 0.0f) - beta[i % 4] * sum;
  }
  const float scale = load_shared(own_betas + column * 4) / kProductScale;
  const uint32_t seq_heads = smem + PrepareSmem::kDiagonals + I * PrepareSmem::kDiagonalsBytes + lane * 16;
  store_column(seq_heads, x);
#pragma unroll
  for (float& y : x) y *= scale;
  store_column(seq_heads + PrepareSmem::kScaled, x);
  __syncwarp();
}

// M[8 J ..] = M_IJ for J < I, diagonal = D_I in fp16; stores both for the warps below. `products` is K K^T as
// store_products left it.
template <int I>
GD_DEVICE void begin_block_row(float* M, uint32_t (&diagonal)[4], const uint32_t* products, uint32_t below,
                               uint32_t seq_heads, uint32_t exchange, uint32_t betas, int lane) {
  uint32_t columns[2], rows[2], scaled[4];  // D11 and D22 by columns and by rows; D_I beta
  ldmatrix_x2(columns, seq_heads + (lane & 15) * 16);
  ldmatrix_x2_trans(rows, seq_heads + (lane & 15) * 16);
  ldmatrix_x2_trans(scaled, seq_heads + PrepareSmem::kScaled + (lane & 15) * 16);
  float y[4] = {}, z[4] = {};
  mma_k8(y, columns[0], 0, below);                 // (K K^T_21 D11)^T
  mma_k8(z, scaled[1], 0, pack_half(y[0], y[1]));  // D22 L21 D11
  diagonal[0] = rows[0];
  diagonal[1] = pack_half(-z[0], -z[1]);
  diagonal[2] = 0;
  diagonal[3] = rows[1];
  if constexpr (I < 3)
    stmatrix(exchange + I * kBlockBytes + lane * 16, diagonal[0], diagonal[1], diagonal[2], diagonal[3]);
  if constexpr (I > 0) {
    const float2 beta = load_shared2(betas + (16 * I + 2 * (lane & 3)) * 4);
    scaled[3] = scaled[1];
    scaled[1] = pack_half(-z[0] * (beta.x / kProductScale), -z[1] * (beta.y / kProductScale));
    scaled[2] = 0;
#pragma unroll
    for (int J = 0; J < I; ++J) {
      float* c = M + 8 * J;
#pragma unroll
      for (int i = 0; i < 8; ++i) c[i] = 0;
      mma_k16(c, scaled, products[4 * J], products[4 * J + 1]);
      mma_k16(c + 4, scaled, products[4 * J + 2], products[4 * J + 3]);
      if constexpr (I < 3)
        stmatrix(exchange + PrepareSmem::kOffDiagonal + off_diagonal_offset(I, J) + lane * 16, pack_half(c[0], c[1]),
                 pack_half(c[2], c[3]), pack_half(c[4], c[5]), pack_half(c[6], c[7]));
    }
  }
}

// After the barrier: turns M_IJ in T[8 J ..] into T_IJ for J < I.
template <int I>
GD_DEVICE void finish_block_row(float* T, uint32_t exchange, int lane) {
  const uint32_t diagonals = exchange + lane * 16, blocks = exchange + PrepareSmem::kOffDiagonal + lane * 16;
#pragma unroll
  for (int K = I - 1; K >= 0; --K) {
    float* c = T + 8 * K;
    const uint32_t a[4] = {pack_half(-c[0], -c[1]), pack_half(-c[2], -c[3]), pack_half(-c[4], -c[5]),
                           pack_half(-c[6], -c[7])};
    uint32_t b[4];
#pragma unroll
    for (int J = 0; J < K; ++J) {
      ldmatrix_trans(b, blocks + off_diagonal_offset(K, J));
      mma_k16(T + 8 * J, a, b[0], b[1]);
      mma_k16(T + 8 * J + 4, a, b[2], b[3]);
    }
    ldmatrix_trans(b, diagonals + K * kBlockBytes);
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = 0;
    mma_k16(c, a, b[0], b[1]);
    mma_k16(c + 4, a, b[2], b[3]);
  }
}

// Stores the block row of T, rows scaled by r^k.
template <int I, class Elem>
GD_DEVICE void store_inverse(const float* T, const uint32_t (&diagonal)[4], uint32_t triangle, float r0, float r1,
                             int lane) {
  const uint32_t at = triangle + triangle_block(I, 0) + block_offset(block_row(lane), block_column(lane));
#pragma unroll
  for (int J = 0; J < I; ++J) {
    const float* c = T + 8 * J;
    stmatrix(at + J * kBlockBytes, pack<Elem>(r0 * c[0], r0 * c[1]), pack<Elem>(r1 * c[2], r1 * c[3]),
             pack<Elem>(r0 * c[4], r0 * c[5]), pack<Elem>(r1 * c[6], r1 * c[7]));
  }
  const float2 a = unpack<__half>(diagonal[0]), b = unpack<__half>(diagonal[1]), d = unpack<__half>(diagonal[3]);
  stmatrix(at + I * kBlockBytes, pack<Elem>(r0 * a.x, r0 * a.y), pack<Elem>(r1 * b.x, r1 * b.y), 0,
           pack<Elem>(r1 * d.x, r1 * d.y));
}

// Block row I of T for all heads of the group. A head's T is stored to global memory when every warp has reached the
// next head's barrier.
template <int I, class Elem>
GD_DEVICE void invert(const CallParams& p, int chunk_index, int first_head, uint32_t smem, uint32_t betas,
                      uint32_t below, int thread_lane) {
  uint32_t products[4 * I + 1];
#pragma unroll
  for (int J = 0; J < I; ++J) {
    const uint4 v = load_shared_words(smem + PrepareSmem::kProducts + off_diagonal_offset(I, J) + thread_lane * 16);
    products[4 * J] = v.x;
    products[4 * J + 1] = v.y;
    products[4 * J + 2] = v.z;
    products[4 * J + 3] = v.w;
  }
  const bool sends = I == 0 && thread_lane == 0;
  const auto send = [&](int v) {
    bulk_store(p.prepared_chunk(chunk_index, first_head + v), smem + PrepareSmem::kInverse + v % 2 * kInverseBytes,
               kInverseBytes);
    store_commit();
  };
#pragma unroll 1
  for (int v = 0; v < p.group; ++v) {
    const int lane = opaque(thread_lane);
    const uint32_t exchange = smem + PrepareSmem::kExchange + v % 2 * PrepareSmem::kExchangeBytes;
    if (v % 2 == 0) substitute<I>(smem, betas + min(v + (lane >> 4), p.group - 1) * kVectorBytes, lane);
    float M[8 * I + 1];
    uint32_t diagonal[4];
    begin_block_row<I>(
        M, diagonal, products, below,
        smem + PrepareSmem::kDiagonals + I * PrepareSmem::kDiagonalsBytes + v % 2 * PrepareSmem::kDiagonalBytes,
        exchange, betas + v * kVectorBytes, lane);
    if (sends) store_wait_read<0>();  // the T buffer about to be overwritten
    named_barrier_sync_divergent(kBlockRowsReady, kPrepareThreads);
    if (sends && v > 0) send(v - 1);
    finish_block_row<I>(M, exchange, lane);
    const uint32_t norms = smem + PrepareSmem::kNorms + (16 * I + (lane >> 2)) * 4;
    store_inverse<I, Elem>(M, diagonal, smem + PrepareSmem::kInverse + v % 2 * kInverseBytes, load_shared(norms),
                           load_shared(norms + 32), lane);
    fence_async_shared();
  }
  named_barrier_sync_divergent(kBlockRowsReady, kPrepareThreads);
  if (sends) {
    send(p.group - 1);
    store_wait_read<0>();
  }
}

}  // namespace gatedelta::cuda::sm90
