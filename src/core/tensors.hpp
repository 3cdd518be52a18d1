// Tensors, states and sequences of a call: base pointer + strides in elements. Host and device share these types, from
// validation to the kernels. Presence is a bool or a dtype, never a pointer: in a workspace query a tensor is
// present although its data pointer is null.
#pragma once

#include <cstdint>

#include "gatedelta/gatedelta.h"

// The CPU backend also compiles these headers with the flags of every instruction set. A function that is not inlined
// there could be linked into code for lesser machines, so every function here must be.
#if defined(__CUDACC__)
#define GD_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define GD_ALWAYS_INLINE inline __attribute__((always_inline))
#endif

namespace gatedelta {

constexpr int kChunk = GD_CHUNK;  // tokens per chunk, C in docs/math.md

GD_ALWAYS_INLINE int64_t dtype_bytes(gd_dtype dtype) {
  switch (dtype) {
    case GD_F32:
    case GD_I32: return 4;
    case GD_BF16:
    case GD_F16: return 2;
    case GD_I64: return 8;
    case GD_DTYPE_NONE: break;
  }
  return 0;
}

// [B, T, H, D] with contiguous D, or [B, T, H].
struct TokenRows {
  void* data = nullptr;
  gd_dtype dtype = GD_DTYPE_NONE;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  GD_ALWAYS_INLINE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
  GD_ALWAYS_INLINE int64_t offset(int64_t batch, int64_t token, int64_t head) const {
    return batch * batch_stride + token * token_stride + head * head_stride;
  }
};

// [H].
struct HeadVector {
  void* data = nullptr;
  gd_dtype dtype = GD_DTYPE_NONE;
  int64_t stride = 0;

  GD_ALWAYS_INLINE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
};

// Contiguous int32 or int64 numbers: the offsets of packed sequences.
struct IndexVector {
  const void* data = nullptr;
  bool is_int64 = false;
  bool present = false;

  GD_ALWAYS_INLINE explicit operator bool() const { return present; }
  GD_ALWAYS_INLINE int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// int32 or int64 numbers, one or a row of them for each sequence: [N] or [N, S] with any strides.
struct IndexRows {
  const void* data = nullptr;
  bool is_int64 = false;
  bool present = false;
  int64_t stride = 0, column_stride = 0;
  int64_t columns = 1;

  GD_ALWAYS_INLINE explicit operator bool() const { return present; }
  GD_ALWAYS_INLINE int64_t operator()(int64_t row, int64_t column) const {
    return at(row * stride + column * column_stride);
  }
  GD_ALWAYS_INLINE int64_t operator[](int64_t n) const { return at(n * stride); }

 private:
  GD_ALWAYS_INLINE int64_t at(int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// [slots, H, K, V] or [slots, H, V, K]; each matrix is contiguous.
struct StateRows {
  void* data = nullptr;
  gd_dtype dtype = GD_DTYPE_NONE;
  int64_t slots = 0, slot_stride = 0, head_stride = 0;
  IndexRows indices;       // absent = sequence n has slot n
  int64_t first_slot = 0;  // indices below it are null slots

  GD_ALWAYS_INLINE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
  // Slot of sequence n; negative = none.
  GD_ALWAYS_INLINE int64_t slot(int64_t n) const { return !*this ? -1 : indices ? resolve(indices[n]) : n; }
  // The slot an index names, -1 for a null slot.
  GD_ALWAYS_INLINE int64_t resolve(int64_t index) const { return index < first_slot ? -1 : index; }
  GD_ALWAYS_INLINE int64_t offset(int64_t slot, int64_t head) const { return slot * slot_stride + head * head_stride; }
};

// Where one sequence's tokens are.
struct SequenceSpan {
  int64_t batch, begin, length;
};

struct Sequences {
  int64_t count = 0;
  int64_t batch = 0, tokens = 0;  // B, T
  IndexVector offsets;            // cu_seqlens; absent = one sequence per batch entry

  GD_ALWAYS_INLINE SequenceSpan operator[](int64_t n) const {
    if (!offsets) return {n, 0, tokens};
    return {0, offsets[n], offsets[n + 1] - offsets[n]};
  }
  // Tokens of batch entry 0 from here on belong to no sequence.
  GD_ALWAYS_INLINE int64_t used_tokens() const { return offsets ? offsets[count] : tokens; }
};

}  // namespace gatedelta
