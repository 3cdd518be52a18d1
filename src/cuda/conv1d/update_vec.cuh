// The usual decode step: a few tokens per sequence, one type, four taps, channels or a state's columns contiguous.
//
// A thread has kUpdateVecBytes of neighbouring channels of one sequence, and everything in registers. It asks for the
// slot first, then for what does not depend on it, then for the state. Everything of a state is read before anything of
// it is written.
#pragma once

#include <type_traits>

#include "cuda/conv1d/access.cuh"
#include "cuda/conv1d/update_vec.hpp"
#include "cuda/device/pdl.cuh"

namespace gatedelta::cuda {

// kWords words of memory, kUpdateVecBytes or 16 at a time.
template <int kWords, int kStep = kUpdateVecBytes / 4>
GD_DEVICE void load_words(uint32_t (&words)[kWords], const char* from) {
#pragma unroll
  for (int begin = 0; begin < kWords; begin += kStep) {
    const auto packet = *reinterpret_cast<const Packet<4 * kStep>*>(from + 4 * begin);
#pragma unroll
    for (int i = 0; i < kStep; ++i) words[begin + i] = packet.words[i];
  }
}

// Filters of a thread's channels, as they lie in memory. Where they are narrow, half of the words are used.
template <gd_dtype kType>
struct RawFilters {
  static constexpr int kVector = vec_channels(kType), kTaps = kMaxTaps * kVector;
  uint32_t taps[kTaps], bias[kVector];

  GD_DEVICE void request(const UpdateVecParams& p, int64_t channel) {
    if (kType == GD_F32 || p.wide_filters) {
      load_words<kTaps, 4>(taps, p.weight + channel * (kMaxTaps * 4));
      if (p.has_bias) load_words(bias, p.bias + channel * 4);
    } else {
      load_words<kTaps / 2, 4>(reinterpret_cast<uint32_t(&)[kTaps / 2]>(taps), p.weight + channel * (kMaxTaps * 2));
      if (p.has_bias) load_words(reinterpret_cast<uint32_t(&)[kVector / 2]>(bias), p.bias + channel * 2);
    }
  }
  template <gd_dtype kFrom>
  GD_DEVICE void widen_as(Filter (&filter)[kVector], bool has_bias) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
#pragma unroll
      for (int i = 0; i < kMaxTaps; ++i) filter[v].weight[i] = number<kFrom>(taps, v * kMaxTaps + i);
      filter[v].bias = has_bias ? number<kFrom>(bias, v) : 0.0f;
    }
  }
  GD_DEVICE void widen(Filter (&filter)[kVector], const UpdateVecParams& p) const {
    if (kType == GD_F32 || p.wide_filters) {
      widen_as<GD_F32>(filter, p.has_bias);
    } else {
      widen_as<kType>(filter, p.has_bias);
    }
  }

 private:
  template <gd_dtype kFrom>
  GD_DEVICE static float number(const uint32_t* words, int i) {
    if constexpr (kFrom == GD_F32) return __uint_as_float(words[i]);
    if constexpr (kFrom == GD_BF16) return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16))));
  }
};

// Number i of 16-bit ones into the lower half, number k into the upper one.
GD_DEVICE uint32_t pair_halves(const uint32_t* words, int i, int k) {
  return __byte_perm(words[i / 2], words[k / 2], (i % 2 ? 0x32u : 0x10u) | (k % 2 ? 0x7600u : 0x5400u));
}

// A state whose channels have kColumns neighbouring numbers each: a thread's channels are kColumns pieces of
// kUpdateVecBytes. Those of a warp go through shared memory: its accesses are then contiguous, and full sectors are
// written.
template <gd_dtype kType, int kColumns>
struct ChannelStates {
  static constexpr int kVector = vec_channels(kType), kRow = kUpdateVecBytes / 4, kWords = kColumns * kRow;
  using Row = Numbers<kVector, kType>;
  using Piece = Packet<kUpdateVecBytes>;
  char* const warp_state;  // of the warp's first channel
  Piece* const shared;     // [32 * kColumns]
  const int lane, pieces;  // of the warp

  GD_DEVICE int place(int i) const { return i * 32 + lane; }  // of the i-th piece that the thread moves
  GD_DEVICE void read(Row (&columns)[kColumns]) const {
    uint32_t words[kWords] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (place(i) >= pieces) continue;
      const Piece piece = *reinterpret_cast<const Piece*>(warp_state + place(i) * kUpdateVecBytes);
#pragma unroll
      for (int w = 0; w < kRow; ++w) words[i * kRow + w] = piece.words[w];
    }
    exchange(words, true);
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int w = 0; w < kRow; ++w) {
        if constexpr (kType == GD_F32) {
          columns[column].packet.words[w] = words[w * kColumns + column];
        } else {
          columns[column].packet.words[w] =
              pair_halves(words, 2 * w * kColumns + column, (2 * w + 1) * kColumns + column);
        }
      }
    }
  }
  // From the warp's order to the thread's, or back.
  GD_DEVICE void exchange(uint32_t (&words)[kWords], bool to_thread) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      Piece piece;
