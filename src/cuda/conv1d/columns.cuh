// The convolution where tokens are contiguous and sequences are not packed: a lane has kVector neighbouring tokens of
// a channel, and gets those before and after them from its neighbours.
#pragma once

#include "cuda/conv1d/backward.cuh"
#include "cuda/conv1d/forward.cuh"

namespace gatedelta::cuda {

// kVector tokens of one channel, from token t on.
template <int kVector, gd_dtype kType>
GD_DEVICE void load_tokens(Raw<kVector>& raw, const TokenRows& rows, int64_t batch, int64_t channel, int64_t t) {
  raw.load(element(rows.data, kType, rows.offset(batch, t, channel)), kType, true);
}
template <int kVector, gd_dtype kType>
GD_DEVICE void store_tokens(const TokenRows& rows, int64_t batch, int64_t channel, int64_t t,
                            const float (&x)[kVector]) {
  char* const to = const_cast<char*>(element(rows.data, kType, rows.offset(batch, t, channel)));
  store_numbers<kVector>(to, kType, x, true);
}

// The taps - 1 inputs before token t of lane 0: of x, or of the state.
template <int kVector, gd_dtype kType, int kTaps>
GD_DEVICE void load_before(float (&before)[kTaps - 1], const Conv1dInputs& in, int64_t batch, int64_t channel,
                           int64_t t, int64_t slot) {
#pragma unroll
  for (int i = 0; i + 1 < kTaps; ++i) {
    const int64_t position = t - (kTaps - 1) + i;
    before[i] = 0;
    if (position >= 0) {
      before[i] = load_number(in.x.data, kType, in.x.offset(batch, position, channel));
    } else if (slot >= 0) {
      const ConvStates& states = in.initial;
      before[i] = load_number(states.data, states.dtype, states.offset(slot, channel, states.columns + position));
    }
  }
}

// x of the lane behind the last taps - 1 tokens of the lane before it.
template <int kVector, int kTaps>
struct Tokens {
  float x[kVector + kTaps - 1];

  // `before` is that of lane 0. Called by whole warps.
  template <gd_dtype kType>
  GD_DEVICE void set(const Raw<kVector>& raw, const float (&before)[kTaps - 1], int lane) {
    raw.widen(x + kTaps - 1, kType);
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) {
      const float left = __shfl_up_sync(~0u, x[kVector + i], 1);
      x[i] = lane == 0 ? before[i] : left;
    }
  }
  GD_DEVICE float sum(const Filter<kTaps>& filter, int j) const {
    float window[kTaps - 1];
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) window[i] = x[j + i];
    return filter.sum(window, x[j + kTaps - 1]);
  }
};

// The final state of a channel, a column per lane. Called by whole warps after the state has been read.
GD_DEVICE void store_columns(const Conv1dProblem& problem, int64_t batch, int64_t channel, int lane) {
  const Conv1dInputs& in = problem.in;
  const ConvStates &initial = in.initial, &final = problem.final;
  const int64_t from = initial.slot(batch), to = final.slot(batch);
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
        x = load_number(initial.data, initial.dtype, initial.offset(from, channel, old));
      }
    }
    __syncwarp();  // all lanes have read: in place, what a column gets lies in a later one
    if (column >= source.columns) continue;
    const char* const place = element(final.data, final.dtype, final.offset(to, channel, column));
    store_numbers<1>(const_cast<char*>(place), final.dtype, &x, true);
  }
}

template <gd_dtype kType, int kTaps>
__global__ void __launch_bounds__(32 * kConvWarps, 8) conv_columns_kernel(const __grid_constant__ ConvParams p) {
  constexpr int kVector = kType == GD_F32 ? 4 : 8;
  constexpr int kAhead = 2;  // channels that are requested before they are needed
  const Conv1dProblem& problem = p.problem;
  const Conv1dInputs& in = problem.in;
  const ConvGrid& grid = p.grid;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t blocks = grid.channel_blocks, slot = blockIdx.x / static_cast<uint32_t>(blocks);
  const int64_t first = ((blockIdx.x - slot * blocks) * kConvWarps + warp) * kConvChannels;
  const int64_t tokens = in.sequences.tokens;
  if (first >= in.channels) return;
#pragma unroll 1
  for (int64_t chunk = slot; chunk < grid.chunks; chunk += grid.slots) {
    const int64_t batch = chunk / grid.chunks_per_row, begin = (chunk - batch * grid.chunks_per_row) * grid.chunk;
    const int64_t t = begin + lane * kVector;
    const bool is_padding = problem.is_padding(batch);
    const int64_t from = is_padding ? -1 : in.initial.slot(batch);
    const int count = static_cast<int>(in.channels - first < kConvChannels ? in.channels - first : kConvChannels);
    Raw<kVector> ahead[kAhead];
    const auto request = [&](int j, int c) {
      ahead[j].clear();
      if (c < count && t < tokens && !is_padding) load_tokens<kVector, kType>(ahead[j], in.x, batch, first + c, t);
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) request(j, j);
#pragma unroll 1
    for (int c = 0; c < count; c += kAhead) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (c + j >= count) break;
        const int64_t channel = first + c + j;
        Filter<kTaps> filter[1];
        ChannelVector<1>{channel}.load(filter, in, p.packed_weights);
        float before[kTaps - 1] = {};
        if (lane == 0 && !is_padding) load_before<kVector, kType, kTaps>(before, in, batch, channel, t, from);
        Tokens<kVector, kTaps> x;
        x.template set<kType>(ahead[j], before, lane);
        request(j, c + j + kAhead);
        float y[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          y[i] = is_padding ? 0.0f : Filter<kTaps>::activate(x.sum(filter[0], i), in.silu);
        if (t < tokens) store_tokens<kVector, kType>(problem.y, batch, channel, t, y);
      }
    }
    __syncwarp();  // lane 0 has read the states
#pragma unroll 1
    for (int c = 0; c < count && begin == 0 && !is_padding; ++c) store_columns(problem, batch, first + c, lane);
  }
}

