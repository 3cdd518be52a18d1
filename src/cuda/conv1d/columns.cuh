// The convolution where tokens are contiguous and sequences are not packed: a warp has a channel, a lane 16 bytes of
// its tokens, a piece of the channel at a time. Neighbouring tokens come from the neighbouring lanes, and from the
// piece before (forward) or after (backward) at the piece's end.
#pragma once

#include "cuda/conv1d/backward.cuh"
#include "cuda/conv1d/forward.cuh"

namespace gatedelta::cuda {

// Where a warp of the column kernels is.
struct ColumnPlace {
  int lane;
  int64_t slot, channel;

  GD_DEVICE explicit ColumnPlace(const ConvGrid& grid) : lane(static_cast<int>(threadIdx.x) % 32) {
    const auto blocks = static_cast<uint32_t>(grid.channel_blocks);
    slot = blockIdx.x / blocks;
    channel = int64_t{blockIdx.x - static_cast<uint32_t>(slot) * blocks} * kConvWarps + threadIdx.x / 32;
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

// x of a lane behind the three tokens before: of the lane before it, in lane 0 those that lane 31 gives.
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
    __syncwarp();  // all lanes have read: in place, what a column gets lies in a later one
    if (column < source.columns) store_state(problem.final, to, channel, column, x);
  }
}

template <gd_dtype kType>
__global__ void __launch_bounds__(kConvThreads, 8) conv_columns_kernel(const __grid_constant__ ConvParams p) {
  constexpr int kVector = kConvAlign / (kType == GD_F32 ? 4 : 2), kPiece = 32 * kVector;
  constexpr int kAhead = 2;  // pieces that are requested before they are needed
  using Words = Numbers<kVector, kType>;
  const Conv1dProblem& problem = p.problem;
  const Conv1dInputs& in = problem.in;
  const ColumnPlace place(p.grid);
  const int lane = place.lane;
  if (place.channel >= in.channels) return;
#pragma unroll 1
  for (int64_t number = place.slot; number < p.grid.chunks; number += p.grid.slots) {
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
    const auto walk = [&](bool silu) {
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
    in.silu ? walk(true) : walk(false);
    __syncwarp();  // lane 31 has read the state
    if (chunk.begin == 0) store_columns(problem, chunk.batch, place.channel, lane);
  }
}

// From the last piece of a chunk to the first: a piece needs the dz of the three tokens after it.
template <gd_dtype kType>
struct ConvColumnsBackward {
  static constexpr int kVector = kConvAlign / (kType == GD_F32 ? 4 : 2), kPiece = 32 * kVector;
  using Words = Numbers<kVector, kType>;
  const Conv1dBackwardProblem& problem;
  const Conv1dInputs& in;
  const ColumnPlace place;
  Filter filter[1];
  float sums[kConvSums] = {};  // of dweight, then dbias

  GD_DEVICE explicit ConvColumnsBackward(const ConvBackwardParams& p)
      : problem(p.problem), in(p.problem.in), place(p.grid) {}

  // dz of the three tokens after a chunk; past the sequence's end it is 0.
  GD_DEVICE void load_after(float (&after)[kMaxTaps - 1], const ColumnChunk& chunk) const {
    float x[2 * (kMaxTaps - 1)];
#pragma unroll
    for (int i = 0; i + 1 < kMaxTaps; ++i) after[i] = 0;
    if (chunk.end >= in.sequences.tokens) return;
    const int64_t first = chunk.end - (kMaxTaps - 1);
#pragma unroll
    for (int i = 0; i < 2 * (kMaxTaps - 1); ++i)
      x[i] = load_number(in.x.data, kType, in.x.offset(chunk.batch, first + i, place.channel));
#pragma unroll
    for (int i = 0; i + 1 < kMaxTaps; ++i) {
      const TokenRows& d_y = problem.d_y;
      const float dy = load_number(d_y.data, kType, d_y.offset(chunk.batch, chunk.end + i, place.channel));
      after[i] = conv_sum_gradient(filter[0].sum(x[i], x[i + 1], x[i + 2], x[i + 3]), dy, in.silu);
    }
  }

  // The gradient of the initial state, a column per lane: what the first tokens' sums pass on. Lane 0 has their dz.
  GD_DEVICE void store_state_gradient(const float (&dz)[kVector + kMaxTaps - 1], int64_t batch) const {
    const ConvStates& d = problem.d_initial;
#pragma unroll 1
    for (int64_t first = 0; first < d.columns; first += 32) {
      const int64_t column = first + place.lane, position = column - d.columns;
      float sum = 0;
#pragma unroll
      for (int j = 0; j + 1 < kMaxTaps; ++j) {
        const float gradient = __shfl_sync(~0u, dz[j], 0);
#pragma unroll
        for (int i = 0; i < kMaxTaps; ++i)
          if (position + kMaxTaps - 1 - i == j) sum = fmaf(filter[0].weight[i], gradient, sum);
      }
      if (column >= d.columns) continue;
      sum += final_gradient(problem.d_final, batch, place.channel, position - in.sequences.tokens);
      store_state(d, batch, place.channel, column, sum);
    }
  }

  GD_DEVICE void run(const ColumnChunk& chunk) {
    const int lane = place.lane;
    const int64_t tokens = in.sequences.tokens;
    const int length = static_cast<int>(chunk.end - chunk.begin);
    const int pieces = length > 0 ? (length + kPiece - 1) / kPiece : 1;  // without tokens there are states
    const int64_t start = chunk.begin + int64_t{pieces - 1} * kPiece + lane * kVector;
    const char* x_at = column_at<kType>(in.x, chunk.batch, place.channel, start);
    const char* dy_at = column_at<kType>(problem.d_y, chunk.batch, place.channel, start);
    char* dx_at = column_at<kType>(problem.dx, chunk.batch, place.channel, start);
    Words x_words, dy_words, x_below, dy_below;
    x_words.clear(), dy_words.clear(), x_below.clear(), dy_below.clear();
    bool is_there = start < chunk.end;  // in the pieces below all tokens are
    if (is_there) x_words.load(x_at, kType), dy_words.load(dy_at, kType);
    if (pieces > 1) x_below.load(x_at - 32 * kConvAlign, kType), dy_below.load(dy_at - 32 * kConvAlign, kType);
    load_packed_filters(filter, in, place.channel);
    float before[kMaxTaps - 1], carry[kMaxTaps - 1];
    load_before(before, in, chunk.batch, place.channel, chunk.begin,
                chunk.begin == 0 ? in.initial.slot(chunk.batch) : -1);
    load_after(carry, chunk);
#pragma unroll 1
    for (int piece = pieces - 1; piece >= 0; --piece) {
      float below[kVector];
      x_below.widen(below, kType);
      float previous[kMaxTaps - 1];
#pragma unroll
      for (int i = 0; i + 1 < kMaxTaps; ++i) previous[i] = piece > 0 ? below[kVector - 3 + i] : before[i];
      ColumnTokens<kVector, kType> x;
      x.set(x_words, previous, lane);
      // dz of this lane's tokens and of the three after them.
      float dz[kVector + kMaxTaps - 1] = {};
      if (is_there) {
        dy_words.widen(dz, kType);
        if (in.silu) {
#pragma unroll
          for (int j = 0; j < kVector; ++j) dz[j] = conv_sum_gradient(x.sum(filter[0], j), dz[j], true);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
#pragma unroll
          for (int i = 0; i < kMaxTaps; ++i) sums[i] = fmaf(dz[j], x.x[j + i], sums[i]);
          sums[kMaxTaps] += dz[j];
        }
      }
      x_words = x_below, dy_words = dy_below;
      if (piece > 1) x_below.load(x_at - 2 * 32 * kConvAlign, kType), dy_below.load(dy_at - 2 * 32 * kConvAlign, kType);
#pragma unroll
      for (int i = 0; i + 1 < kMaxTaps; ++i) {
        dz[kVector + i] = __shfl_sync(~0u, lane == 0 ? carry[i] : dz[i], (lane + 1) % 32);
        carry[i] = dz[i];
      }
      if (piece == 0 && chunk.begin == 0 && problem.d_initial) store_state_gradient(dz, chunk.batch);
      if (problem.dx && is_there) {
        float dx[kVector] = {};
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
#pragma unroll
          for (int i = 0; i < kMaxTaps; ++i) dx[j] = fmaf(filter[0].weight[i], dz[j + kMaxTaps - 1 - i], dx[j]);
        }
        const int64_t t = chunk.begin + int64_t{piece} * kPiece + lane * kVector;
        if (problem.d_final && t + kVector > tokens - problem.d_final.columns) {
#pragma unroll
          for (int j = 0; j < kVector; ++j)
            dx[j] += final_gradient(problem.d_final, chunk.batch, place.channel, t + j - tokens);
        }
        Words::store(dx_at, kType, dx);
      }
      x_at -= 32 * kConvAlign, dy_at -= 32 * kConvAlign, dx_at -= 32 * kConvAlign;
      is_there = true;
    }
  }
};

template <gd_dtype kType>
__global__ void __launch_bounds__(kConvThreads)
    conv_columns_backward_kernel(const __grid_constant__ ConvBackwardParams p) {
  ConvColumnsBackward<kType> columns(p);
  const ColumnPlace& place = columns.place;
  const Conv1dInputs& in = p.problem.in;
  if (place.channel >= in.channels) return;
  allow_next_kernel();
#pragma unroll 1
  for (int64_t number = place.slot; number < p.grid.chunks; number += p.grid.slots)
    columns.run(ColumnChunk(p.grid, number, in.sequences.tokens));
#pragma unroll
  for (int i = 0; i < kConvSums; ++i) {
    float sum = columns.sums[i];
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (place.lane == 0) p.store(place.slot, i, place.channel, sum);
  }
}

}  // namespace gatedelta::cuda