#pragma unroll
      for (int w = 0; w < kRow; ++w) piece.words[w] = words[i * kRow + w];
      shared[to_thread ? place(i) : lane * kColumns + i] = piece;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const Piece piece = shared[to_thread ? lane * kColumns + i : place(i)];
#pragma unroll
      for (int w = 0; w < kRow; ++w) words[i * kRow + w] = piece.words[w];
    }
    __syncwarp();
  }
  GD_DEVICE void write(const Row (&columns)[kColumns]) const {
    uint32_t words[kWords], by_column[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) by_column[i] = columns[i / kRow].packet.words[i % kRow];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kType == GD_F32) {
        words[i] = by_column[i % kColumns * kRow + i / kColumns];
      } else {
        const auto at = [](int n) { return n % kColumns * kVector + n / kColumns; };
        words[i] = pair_halves(by_column, at(2 * i), at(2 * i + 1));
      }
    }
    exchange(words, false);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (place(i) >= pieces) continue;
      Piece piece;
#pragma unroll
      for (int w = 0; w < kRow; ++w) piece.words[w] = words[i * kRow + w];
      *reinterpret_cast<Piece*>(warp_state + place(i) * kUpdateVecBytes) = piece;
    }
  }
};

// The states of a warp's channels in shared memory, of any number of columns: each lane has those of its own channels,
// an odd number of words apart, so that lanes meet in no bank.
template <gd_dtype kType>
struct SharedStates {
  static constexpr int kVector = vec_channels(kType), kRow = kUpdateVecBytes / 4, kBatch = 4;
  static constexpr int kWords = 32 * (kUpdateVecColumns * kRow + 1);  // of a warp, at most
  using Row = Numbers<kVector, kType>;
  using Piece = Packet<kUpdateVecBytes>;
  using Number = std::conditional_t<kType == GD_F32, uint32_t, uint16_t>;
  uint32_t* const shared;
  const int lane, columns, pieces;  // pieces of kUpdateVecBytes, of the warp

  // Calls move(word in shared memory, piece in memory or a number past the last one) for kBatch pieces of this lane.
  template <class Move>
  GD_DEVICE void for_pieces(const Move& move) const {
    const int turn = 32 / columns, rest = 32 % columns;
    int owner = lane / columns, column = lane % columns;
#pragma unroll 1
    for (int first = 0; first < columns; first += kBatch) {
      int word[kBatch], piece[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        word[i] = owner * (columns * kRow + 1) + column * kRow;
        piece[i] = first + i < columns ? (first + i) * 32 + lane : pieces;
        owner += turn, column += rest;
        if (column >= columns) column -= columns, ++owner;
      }
      move(word, piece);
    }
  }
  GD_DEVICE void read(const char* warp_state) const {
    for_pieces([&](const int(&word)[kBatch], const int(&piece)[kBatch]) {
      Piece found[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (piece[i] < pieces) found[i] = *reinterpret_cast<const Piece*>(warp_state + piece[i] * kUpdateVecBytes);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int w = 0; w < kRow; ++w)
          if (piece[i] < pieces) shared[word[i] + w] = found[i].words[w];
      }
    });
    __syncwarp();
  }
  GD_DEVICE void write(char* warp_state) const {
    __syncwarp();
    for_pieces([&](const int(&word)[kBatch], const int(&piece)[kBatch]) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (piece[i] >= pieces) continue;
        Piece found;
#pragma unroll
        for (int w = 0; w < kRow; ++w) found.words[w] = shared[word[i] + w];
        *reinterpret_cast<Piece*>(warp_state + piece[i] * kUpdateVecBytes) = found;
      }
    });
  }
  GD_DEVICE void clear() const {
#pragma unroll 1
    for (int i = 0; i < columns * kRow; ++i) shared[lane * (columns * kRow + 1) + i] = 0;
  }

  // A column of this lane's channels.
  GD_DEVICE Number* numbers(int column) const {
    return reinterpret_cast<Number*>(shared + lane * (columns * kRow + 1)) + column;
  }
  GD_DEVICE void load(Row& row, int column) const {
    const Number* const from = numbers(column);
#pragma unroll
    for (int w = 0; w < kRow; ++w) {
      if constexpr (kType == GD_F32) {
        row.packet.words[w] = from[w * columns];
      } else {
        row.packet.words[w] = from[2 * w * columns] | static_cast<uint32_t>(from[(2 * w + 1) * columns]) << 16;
      }
    }
  }
  GD_DEVICE void store(const Row& row, int column) const {
    Number* const to = numbers(column);
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      to[v * columns] = static_cast<Number>(kType == GD_F32 ? row.packet.words[v / (kVector / kRow)]
                                                            : row.packet.words[v / 2] >> (v % 2 * 16));
  }
};

