// The backward where channels are contiguous, with the chunks of rows.cuh.
//
// A warp goes through a plain chunk from its first token to three behind its last one, which complete the chunk's dx.
// Tokens are copied to a ring in shared memory: copies in flight take no registers, so more warps fit. A lane reads
// only its own copies, so no warp waits for another one.
//
// Chunks at the ends of a sequence without states and their gradients are plain, too: inputs beyond the ends are 0.
#pragma once

#include "cuda/conv1d/backward.cuh"
#include "cuda/conv1d/rows.cuh"

namespace gatedelta::cuda {

// Copies of a warp's tokens, in stages of kBatch.
template <gd_dtype kType>
struct RowRing {
  static constexpr int kBatch = kConvRowBatch, kStages = conv_row_stages(kType);
  using Words = Numbers<kConvRowVector, kType>;
  Words x[kStages][kBatch][32], dy[kStages][kBatch][32];
};

template <gd_dtype kType>
struct ConvBackwardRows {
  using Ring = RowRing<kType>;
  using Words = typename Ring::Words;
  static constexpr int kVector = kConvRowVector, kBefore = kMaxTaps - 1, kBatch = Ring::kBatch;
  static_assert(kBatch == kMaxTaps, "a token's place in a window of rows follows from its place in the batch");
  const ConvBackwardParams& p;
  Ring& ring;
  const int lane;
  const int own, there;  // tokens of the chunk; tokens with a dz, up to three of them after the chunk
  const char *x_at, *dy_at;
  char* dx_at;
  Words before[kBefore];
  Filter filter[kVector];
  float sums[kConvSums][kVector] = {};                     // of dweight, then dbias
  float x[kMaxTaps][kVector], dz[kMaxTaps][kVector] = {};  // rings: no row is copied

  GD_DEVICE ConvBackwardRows(const ConvBackwardParams& params, Ring& warp_ring, int64_t batch, int64_t token,
                             int64_t channel, int own_tokens, int tokens_there)
      : p(params),
        ring(warp_ring),
        lane(static_cast<int>(threadIdx.x) % 32),
        own(own_tokens),
        there(tokens_there),
        x_at(TokenCursor<kType>(p.problem.in.x, batch, token, channel).at),
        dy_at(TokenCursor<kType>(p.problem.d_y, batch, token, channel).at),
        dx_at(TokenCursor<kType>(p.problem.dx, batch, token - kBefore, channel).at) {
#pragma unroll
    for (int i = 0; i < kBefore; ++i) {
      before[i].clear();
      if (token > 0) before[i].load(x_at - (kBefore - i) * p.x_step, kType);
    }
#pragma unroll
    for (int stage = 0; stage + 1 < Ring::kStages; ++stage) request(stage * kBatch, stage);
  }

  // Copies a batch of tokens, zeros past the last one.
  GD_DEVICE void request(int first, int stage) {
    const auto copy = [&](int j, bool is_there) {
      copy_async_or_zero(&ring.x[stage][j][lane], x_at, is_there);
      copy_async_or_zero(&ring.dy[stage][j][lane], dy_at, is_there);
      x_at += p.x_step;
      dy_at += p.d_y_step;
    };
    if (first + kBatch <= there) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) copy(j, true);
    } else {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) copy(j, first + j < there);
    }
    copy_commit();
  }

  // Token j of a batch. Its dz completes the dx of the token three before it.
  template <bool kSilu, bool kBias>
  GD_DEVICE void step(int j, int stage, bool is_own, bool completes) {
    float dy[kVector], dx[kVector] = {};
    ring.x[stage][j][lane].widen(x[(j + 3) % 4], kType);
    ring.dy[stage][j][lane].widen(dy, kType);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (kSilu) {
        const float z = filter[v].sum(x[j % 4][v], x[(j + 1) % 4][v], x[(j + 2) % 4][v], x[(j + 3) % 4][v]);
        dy[v] = conv_sum_gradient(z, dy[v], true);
      }
      dz[j % 4][v] = dy[v];
#pragma unroll
      for (int i = 0; i < kMaxTaps; ++i) {
        if (is_own) sums[i][v] = fmaf(dz[j % 4][v], x[(j + i) % 4][v], sums[i][v]);
        dx[v] = fmaf(filter[v].weight[i], dz[(j + 4 - i) % 4][v], dx[v]);
      }
      if (is_own && kBias) sums[kMaxTaps][v] += dz[j % 4][v];
    }
    if (completes) Words::store(dx_at, kType, dx);
    dx_at += p.dx_step;
  }

  // kBias: there is a bias, or its gradient is wanted.
  template <bool kSilu, bool kBias>
  GD_DEVICE void run(int64_t channel) {
    const bool has_dx = static_cast<bool>(p.problem.dx);
    load_packed_filters(filter, p.problem.in, channel);
    if (!kBias) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) filter[v].bias = 0;
    }
