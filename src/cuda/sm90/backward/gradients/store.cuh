// dQ and dK to global memory, through l2norm if there is one; zeros for tokens that belong to no sequence.
#pragma once

#include "cuda/sm90/backward/gradients/gradients.cuh"

namespace gatedelta::cuda::sm90 {

// l2norm backward: dx = r (dy - y <y, dy>), y = r x; x already holds r dy. Staged through the Q or K tiles, which are
// free by now.
template <class Elem>
GD_DEVICE void Gradients<Elem>::store_rows(float (&x)[64], uint32_t tiles, float2 norm, const CUtensorMap* map,
                                           const TokenRows& to, GradientBarrier barrier, const Cursor& cursor) const {
  int lane = this->lane;
  // NOTE(ptxas): opaque, so that addresses are computed here and not kept in registers through all heads.
  asm volatile("" : "+r"(lane));
  if (p.l2norm) {
    const float2 d = dots(x, tiles);
    const float a = norm.x * norm.x * d.x, b = norm.y * norm.y * d.y;
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      const Place place = accumulator_place(lane, i % 32);
      const float2 y = unpack<Elem>(
          load_shared_word(tiles + i / 32 * kTileBytes + tile_offset(16 * warp + place.row, place.column)));
      const float factor = i / 2 % 2 ? b : a;
      x[i] -= factor * y.x;
      x[i + 1] -= factor * y.y;
    }
    __syncwarp();
  }
  const uint32_t own = tiles + tile_offset(16 * warp + block_row(lane), block_column(lane));
#pragma unroll
  for (int J = 0; J < 8; ++J) {
    const float* c = x + 8 * J;
    stmatrix((own + J / 4 * kTileBytes) ^ (J % 4 * 32), pack<Elem>(c[0], c[1]), pack<Elem>(c[2], c[3]),
             pack<Elem>(c[4], c[5]), pack<Elem>(c[6], c[7]));
  }
  fence_async_shared();
  named_barrier_sync(barrier, 128);
  const Unit unit = this->unit(cursor);
  const bool whole = unit.tokens == kChunkTokens;
  if (!whole && to) {
    constexpr int kPacketsPerRow = kHeadDim * 2 / 16;
    auto* data = static_cast<uint16_t*>(to.data) + to.offset(unit.batch, unit.token, unit.key_head);
#pragma unroll 1
    for (int i = tid; i < unit.tokens * kPacketsPerRow; i += 128) {
      const int r = i / kPacketsPerRow, piece = i % kPacketsPerRow;
      *reinterpret_cast<uint4*>(data + r * to.token_stride + piece * 8) =
          load_shared_words(tiles + piece / 8 * kTileBytes + tile_offset(r, piece % 8 * 8));
    }
  }
  if (!whole) named_barrier_sync(barrier, 128);
  if (warp != 0 || !elect_one()) return;
  if (whole && to) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      tma_store(map, tiles + half * kTileBytes, unit.key_head, unit.token, unit.batch, half);
    store_commit();
    store_wait_read<0>();
  }
  barrier_arrive(key_pipe.empty(0));
}

// Zeroes the gradients of tokens past the last offset; by one warpgroup.
template <class Elem>
GD_DEVICE void Gradients<Elem>::zero_unused_tokens() const {
  if (!p.sequences.offsets) return;
  const int64_t used = p.sequences.offsets[p.sequences.count], count = p.sequences.tokens - used;
  const int64_t thread = int64_t{blockIdx.x} * 128 + tid, stride = int64_t{gridDim.x} * 128;
  const auto zero = [&](const TokenRows& to, int heads, int pieces, int bytes) {
    if (!to) return;
    for (int64_t i = thread; i < count * heads * pieces; i += stride) {
      const int piece = static_cast<int>(i % pieces), head = static_cast<int>(i / pieces % heads);
      auto* at =
          static_cast<uint8_t*>(to.data) + (to.offset(0, used + i / pieces / heads, head) + piece * (16 / 2)) * bytes;
      if (pieces > 1) {
        *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
      } else if (bytes == 4) {
        *reinterpret_cast<uint32_t*>(at) = 0;
      } else {
        *reinterpret_cast<uint16_t*>(at) = 0;
      }
    }
  };
  constexpr int kPacketsPerRow = kHeadDim * 2 / 16;
  zero(p.dq, p.key_heads, kPacketsPerRow, 2);
  zero(p.dk, p.key_heads, kPacketsPerRow, 2);
  zero(p.dv, p.value_heads, kPacketsPerRow, 2);
  zero(p.dg, p.value_heads, 1, p.dg.dtype == GD_F32 ? 4 : 2);
  zero(p.dbeta, p.value_heads, 1, p.dbeta.dtype == GD_F32 ? 4 : 2);
}

}  // namespace gatedelta::cuda::sm90
