// The convolution's forward where a thread owns a channel of any type and strides, token after token.
//
// In place: only the chunk with a sequence's first tokens reads its state, and the thread that reads a channel of the
// state also writes it, after its reads.
#pragma once

#include "cuda/conv1d/access.cuh"
#include "cuda/conv1d/segments.cuh"

namespace gatedelta::cuda {

struct ConvParams {
  Conv1dProblem problem;
  ConvGrid grid;
};

struct ConvChannel {
  static constexpr int kAhead = 8;  // tokens that are loaded before they are needed
  const Conv1dProblem& problem;
  const Conv1dInputs& in;
  const int64_t channel;
  const int skip;
  Filter filter;

  GD_DEVICE ConvChannel(const ConvParams& p, int64_t own)
      : problem(p.problem), in(p.problem.in), channel(own), skip(skipped_taps(p.problem.in)) {
    load_filter(filter, in, channel);
  }

  GD_DEVICE void clear(int64_t batch, int64_t begin, int64_t end) const {
    const float zero = 0;
    if (!problem.y) return;
    TokenCursor<> y(problem.y, batch, begin, channel);
#pragma unroll 1
    for (int64_t t = begin; t < end; ++t, y.at += y.step) store_numbers<1>(y.at, y.type, &zero, true);
  }

  // Stores the state before the outputs: by then their window is in registers, and the segment need not stay there.
  GD_DEVICE void run(const Segment& s) const {
    if (problem.is_padding(s.sequence)) return clear(s.span.batch, s.span.begin + s.from, s.span.begin + s.to);
    const int64_t slot = s.from == 0 ? in.initial.slot(s.sequence) : -1, history_end = problem.history_end(s.sequence);
    float window[kMaxTaps];
#pragma unroll
    for (int i = 0; i + 1 < kMaxTaps; ++i)
      window[i] = load_input(in, s.span, s.from - (kMaxTaps - 1) + i, channel, slot, history_end);
    if (s.from == 0) {
      const int64_t to = problem.final.slot(s.sequence);
      if (to >= 0) store_final(s, slot, to);
    }
    if (problem.y || problem.steps)
      compute(window, s.span.batch, s.span.begin + s.from, static_cast<int>(s.to - s.from));
  }

  GD_DEVICE void compute(float (&window)[kMaxTaps], int64_t batch, int64_t token, int count) const {
    TokenCursor<> x(in.x, batch, token, channel), y(problem.y, batch, token, channel);
    Scalar ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j, x.at += x.step)
      if (j < count) ahead[j].load(x.at, x.type);
#pragma unroll 1
    for (; count > 0; --count, ++token, x.at += x.step, y.at += y.step) {
      window[3] = ahead[0].value(x.type);
#pragma unroll
      for (int j = 0; j + 1 < kAhead; ++j) ahead[j] = ahead[j + 1];
      if (count > kAhead) ahead[kAhead - 1].load(x.at, x.type);
      const float out = conv_activate(filter.sum(window[0], window[1], window[2], window[3], skip), in.silu);
      if (problem.y) store_numbers<1>(y.at, y.type, &out, true);
#pragma unroll
      for (int i = 0; i + 1 < kMaxTaps; ++i) window[i] = window[i + 1];
      store_window(window, batch, token);
    }
  }

  GD_DEVICE void store_window(const float (&window)[kMaxTaps], int64_t batch, int64_t token) const {
    const StepWindows& steps = problem.steps;
    if (!steps) return;
#pragma unroll
    for (int i = 0; i + 1 < kMaxTaps; ++i) {
      if (i < skip) continue;
      const char* const to = element(steps.data, steps.dtype, steps.offset(batch, token, channel, i - skip));
      store_numbers<1>(const_cast<char*>(to), steps.dtype, window + i, true);
    }
  }

  // Columns in ascending order: in place a column is copied from a later one. Some are read at the same time.
  GD_DEVICE void store_final(const Segment& s, int64_t from, int64_t to) const {
    constexpr int kColumns = kMaxTaps - 1;
    const FinalColumns source = problem.final_columns(s.sequence, s.span.length);
#pragma unroll 1
    for (int64_t column = 0; column < source.columns; column += kColumns) {
      float x[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (column + i < source.columns)
          x[i] = load_input(in, s.span, source.first_input + column + i, channel, from, source.history_end);
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (column + i < source.columns) store_state(problem.final, to, channel, column + i, x[i]);
    }
  }

  // Called by whole warps: lanes that are not live only help to find sequences.
  GD_DEVICE void run(int64_t number, const ConvGrid& grid, bool is_live) const {
    Chunk chunk(in.sequences, grid, number);
    Segment segment;
    chunk.find_sequences();
#pragma unroll 1
    while (chunk.next(segment, kMaxTaps - 1))
      if (is_live) run(segment);
    if (is_live) clear(chunk.row, chunk.unused(), chunk.end);
  }
};

__global__ void __launch_bounds__(kConvThreads) conv_any_kernel(const __grid_constant__ ConvParams p) {
  const ConvGrid& grid = p.grid;
  const auto blocks = static_cast<uint32_t>(grid.channel_blocks), group = blockIdx.x / blocks;
  const int64_t channel = int64_t{blockIdx.x - group * blocks} * kConvThreads + threadIdx.x;
  const bool is_live = channel < p.problem.in.channels;
  const ConvChannel one(p, is_live ? channel : 0);
#pragma unroll 1
  for (int64_t number = group; number < grid.chunks; number += grid.groups) one.run(number, grid, is_live);
}

}  // namespace gatedelta::cuda