#pragma unroll
    for (int i = 0; i < kBefore; ++i) before[i].widen(x[i], kType);
    int stage = 0, first = 0;
#pragma unroll 1
    for (; first < own; first += kBatch) {
      copy_wait<Ring::kStages - 2>();
      request(first + (Ring::kStages - 1) * kBatch, stage == 0 ? Ring::kStages - 1 : stage - 1);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) step<kSilu, kBias>(j, stage, true, has_dx && (j >= kBefore || first > 0));
      stage = stage + 1 == Ring::kStages ? 0 : stage + 1;
    }
    copy_wait<0>();
#pragma unroll
    for (int j = 0; j < kBefore; ++j) step<kSilu, kBias>(j, stage, false, has_dx && first + j - kBefore < own);
  }
};

template <gd_dtype kType>
__global__ void __launch_bounds__(kConvThreads, kConvRowBackwardCtas)
    conv_rows_backward_kernel(const __grid_constant__ ConvBackwardParams p) {
  constexpr int kVector = kConvRowVector, kBefore = kMaxTaps - 1;
  __shared__ RowRing<kType> rings[kConvWarps];
  // Of each warp's plain chunks, then of the others.
  __shared__ float sums[kConvWarps + 1][kConvSums][kConvThreads];
  const ConvGrid& grid = p.grid;
  const Conv1dInputs& in = p.problem.in;
  const RowPlace place(grid);
  const int64_t own = place.first + place.lane * kVector, single = place.first + threadIdx.x;
  const bool is_live = own < in.channels, is_there = single < in.channels;
  const int64_t columns = p.problem.d_final ? p.problem.d_final.columns : 0;
  const int64_t reach = columns > kBefore ? columns : kBefore;  // from a plain chunk to its sequence's end
  const bool plain_ends = has_plain_ends(p.problem);
  allow_next_kernel();
  for (auto& warp : sums) {
#pragma unroll
    for (int i = 0; i < kConvSums; ++i) warp[i][threadIdx.x] = 0;
  }
  __syncthreads();

  const auto plain = [&](int64_t number) {
    const Chunk chunk(in.sequences, grid, number);
    const int64_t batch = chunk.row, begin = chunk.begin, before = begin - kBefore;
    const int64_t after = begin + grid.chunk + reach, left = in.sequences.tokens - begin;
    if (!plain_ends && (before < 0 || after > in.sequences.tokens)) return false;
    const auto count = static_cast<int>(chunk.end - begin), reached = count + kBefore;
    if (count == 0) return plain_ends;
    ConvBackwardRows<kType> rows(p, rings[place.warp], batch, begin, is_live ? own : 0, count,
                                 left < reached ? static_cast<int>(left) : reached);
    const bool is_plain = plain_ends || sequence_of(in.sequences, batch, before, after) >= 0;
    if (!is_plain) {
      copy_wait<0>();
      return false;
    }
    if (!is_live) {
      copy_wait<0>();
      return true;
    }
    if (!in.silu) {
      rows.template run<false, true>(own);
    } else if (in.bias || p.problem.dbias) {
      rows.template run<true, true>(own);
    } else {
      rows.template run<true, false>(own);
    }
#pragma unroll
    for (int i = 0; i < kConvSums; ++i) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) sums[place.warp][i][place.lane * kVector + v] += rows.sums[i][v];
    }
    return true;
  };
  take_chunks(grid, place, plain, [&](int64_t number) {
    ConvBackwardChannel one(p, is_there ? single : 0);
    one.run(number, grid, is_there);
#pragma unroll
    for (int i = 0; i < kConvSums; ++i) sums[kConvWarps][i][threadIdx.x] += one.sums[i];
  });
  if (!is_there || !p.partial) return;
#pragma unroll
  for (int i = 0; i < kConvSums; ++i) {
    float sum = sums[0][i][threadIdx.x];
#pragma unroll
    for (int warp = 1; warp <= kConvWarps; ++warp) sum += sums[warp][i][threadIdx.x];
    p.store(place.group, i, single, sum);
  }
}

}  // namespace gatedelta::cuda
