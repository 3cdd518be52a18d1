// Products over value columns, a stage at a time.
#pragma once

#include "cuda/portable/backward/gradients/gradients.cuh"

namespace gatedelta::cuda::portable {

template <class Config>
GD_DEVICE void Gradients<Config>::multiply_stage(uint32_t stage) {
#pragma unroll
  for (int kk = 0; kk < Config::kValueColumns / 16; ++kk) {
    uint32_t s[kN / 2][4];
    load_snapshot_operand(s, stage + Smem::kStates, kk);
    multiply_rows(queries, stage + Smem::kOutputs, s, kk);
    multiply_rows(reads, stage + Smem::kValues, s, kk);
    load_snapshot_operand(s, stage + Smem::kGradients, kk);
    multiply_rows(writes, stage + Smem::kU, s, kk);
    multiply_pairs(stage, kk);
  }
#pragma unroll
  for (int i = 0; i < Smem::kSnapshotBytes / kPacketBytes / kThreads; ++i) {
    const uint32_t at = stage + (tid + i * kThreads) * kPacketBytes;
    const uint4 a = load_shared_words(at + Smem::kStates), b = load_shared_words(at + Smem::kGradients);
    product += dot(a.x, b.x) + dot(a.y, b.y) + (dot(a.z, b.z) + dot(a.w, b.w));
  }
}

template <class Config>
GD_DEVICE float Gradients<Config>::dot(uint32_t a, uint32_t b) {
  const float2 x = unpack<Elem>(a), y = unpack<Elem>(b);
  return x.x * y.x + x.y * y.y;
}

// Loads sixteen value columns by the warp's key columns, as a right operand.
template <class Config>
GD_DEVICE void Gradients<Config>::load_snapshot_operand(uint32_t (&s)[kN / 2][4], uint32_t snapshot, int kk) const {
  const int value_block = 2 * kk + (lane >> 3 & 1), key_block = column / 8 + (lane >> 4);
#pragma unroll
  for (int n = 0; n < kN / 2; ++n)
    load_matrices_transposed(
        s[n], snapshot + (value_block * kKeyBlocks + key_block + 2 * n) * 128 + (lane & 7) * kPacketBytes);
}

template <class Config>
GD_DEVICE void Gradients<Config>::multiply_rows(Rows& c, uint32_t X, const uint32_t (&s)[kN / 2][4], int kk) const {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t a[4];
    load_matrices(a, X + values_offset<Config::kValueColumns>(32 * half + 16 * i + (lane & 15), 2 * kk + (lane >> 4)));
#pragma unroll
    for (int n = 0; n < kN; ++n)
      mma<Elem>(c[i][n], a[0], a[1], a[2], a[3], s[n / 2][n % 2 * 2], s[n / 2][n % 2 * 2 + 1]);
  }
}

template <class Config>
GD_DEVICE void Gradients<Config>::multiply_pairs(uint32_t stage, int kk) {
  uint32_t a[4];
  load_matrices(a, stage + (is_update ? Smem::kValues : Smem::kOutputs) +
                       values_offset<Config::kValueColumns>(16 * pair_tile + (lane & 15), 2 * kk + (lane >> 4)));
#pragma unroll
  for (int J = 0; J < 4; ++J) {
    if (J > pair_tile) break;
    uint32_t u[4];
    load_matrices(
        u, stage + Smem::kU +
               values_offset<Config::kValueColumns>(16 * J + (lane & 7) + (lane >> 4) * 8, 2 * kk + (lane >> 3 & 1)));
#pragma unroll
    for (int n = 0; n < 2; ++n) mma<Elem>(pairs[J][n], a[0], a[1], a[2], a[3], u[2 * n], u[2 * n + 1]);
  }
}

}  // namespace gatedelta::cuda::portable
