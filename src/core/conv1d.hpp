// A validated convolution, as backends take it. src/api/validate builds it; nothing checks it again.
#pragma once

#include <cstdint>

#include "core/tensors.hpp"

namespace gatedelta {

constexpr int kMaxTaps = 4;  // W

// [D, W], of any strides.
struct TapWeights {
  void* data = nullptr;
  gd_dtype dtype = GD_DTYPE_NONE;
  int64_t channel_stride = 0, tap_stride = 0;

  GD_ALWAYS_INLINE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
};

// [slots, D, S], of any strides: the last S inputs of a sequence in each slot, the newest last.
struct ConvStates {
  void* data = nullptr;
  gd_dtype dtype = GD_DTYPE_NONE;
  int64_t slots = 0, columns = 0;
  int64_t slot_stride = 0, channel_stride = 0, column_stride = 0;
  IndexRows indices;       // absent = sequence n has slot n
  int64_t first_slot = 0;  // indices below it name no slot

  GD_ALWAYS_INLINE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
  // Slot of sequence n; negative = none.
  GD_ALWAYS_INLINE int64_t slot(int64_t n) const {
    if (!*this) return -1;
    if (!indices) return n;
    const int64_t index = indices[n];
    return index < first_slot ? -1 : index;
  }
  GD_ALWAYS_INLINE int64_t offset(int64_t slot, int64_t channel, int64_t column) const {
    return slot * slot_stride + channel * channel_stride + column * column_stride;
  }
};

// [B, T, D, W - 1], of any strides.
struct StepWindows {
  void* data = nullptr;
  gd_dtype dtype = GD_DTYPE_NONE;
  int64_t batch_stride = 0, token_stride = 0, channel_stride = 0, column_stride = 0;

  GD_ALWAYS_INLINE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
  GD_ALWAYS_INLINE int64_t offset(int64_t batch, int64_t token, int64_t channel, int64_t column) const {
    return batch * batch_stride + token * token_stride + channel * channel_stride + column * column_stride;
  }
};

struct Conv1dInputs {
  Sequences sequences;
  int64_t channels = 0;  // D
  int taps = 0;          // W
  TokenRows x;           // [B, T, D]: a head is a channel
  TapWeights weight;
  HeadVector bias;
  ConvStates initial;  // a sequence without a slot starts from zero
  bool silu = false;
};

// Where the columns of a final state come from: the last `columns` inputs up to the sequence's end. Input p of the
// sequence is x_p, or where p is negative column history_end + p of the initial state.
struct FinalColumns {
  int64_t columns;      // the first ones of the state; those beyond stay as they are
  int64_t first_input;  // p of column 0
  int64_t history_end;
};

struct Conv1dProblem {
  Conv1dInputs in;
  TokenRows y;       // optional
  ConvStates final;  // of a sequence without a slot it is not stored
  IndexRows previous_accept_lengths;
  StepWindows steps;

  // A padded row is skipped: its rows of y are zero, nothing of it is read or stored.
  GD_ALWAYS_INLINE bool is_padding(int64_t n) const {
    return in.initial.indices && final.indices && in.initial.slot(n) < 0 && final.slot(n) < 0;
  }
  // The column of the initial state after the sequence's last input. Lengths are not validated on CUDA: one that is
  // none counts as the nearest one.
  GD_ALWAYS_INLINE int64_t history_end(int64_t n) const {
    if (!previous_accept_lengths) return in.initial.columns;
    const int64_t accepted = previous_accept_lengths[n], most = in.initial.columns - in.taps + 2;
    return in.taps - 2 + (accepted < 1 ? 1 : accepted < most ? accepted : most);
  }
  GD_ALWAYS_INLINE FinalColumns final_columns(int64_t n, int64_t length) const {
    if (!previous_accept_lengths) return {final.columns, length - final.columns, in.initial.columns};
    if (length == 0) return {final.columns, -final.columns, in.initial.columns};  // copied as it is
    const int64_t columns = in.taps - 2 + length;
    return {columns < final.columns ? columns : final.columns, 2 - in.taps, history_end(n)};
  }
};

struct Conv1dBackwardProblem {
  Conv1dInputs in;
  TokenRows d_y, dx;
  ConvStates d_final, d_initial;  // without indices
  TapWeights dweight;
  HeadVector dbias;
};

}  // namespace gatedelta
