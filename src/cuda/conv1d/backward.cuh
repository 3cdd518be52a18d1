// The convolution's backward where a thread owns a channel of any type and strides, token after token:
//   dz_t = d_y_t act'(z_t),  dx_p = sum over i of w_i dz_{p + W - 1 - i},  dw_i = sum over t of dz_t x_{t - W + 1 + i}
// A chunk goes through three tokens more than it owns, because its last dx need their dz. The dx of the inputs before a
// sequence are the gradient of its state. Sums over tokens stay in registers; each group of the grid stores a partial
// sum, and a second kernel adds the partial sums. The order of all sums is fixed.
#pragma once

#include "cuda/conv1d/access.cuh"
#include "cuda/conv1d/segments.cuh"
#include "cuda/device/pdl.cuh"

namespace gatedelta::cuda {

struct ConvBackwardParams {
  Conv1dBackwardProblem problem;
  ConvGrid grid;
  float* partial;                     // [groups][kConvSums][D]; null: neither dweight nor dbias is wanted
  int64_t x_step, d_y_step, dx_step;  // bytes from a token to the next: as arguments they take no registers

  GD_DEVICE void store(int64_t group, int sum, int64_t channel, float value) const {
    if (partial) partial[(group * kConvSums + sum) * problem.in.channels + channel] = value;
  }
};

// The term of a final state's gradient in the gradient of an input `after` its sequence's end (negative: before it).
GD_DEVICE float final_gradient(const ConvStates& d_final, int64_t sequence, int64_t channel, int64_t after) {
  const int64_t column = d_final.columns + after;
  return d_final && column >= 0 ? load_state(d_final, sequence, channel, column) : 0.0f;
}

struct ConvBackwardChannel {
  static constexpr int kAhead = 8;  // tokens that are loaded before they are needed
  const Conv1dBackwardProblem& p;
  const Conv1dInputs& in;
  const int64_t channel;
  const int skip;
  Filter filter;
  float sums[kConvSums] = {};  // of dweight, then dbias

  GD_DEVICE ConvBackwardChannel(const ConvBackwardParams& params, int64_t own)
      : p(params.problem), in(params.problem.in), channel(own), skip(skipped_taps(params.problem.in)) {
    load_filter(filter, in, channel);
  }

  GD_DEVICE void clear(int64_t batch, int64_t begin, int64_t end) const {
    const float zero = 0;
    if (!p.dx) return;
    TokenCursor<> dx(p.dx, batch, begin, channel);
#pragma unroll 1
    for (int64_t t = begin; t < end; ++t, dx.at += dx.step) store_numbers<1>(dx.at, dx.type, &zero, true);
  }

  // Stores the gradient of a column of the initial state.
  GD_DEVICE void store_state_gradient(float dx, const Segment& s, int64_t position) const {
    const int64_t column = p.d_initial.columns + position;
    if (column < 0) return;
    dx += final_gradient(p.d_final, s.sequence, channel, position - s.span.length);
    store_state(p.d_initial, s.sequence, channel, column, dx);
  }

  GD_DEVICE void run(const Segment& s) {
    const bool has_state = s.from == 0 && p.d_initial;
    // Columns that no token reads.
#pragma unroll 1
    for (int64_t position = -p.d_initial.columns; has_state && position < 1 - kMaxTaps; ++position)
      store_state_gradient(0.0f, s, position);
    float x[kMaxTaps], dz[kMaxTaps] = {};  // dz: the newest first
    const int64_t slot = s.from < kMaxTaps - 1 ? in.initial.slot(s.sequence) : -1;
#pragma unroll
    for (int i = 0; i + 1 < kMaxTaps; ++i)
      x[i] = load_input(in, s.span, s.from - (kMaxTaps - 1) + i, channel, slot, in.initial.columns);

    const int64_t token = s.span.begin + s.from, left = s.span.length - s.from;
    const int own = static_cast<int>(s.to - s.from), all = own + kMaxTaps - 1;
    const int count = static_cast<int>(left < all ? left : all);  // tokens that have a dz
    // From this token on the final state's gradient adds to dx.
    const int64_t last_columns = left - p.d_final.columns;
    const int tail = !p.d_final || last_columns > all ? all : static_cast<int>(last_columns < 0 ? 0 : last_columns);
    TokenCursor<> x_in(in.x, s.span.batch, token, channel), dy_in(p.d_y, s.span.batch, token, channel);
    TokenCursor<> dx_out(p.dx, s.span.batch, token, channel);
    Scalar x_ahead[kAhead], dy_ahead[kAhead];
    const auto request = [&](int j, bool is_there) {
      if (is_there) {
        x_ahead[j].load(x_in.at, x_in.type);
        dy_ahead[j].load(dy_in.at, dy_in.type);
      }
      x_in.at += x_in.step;
      dy_in.at += dy_in.step;
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) request(j, j < count);
#pragma unroll 1
    for (int t = 0; t < all; ++t) {
      dz[0] = 0;
      if (t < count) {
        x[3] = x_ahead[0].value(x_in.type);
        dz[0] = conv_sum_gradient(filter.sum(x[0], x[1], x[2], x[3], skip), dy_ahead[0].value(dy_in.type), in.silu);
      }
#pragma unroll
      for (int j = 0; j + 1 < kAhead; ++j) x_ahead[j] = x_ahead[j + 1], dy_ahead[j] = dy_ahead[j + 1];
      request(kAhead - 1, t + kAhead < count);
      if (t < own) {
#pragma unroll
        for (int i = 0; i < kMaxTaps; ++i)
          if (i >= skip) sums[i] = fmaf(dz[0], x[i], sums[i]);
        sums[kMaxTaps] += dz[0];
      }
      // dx of the input three tokens before this one.
      float dx = 0;
#pragma unroll
      for (int i = 0; i < kMaxTaps; ++i)
        if (i >= skip) dx = fmaf(filter.weight[i], dz[i], dx);
      const int position = t - (kMaxTaps - 1);
      if (position < 0) {
        if (has_state) store_state_gradient(dx, s, position);
      } else if (p.dx) {
        if (position >= tail) dx += final_gradient(p.d_final, s.sequence, channel, s.from + position - s.span.length);
        store_numbers<1>(dx_out.at, dx_out.type, &dx, true);
        dx_out.at += dx_out.step;
      }
#pragma unroll
      for (int i = 0; i + 1 < kMaxTaps; ++i) {
        x[i] = x[i + 1];
        dz[kMaxTaps - 1 - i] = dz[kMaxTaps - 2 - i];
      }
    }
  }