// An index of a sequence, in two steps: a branch on its type around both would wait for memory before the next request.
struct SequenceIndex {
  int64_t wide = 0;
  int32_t narrow = 0;

  GD_DEVICE void request(const IndexRows& rows, int64_t n) {
    if (rows.present && rows.is_int64) wide = static_cast<const int64_t*>(rows.data)[n * rows.stride];
    if (rows.present && !rows.is_int64) narrow = static_cast<const int32_t*>(rows.data)[n * rows.stride];
  }
  GD_DEVICE int64_t value(const IndexRows& rows) const { return rows.is_int64 ? wide : narrow; }
  // As ConvStates::slot.
  GD_DEVICE int64_t slot(const UpdateVecStates& states, int64_t n) const {
    if (!states.indices) return states.present ? n : -1;
    return value(states.indices) < states.first_slot ? -1 : value(states.indices);
  }
  // As Conv1dProblem::history_end.
  GD_DEVICE int history_end(const UpdateVecParams& p) const {
    if (!p.accepted) return p.columns;
    const int64_t accepted = value(p.accepted), most = p.columns - kMaxTaps + 2;
    return static_cast<int>(kMaxTaps - 2 + (accepted < 1 ? 1 : accepted < most ? accepted : most));
  }
};

// kColumns: neighbouring columns of a channel's state, kAnyColumns where their number is known at run time, or 0 where
// the channels of a column are neighbours.
// kTokens: tokens requested at once; 1 where a sequence has one.
constexpr int kAnyColumns = -1;
template <gd_dtype kType, int kColumns, int kTokens>
__global__ void __launch_bounds__(kUpdateVecThreads, (kTokens == 1 ? 640 : 384) / kUpdateVecThreads)
    conv_update_vec_kernel(const __grid_constant__ UpdateVecParams p) {
  constexpr int kVector = RawFilters<kType>::kVector, kWindow = kMaxTaps - 1, kKept = kColumns > 0 ? kColumns : kWindow;
  using Row = Numbers<kVector, kType>;
  using Channels = ChannelStates<kType, kKept>;
  const auto store = [](char* to, const Row& row) { *reinterpret_cast<Row*>(to) = row; };
  allow_next_kernel();
  const int64_t n = blockIdx.x;  // sequences of the same channels are neighbours: the filters stay in L1
  SequenceIndex from_index, to_index, accepted;
  from_index.request(p.initial.indices, n);
  to_index.request(p.final.indices, n);
  accepted.request(p.accepted, n);

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t warp_channel = (int64_t{blockIdx.y} * kUpdateVecThreads + (thread - lane)) * kVector;
  const int64_t channel = warp_channel + lane * kVector, bytes = channel * (kUpdateVecBytes / kVector);
  const bool is_live = channel < p.channels;
  const int tokens = kTokens == 1 ? 1 : p.tokens;
  const char* const x = p.x.data + n * p.x.batch + bytes;
  char* const y = p.y.data + n * p.y.batch + bytes;
  Row inputs[kTokens];
  const auto request = [&](int first) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
      if (is_live && first + i < tokens) inputs[i].load(x + (first + i) * p.x.token, kType);
  };
  RawFilters<kType> raw;
  if (is_live) raw.request(p, channel);
  request(0);

  const int64_t from = from_index.slot(p.initial, n), to = to_index.slot(p.final, n);
  if (p.has_padding && from < 0 && to < 0) {
    Row zero;
    zero.clear();
    for (int t = 0; is_live && t < tokens; ++t) store(y + t * p.y.token, zero);
    return;
  }
  Row kept[kKept];  // the last inputs so far
