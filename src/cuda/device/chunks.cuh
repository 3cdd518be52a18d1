// Locates chunks.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/device/sequences.hpp"

namespace gatedelta::cuda {

struct ChunkPlace {
  int sequence, batch, token, rows;  // tokens past the last offset belong to sequence N
};
// The chunk with an index. Its sequence is the last one that starts at or before it; a warp searches 32-ary.
GD_DEVICE ChunkPlace locate_chunk(const ChunkedSequences& s, int chunk_index, int lane) {
  const int tokens = static_cast<int>(s.tokens);
  if (!s.offsets) {
    const int chunks = (tokens - 1) / kChunkTokens + 1;
    const int n = chunk_index / chunks, token = (chunk_index - n * chunks) * kChunkTokens;
    return {n, n, token, min(tokens - token, kChunkTokens)};
  }
  int low = 0, count = s.count + 1;  // sequences that may be the one
  while (count > 1) {
    const int step = (count + 31) / 32, tried = min(low + lane * step, s.count);
    const int first = static_cast<int>(s.offsets[tried]) / kChunkTokens + tried;
    const int found = count_lanes(lane * step < count && first <= chunk_index) - 1;
    low += found * step;
    count = min(step, count - found * step);
  }
  const auto begin = static_cast<int>(s.offsets[low]);
  const int end = low == s.count ? tokens : static_cast<int>(s.offsets[low + 1]);
  const int token = begin + (chunk_index - begin / kChunkTokens - low) * kChunkTokens;
  return {low, 0, token, min(end - token, kChunkTokens)};
}

}  // namespace gatedelta::cuda
