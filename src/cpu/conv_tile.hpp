// A tile of tokens and channels in fp32, [kConvRows][kConvChannels], to and from tensors of any type and strides.
#pragma once

#include "core/conv1d.hpp"
#include "cpu/plan.hpp"
#include "cpu/simd.hpp"

namespace gatedelta::cpu::GD_ISA {

// Both are multiples of 16, as transpose() requires. A tile has the taps - 1 inputs before its tokens, too.
constexpr int kConvRows = 64, kConvChannels = 64;
constexpr int kConvTile = (kConvRows + 16) * kConvChannels;  // transpose() writes up to 15 rows more than it is given

// Rows of a tensor seen as [batch, row, channel]: tokens of x, columns of a state.
struct ConvRows {
  void* data;
  gd_dtype dtype;
  int64_t first;  // offset of row 0, channel 0
  int64_t row_stride, channel_stride;
};
GD_ALWAYS_INLINE ConvRows tokens_of(const TokenRows& t, int64_t batch, int64_t token, int64_t channel) {
  return {t.data, t.dtype, t.offset(batch, token, channel), t.token_stride, t.head_stride};
}
GD_ALWAYS_INLINE ConvRows columns_of(const ConvStates& s, int64_t slot, int64_t channel, int64_t column) {
  return {s.data, s.dtype, s.offset(slot, channel, column), s.column_stride, s.channel_stride};
}
GD_ALWAYS_INLINE ConvRows window_of(const StepWindows& s, int64_t batch, int64_t token, int64_t channel) {
  return {s.data, s.dtype, s.offset(batch, token, channel, 0), s.column_stride, s.channel_stride};
}

// n neighbouring numbers, any n.
GD_ALWAYS_INLINE void load_run(float* dst, const void* src, gd_dtype dtype, int64_t offset, int n) {
  const int whole = n / kVector * kVector;
  load_row(dst, src, dtype, offset, whole);
  for (int i = whole; i < n; ++i) dst[i] = load_scalar(src, dtype, offset + i);
}
GD_ALWAYS_INLINE void store_run(void* dst, gd_dtype dtype, int64_t offset, const float* src, int n) {
  const int whole = n / kVector * kVector;
  store_row(dst, dtype, offset, src, whole);
  for (int i = whole; i < n; ++i) store_scalar(dst, dtype, offset + i, src[i]);
}

GD_ALWAYS_INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }
constexpr int kTransposeRows = 8;  // with fewer, single numbers are as fast

// `spare` is another tile's memory. Channels from `width` on hold anything.
inline void load_tile(float* tile, float* spare, const ConvRows& from, int rows, int width) {
  if (from.channel_stride == 1) {
    for (int r = 0; r < rows; ++r)
      load_run(tile + r * kConvChannels, from.data, from.dtype, from.first + r * from.row_stride, width);
  } else if (from.row_stride == 1 && rows >= kTransposeRows) {
    for (int c = 0; c < width; ++c)
      load_run(spare + c * kConvRows, from.data, from.dtype, from.first + c * from.channel_stride, rows);
    transpose(tile, kConvChannels, spare, kConvRows, round_up(width, 16), round_up(rows, 16));
  } else {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < width; ++c)
        tile[r * kConvChannels + c] =
            load_scalar(from.data, from.dtype, from.first + r * from.row_stride + c * from.channel_stride);
  }
}

inline void store_tile(const ConvRows& to, const float* tile, float* spare, int rows, int width) {
  if (to.channel_stride == 1) {
    for (int r = 0; r < rows; ++r)
      store_run(to.data, to.dtype, to.first + r * to.row_stride, tile + r * kConvChannels, width);
  } else if (to.row_stride == 1 && rows >= kTransposeRows) {
    transpose(spare, kConvRows, tile, kConvChannels, round_up(rows, 16), round_up(width, 16));
    for (int c = 0; c < width; ++c)
      store_run(to.data, to.dtype, to.first + c * to.channel_stride, spare + c * kConvRows, rows);
  } else {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < width; ++c)
        store_scalar(to.data, to.dtype, to.first + r * to.row_stride + c * to.channel_stride,
                     tile[r * kConvChannels + c]);
  }
}