#pragma unroll
  for (int i = 0; i < kKept; ++i) kept[i].clear();
  [[maybe_unused]] const auto channels = [&](const UpdateVecStates& states, int64_t slot) {
    __shared__ typename Channels::Piece pieces[kUpdateVecThreads / 32][32 * kKept];
    const int64_t left = (p.channels - warp_channel) / kVector;
    return Channels{states.data + slot * states.slot + warp_channel * (kKept * kUpdateVecBytes / kVector),
                    pieces[thread / 32], lane, static_cast<int>(left < 32 ? left : 32) * kKept};
  };
  [[maybe_unused]] const auto in_shared = [&] {
    __shared__ uint32_t words[kUpdateVecThreads / 32][SharedStates<kType>::kWords];
    const int64_t left = (p.channels - warp_channel) / kVector;
    return SharedStates<kType>{words[thread / 32], lane, p.columns,
                               left <= 0 ? 0 : static_cast<int>(left < 32 ? left : 32) * p.columns};
  };
  // Of the warp's channels.
  [[maybe_unused]] const auto warp_state = [&](const UpdateVecStates& states, int64_t slot) {
    return states.data + slot * states.slot + warp_channel * p.columns * (kUpdateVecBytes / kVector);
  };
  if (from >= 0) {
    if constexpr (kColumns > 0) {
      channels(p.initial, from).read(kept);
    } else if constexpr (kColumns == kAnyColumns) {
      in_shared().read(warp_state(p.initial, from));
      const int end = accepted.history_end(p);
#pragma unroll
      for (int i = 0; i < kWindow; ++i) in_shared().load(kept[i], end - kWindow + i);
    } else if (is_live) {
      const char* const newest =
          p.initial.data + from * p.initial.slot + accepted.history_end(p) * p.initial.column + bytes;
#pragma unroll
      for (int i = 0; i < kWindow; ++i) kept[i].load(newest + (i - kWindow) * p.initial.column, kType);
    }
  }
  Filter filter[kVector];
  raw.widen(filter, p);

  // Input `position` of the sequence, counted from its first token, has a column of its own in the final state.
  char* const state = p.final.data + to * p.final.slot + bytes;
  const int first_column = p.accepted ? kMaxTaps - 2 : p.columns - tokens;
  [[maybe_unused]] const auto keep = [&](const Row& row, int position) {
    const int column = first_column + position;
    if (to < 0 || column < 0 || column >= p.columns) return;
    if constexpr (kColumns == kAnyColumns) {
      in_shared().store(row, column);
    } else if (is_live) {
      store(state + column * p.final.column, row);
    }
  };
  if constexpr (kColumns == kAnyColumns) {
    if (from < 0) in_shared().clear();
#pragma unroll 1
    for (int column = 0; column < first_column - kWindow && !p.accepted; ++column) {
      Row row;
      in_shared().load(row, column + tokens);
      in_shared().store(row, column);
    }
#pragma unroll
    for (int i = 0; i < kWindow; ++i) keep(kept[i], i - kWindow);
  }
  if constexpr (kColumns == 0) {
    // Columns older than the window move. Each gets what lies in a later one, so they are written in ascending order.
    constexpr int kBatch = 4;
    const int older = is_live && to >= 0 && !p.accepted ? first_column - kWindow : 0;
    const char* const source = p.initial.data + from * p.initial.slot + tokens * p.initial.column + bytes;
#pragma unroll 1
    for (int column = 0; column < older; column += kBatch) {
      Row rows[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        rows[i].clear();
        if (from >= 0 && column + i < older) rows[i].load(source + (column + i) * p.initial.column, kType);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (column + i < older) store(state + (column + i) * p.final.column, rows[i]);
    }
#pragma unroll
    for (int i = 0; i < kWindow; ++i) keep(kept[i], i - kWindow);
  }

#pragma unroll 1
  for (int first = 0; first < tokens; first += kTokens) {
    if (kTokens > 1 && first > 0) request(first);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (first + i >= tokens) break;
      float window[kMaxTaps][kVector], out[kVector];
#pragma unroll
      for (int k = 0; k < kWindow; ++k) kept[kKept - kWindow + k].widen(window[k], kType);
      inputs[i].widen(window[kWindow], kType);
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        out[v] = conv_activate(filter[v].sum(window[0][v], window[1][v], window[2][v], window[3][v]), p.silu);
      if (is_live) Row::store(y + (first + i) * p.y.token, kType, out);
      if constexpr (kColumns <= 0) keep(inputs[i], first + i);
#pragma unroll
      for (int k = 0; k + 1 < kKept; ++k) kept[k] = kept[k + 1];
      kept[kKept - 1] = inputs[i];
    }
  }
  if (to < 0) return;
  if constexpr (kColumns > 0) channels(p.final, to).write(kept);
  if constexpr (kColumns == kAnyColumns) in_shared().write(warp_state(p.final, to));
}

}  // namespace gatedelta::cuda
