// Tensors, indices and states with byte strides of 32 bits, and the conditions for them: strides and slots fit 31 bits.
// Such kernel parameters are half as long, and an address takes few instructions.
#pragma once

#include <cstdint>

#include "core/tensors.hpp"
#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda {

// ---- alignment ------------------------------------------------------------------------------------------------------

constexpr int64_t kAccessAlign = 16;  // bytes of the widest access
inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAccessAlign == 0; }
inline bool is_aligned(const TokenRows& rows) {
  const int64_t bytes = dtype_bytes(rows.dtype);
  return !rows || (is_aligned(rows.data) && rows.batch_stride * bytes % kAccessAlign == 0 &&
                   rows.token_stride * bytes % kAccessAlign == 0 && rows.head_stride * bytes % kAccessAlign == 0);
}
inline bool is_aligned(const StateRows& rows) {
  const int64_t bytes = dtype_bytes(rows.dtype);
  return !rows || (is_aligned(rows.data) && rows.slot_stride * bytes % kAccessAlign == 0 &&
                   rows.head_stride * bytes % kAccessAlign == 0);
}

// ---- strides --------------------------------------------------------------------------------------------------------

// Whether strides in bytes, and slots, fit 31 bits.
inline bool fits_32bit(int64_t stride, int64_t bytes) { return stride >= 0 && stride <= INT32_MAX / bytes; }
inline bool fits_32bit(const TokenRows& rows) {
  const int64_t bytes = rows ? dtype_bytes(rows.dtype) : 1;
  return fits_32bit(rows.batch_stride, bytes) && fits_32bit(rows.token_stride, bytes) &&
         fits_32bit(rows.head_stride, bytes);
}
inline bool fits_32bit(const IndexRows& rows) {
  return fits_32bit(rows.stride, 8) && fits_32bit(rows.column_stride, 8);
}
inline bool fits_32bit(const StateRows& rows) {
  const int64_t bytes = rows ? dtype_bytes(rows.dtype) : 1;
  return fits_32bit(rows.slot_stride, bytes) && fits_32bit(rows.head_stride, bytes) && fits_32bit(rows.indices) &&
         rows.slots <= INT32_MAX && fits_32bit(rows.first_slot, 1);
}

// ---- kernel parameters, strides in bytes ----------------------------------------------------------------------------

struct Rows32 {
  char* data = nullptr;
  uint32_t batch_stride = 0, token_stride = 0, head_stride = 0;
  gd_dtype dtype = GD_DTYPE_NONE;

  Rows32() = default;
  explicit Rows32(const TokenRows& rows)
      : data(static_cast<char*>(rows.data)),
        batch_stride(static_cast<uint32_t>(rows.batch_stride * dtype_bytes(rows.dtype))),
        token_stride(static_cast<uint32_t>(rows.token_stride * dtype_bytes(rows.dtype))),
        head_stride(static_cast<uint32_t>(rows.head_stride * dtype_bytes(rows.dtype))),
        dtype(rows.dtype) {}
  explicit Rows32(const HeadVector& vector)
      : data(static_cast<char*>(vector.data)),
        head_stride(static_cast<uint32_t>(vector.stride * dtype_bytes(vector.dtype))),
        dtype(vector.dtype) {}
  GD_HOST_DEVICE char* at(uint32_t batch, uint32_t token, uint32_t head) const {
    return data + uint64_t{batch} * batch_stride + uint64_t{token} * token_stride + uint64_t{head} * head_stride;
  }
  GD_HOST_DEVICE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
};

struct Indices32 {
  const char* data = nullptr;
  uint32_t stride = 0;
  bool present = false, is_int64 = false;

  Indices32() = default;
  explicit Indices32(const IndexRows& rows)
      : data(static_cast<const char*>(rows.data)),
        stride(static_cast<uint32_t>(rows.stride * (rows.is_int64 ? 8 : 4))),
        present(rows.present),
        is_int64(rows.is_int64) {}
};

// A pool of states, of a type known at compile time.
struct States32 {
  Indices32 indices;  // absent = sequence n has slot n
  char* data = nullptr;
  uint32_t slot_stride = 0, head_stride = 0;
  int32_t first_slot = 0;  // indices below it are null slots
  bool present = false;

  States32() = default;
  explicit States32(const StateRows& rows)
      : indices(rows.indices),
        data(static_cast<char*>(rows.data)),
        slot_stride(static_cast<uint32_t>(rows.slot_stride * dtype_bytes(rows.dtype))),
        head_stride(static_cast<uint32_t>(rows.head_stride * dtype_bytes(rows.dtype))),
        first_slot(rows.indices ? static_cast<int32_t>(rows.first_slot) : 0),
        present(static_cast<bool>(rows)) {}
  GD_HOST_DEVICE char* at(int32_t slot, uint32_t head) const {
    return data + uint64_t{static_cast<uint32_t>(slot)} * slot_stride + uint64_t{head} * head_stride;
  }
};

}  // namespace gatedelta::cuda
