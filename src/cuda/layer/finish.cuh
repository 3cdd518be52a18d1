// Gated norm of the rule's outputs, and the shift of the conv states. Before the rule has finished, this kernel loads
// only tensors that the rule does not write. It loads conv states then, too, but does not store them: the rule's CTAs
// still read them.
#pragma once

#include "cuda/device/pdl.cuh"
#include "cuda/gated_norm/row.cuh"
#include "cuda/layer/config.hpp"

namespace gatedelta::cuda {

template <gd_dtype kInput>
GD_DEVICE void finish_rows(const LayerFinishParams& p) {
  constexpr int kCount = LayerNorm::kNumbers;
  const int lane = static_cast<int>(threadIdx.x) % LayerNorm::kLanes;
  const uint32_t row = blockIdx.x * kFinishRows + threadIdx.x / LayerNorm::kLanes;
  const uint32_t valid = min(row, p.rows - 1);  // shuffles need whole warps
  const uint32_t n = p.heads.quotient(valid), head = p.heads.remainder(valid, n);
  RawNumbers<LayerNorm> z_raw, x_raw;
  z_raw.load(p.z.at(n, 0, head), kInput, true, lane, kDecodeDim);
  float w[kCount], x[kCount], z[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) w[i] = 1;
  if (p.norm.weight) {
    RawNumbers<LayerNorm> w_raw;
    w_raw.load(static_cast<const char*>(p.norm.weight.data), p.norm.weight.dtype, true, lane, kDecodeDim);
    w_raw.widen(w, p.norm.weight.dtype);
  }
  z_raw.widen(z, kInput);

  wait_for_previous_kernel();
  x_raw.load(p.o.at(n, 0, head), kInput, true, lane, kDecodeDim);
  x_raw.widen(x, kInput);
  gated_norm_row<LayerNorm::kLanes>(x, z, w, p.norm, 1.0f / kDecodeDim);
  if (row < p.rows) store_row<LayerNorm>(p.y.at(n, 0, head), kInput, x, true, lane, kDecodeDim);
}

// Shifts a state's columns by one and appends the token's input.
GD_DEVICE void shift_states(const LayerFinishParams& p) {
  const uint32_t i = (blockIdx.x - p.row_ctas) * kFinishThreads + threadIdx.x;
  const uint32_t n = p.channels.quotient(min(i, p.shifts - 1)), channel = p.channels.remainder(min(i, p.shifts - 1), n);
  const int64_t read = p.initial.slot(n), write = i < p.shifts ? p.final.slot(n) : -1;
  const auto* const from =
      static_cast<const uint16_t*>(p.initial.data) + p.initial.offset(read < 0 ? 0 : read, channel, 0);
  auto* const to = static_cast<uint16_t*>(p.final.data) + p.final.offset(write < 0 ? 0 : write, channel, 0);
  const uint16_t x = *reinterpret_cast<const uint16_t*>(p.x.at(n, 0, 0) + channel * sizeof(uint16_t));
  const auto columns = static_cast<int>(p.final.columns);
  constexpr int kHeld = kLayerTaps - 1;
  uint16_t held[kHeld - 1] = {};  // of a state with kHeld columns, the usual one
  if (read >= 0 && columns == kHeld) {
#pragma unroll
    for (int c = 0; c + 1 < kHeld; ++c) held[c] = from[(c + 1) * p.initial.column_stride];
  }
  wait_for_previous_kernel();
  if (write < 0) return;
  if (columns == kHeld) {
#pragma unroll
    for (int c = 0; c + 1 < kHeld; ++c) to[c * p.final.column_stride] = held[c];
  } else {
#pragma unroll 1
    for (int c = 0; c + 1 < columns; ++c)
      to[c * p.final.column_stride] = read < 0 ? uint16_t{0} : from[(c + 1) * p.initial.column_stride];
  }
  to[(columns - 1) * p.final.column_stride] = x;
}

template <gd_dtype kInput>
__global__ void __launch_bounds__(kFinishThreads) layer_finish_kernel(const __grid_constant__ LayerFinishParams p) {
  if (blockIdx.x < p.row_ctas) return finish_rows<kInput>(p);
  shift_states(p);
}

}  // namespace gatedelta::cuda
