// Slots of sequences: where a state is read and where it is stored.
#pragma once

#include "cuda/decode/config.hpp"
#include "cuda/device/ptx.cuh"

namespace gatedelta::cuda {

// An index that is loaded early and used late, without a branch or a wait in between.
struct IndexRequest {
  int32_t low = -1, high = 0;
  bool is_int64 = false;

  IndexRequest() = default;
  // `otherwise`: the value without indices.
  GD_DEVICE IndexRequest(const Indices32& indices, uint64_t offset, uint32_t otherwise)
      : low(static_cast<int32_t>(otherwise)), is_int64(indices.is_int64) {
    load_words_if(indices.present, indices.is_int64, indices.data + offset, low, high);
  }
  GD_DEVICE int64_t value() const {
    const int64_t upper = is_int64 ? high : low >> 31;
    return static_cast<int64_t>(static_cast<uint64_t>(upper) << 32 | static_cast<uint32_t>(low));
  }
  // Slot of `rows`; negative = none.
  GD_DEVICE int32_t slot(const States32& rows) const {
    return (is_int64 ? high : 0) == 0 && low >= rows.first_slot ? low : -1;
  }
};

// Loads the slot of sequence n.
GD_DEVICE IndexRequest request_slot(const States32& rows, uint32_t n) {
  return {rows.indices, uint64_t{n} * rows.indices.stride, rows.present ? n : ~0u};
}
// Loads the slot that sequence n reads; previous_accept_lengths picks it from a row of slots.
GD_DEVICE IndexRequest request_read_slot(const ManyTokenParams& p, uint32_t n) {
  uint64_t offset = uint64_t{n} * p.initial.indices.stride;
  if (p.previous_accept_lengths.present) {
    const int64_t column =
        IndexRequest(p.previous_accept_lengths, uint64_t{n} * p.previous_accept_lengths.stride, 0).value() - 1;
    const int64_t last = int64_t{p.columns} - 1;
    offset += static_cast<uint64_t>(column < 0 ? 0 : column < last ? column : last) * p.column_stride;
  }
  return {p.initial.indices, offset, p.initial.present ? n : ~0u};
}

// Loads the slot that sequence n reads before anything else. The addresses of a token need many arguments, each line of
// them a cold miss, and the compiler would compute them first; it moves no load past a barrier of the warp. n may be
// past the last sequence.
GD_DEVICE IndexRequest request_first(const OneTokenParams& p, uint32_t n) {
  const IndexRequest request = request_slot(p.initial, n < p.sequences ? n : 0);
  __syncwarp();
  return request;
}
GD_DEVICE IndexRequest request_first(const ManyTokenParams& p, uint32_t n) {
  const IndexRequest request = n < p.sequences ? request_read_slot(p, n) : IndexRequest();
  __syncwarp();
  return request;
}

// Loads the slot of the state after a token; a column past the last one has none.
GD_DEVICE IndexRequest request_step_slot(const ManyTokenParams& p, uint32_t n, uint32_t column) {
  const IndexRows& indices = p.step_states.indices;
  IndexRequest request;
  request.high = -1, request.is_int64 = indices.is_int64;
  load_words_if(indices.present && column < indices.columns, indices.is_int64,
                static_cast<const char*>(indices.data) +
                    (n * indices.stride + column * indices.column_stride) * (indices.is_int64 ? 8 : 4),
                request.low, request.high);
  return request;
}

// Whether sequence n, which has no slot to read from, is a padded row.
GD_DEVICE bool is_padding(const OneTokenParams& p, uint32_t n) {
  if (!p.initial.indices.present) return false;
  return p.final.indices.present ? request_slot(p.final, n).slot(p.final) < 0 : p.pads_by_read_index;
}

}  // namespace gatedelta::cuda
