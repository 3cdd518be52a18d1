// The convolution's backward where a thread owns channels:
//   dz_t = d_y_t act'(z_t),  dx_p = sum over i of w_i dz_{p + W - 1 - i},  dw_i = sum over t of dz_t x_{t - W + 1 + i}
// A chunk goes through W - 1 tokens more than it owns, because its last dx need their dz. What would be dx of the W - 1
// inputs before a sequence is the gradient of its state. Sums over tokens stay in registers; each slot of the grid
// stores them as a partial sum, and a second kernel adds those up in a fixed order.
#pragma once

#include "cuda/conv1d/access.cuh"
#include "cuda/conv1d/segments.cuh"

namespace gatedelta::cuda {

struct ConvBackwardParams {
  Conv1dBackwardProblem problem;
  ConvGrid grid;
  bool packed_weights;
  float* partial;  // [slots][W + 1][D]; null: neither dweight nor dbias is wanted
};

// What the gradient of a final state adds to an input `after` its sequence's end (negative: before it).
GD_DEVICE float final_gradient(const ConvStates& d_final, int64_t sequence, int64_t channel, int64_t after) {
  const int64_t column = d_final.columns + after;
  if (!d_final || column < 0) return 0;
  return load_number(d_final.data, d_final.dtype, d_final.offset(sequence, channel, column));
}

template <int kVector, gd_dtype kType, int kTaps>
struct ConvBackwardWalk {
  static constexpr int kBatch = 4;  // tokens that are requested before they are needed
  const ConvBackwardParams& p;
  const Conv1dInputs& in;
  ChannelVector<kVector> at;
  Filter<kTaps> filter[kVector];
  float dw[kTaps][kVector] = {}, db[kVector] = {};

  GD_DEVICE ConvBackwardWalk(const ConvBackwardParams& params, int64_t channel)
      : p(params), in(params.problem.in), at{channel} {
    at.load(filter, in, p.packed_weights);
  }

  GD_DEVICE void clear(int64_t batch, int64_t begin, int64_t end) const {
    const float zeros[kVector] = {};
    if (!p.problem.dx) return;
#pragma unroll 1
    for (int64_t t = begin; t < end; ++t) at.template store<kType>(p.problem.dx, batch, t, zeros);
  }

  GD_DEVICE void load_window(float (&window)[kVector][kTaps - 1], const Segment& s) const {
    const int64_t slot = in.initial.slot(s.sequence);
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) {
      const int64_t position = s.from - (kTaps - 1) + i;
      float x[kVector] = {};
      if (position >= 0) {
        Numbers<kVector, kType> numbers;
        at.load(numbers, in.x, s.span.batch, s.span.begin + position);
        numbers.widen(x, in.x.dtype);
      } else if (slot >= 0) {
        at.load(x, in.initial, slot, in.initial.columns + position, false);
      }
#pragma unroll
      for (int v = 0; v < kVector; ++v) window[v][i] = x[v];
    }
  }

  GD_DEVICE void run(const Segment& s) {
    float window[kVector][kTaps - 1];
    load_window(window, s);
    if (s.from == 0 && p.problem.d_initial) state_gradient(s, window);
    const int64_t left = s.span.length - s.from;  // tokens to the sequence's end
    const int own = static_cast<int>(s.to - s.from), all = own + kTaps - 1;
    compute(window, s, own, static_cast<int>(left < all ? left : all));
  }

  // The gradient of the sums before the activation, of the token x that enters the window.
  GD_DEVICE float sum_gradient(int v, const float (&window)[kTaps - 1], float x, float dy) const {
    return in.silu ? Filter<kTaps>::sum_gradient(filter[v].sum(window, x), dy, true) : dy;
  }

