// Loads of K and Q, and their norms.
#pragma once

#include "cuda/portable/prepare/prepare.cuh"

namespace gatedelta::cuda::portable {

// Loads K or Q of a chunk. Rows past the end and columns past K are zero.
template <class Config>
GD_DEVICE void Prepare<Config>::load_rows(const TokenRows& rows_of, uint32_t stride, int key_dim, int batch, int token,
                                          int rows, int head, uint32_t to, int tid) {
  const int first = tid / 8, packet = tid % 8;
  const auto* const from = static_cast<const uint16_t*>(rows_of.data) + rows_of.offset(batch, token, head);
#pragma unroll
  for (int i = 0; i < kChunkTokens * 8 / kThreads; ++i) {
    const int row = first + i * (kThreads / 8);
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      const int column = tile * kTileColumns + packet * kPacketColumns;
      const bool valid = row < rows && column < key_dim;
      copy_async(to + tile * Config::kTileBytes + tile_offset(row, packet), from + (valid ? row * stride + column : 0),
                 valid);
    }
  }
}

// r^k and r^q: a thread has a row.
template <class Config>
GD_DEVICE void Prepare<Config>::find_norms(const Params& p, int chunk_index, int key_head, uint32_t smem, int tid) {
  static_assert(kThreads == 2 * kChunkTokens);
  const int row = tid % kChunkTokens, is_query = tid / kChunkTokens;
  float norm = 1;
  if (p.l2norm) {
    float sum = 0;
    const uint32_t at = smem + (is_query ? Smem::kQ : Smem::kK);
#pragma unroll 1
    for (int tile = 0; tile < Config::kTiles; ++tile)
#pragma unroll
      for (int packet = 0; packet < 8; ++packet) {
        const uint4 x = load_shared_words(at + tile * Config::kTileBytes + tile_offset(row, packet));
        const float2 a = unpack<Elem>(x.x), b = unpack<Elem>(x.y), c = unpack<Elem>(x.z), d = unpack<Elem>(x.w);
        sum += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y + c.x * c.x + c.y * c.y + d.x * d.x + d.y * d.y;
      }
    norm = rsqrtf(sum + 1e-6f);
  }
  store_shared(smem + Smem::kNorms + tid * 4, norm);
  if (p.norms) p.chunk_norms(chunk_index, key_head)[tid] = norm;
}

}  // namespace gatedelta::cuda::portable