inline void clear_rows(float* tile, int rows) {
  for (int i = 0; i < rows * kConvChannels; i += kVector) store(tile + i, Vec{});
}

// Inputs [first, first + rows) of a sequence. Input p < 0 is column history_end + p of the initial state's slot, or 0.
inline void load_inputs(float* tile, float* spare, const Conv1dInputs& in, const SequenceSpan& span, int64_t slot,
                        int64_t history_end, int64_t first, int rows, int64_t channel, int width) {
  int done = 0;
  if (first < 0) {
    done = static_cast<int>(-first < rows ? -first : rows);
    const int64_t column = history_end + first;
    const int unknown = static_cast<int>(slot < 0 ? done : column < 0 ? (-column < done ? -column : done) : 0);
    clear_rows(tile, unknown);
    if (unknown < done)
      load_tile(tile + unknown * kConvChannels, spare, columns_of(in.initial, slot, channel, column + unknown),
                done - unknown, width);
  }
  if (done < rows)
    load_tile(tile + done * kConvChannels, spare, tokens_of(in.x, span.batch, span.begin + first + done, channel),
              rows - done, width);
}

// Weights and bias in fp32, one row per tap and one of the bias; whole tiles wide.
class ConvWeights {
 public:
  GD_ALWAYS_INLINE ConvWeights(Carver& carve, const Conv1dInputs& in)
      : width_((in.channels + kConvChannels - 1) / kConvChannels * kConvChannels),
        rows_(carve.take<float>((in.taps + 1) * width_)) {}

  void fill(const Conv1dInputs& in) const {
    for (int i = 0; i < in.taps; ++i) {
      float* const row = rows_ + i * width_;
      for (int64_t c = 0; c < in.channels; ++c)
        row[c] = load_scalar(in.weight.data, in.weight.dtype, c * in.weight.channel_stride + i * in.weight.tap_stride);
    }
    float* const bias = rows_ + in.taps * width_;
    for (int64_t c = 0; c < in.channels; ++c)
      bias[c] = in.bias ? load_scalar(in.bias.data, in.bias.dtype, c * in.bias.stride) : 0.0f;
    for (int i = 0; i <= in.taps; ++i)
      for (int64_t c = in.channels; c < width_; ++c) rows_[i * width_ + c] = 0;
  }
  // Row i; the bias is row `taps`.
  GD_ALWAYS_INLINE const float* row(int i) const { return rows_ + i * width_; }

 private:
  int64_t width_;
  float* rows_;
};

GD_ALWAYS_INLINE Vec sigmoid(Vec z) { return 1.0f / (1.0f + exp(-z)); }

// Channels an item takes: as many tiles as leave every lane some items.
GD_ALWAYS_INLINE int64_t tiles_per_item(int64_t channels, int64_t sequences, int lanes) {
  const int64_t tiles = (channels + kConvChannels - 1) / kConvChannels;
  const int64_t wanted = lanes > 1 && sequences > 0 ? (4 * int64_t{lanes} + sequences - 1) / sequences : 1;
  return tiles > wanted ? tiles / wanted : 1;
}

// A lane with fewer numbers than this takes longer to start than it saves.
constexpr int64_t kConvLaneNumbers = 16 * 1024;
GD_ALWAYS_INLINE int useful_lanes(const Conv1dInputs& in, int lanes) {
  const int64_t useful = in.sequences.batch * in.sequences.tokens * in.channels / kConvLaneNumbers;
  return static_cast<int>(useful < 1 ? 1 : useful < lanes ? useful : lanes);
}

}  // namespace gatedelta::cpu::GD_ISA
