// The convolution of a few tokens per sequence: decode steps and windows of drafts, with states in a pool.
//
// A CTA has kConvThreads channels of some sequences, a thread one channel. States go through shared memory, 16 bytes at
// a time in either order of memory: where a channel's columns are neighbours, threads that read their own ones would
// touch each sector as often as there are columns. A CTA reads all of a state before it writes any of it.
#pragma once

#include "cuda/conv1d/access.cuh"

namespace gatedelta::cuda {

struct UpdateParams {
  Conv1dProblem problem;
  UpdateGrid grid;
  UpdateTile initial, final;
  bool packed_weights;
};

// A number in shared memory.
GD_DEVICE float tile_number(const char* tile, gd_dtype dtype, int at) {
  if (dtype == GD_F32) return reinterpret_cast<const float*>(tile)[at];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(tile)[at];
  if (dtype == GD_BF16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  return __half2float(__ushort_as_half(bits));
}
GD_DEVICE void set_tile_number(char* tile, gd_dtype dtype, int at, float x) {
  store_numbers<1>(tile + at * (dtype == GD_F32 ? 4 : 2), dtype, &x, true);
}

struct ConvUpdate {
  const UpdateParams& p;
  const Conv1dProblem& problem;
  const Conv1dInputs& in;
  char *initial, *final;  // [sequences of the CTA][UpdateTile]
  float* inputs;          // [kUpdateTokens][kConvThreads]
  const int thread;
  const int64_t block, channel;  // the CTA's first channel, the thread's
  const int64_t first;           // sequence
  const int count;
  const bool is_live;

  GD_DEVICE ConvUpdate(const UpdateParams& params, char* shared, int64_t group, int64_t block_channel)
      : p(params),
        problem(params.problem),
        in(params.problem.in),
        initial(shared + kUpdateInputBytes),
        final(initial + params.grid.sequences * params.initial.bytes),
        inputs(reinterpret_cast<float*>(shared)),
        thread(static_cast<int>(threadIdx.x)),
        block(block_channel),
        channel(block_channel + thread),
        first(group * params.grid.sequences),
        count(static_cast<int>(in.sequences.count - first < params.grid.sequences ? in.sequences.count - first
                                                                                  : params.grid.sequences)),
        is_live(channel < in.channels) {}

  // Calls move(slot, bytes into the slot, place in the tiles) for the 16-byte pieces of the CTA's states, kBatch of
  // them at a time: it loads the slots of all of them before the first is needed.
  template <class Slot, class Move>
  GD_DEVICE void for_pieces(const UpdateTile& tile, const ConvStates& states, const Slot& slot_of,
                            const Move& move) const {
    constexpr int kBatch = 4;
    const int channels = static_cast<int>(in.channels - block < kConvThreads ? in.channels - block : kConvThreads);
    const int size = states.dtype == GD_F32 ? 4 : 2;
    const auto columns = static_cast<uint32_t>(states.columns), rows = tile.by_column ? columns : 1;
    const uint32_t row_pieces = channels * (tile.by_column ? 1 : columns) * size / kConvAlign;
    const uint32_t pieces = count * rows * row_pieces;
    const int64_t column_bytes = tile.by_column ? states.column_stride * size : 0;
    const int64_t block_bytes = block * states.channel_stride * size;
#pragma unroll 1
    for (uint32_t begin = thread; begin < pieces; begin += kBatch * kConvThreads) {
      int64_t slot[kBatch], offset[kBatch];
      int place[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t piece = begin + i * kConvThreads, row = piece / row_pieces, at = piece - row * row_pieces;
        const uint32_t n = row / rows, column = row - n * rows;
        slot[i] = piece < pieces ? slot_of(static_cast<int>(n)) : -1;
        offset[i] = block_bytes + column * column_bytes + at * kConvAlign;
        place[i] = static_cast<int>(n * tile.bytes + column * kConvThreads * size + at * kConvAlign);
      }
      move(slot, offset, place);
    }
  }
  GD_DEVICE void read_states() const {
    const ConvStates& states = in.initial;
    const int size = states.dtype == GD_F32 ? 4 : 2;
    if (!p.initial.vectors) {
      for (int n = 0; n < count && is_live; ++n) {
        const int64_t slot = states.slot(first + n);
        for (int column = 0; slot >= 0 && column < states.columns; ++column)
          set_tile_number(initial + n * p.initial.bytes, states.dtype, p.initial.at(thread, column),
                          load_state(states, slot, channel, column));
      }
      return;
    }
    for_pieces(
        p.initial, states, [&](int n) { return states.slot(first + n); },
        [&](const auto& slot, const auto& offset, const auto& place) {
          constexpr int kBatch = sizeof(slot) / sizeof(slot[0]);
          Packet<kConvAlign> packets[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i)
            if (slot[i] >= 0)
              packets[i] = *reinterpret_cast<const Packet<kConvAlign>*>(
                  static_cast<const char*>(states.data) + slot[i] * states.slot_stride * size + offset[i]);
#pragma unroll
          for (int i = 0; i < kBatch; ++i)
            if (slot[i] >= 0) *reinterpret_cast<Packet<kConvAlign>*>(initial + place[i]) = packets[i];
        });
  }
  // The slot of a final state that is stored as a whole, by all threads.
  GD_DEVICE int64_t whole_slot(int n) const {
    return problem.final_columns(first + n, length(n)).columns == problem.final.columns ? problem.final.slot(first + n)
                                                                                        : -1;
  }
  GD_DEVICE void write_states() const {
    const ConvStates& states = problem.final;
    const int size = states.dtype == GD_F32 ? 4 : 2;
    for_pieces(
        p.final, states, [&](int n) { return whole_slot(n); },
        [&](const auto& slot, const auto& offset, const auto& place) {
#pragma unroll
          for (int i = 0; i < static_cast<int>(sizeof(slot) / sizeof(slot[0])); ++i)
            if (slot[i] >= 0)
              *reinterpret_cast<Packet<kConvAlign>*>(static_cast<char*>(states.data) +
                                                     slot[i] * states.slot_stride * size + offset[i]) =
                  *reinterpret_cast<const Packet<kConvAlign>*>(final + place[i]);
        });
  }

  GD_DEVICE int64_t length(int n) const { return in.sequences[first + n].length; }

  // Loads x of up to kUpdateTokens tokens at once: of one sequence, or of all sequences if each has `tokens`.
  GD_DEVICE void load_inputs(int64_t batch, int64_t begin, int64_t tokens, int64_t wanted) const {
    Scalar x[kUpdateTokens];
    int64_t t = 0;
#pragma unroll
    for (int i = 0; i < kUpdateTokens; ++i) {
      if (i < wanted) x[i].load(element(in.x.data, in.x.dtype, in.x.offset(batch, begin + t, channel)), in.x.dtype);
      if (++t == tokens) t = 0, ++batch;
    }
#pragma unroll
    for (int i = 0; i < kUpdateTokens; ++i)
      if (i < wanted) inputs[i * kConvThreads + thread] = x[i].value(in.x.dtype);
  }

  GD_DEVICE float old_input(int n, int64_t slot, int64_t column) const {
    if (slot < 0 || column < 0) return 0;
    return tile_number(initial + n * p.initial.bytes, in.initial.dtype, p.initial.at(thread, static_cast<int>(column)));
  }

  // `row`: where the sequence's inputs begin in shared memory, if it holds all of them.
  GD_DEVICE void store_final(int n, const SequenceSpan& span, int64_t from, int row) const {
    const int64_t to = problem.final.slot(first + n);
    if (to < 0) return;
    const FinalColumns source = problem.final_columns(first + n, span.length);
    const bool by_pieces = p.final.vectors && source.columns == problem.final.columns;
#pragma unroll 1
    for (int64_t column = 0; column < source.columns; ++column) {
      const int64_t position = source.first_input + column;
      float x;
      if (position < 0) {
        x = old_input(n, from, source.history_end + position);
      } else if (span.length <= kUpdateTokens) {
        x = inputs[(row + position) * kConvThreads + thread];
      } else {
        x = load_number(in.x.data, in.x.dtype, in.x.offset(span.batch, span.begin + position, channel));
      }
      if (by_pieces) {
        set_tile_number(final + n * p.final.bytes, problem.final.dtype, p.final.at(thread, static_cast<int>(column)),
                        x);
      } else {
        store_state(problem.final, to, channel, column, x);
      }
    }
  }

  GD_DEVICE void store_output(int64_t batch, int64_t token, float y) const {
    const TokenRows& out = problem.y;
    if (!out) return;
    store_numbers<1>(const_cast<char*>(element(out.data, out.dtype, out.offset(batch, token, channel))), out.dtype, &y,
                     true);
  }
  GD_DEVICE void store_window(const float (&window)[kMaxTaps - 1], int skip, int64_t batch, int64_t token) const {
    const StepWindows& steps = problem.steps;
    if (!steps) return;
#pragma unroll
    for (int i = 0; i + 1 < kMaxTaps; ++i) {
      if (i < skip) continue;
      const char* const to = element(steps.data, steps.dtype, steps.offset(batch, token, channel, i - skip));
      store_numbers<1>(const_cast<char*>(to), steps.dtype, window + i, true);
    }
  }

  // Computes a sequence whose first inputs are in shared memory from `row` on.
  GD_DEVICE void run(const Filter& filter, int n, int row) const {
    const SequenceSpan span = in.sequences[first + n];
    if (problem.is_padding(first + n)) {
      for (int64_t t = 0; t < span.length; ++t) store_output(span.batch, span.begin + t, 0);
      return;
    }
    const int skip = skipped_taps(in);
    const int64_t from = in.initial.slot(first + n), end = problem.history_end(first + n);
    float window[kMaxTaps - 1];
#pragma unroll
    for (int i = 0; i + 1 < kMaxTaps; ++i) window[i] = old_input(n, from, end - (kMaxTaps - 1) + i);
#pragma unroll 1
    for (int64_t t = 0; t < span.length; ++t) {
      const int at = static_cast<int>(t % kUpdateTokens);
      if (at == 0 && t > 0) {
        const int64_t left = span.length - t;
        load_inputs(span.batch, span.begin + t, left, left);
      }
      const float x = inputs[(row + at) * kConvThreads + thread];
      const float z = filter.sum(window[0], window[1], window[2], x, skip);
      window[0] = window[1], window[1] = window[2], window[2] = x;
      store_output(span.batch, span.begin + t, conv_activate(z, in.silu));
      store_window(window, skip, span.batch, span.begin + t);
    }
    store_final(n, span, from, row);
  }
};

__global__ void __launch_bounds__(kConvThreads) conv_update_kernel(const __grid_constant__ UpdateParams p) {
  extern __shared__ __align__(16) char shared[];
  const Conv1dInputs& in = p.problem.in;
  const auto blocks = static_cast<uint32_t>(p.grid.channel_blocks), group = blockIdx.x / blocks;
  const ConvUpdate update(p, shared, group, int64_t{blockIdx.x - group * blocks} * kConvThreads);
  if (update.count == 0) {  // one more group: the tokens of no sequence
    for (int64_t t = in.sequences.used_tokens(); update.is_live && t < in.sequences.tokens; ++t)
      update.store_output(0, t, 0);
    return;
  }
  Filter filter[1] = {};
  if (update.is_live) {
    if (p.packed_weights) {
      load_packed_filters(filter, in, update.channel);
    } else {
      load_filter(filter[0], in, update.channel);
    }
    const SequenceSpan span = in.sequences[update.first];
    update.load_inputs(span.batch, span.begin, span.length, update.count * span.length);
  }
  update.read_states();
  __syncthreads();
  if (update.is_live) {
    int row = 0;
#pragma unroll 1
    for (int n = 0; n < update.count; ++n) {
      update.run(filter[0], n, row);
      row += static_cast<int>(update.length(n));
    }
  }
  if (!p.final.vectors) return;
  __syncthreads();
  update.write_states();
}

}  // namespace gatedelta::cuda
