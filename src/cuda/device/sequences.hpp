// Chunks of sequences as the kernels see them: plain arithmetic that needs no CUDA, shared with plans and tests. The
// tensors themselves are those of core/tensors.hpp.
#pragma once

#include <cstdint>

#include "core/tensors.hpp"
#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda {

constexpr int kChunkTokens = 64;

// The sequences of a call with 32-bit counts, and the index of every chunk in the workspace.
struct ChunkedSequences {
  int count, batch;  // N; B
  int64_t tokens;    // T
  IndexVector offsets;

  GD_HOST_DEVICE SequenceSpan operator[](int n) const {
    if (!offsets) return {n, 0, tokens};
    const int64_t begin = offsets[n];
    return {0, begin, offsets[n + 1] - begin};
  }
  // Chunk c of sequence n has chunk index first_chunk_index(n) + c. This needs no table, and indices of different
  // sequences never collide because every sequence has one to spare.
  GD_HOST_DEVICE int64_t first_chunk_index(int n) const {
    return offsets ? first_chunk_index_at(offsets[n], n) : n * chunks(tokens);
  }
  template <class Offset>
  GD_HOST_DEVICE static Offset first_chunk_index_at(Offset begin, int n) {
    return begin / kChunkTokens + n;
  }
  GD_HOST_DEVICE static int64_t chunks(int64_t length) { return (length + kChunkTokens - 1) / kChunkTokens; }
  // Tokens past the last offset count as sequence N, which is padding.
  GD_HOST_DEVICE int64_t workspace_chunks() const {
    return offsets ? tokens / kChunkTokens + count + 1 : count * chunks(tokens);
  }
};

// From shapes alone: in a size query the offsets have no data yet; only their presence counts.
inline ChunkedSequences sequences_of(const Sequences& s) {
  return {static_cast<int>(s.count), static_cast<int>(s.batch), s.tokens, s.offsets};
}

// Of a backward: rows with a small beta leave the gradient chain as Z, because dV = beta o Z would lose bits, or all of
// them, and the gradient of beta needs Z where beta is 0.
constexpr float kSmallBeta = 1.0f / 64;
GD_HOST_DEVICE inline bool stores_unscaled(float beta) { return beta < kSmallBeta && beta > -kSmallBeta; }

}  // namespace gatedelta::cuda
