// `update_vec`, the usual decode step: a few tokens per sequence, one type, four taps, channels or a state's columns
// contiguous.
//
// A thread has kUpdateVecBytes of neighbouring channels of one sequence, and everything in registers. It loads the slot
// first, then what does not depend on it, then the state. It reads all of a state before it writes any of it.
#pragma once

#include "cuda/conv1d/update_vec_filters.cuh"
#include "cuda/conv1d/update_vec_states.cuh"
#include "cuda/device/pdl.cuh"

namespace gatedelta::cuda {

// An index of a sequence, loaded and used in two steps: a branch on its type around both would wait for memory before
// the next load.
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
// kTokens: tokens loaded at once; 1 if a sequence has one.
constexpr int kAnyColumns = -1;
template <gd_dtype kType, int kColumns, int kTokens>
__global__ void __launch_bounds__(kUpdateVecThreads, (kTokens == 1 ? 640 : 384) / kUpdateVecThreads)
    conv_update_vec_kernel(const __grid_constant__ UpdateVecParams p) {
  constexpr int kVector = RawFilters<kType>::kVector, kWindow = kMaxTaps - 1, kKept = kColumns > 0 ? kColumns : kWindow;
  using Row = Numbers<kVector, kType>;
  using Channels = ChannelStates<kType, kKept>;
  const auto store = [](char* to, const Row& row) { *reinterpret_cast<Row*>(to) = row; };
  allow_next_kernel();
  const int64_t n = blockIdx.x;  // neighbouring CTAs have the same channels: the filters stay in L1
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
  // Address of the warp's channels.
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
    // Columns older than the window shift: each is copied from a later one, so the writes are in ascending order.
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
