// Where chunks are, and what the forward kernel wants to know of the lengths of packed sequences.
#pragma once

#include "cuda/portable/ptx.cuh"

namespace gatedelta::cuda::portable {

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

// Of packed sequences: their order, longest first, and the number of each one's first checkpoint. By helper CTAs of
// kRanksPerCta threads.
GD_DEVICE void look_at_lengths(const Params& p, int helper, int tid) {
  const int count = p.sequences.count, n = helper * kRanksPerCta + tid;
  if (p.order && n < count) {
    const int64_t length = p.sequences[n].length;
    int rank = 0;  // longer ones, and equally long ones before it
    for (int m = 0; m < count; ++m) {
      const int64_t other = p.sequences[m].length;
      rank += other > length || (other == length && m < n);
    }
    p.order[rank] = n;
  }
  if (p.first_checkpoint && n == 0) {
    int64_t total = 0;
    for (int m = 0; m < count; ++m) {
      p.first_checkpoint[m] = total;
      total += p.sequences[m].length / p.checkpoint_every;
    }
  }
}

}  // namespace gatedelta::cuda::portable
