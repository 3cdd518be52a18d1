// The backward where tokens are contiguous, with the lanes and pieces of columns.cuh.
#pragma once

#include "cuda/conv1d/backward.cuh"
#include "cuda/conv1d/columns.cuh"

namespace gatedelta::cuda {

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

  // The gradient of the initial state, a column per lane, from the dz of the first tokens, which lane 0 has.
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

// Copies of a warp's tokens, a piece in each stage.
template <gd_dtype kType>
struct ColumnRing {
  static constexpr int kStages = 4;
  using Words = Numbers<kConvAlign / (kType == GD_F32 ? 4 : 2), kType>;
  Words x[kStages][32], dy[kStages][32];
};

// The usual backward: SiLU, no bias, no state, and no gradient of these. Pieces are copied to a ring in shared memory:
// it takes no registers, and more copies overlap. A lane reads only its own copies.
template <gd_dtype kType>
struct ConvColumnsUsualBackward : ConvColumnsBackward<kType> {
  using Base = ConvColumnsBackward<kType>;
  using Ring = ColumnRing<kType>;
  using Base::filter, Base::in, Base::place, Base::problem, Base::sums;
  using typename Base::Words;
  static constexpr int kVector = Base::kVector, kPiece = Base::kPiece, kBytes = 32 * kConvAlign;
  Ring& ring;

  GD_DEVICE ConvColumnsUsualBackward(const ConvBackwardParams& p, Ring& warp_ring) : Base(p), ring(warp_ring) {}

  GD_DEVICE void run(const ColumnChunk& chunk) {
    const int lane = place.lane, pieces = (static_cast<int>(chunk.end - chunk.begin) + kPiece - 1) / kPiece;
    const int64_t start = chunk.begin + int64_t{pieces - 1} * kPiece + lane * kVector;
    const char* x_from = column_at<kType>(in.x, chunk.batch, place.channel, start);
    const char* dy_from = column_at<kType>(problem.d_y, chunk.batch, place.channel, start);
    char* dx_at = column_at<kType>(problem.dx, chunk.batch, place.channel, start);
    bool is_there = start < chunk.end;  // in the pieces below all tokens are
    // The piece below the first one has the three tokens before it, or zeros.
    const auto request = [&](int piece, int stage) {
      const bool has_dy = piece >= 0 && (is_there || piece + 1 < pieces);
      copy_async_or_zero(&ring.x[stage][lane], x_from, has_dy || (piece == -1 && chunk.begin > 0));
      copy_async_or_zero(&ring.dy[stage][lane], dy_from, has_dy);
      x_from -= kBytes, dy_from -= kBytes;
      copy_commit();
    };
#pragma unroll
    for (int stage = 0; stage + 1 < Ring::kStages; ++stage) request(pieces - 1 - stage, stage);
    load_packed_filters(filter, in, place.channel);
    filter[0].bias = 0;
    float carry[kMaxTaps - 1];
    this->load_after(carry, chunk);
    int stage = 0;
#pragma unroll 1
    for (int piece = pieces - 1; piece >= 0; --piece) {
      const int below_stage = (stage + 1) % Ring::kStages;
      copy_wait<Ring::kStages - 3>();  // this piece and the one below have arrived
      request(piece - (Ring::kStages - 1), (stage + Ring::kStages - 1) % Ring::kStages);
      float below[kVector], previous[kMaxTaps - 1];
      ring.x[below_stage][lane].widen(below, kType);
#pragma unroll
      for (int i = 0; i + 1 < kMaxTaps; ++i) previous[i] = below[kVector - 3 + i];
      ColumnTokens<kVector, kType> x;
      x.set(ring.x[stage][lane], previous, lane);
      float dz[kVector + kMaxTaps - 1];
      ring.dy[stage][lane].widen(dz, kType);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        dz[j] = conv_sum_gradient(x.sum(filter[0], j), dz[j], true);
#pragma unroll
        for (int i = 0; i < kMaxTaps; ++i) sums[i] = fmaf(dz[j], x.x[j + i], sums[i]);
      }
#pragma unroll
      for (int i = 0; i + 1 < kMaxTaps; ++i) {
        dz[kVector + i] = __shfl_sync(~0u, lane == 0 ? carry[i] : dz[i], (lane + 1) % 32);
        carry[i] = dz[i];
      }
      float dx[kVector] = {};
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
#pragma unroll
        for (int i = 0; i < kMaxTaps; ++i) dx[j] = fmaf(filter[0].weight[i], dz[j + kMaxTaps - 1 - i], dx[j]);
      }
      if (problem.dx && is_there) Words::store(dx_at, kType, dx);
      dx_at -= kBytes;
      is_there = true;
      stage = below_stage;
    }
    copy_wait<0>();  // the next chunk copies to the same places
  }
};

template <class Columns>
GD_DEVICE void run_columns(const ConvBackwardParams& p, Columns& columns) {
  const ColumnPlace& place = columns.place;
  const Conv1dInputs& in = p.problem.in;
  if (place.channel >= in.channels) return;
  allow_next_kernel();
#pragma unroll 1
  for (int64_t number = place.group; number < p.grid.chunks; number += p.grid.groups)
    columns.run(ColumnChunk(p.grid, number, in.sequences.tokens));
#pragma unroll
  for (int i = 0; i < kConvSums; ++i) {
    float sum = columns.sums[i];
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (place.lane == 0) p.store(place.group, i, place.channel, sum);
  }
}

template <gd_dtype kType>
__global__ void __launch_bounds__(kConvThreads)
    conv_columns_backward_kernel(const __grid_constant__ ConvBackwardParams p) {
  ConvColumnsBackward<kType> columns(p);
  run_columns(p, columns);
}
template <gd_dtype kType>
__global__ void __launch_bounds__(kConvThreads, kConvColumnBackwardCtas)
    conv_columns_usual_backward_kernel(const __grid_constant__ ConvBackwardParams p) {
  __shared__ ColumnRing<kType> rings[kConvWarps];
  ConvColumnsUsualBackward<kType> columns(p, rings[threadIdx.x / 32]);
  run_columns(p, columns);
}

}  // namespace gatedelta::cuda
