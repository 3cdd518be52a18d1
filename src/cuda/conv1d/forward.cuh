// The convolution's forward: `walk`, where a thread owns channels and goes from token to token, and `columns`, where
// the lanes of a warp share the tokens of a channel.
//
// In place: the chunk that holds a sequence's first tokens is alone to read its state, and the thread that reads a
// channel of it is the one that writes it, after its reads.
#pragma once

#include "cuda/conv1d/access.cuh"
#include "cuda/conv1d/segments.cuh"

namespace gatedelta::cuda {

struct ConvParams {
  Conv1dProblem problem;
  ConvGrid grid;
  bool packed_weights, initial_vectors, final_vectors;
};

template <int kVector, gd_dtype kType, int kTaps>
struct ConvWalk {
  static constexpr int kBatch = kType == GD_F32 ? 4 : 8;  // tokens that are requested before they are needed
  const ConvParams& p;
  const Conv1dInputs& in;
  ChannelVector<kVector> at;
  Filter<kTaps> filter[kVector];

  GD_DEVICE ConvWalk(const ConvParams& params, int64_t channel) : p(params), in(params.problem.in), at{channel} {
    at.load(filter, in, p.packed_weights);
  }

  GD_DEVICE void clear(int64_t batch, int64_t begin, int64_t end) const {
    const float zeros[kVector] = {};
    if (!p.problem.y) return;
#pragma unroll 1
    for (int64_t t = begin; t < end; ++t) at.template store<kType>(p.problem.y, batch, t, zeros);
  }

  // Input number `position` of the sequence; negative ones are the state's.
  GD_DEVICE void load_input(float (&x)[kVector], const SequenceSpan& span, int64_t position, int64_t slot,
                            int64_t history_end) const {
    if (position >= 0) {
      Numbers<kVector, kType> numbers;
      at.load(numbers, in.x, span.batch, span.begin + position);
      numbers.widen(x, in.x.dtype);
    } else if (slot >= 0 && history_end + position >= 0) {
      at.load(x, in.initial, slot, history_end + position, p.initial_vectors);
    } else {
#pragma unroll
      for (int v = 0; v < kVector; ++v) x[v] = 0;
    }
  }

  // The state is written before the outputs: what they need of it is in registers by then, and the segment is not.
  GD_DEVICE void run(const Segment& s) const {
    const Conv1dProblem& problem = p.problem;
    if (problem.is_padding(s.sequence)) return clear(s.span.batch, s.span.begin + s.from, s.span.begin + s.to);
    const int64_t slot = in.initial.slot(s.sequence), history_end = problem.history_end(s.sequence);
    float window[kVector][kTaps - 1];
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) {
      float x[kVector];
      load_input(x, s.span, s.from - (kTaps - 1) + i, slot, history_end);
#pragma unroll
      for (int v = 0; v < kVector; ++v) window[v][i] = x[v];
    }
    if (s.from == 0) {
      const int64_t to = problem.final.slot(s.sequence);
      if (to >= 0) store_state(s, slot, to);
    }
    if (problem.y || problem.steps)
      compute(window, s.span.batch, s.span.begin + s.from, static_cast<int>(s.to - s.from));
  }

  // A token's place in registers is requested anew, for the token kBatch further on, as soon as the token is taken.
  GD_DEVICE void compute(float (&window)[kVector][kTaps - 1], int64_t batch, int64_t token, int count) const {
    const TokenRows& out = p.problem.y;
    const gd_dtype x_type = kType == GD_DTYPE_NONE ? in.x.dtype : kType;
    const gd_dtype y_type = kType == GD_DTYPE_NONE ? out.dtype : kType;
    const char* x_at = element(in.x.data, x_type, in.x.offset(batch, token, at.channel));
    char* y_at = const_cast<char*>(element(out.data, y_type, out.offset(batch, token, at.channel)));
    const int64_t x_step = in.x.token_stride * (x_type == GD_F32 ? 4 : 2);
    const int64_t y_step = out.token_stride * (y_type == GD_F32 ? 4 : 2);
    Numbers<kVector, kType> ahead[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j, x_at += x_step)
      if (j < count) ahead[j].load(x_at, x_type);
#pragma unroll 1
    for (int t = 0; t < count; t += kBatch) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (t + j >= count) break;
        float x[kVector], y[kVector];
        ahead[j].widen(x, x_type);
        if (t + j + kBatch < count) ahead[j].load(x_at, x_type);
        x_at += x_step;
#pragma unroll
        for (int v = 0; v < kVector; ++v) y[v] = filter[v].step(window[v], x[v], in.silu);
        if (kType != GD_DTYPE_NONE || out) store_numbers<kVector>(y_at, y_type, y, kVector > 1);
        y_at += y_step;
        if constexpr (kVector == 1) store_window(window[0], batch, token + t + j);
      }
    }
  }

  GD_DEVICE void store_window(const float (&window)[kTaps - 1], int64_t batch, int64_t token) const {
    const StepWindows& steps = p.problem.steps;
    if (!steps) return;
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) {
      const char* const to = element(steps.data, steps.dtype, steps.offset(batch, token, at.channel, i));
      store_numbers<1>(const_cast<char*>(to), steps.dtype, window + i, true);
    }
  }

  // Some columns are read before the first of them is written: in place, what a column gets lies in a later one.
  GD_DEVICE void store_state(const Segment& s, int64_t from, int64_t to) const {
    constexpr int kColumns = kVector == 1 ? 4 : 1;
    const FinalColumns source = p.problem.final_columns(s.sequence, s.span.length);
#pragma unroll 1
    for (int64_t column = 0; column < source.columns; column += kColumns) {
      float x[kColumns][kVector];
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        if (column + j < source.columns)
          load_input(x[j], s.span, source.first_input + column + j, from, source.history_end);
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        if (column + j < source.columns) at.store(p.problem.final, to, column + j, x[j], p.final_vectors);
    }
  }
};

template <int kVector, gd_dtype kType, int kTaps>
__global__ void __launch_bounds__(kConvThreads, 8) conv_walk_kernel(const __grid_constant__ ConvParams p) {
  const ConvGrid& grid = p.grid;
  const int64_t blocks = grid.channel_blocks, slot = blockIdx.x / static_cast<uint32_t>(blocks);
  const int64_t channel = ((blockIdx.x - slot * blocks) * kConvThreads + threadIdx.x) * kVector;
  const bool is_live = channel < p.problem.in.channels;  // the others only help to find sequences
  const ConvWalk<kVector, kType, kTaps> walk(p, is_live ? channel : 0);
#pragma unroll 1
  for (int64_t number = slot; number < grid.chunks; number += grid.slots) {
    Chunk chunk(p.problem.in.sequences, grid, number);
    Segment segment;
#pragma unroll 1
    while (chunk.next(segment, kTaps - 1))
      if (is_live) walk.run(segment);
    if (is_live) walk.clear(chunk.row, chunk.unused(), chunk.end);
  }
}

}  // namespace gatedelta::cuda
