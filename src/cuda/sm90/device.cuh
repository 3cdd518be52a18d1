// Small device helpers that several kernels share.
#pragma once

#include <type_traits>

#include "cuda/device/sequences.hpp"
#include "cuda/sm90/ptx.cuh"
#include "gatedelta/gatedelta.h"

namespace gatedelta::cuda::sm90 {

GD_DEVICE float load_number(const void* data, int dtype, int64_t i) {
  if (dtype == GD_F32) return static_cast<const float*>(data)[i];
  if (dtype == GD_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  return __half2float(static_cast<const __half*>(data)[i]);
}

GD_DEVICE void store_number(void* data, int dtype, int64_t i, float x) {
  if (dtype == GD_F32) {
    static_cast<float*>(data)[i] = x;
  } else if (dtype == GD_BF16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
  } else {
    static_cast<__half*>(data)[i] = __float2half_rn(x);
  }
}

// Calls f with the warp index as a compile-time constant, for straight-line code per block row.
template <class F>
GD_DEVICE void with_warp(int warp, const F& f) {
  switch (warp) {
    case 0: return f(std::integral_constant<int, 0>{});
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    default: return f(std::integral_constant<int, 3>{});
  }
}

// Copies the rows of a ragged chunk to one or two tiles of 64 columns, zero-filled to 64 rows. `stride` threads share
// it. NOTE: TMA would also fetch rows past the sequence end; they may be NaN, and 0 * NaN = NaN.
GD_DEVICE void load_ragged_rows(uint32_t tiles, bool two, int tile_stride, const uint16_t* from, int64_t token_stride,
                                int tokens, int thread, int stride) {
#pragma unroll 1
  for (int i = thread; i < (two ? 2 : 1) * kChunkTokens * 8; i += stride) {
    const int packet = i % 8, tile = two ? i / 8 % 2 : 0, row = two ? i / 16 : i / 8;
    const bool valid = row < tokens;
    copy_async16(tiles + tile * tile_stride + tile_offset(row, packet * 8),
                 from + (valid ? row * token_stride : 0) + tile * 64 + packet * 8, valid);
  }
}
// After load_ragged_rows by one warp: all lanes arrive but one, which arrives when it has issued the stage's other
// loads.
GD_DEVICE void arrive_after_copies(uint32_t full) {
  copy_async_wait();
  fence_async_shared();
  if (!elect_one()) barrier_arrive(full);
  __syncwarp();
}

struct ChunkPlace {
  int sequence, batch, token, rows, chunk;  // tokens past the last offset belong to sequence N
};
// The chunk at a chunk index. Its sequence is the last one that starts at or before it; the warp searches 32-ary.
GD_DEVICE ChunkPlace locate_chunk(const ChunkedSequences& s, int chunk_index, int lane) {
  const int tokens = static_cast<int>(s.tokens);
  if (!s.offsets) {
    const int chunks = static_cast<int>(ChunkedSequences::chunks(s.tokens));
    const int n = static_cast<int>(static_cast<uint32_t>(chunk_index) / static_cast<uint32_t>(chunks));
    const int chunk = chunk_index - n * chunks, token = chunk * kChunkTokens;
    return {n, n, token, min(tokens - token, kChunkTokens), chunk};
  }
  const auto first_chunk_index = [](int begin, int n) {
    return static_cast<int>(ChunkedSequences::first_chunk_index_at(static_cast<uint32_t>(begin), n));
  };
  int low = 0, count = s.count + 1, step, found, begin;
  do {
    step = (count + 31) / 32;
    const int tried = min(low + lane * step, s.count);
    begin = static_cast<int>(s.offsets[tried]);
    const bool begins = lane * step < count && first_chunk_index(begin, tried) <= chunk_index;
    found = __popc(__ballot_sync(~0u, begins)) - 1;
    low += found * step;
    count = min(step, count - found * step);
  } while (step > 1);
  int end = __shfl_sync(~0u, begin, found + 1);
  begin = __shfl_sync(~0u, begin, found);
  if (low == s.count)
    end = tokens;
  else if (found == 31)
    end = static_cast<int>(s.offsets[low + 1]);
  const int chunk = chunk_index - first_chunk_index(begin, low), token = begin + chunk * kChunkTokens;
  return {low, 0, token, min(end - token, kChunkTokens), chunk};
}

}  // namespace gatedelta::cuda::sm90
