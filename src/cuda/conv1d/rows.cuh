// The convolution where channels are contiguous: a lane has kConvRowVector neighbouring channels, a warp a chunk of
// tokens.
//
// Almost all chunks are plain: all their inputs are in one sequence. The addresses of their rows follow from the
// chunk's number alone, so a warp loads them before filters and sequence offsets. All threads of a CTA compute its
// other chunks, one after the other, as the kernel `any` does.
//
// The warps of a CTA have neighbouring chunks of the same channels: rows that are read twice are in L1.
#pragma once

#include "cuda/conv1d/forward.cuh"

namespace gatedelta::cuda {

static_assert(kConvThreads == 32 * kConvRowVector, "a CTA has a channel per thread where chunks are not plain");

// Channels of a CTA, and its first chunks. The last chunks run second: chunks at a sequence's ends take longer.
struct RowPlace {
  int lane, warp;
  int64_t group, first;  // channel

  GD_DEVICE explicit RowPlace(const ConvGrid& grid)
      : lane(static_cast<int>(threadIdx.x) % 32), warp(static_cast<int>(threadIdx.x) / 32) {
    const auto blocks = static_cast<uint32_t>(grid.channel_blocks), number = blockIdx.x / blocks;
    group = number == 0 ? 0 : grid.groups - number;
    first = int64_t{blockIdx.x - number * blocks} * kConvThreads;
  }
};

// Calls `plain` with the number of each warp's chunk; it returns whether the chunk is plain. Calls `other` in all
// threads with the numbers of the chunks that are not. A chunk's number is the CTA's first one plus the warp's index.
template <class Plain, class Other>
GD_DEVICE void take_chunks(const ConvGrid& grid, const RowPlace& place, const Plain& plain, const Other& other) {
  __shared__ bool is_plain[kConvWarps];
#pragma unroll 1
  for (int64_t number = place.group * kConvWarps; number < grid.chunks; number += grid.groups * kConvWarps) {
    const bool taken = number + place.warp >= grid.chunks || plain(number + place.warp);
    if (place.lane == 0) is_plain[place.warp] = taken;
    if (__syncthreads_and(taken)) continue;
#pragma unroll 1
    for (int warp = 0; warp < kConvWarps; ++warp)
      if (!is_plain[warp]) other(number + warp);
    __syncthreads();
  }
}

template <gd_dtype kType>
__global__ void __launch_bounds__(kConvThreads, conv_row_ctas(kType))
    conv_rows_kernel(const __grid_constant__ ConvParams p) {
  constexpr int kVector = kConvRowVector, kTokens = kConvRowTokens, kBefore = kMaxTaps - 1;
  using Words = Numbers<kVector, kType>;
  const ConvGrid& grid = p.grid;
  const Conv1dInputs& in = p.problem.in;
  const Sequences& sequences = in.sequences;
  const RowPlace place(grid);
  const int64_t own = place.first + place.lane * kVector;
  const bool is_live = own < in.channels;  // other lanes only help to find sequences
  const int64_t channel = is_live ? own : 0;

  const auto plain = [&](int64_t number) {
    const Chunk chunk(sequences, grid, number);
    const int64_t batch = chunk.row, begin = chunk.begin, before = begin - kBefore, after = begin + kTokens;
    // The last chunk of a pack also has the empty sequences at the end.
    const int64_t end = sequences.offsets ? sequences.tokens - 1 : sequences.tokens;
    if (grid.chunk < kTokens || before < 0 || after > end) return false;
    Words rows[kBefore + kTokens];
    const TokenCursor<kType> x(in.x, batch, before, channel);
#pragma unroll
    for (int i = 0; i < kBefore + kTokens; ++i) rows[i].load(x.at + i * x.step, kType);
    const int64_t sequence = sequence_of(sequences, batch, before, after);
    if (sequence < 0 || p.problem.is_padding(sequence)) return false;
    if (!is_live) return true;
    Filter filter[kVector];
    load_packed_filters(filter, in, channel);

    const TokenCursor<kType> y(p.problem.y, batch, begin, channel);
    const auto compute = [&](bool silu) {
      float window[kMaxTaps][kVector];  // a ring: no row is copied
#pragma unroll
      for (int i = 0; i < kBefore; ++i) rows[i].widen(window[i], kType);
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        rows[kBefore + j].widen(window[(j + 3) % 4], kType);
        float out[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          const float z =
              filter[v].sum(window[j % 4][v], window[(j + 1) % 4][v], window[(j + 2) % 4][v], window[(j + 3) % 4][v]);
          out[v] = conv_activate(z, silu);
        }
        Words::store(y.at + j * y.step, kType, out);
      }
    };
    in.silu ? compute(true) : compute(false);
    return true;
  };
  take_chunks(grid, place, plain, [&](int64_t number) {
    const int64_t single = place.first + threadIdx.x;
    const bool is_there = single < in.channels;
    const ConvChannel one(p, is_there ? single : 0);
    one.run(number, grid, is_there);
  });
}

}  // namespace gatedelta::cuda