  // `own` tokens from s.from on, of which `count` have a dz that matters, those after them included.
  GD_DEVICE void compute(float (&window)[kVector][kTaps - 1], const Segment& s, int own, int count) {
    const TokenRows &in_x = in.x, &in_dy = p.problem.d_y, &out = p.problem.dx;
    const int64_t token = s.span.begin + s.from;
    const auto type_of = [](const TokenRows& rows) { return kType == GD_DTYPE_NONE ? rows.dtype : kType; };
    const auto bytes = [](const TokenRows& rows, int64_t at) {
      const gd_dtype type = kType == GD_DTYPE_NONE ? rows.dtype : kType;
      return at * (type == GD_F32 ? 4 : 2);
    };
    const char* x_at = static_cast<const char*>(in_x.data) + bytes(in_x, in_x.offset(s.span.batch, token, at.channel));
    const char* dy_at =
        static_cast<const char*>(in_dy.data) + bytes(in_dy, in_dy.offset(s.span.batch, token, at.channel));
    char* dx_at = static_cast<char*>(out.data) + bytes(out, out.offset(s.span.batch, token, at.channel));
    const int64_t x_step = bytes(in_x, in_x.token_stride), dy_step = bytes(in_dy, in_dy.token_stride);
    const int64_t dx_step = bytes(out, out.token_stride);
    // From this token on the final state's gradient counts.
    const int64_t tail = p.problem.d_final ? s.span.length - p.problem.d_final.columns - s.from : INT64_MAX;

    Numbers<kVector, kType> x_ahead[kBatch], dy_ahead[kBatch];
    const auto request = [&](int j, int t) {
      if (t < count) {
        x_ahead[j].load(x_at, type_of(in_x));
        dy_ahead[j].load(dy_at, type_of(in_dy));
      }
      x_at += x_step;
      dy_at += dy_step;
    };
#pragma unroll
    for (int j = 0; j < kBatch; ++j) request(j, j);
    float dz[kVector][kTaps] = {};  // of this token and the ones before it, oldest first
#pragma unroll 1
    for (int t = 0; t < own + kTaps - 1; t += kBatch) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (t + j >= own + kTaps - 1) break;
        float x[kVector] = {}, dy[kVector] = {};
        if (t + j < count) {
          x_ahead[j].widen(x, type_of(in_x));
          dy_ahead[j].widen(dy, type_of(in_dy));
        }
        request(j, t + j + kBatch);
        const bool is_own = t + j < own;
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          // Past the sequence's end dy is 0, and so is dz.
          push_gradient(dz[v], sum_gradient(v, window[v], x[v], dy[v]));
          if (is_own) add_weights(v, window[v], x[v], dz[v][kTaps - 1]);
          Filter<kTaps>::push(window[v], x[v]);
        }
        const int position = t + j - (kTaps - 1);
        if (position < 0) continue;
        if (out) {
          float dx[kVector];
          input_gradient(dx, dz);
          if (position >= tail) add_final(dx, s.sequence, s.from + position - s.span.length);
          store_numbers<kVector>(dx_at, type_of(out), dx, kVector > 1);
        }
        dx_at += dx_step;
      }
    }
  }

  GD_DEVICE static void push_gradient(float (&dz)[kTaps], float gradient) {
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) dz[i] = dz[i + 1];
    dz[kTaps - 1] = gradient;
  }
  GD_DEVICE void add_weights(int v, const float (&window)[kTaps - 1], float x, float gradient) {
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) dw[i][v] = fmaf(gradient, window[i], dw[i][v]);
    dw[kTaps - 1][v] = fmaf(gradient, x, dw[kTaps - 1][v]);
    db[v] += gradient;
  }
  // Of the input W - 1 tokens before the newest of dz.
  GD_DEVICE void input_gradient(float (&dx)[kVector], const float (&dz)[kVector][kTaps]) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      dx[v] = 0;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) dx[v] = fmaf(filter[v].weight[i], dz[v][kTaps - 1 - i], dx[v]);
    }
  }
  GD_DEVICE void add_final(float (&dx)[kVector], int64_t sequence, int64_t after) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) dx[v] += final_gradient(p.problem.d_final, sequence, at.channel + v, after);
  }

  // The inputs before the sequence: what the first tokens' sums pass on to them, and the final state where the sequence
  // is shorter than it.
  GD_DEVICE void state_gradient(const Segment& s, const float (&history)[kVector][kTaps - 1]) const {
    const ConvStates& d = p.problem.d_initial;
    float window[kVector][kTaps - 1], dz[kVector][kTaps] = {};
#pragma unroll
    for (int v = 0; v < kVector; ++v)
#pragma unroll
      for (int i = 0; i + 1 < kTaps; ++i) window[v][i] = history[v][i];
#pragma unroll
    for (int t = 0; t + 1 < kTaps; ++t) {
      float x[kVector] = {}, dy[kVector] = {}, dx[kVector];
      if (t < s.span.length) {
        Numbers<kVector, kType> numbers;
        at.load(numbers, in.x, s.span.batch, s.span.begin + t);
        numbers.widen(x, in.x.dtype);
        at.load(numbers, p.problem.d_y, s.span.batch, s.span.begin + t);
        numbers.widen(dy, p.problem.d_y.dtype);
      }
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        push_gradient(dz[v], sum_gradient(v, window[v], x[v], dy[v]));
        Filter<kTaps>::push(window[v], x[v]);
      }
      const int64_t position = t - (kTaps - 1);
      input_gradient(dx, dz);
      add_final(dx, s.sequence, position - s.span.length);
      at.store(d, s.sequence, d.columns + position, dx, false);
    }
