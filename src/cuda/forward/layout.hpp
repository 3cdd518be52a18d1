// The forward's tensors, sequences and workspace as kernels see them; plain arithmetic that needs no CUDA, so that the
// plan (plan.hpp) and the tests share it.
#pragma once

#include <cstdint>

#include "cuda/tiles.hpp"

namespace gatedelta::cuda {

constexpr int kChunkTokens = 64;
constexpr int kHeadDim = 128;  // K = V

// [B, T, H] of rows or scalars; strides in elements.
struct Rows {
  void* data;
  int64_t batch_stride, token_stride, head_stride;
  int dtype;  // gd_dtype

  GD_HOST_DEVICE int64_t offset(int batch, int64_t token, int head) const {
    return batch * batch_stride + token * token_stride + head * head_stride;
  }
};

struct HeadScalars {
  const void* data;  // null = absent
  int64_t stride;
  int dtype;
};

struct Indices {
  const void* data;  // null = absent
  bool is_int64;

  GD_HOST_DEVICE int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct States {
  void* data;  // null = absent
  int64_t slot_stride, head_stride;
  int dtype;
  Indices indices;

  // Slot of a sequence; negative = none.
  GD_HOST_DEVICE int64_t slot(int64_t n) const { return !data ? -1 : indices.data ? indices[n] : n; }
};

struct Span {
  int batch;
  int64_t begin, length;
};

struct Sequences {
  int count, batch;  // N; B
  int64_t tokens;    // T
  Indices offsets;

  GD_HOST_DEVICE Span operator[](int n) const {
    if (!offsets.data) return {n, 0, tokens};
    const int64_t begin = offsets[n];
    return {0, begin, offsets[n + 1] - begin};
  }
  // A chunk's place in the workspace needs no table: chunk c of sequence n is slot first_slot(n) + c, and slots of
  // different sequences never meet because every sequence brings one to spare.
  GD_HOST_DEVICE int64_t first_chunk_index(int n) const {
    return offsets.data ? first_chunk_index_at(offsets[n], n) : n * chunks(tokens);
  }
  template <class Offset>
  GD_HOST_DEVICE static Offset first_chunk_index_at(Offset begin, int n) {
    return begin / kChunkTokens + n;
  }
  GD_HOST_DEVICE static int64_t chunks(int64_t length) { return (length + kChunkTokens - 1) / kChunkTokens; }
  // Tokens past the last offset count as sequence N, which nobody owns.
  GD_HOST_DEVICE int64_t workspace_chunks() const {
    return offsets.data ? tokens / kChunkTokens + count + 1 : count * chunks(tokens);
  }
};

constexpr int kSaveInterval = 16;  // after so many a forward keeps the state, for its backward
constexpr int kMaxSorted = 1024;   // sequences that are put in order; more of them balance themselves

// What prepare leaves for one chunk and value head: the inverse as a tile ready for wgmma, then vectors of 64 floats.
constexpr int kInverseBytes = kTriangleBytes;
constexpr int kVectorBytes = kChunkTokens * 4;
enum ChunkVector {
  kLogGamma,    // b_i, cumulated gate in units of log 2
  kReadKey,     // gamma_i r^k_i: what K S is scaled by
  kReadQuery,   // s gamma_i r^q_i: what Q S is scaled by
  kBeta,        // beta_j
  kBetaTail,    // beta_j e^{b_e - b_j}, e the last token of j's block of 16
  kScoreScale,  // s r^q_i: what R's rows are scaled by
  kForwardVectors,
  kKeyNorm = kForwardVectors,  // r^k_i, for a backward only
  kVectors
};
constexpr int kVectorsBytes = kVectors * kVectorBytes;
constexpr int kPreparedBytes = kInverseBytes + kForwardVectors * kVectorBytes;
constexpr int kBackwardPreparedBytes = kInverseBytes + kVectorsBytes;

// Rings of slots in the main kernel's shared memory.
enum Stages {
  kLoadStages = 3,
  kValueStages = 3,
  kScoreStages = 2,
  kOperandStages = 2,
  kWorkStages = 8,
  kMergeStages = 2
};

// A slot of a ring and the parity of the barrier phase a consumer waits for there; a producer waits for the other one.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  GD_HOST_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  GD_HOST_DEVICE int previous_stage() const { return stage == 0 ? kStages - 1 : stage - 1; }
};
// The same as one number, for a ring that is rarely looked at.
struct WorkPipelineState {
  int count = 0;
  GD_HOST_DEVICE PipelineState<kWorkStages> at() const {
    return {count % kWorkStages, static_cast<uint32_t>(count / kWorkStages) & 1};
  }
  GD_HOST_DEVICE void advance() { ++count; }
};
static_assert((kWorkStages & (kWorkStages - 1)) == 0);

}  // namespace gatedelta::cuda
