// Tensors and sequences as the kernels see them: plain arithmetic that needs no CUDA, shared with plans and tests.
#pragma once

#include <cstdint>

#include "cuda/host_device.hpp"

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
  // Chunk c of sequence n has chunk index first_chunk_index(n) + c. This needs no table, and indices of different
  // sequences never collide because every sequence has one to spare.
  GD_HOST_DEVICE int64_t first_chunk_index(int n) const {
    return offsets.data ? first_chunk_index_at(offsets[n], n) : n * chunks(tokens);
  }
  template <class Offset>
  GD_HOST_DEVICE static Offset first_chunk_index_at(Offset begin, int n) {
    return begin / kChunkTokens + n;
  }
  GD_HOST_DEVICE static int64_t chunks(int64_t length) { return (length + kChunkTokens - 1) / kChunkTokens; }
  // Tokens past the last offset count as sequence N, which is padding.
  GD_HOST_DEVICE int64_t workspace_chunks() const {
    return offsets.data ? tokens / kChunkTokens + count + 1 : count * chunks(tokens);
  }
};

}  // namespace gatedelta::cuda