template <gd_dtype kType, int kTaps>
__global__ void __launch_bounds__(32 * kConvWarps)
    conv_columns_backward_kernel(const __grid_constant__ ConvBackwardParams p) {
  constexpr int kVector = kType == GD_F32 ? 4 : 8;
  const Conv1dBackwardProblem& problem = p.problem;
  const Conv1dInputs& in = problem.in;
  const ConvGrid& grid = p.grid;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t blocks = grid.channel_blocks, slot = blockIdx.x / static_cast<uint32_t>(blocks);
  const int64_t channel = (blockIdx.x - slot * blocks) * kConvWarps + warp;
  const int64_t tokens = in.sequences.tokens;
  if (channel >= in.channels) return;
  Filter<kTaps> filter[1];
  ChannelVector<1>{channel}.load(filter, in, p.packed_weights);
  const float(&w)[kTaps] = filter[0].weight;
  float dw[kTaps] = {}, db = 0;

  Raw<kVector> x_raw, dy_raw;
  const auto load_chunk = [&](int64_t chunk) {
    x_raw.clear();
    dy_raw.clear();
    const int64_t batch = chunk / grid.chunks_per_row;
    const int64_t t = (chunk - batch * grid.chunks_per_row) * grid.chunk + lane * kVector;
    if (chunk >= grid.chunks || t >= tokens) return;
    load_tokens<kVector, kType>(x_raw, in.x, batch, channel, t);
    load_tokens<kVector, kType>(dy_raw, problem.d_y, batch, channel, t);
  };
  load_chunk(slot);
#pragma unroll 1
  for (int64_t chunk = slot; chunk < grid.chunks; chunk += grid.slots) {
    const int64_t batch = chunk / grid.chunks_per_row, begin = (chunk - batch * grid.chunks_per_row) * grid.chunk;
    const int64_t t = begin + lane * kVector;
    float before[kTaps - 1] = {};
    if (lane == 0) load_before<kVector, kType, kTaps>(before, in, batch, channel, t, in.initial.slot(batch));
    Tokens<kVector, kTaps> x;
    x.template set<kType>(x_raw, before, lane);
    // dz of this lane's tokens and of the taps - 1 after them; past the end d_y is 0, so dz is.
    float dz[kVector + kTaps - 1];
    dy_raw.widen(dz, kType);
    load_chunk(chunk + grid.slots);
    const bool is_owner = lane < 31;  // the last lane only looks ahead: its tokens are the next chunk's
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (in.silu) dz[j] = Filter<kTaps>::sum_gradient(x.sum(filter[0], j), dz[j], true);
      if (t >= tokens) dz[j] = 0;
      const float owned = is_owner ? dz[j] : 0.0f;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) dw[i] = fmaf(owned, x.x[j + i], dw[i]);
      db += owned;
    }
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) dz[kVector + i] = __shfl_down_sync(~0u, dz[i], 1);
    const int64_t length = tokens;
    if (begin == 0 && problem.d_initial) {
      // Before the first token: what its window passes on to the state.
      const int64_t columns = problem.d_initial.columns;
#pragma unroll 1
      for (int64_t first = 0; first < columns; first += 32) {
        const int64_t column = first + lane, position = column - columns;
        float sum = 0;
#pragma unroll
        for (int j = 0; j + 1 < kTaps; ++j) {  // dz_j, which lane 0 has
          const float gradient = __shfl_sync(~0u, dz[j], 0);
#pragma unroll
          for (int i = 0; i < kTaps; ++i)
            if (position + kTaps - 1 - i == j) sum = fmaf(w[i], gradient, sum);
        }
        if (column >= columns) continue;
        sum += final_gradient(problem.d_final, batch, channel, position - length);
        const ConvStates& d = problem.d_initial;
        char* const to = const_cast<char*>(element(d.data, d.dtype, d.offset(batch, channel, column)));
        store_numbers<1>(to, d.dtype, &sum, true);
      }
    }
    if (!problem.dx || !is_owner || t >= tokens) continue;
    float dx[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      dx[j] = 0;
#pragma unroll
      for (int i = 0; i < kTaps; ++i) dx[j] = fmaf(w[i], dz[j + kTaps - 1 - i], dx[j]);
    }
    if (problem.d_final && t + kVector > length - problem.d_final.columns) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) dx[j] += final_gradient(problem.d_final, batch, channel, t + j - length);
    }
    store_tokens<kVector, kType>(problem.dx, batch, channel, t, dx);
  }
  if (!p.partial) return;
#pragma unroll
  for (int i = 0; i <= kTaps; ++i) {
    float sum = i < kTaps ? dw[i < kTaps ? i : 0] : db;
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (lane == 0) p.partial[(slot * (kTaps + 1) + i) * in.channels + channel] = sum;
  }
}

}  // namespace gatedelta::cuda