  // Called by whole warps: lanes that are not live only help to find sequences.
  GD_DEVICE void run(int64_t number, const ConvGrid& grid, bool is_live) {
    Chunk chunk(in.sequences, grid, number);
    Segment segment;
    chunk.find_sequences();
#pragma unroll 1
    while (chunk.next(segment, 0))
      if (is_live) run(segment);
    if (is_live) clear(chunk.row, chunk.unused(), chunk.end);
  }
};

__global__ void __launch_bounds__(kConvThreads) conv_any_backward_kernel(const __grid_constant__ ConvBackwardParams p) {
  const ConvGrid& grid = p.grid;
  const auto blocks = static_cast<uint32_t>(grid.channel_blocks), group = blockIdx.x / blocks;
  const int64_t channel = int64_t{blockIdx.x - group * blocks} * kConvThreads + threadIdx.x;
  const bool is_live = channel < p.problem.in.channels;
  allow_next_kernel();
  ConvBackwardChannel one(p, is_live ? channel : 0);
#pragma unroll 1
  for (int64_t number = group; number < grid.chunks; number += grid.groups) one.run(number, grid, is_live);
#pragma unroll
  for (int i = 0; i < kConvSums; ++i)
    if (is_live) p.store(group, i, channel, one.sums[i]);
}

// Adds up the partial sums: a CTA has 32 channels, its rows of threads every kSumRows-th group. Few CTAs: all of
// them are resident when the first kernel ends.
constexpr int kSumRows = 8;
static_assert(kSumRows >= kConvSums);
__global__ void __launch_bounds__(32 * kSumRows) conv_sum_kernel(const __grid_constant__ ConvBackwardParams p) {
  __shared__ float sums[kSumRows][kConvSums][32];
  const Conv1dBackwardProblem& problem = p.problem;
  const int64_t channels = problem.in.channels;
  const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32;
  const int64_t channel = int64_t{blockIdx.x} * 32 + lane;
  float sum[kConvSums] = {};
  wait_for_previous_kernel();
  if (channel < channels) {
#pragma unroll 2
    for (int64_t group = row; group < p.grid.groups; group += kSumRows) {
#pragma unroll
      for (int i = 0; i < kConvSums; ++i) sum[i] += p.partial[(group * kConvSums + i) * channels + channel];
    }
  }
#pragma unroll
  for (int i = 0; i < kConvSums; ++i) sums[row][i][lane] = sum[i];
  __syncthreads();
  const int tap = row, skip = skipped_taps(problem.in);
  if (tap >= kConvSums || channel >= channels) return;
  float total = 0;
#pragma unroll
  for (int i = 0; i < kSumRows; ++i) total += sums[i][tap][lane];
  const TapWeights& dw = problem.dweight;
  const HeadVector& db = problem.dbias;
  if (tap == kMaxTaps) {
    if (db)
      store_numbers<1>(const_cast<char*>(element(db.data, db.dtype, channel * db.stride)), db.dtype, &total, true);
  } else if (tap >= skip && dw) {
    const int64_t to = channel * dw.channel_stride + (tap - skip) * dw.tap_stride;
    store_numbers<1>(const_cast<char*>(element(dw.data, dw.dtype, to)), dw.dtype, &total, true);
  }
}

}  // namespace gatedelta::cuda
