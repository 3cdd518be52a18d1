// The convolution where tokens are contiguous and sequences are not packed: a warp has a channel, a lane 16 bytes of
// its tokens, a piece of the channel at a time. A lane gets neighbouring tokens from the neighbouring lanes, and at the
// piece's end from the piece before (forward) or after (columns_backward.cuh).
#pragma once

#include "cuda/conv1d/forward.cuh"

namespace gatedelta::cuda {

// The place of a warp of the column kernels.
struct ColumnPlace {
  int lane;
  int64_t group, channel;

  GD_DEVICE explicit ColumnPlace(const ConvGrid& grid) : lane(static_cast<int>(threadIdx.x) % 32) {
    const auto blocks = static_cast<uint32_t>(grid.channel_blocks);
    group = blockIdx.x / blocks;
    channel = int64_t{blockIdx.x - static_cast<uint32_t>(group) * blocks} * kConvWarps + threadIdx.x / 32;
  }
};
// Tokens [begin, end) of a batch row.
struct ColumnChunk {
  int64_t batch, begin, end;

  GD_DEVICE ColumnChunk(const ConvGrid& grid, int64_t number, int64_t tokens) {
    batch = number / grid.chunks_per_row;
    begin = (number - batch * grid.chunks_per_row) * grid.chunk;
    end = begin + grid.chunk < tokens ? begin + grid.chunk : tokens;
  }
};

template <gd_dtype kType>
GD_DEVICE char* column_at(const TokenRows& rows, int64_t batch, int64_t channel, int64_t t) {
  return static_cast<char*>(rows.data) + rows.offset(batch, t, channel) * (kType == GD_F32 ? 4 : 2);
}

// The three inputs before token t: of x, or of the state.
GD_DEVICE void load_before(float (&before)[kMaxTaps - 1], const Conv1dInputs& in, int64_t batch, int64_t channel,
                           int64_t t, int64_t slot) {
#pragma unroll
  for (int i = 0; i + 1 < kMaxTaps; ++i) {
    const int64_t position = t - (kMaxTaps - 1) + i;
    before[i] = 0;
    if (position >= 0) {
      before[i] = load_number(in.x.data, in.x.dtype, in.x.offset(batch, position, channel));
    } else if (slot >= 0) {
      before[i] = load_state(in.initial, slot, channel, in.initial.columns + position);
    }
  }
}

// x of a lane, after the three tokens before it: those of the lane before, in lane 0 `before` of lane 31.
template <int kVector, gd_dtype kType>
struct ColumnTokens {
  float x[kVector + kMaxTaps - 1];

  // Called by whole warps.
  GD_DEVICE void set(const Numbers<kVector, kType>& words, const float (&before)[kMaxTaps - 1], int lane) {
    words.widen(x + kMaxTaps - 1, kType);
#pragma unroll
    for (int i = 0; i + 1 < kMaxTaps; ++i)
      x[i] = __shfl_sync(~0u, lane == 31 ? before[i] : x[kVector + i], (lane + 31) % 32);
  }
  GD_DEVICE float sum(const Filter& filter, int j) const { return filter.sum(x[j], x[j + 1], x[j + 2], x[j + 3]); }
};

// The final state of a channel, a column per lane. Called by whole warps after the state has been read.
GD_DEVICE void store_columns(const Conv1dProblem& problem, int64_t batch, int64_t channel, int lane) {
  const Conv1dInputs& in = problem.in;
  const int64_t from = in.initial.slot(batch), to = problem.final.slot(batch);
  if (to < 0) return;
  const FinalColumns source = problem.final_columns(batch, in.sequences.tokens);
#pragma unroll 1
  for (int64_t first = 0; first < source.columns; first += 32) {
    const int64_t column = first + lane, position = source.first_input + column;
    const int64_t old = source.history_end + position;
    float x = 0;
    if (column < source.columns) {
      if (position >= 0) {
        x = load_number(in.x.data, in.x.dtype, in.x.offset(batch, position, channel));
      } else if (from >= 0 && old >= 0) {
        x = load_state(in.initial, from, channel, old);
      }
    }
    __syncwarp();  // all lanes have read: in place a column is copied from a later one
    if (column < source.columns) store_state(problem.final, to, channel, column, x);
  }
}

template <gd_dtype kType>
__global__ void __launch_bounds__(kConvThreads, 8) conv_columns_kernel(const __grid_constant__ ConvParams p) {
  constexpr int kVector = kConvAlign / (kType == GD_F32 ? 4 : 2), kPiece = 32 * kVector;
  constexpr int kAhead = 2;  // pieces that are loaded before they are needed
  using Words = Numbers<kVector, kType>;
  const Conv1dProblem& problem = p.problem;
  const Conv1dInputs& in = problem.in;
  const ColumnPlace place(p.grid);
  const int lane = place.lane;
  if (place.channel >= in.channels) return;
#pragma unroll 1
  for (int64_t number = place.group; number < p.grid.chunks; number += p.grid.groups) {
    const ColumnChunk chunk(p.grid, number, in.sequences.tokens);
    const bool is_padding = problem.is_padding(chunk.batch);
    // Tokens of this lane from here on, in pieces.
    int left = static_cast<int>(chunk.end - chunk.begin) - lane * kVector;
    const char* x_at = column_at<kType>(in.x, chunk.batch, place.channel, chunk.begin + lane * kVector);
    char* y_at = column_at<kType>(problem.y, chunk.batch, place.channel, chunk.begin + lane * kVector);
    Words ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      ahead[j].clear();
      if (left > j * kPiece && !is_padding) ahead[j].load(x_at + j * 32 * kConvAlign, kType);
    }
    Filter filter[1];
    load_packed_filters(filter, in, place.channel);
    float before[kMaxTaps - 1] = {};
    if (lane == 31 && !is_padding)
      load_before(before, in, chunk.batch, place.channel, chunk.begin,
                  chunk.begin == 0 ? in.initial.slot(chunk.batch) : -1);
    const auto compute = [&](bool silu) {
#pragma unroll 1
      for (int pieces = static_cast<int>(chunk.end - chunk.begin); pieces > 0; pieces -= kAhead * kPiece) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          ColumnTokens<kVector, kType> tokens;
          tokens.set(ahead[j], before, lane);
#pragma unroll
          for (int i = 0; i + 1 < kMaxTaps; ++i) before[i] = tokens.x[kVector + i];
          if (left > kAhead * kPiece && !is_padding) ahead[j].load(x_at + kAhead * 32 * kConvAlign, kType);
          float y[kVector];
#pragma unroll
          for (int i = 0; i < kVector; ++i) y[i] = conv_activate(tokens.sum(filter[0], i), silu);
          if (left > 0) Words::store(y_at, kType, y);
          left -= kPiece;
          x_at += 32 * kConvAlign;
          y_at += 32 * kConvAlign;
        }
      }
    };
    if (is_padding) {
      const float zeros[kVector] = {};
#pragma unroll 1
      for (; left > 0; left -= kPiece, y_at += 32 * kConvAlign) Words::store(y_at, kType, zeros);
      continue;
    }
    in.silu ? compute(true) : compute(false);
    __syncwarp();  // lane 31 has read the state
    if (chunk.begin == 0) store_columns(problem, chunk.batch, place.channel, lane);
  }
}

}  // namespace gatedelta::cuda