#pragma unroll 1
    for (int64_t column = 0; column < d.columns - (kTaps - 1); ++column) {
      float dx[kVector] = {};
      add_final(dx, s.sequence, column - d.columns - s.span.length);
      at.store(d, s.sequence, column, dx, false);
    }
  }

  GD_DEVICE void store_sums(int64_t slot) const {
    if (!p.partial) return;
    float* const to = p.partial + slot * (kTaps + 1) * in.channels + at.channel;
#pragma unroll
    for (int i = 0; i <= kTaps; ++i) {
      const float(&sums)[kVector] = i < kTaps ? dw[i < kTaps ? i : 0] : db;
      store_numbers<kVector>(reinterpret_cast<char*>(to + i * in.channels), GD_F32, sums, kVector > 1);
    }
  }
};

template <int kVector, gd_dtype kType, int kTaps>
__global__ void __launch_bounds__(kConvThreads, 6)
    conv_walk_backward_kernel(const __grid_constant__ ConvBackwardParams p) {
  const ConvGrid& grid = p.grid;
  const int64_t blocks = grid.channel_blocks, slot = blockIdx.x / static_cast<uint32_t>(blocks);
  const int64_t channel = ((blockIdx.x - slot * blocks) * kConvThreads + threadIdx.x) * kVector;
  const bool is_live = channel < p.problem.in.channels;  // the others only help to find sequences
  ConvBackwardWalk<kVector, kType, kTaps> walk(p, is_live ? channel : 0);
#pragma unroll 1
  for (int64_t number = slot; number < grid.chunks; number += grid.slots) {
    Chunk chunk(p.problem.in.sequences, grid, number);
    Segment segment;
#pragma unroll 1
    while (chunk.next(segment, 0))
      if (is_live) walk.run(segment);
    if (is_live) walk.clear(chunk.row, chunk.unused(), chunk.end);
  }
  if (is_live) walk.store_sums(slot);
}

// Adds up the partial sums: a CTA has 32 channels of one tap, its rows of threads every kSumRows-th slot.
constexpr int kSumRows = 16;
template <int kTaps>
__global__ void __launch_bounds__(32 * kSumRows) conv_sum_kernel(const __grid_constant__ ConvBackwardParams p) {
  __shared__ float sums[kSumRows][32];
  const Conv1dBackwardProblem& problem = p.problem;
  const int64_t channels = problem.in.channels, blocks = (channels + 31) / 32;
  const int tap = static_cast<int>(blockIdx.x / static_cast<uint32_t>(blocks));
  const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32;
  const int64_t channel = (blockIdx.x - tap * blocks) * 32 + lane;
  float sum = 0;
  if (channel < channels) {
#pragma unroll 8
    for (int64_t slot = row; slot < p.grid.slots; slot += kSumRows)
      sum += p.partial[(slot * (kTaps + 1) + tap) * channels + channel];
  }
  sums[row][lane] = sum;
  __syncthreads();
  if (row > 0 || channel >= channels) return;
#pragma unroll
  for (int i = 1; i < kSumRows; ++i) sum += sums[i][lane];
  const TapWeights& dw = problem.dweight;
  const HeadVector& db = problem.dbias;
  if (tap < kTaps && dw) {
    const int64_t to = channel * dw.channel_stride + tap * dw.tap_stride;
    store_numbers<1>(const_cast<char*>(element(dw.data, dw.dtype, to)), dw.dtype, &sum, true);
  } else if (tap == kTaps && db) {
    store_numbers<1>(const_cast<char*>(element(db.data, db.dtype, channel * db.stride)), db.dtype, &sum, true);
  }
}

}  // namespace gatedelta::cuda
