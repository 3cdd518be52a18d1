// The inverse T of a step and value head, by one warp: four 8 x 8 substitutions in fp32 (a lane has a block and a
// column), joined to 16 x 16 and then to 32 x 32 by products of fp16 operands.
#pragma once

#include <type_traits>

#include "cuda/portable/prepare/prepare.cuh"

namespace gatedelta::cuda::portable {

// `gates`: those of the step and value head; betas are to_betas bytes further.
template <class Config>
GD_DEVICE void Prepare<Config>::solve(const Params& p, const Operands& in, int chunk_index, int head, uint32_t gates,
                                      int to_betas, uint32_t smem, int step, int warp, int lane) {
  uint8_t* const out = p.prepared_step(chunk_index, head, step);
  const uint32_t betas = gates + to_betas, logs = smem + Smem::kLogs + warp * Prepared::kVectorBytes;
  const float beta = load_shared(betas + lane * 4);
  store_vectors(p, out, load_shared(gates + lane * 4), beta, logs, smem, step, lane);
  if (p.vectors) {
    float* const to = p.chunk_vectors(chunk_index, head) + step * kStep + lane;
    to[kLogGamma * kChunkTokens] = load_shared(logs + lane * 4);
    to[kChunkBeta * kChunkTokens] = beta;
  }
  const uint32_t inverses = smem + Smem::kInverses + warp * 2 * Smem::kInverseBytes + lane * kPacketBytes;
  substitute(smem + Smem::kTriangles + step * 4 * Smem::kBelowBytes, betas, beta, inverses, lane);
  sync_warp();
  uint32_t columns[4], rows[4], scaled[4];  // D of the four blocks: (2t.., g), (g, 2t..); D beta / scale (g, 2t..)
  load_matrices(columns, inverses);
  load_matrices_transposed(rows, inverses);
  load_matrices_transposed(scaled, inverses + Smem::kInverseBytes);

  // 16 x 16: the lower left 8 x 8 is -D22 beta K K^T_21 D11.
  float z[2][4];
  uint32_t corner[2];
#pragma unroll
  for (int I = 0; I < 2; ++I) {
    float y[4];
    mma_first<Fp16>(y, columns[2 * I], 0, 0, 0, in.below[I], 0);  // (K K^T_21 D11)^T
    mma_first<Fp16>(z[I], scaled[2 * I + 1], 0, 0, 0, pack_half(y[0], y[1]), 0);
    corner[I] = pack_half(-z[I][0], -z[I][1]);
  }
  // 32 x 32: the lower left 16 x 16 is -(D2 beta) K K^T_21 D1.
  const float2 by = load_shared2(betas + (16 + 2 * (lane & 3)) * 4);
  const uint32_t scaled_corner = pack_half(-z[1][0] * (by.x / kProductScale), -z[1][1] * (by.y / kProductScale));
  float m[2][4], T[2][4];
  mma_first<Fp16>(m[0], scaled[2], scaled_corner, 0, scaled[3], in.above[0], in.above[1]);
  mma_first<Fp16>(m[1], scaled[2], scaled_corner, 0, scaled[3], in.above[2], in.above[3]);
  const uint32_t a[4] = {pack_half(-m[0][0], -m[0][1]), pack_half(-m[0][2], -m[0][3]), pack_half(-m[1][0], -m[1][1]),
                         pack_half(-m[1][2], -m[1][3])};
  mma_first<Fp16>(T[0], a[0], a[1], a[2], a[3], columns[0], transposed(corner[0]));
  mma_first<Fp16>(T[1], a[0], a[1], a[2], a[3], 0, columns[1]);
  store_triangles(p, in, out, T, rows, corner, logs, lane);
  // fp16 has three bits more. NOTE(ptxas): unless `opaque`, values derived from the lane spill on sm_90.
  if constexpr (std::is_same_v<Elem, Bf16>)
    if (load_shared(smem + Smem::kErrorFeedback + step * 4) > 0)
      gather_errors(out, T, rows, corner, logs, opaque(lane));
  sync_warp();  // logs and inverses are the next head's
}

// D of the 8 x 8 blocks on the diagonal: lane 8 r + c has column c of block r. Stored by columns, then times beta of
// the column's token, which is the lane's.
template <class Config>
GD_DEVICE void Prepare<Config>::substitute(uint32_t triangles, uint32_t betas, float own_beta, uint32_t to, int lane) {
  const int r = lane >> 3, column = lane & 7;
  float products[28], beta[8], x[8];
#pragma unroll
  for (int i = 0; i < 7; ++i) load_four(products + 4 * i, triangles + r * Smem::kBelowBytes + 16 * i);
  load_four(beta, betas + 32 * r);
  load_four(beta + 4, betas + 32 * r + 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < i; ++j) sum += products[i * (i - 1) / 2 + j] * x[j];
    x[i] = (i == column ? 1.0f : 0.0f) - beta[i] * sum;
  }
  store_shared_words(to, pack_half(x[0], x[1]), pack_half(x[2], x[3]), pack_half(x[4], x[5]), pack_half(x[6], x[7]));
  const float by = own_beta / kProductScale;
  store_shared_words(to + Smem::kInverseBytes, pack_half(by * x[0], by * x[1]), pack_half(by * x[2], by * x[3]),
                     pack_half(by * x[4], by * x[5]), pack_half(by * x[6], by * x[7]));
}

}  // namespace gatedelta::cuda::portable
