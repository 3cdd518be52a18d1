// `update_vec`, the usual decode step: which calls it supports, its grid and its parameters. Plain arithmetic, shared
// by the launch, the kernel and host tests.
#pragma once

#include <cstdint>

#include "core/conv1d.hpp"
#include "cuda/device/host_device.hpp"
#include "cuda/device/rows32.hpp"

namespace gatedelta::cuda {

constexpr int kUpdateVecThreads = 64;  // of a CTA: few, so that one sequence has many CTAs
constexpr int kUpdateVecBytes = 16;    // of a thread's channels of a token: one access
static_assert(kUpdateVecBytes == kAccessAlign);
constexpr int kUpdateVecTokens = 8;  // of a sequence, at most
constexpr int vec_channels(gd_dtype dtype) { return kUpdateVecBytes / (dtype == GD_F32 ? 4 : 2); }

// Channels contiguous, vectors aligned.
inline bool supports_row(const Conv1dInputs& in, const TokenRows& rows) {
  const int64_t vector = vec_channels(in.x.dtype);
  return rows.dtype == in.x.dtype && rows.head_stride == 1 && is_aligned(rows.data) &&
         (in.sequences.batch <= 1 || rows.batch_stride % vector == 0) &&
         (in.sequences.tokens <= 1 || rows.token_stride % vector == 0);
}
// Taps and bias of one type, x's or fp32, without gaps.
inline bool has_vec_filters(const Conv1dInputs& in) {
  const TapWeights& w = in.weight;
  const auto fits = [&](const void* data, gd_dtype dtype) {
    return (dtype == in.x.dtype || dtype == GD_F32) && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  };
  return in.taps == kMaxTaps && w.tap_stride == 1 && w.channel_stride == kMaxTaps && fits(w.data, w.dtype) &&
         (!in.bias || (in.bias.dtype == w.dtype && in.bias.stride == 1 && fits(in.bias.data, in.bias.dtype)));
}

// The order of a state's numbers in memory.
enum class UpdateVecLayout { none, columns, channels_of_3, channels_of_4, channels };
constexpr int kUpdateVecColumns = 16;  // of a state whose channels are neither of 3 nor of 4 columns, at most
inline UpdateVecLayout state_layout(const Conv1dInputs& in, const ConvStates& states) {
  const int64_t vector = vec_channels(in.x.dtype);
  if (states.dtype != in.x.dtype || !is_aligned(states.data) || states.slot_stride % vector) return {};
  if (states.channel_stride == 1 && states.column_stride % vector == 0) return UpdateVecLayout::columns;
  if (states.column_stride != 1 || states.channel_stride != states.columns) return {};
  return states.columns == 3                                                     ? UpdateVecLayout::channels_of_3
         : states.columns == 4                                                   ? UpdateVecLayout::channels_of_4
         : states.columns >= kMaxTaps - 1 && states.columns <= kUpdateVecColumns ? UpdateVecLayout::channels
                                                                                 : UpdateVecLayout{};
}
inline UpdateVecLayout state_layout(const Conv1dProblem& p) {
  const ConvStates &initial = p.in.initial, &final = p.final;
  if (!initial && !final) return UpdateVecLayout::columns;
  const UpdateVecLayout layout = state_layout(p.in, initial ? initial : final);
  if (initial && final && (initial.columns != final.columns || layout != state_layout(p.in, final))) return {};
  if (!p.previous_accept_lengths || layout == UpdateVecLayout::columns || layout == UpdateVecLayout::none)
    return layout;
  // After a window of drafts a call may leave a column unchanged, but a warp writes whole states.
  const int64_t columns = initial ? initial.columns : final.columns;
  return columns <= p.in.sequences.tokens + kMaxTaps - 2 ? UpdateVecLayout::channels : UpdateVecLayout::none;
}

// CTAs: sequences, and blocks of channels, of which a grid has at most 65535.
struct UpdateVecGrid {
  int64_t sequences, blocks;
};
inline UpdateVecGrid grid_of(const Conv1dInputs& in) {
  const int64_t block = int64_t{kUpdateVecThreads} * vec_channels(in.x.dtype);
  return {in.sequences.batch, (in.channels + block - 1) / block};
}

inline bool supports_update_vec(const Conv1dProblem& p) {
  const Conv1dInputs& in = p.in;
  if (in.sequences.offsets || in.sequences.tokens < 1 || in.sequences.tokens > kUpdateVecTokens || !p.y || p.steps)
    return false;
  if (in.channels % vec_channels(in.x.dtype) || !supports_row(in, in.x) || !supports_row(in, p.y) ||
      !has_vec_filters(in))
    return false;
  if (grid_of(in).blocks > 65535) return false;
  return state_layout(p) != UpdateVecLayout::none;
}

// Distances are in bytes.
struct UpdateVecRows {
  char* data;
  int64_t batch, token;
};
struct UpdateVecStates {
  char* data;
  int64_t slot, column;
  IndexRows indices;
  int64_t first_slot;
  bool present;
};
struct UpdateVecParams {
  UpdateVecStates initial, final;
  UpdateVecRows x, y;
  const char *weight, *bias;
  IndexRows accepted;  // previous_accept_lengths
  int64_t channels;
  int32_t tokens, columns;  // T, S
  bool wide_filters;        // of fp32
  bool has_bias, silu;
  bool has_padding;  // sequences with neither slot are padded rows
};

inline UpdateVecParams update_vec_params(const Conv1dProblem& p) {
  const Conv1dInputs& in = p.in;
  const int64_t size = dtype_bytes(in.x.dtype);
  const auto rows = [&](const TokenRows& t) {
    return UpdateVecRows{static_cast<char*>(t.data), t.batch_stride * size, t.token_stride * size};
  };
  const auto states = [&](const ConvStates& s) {
    return UpdateVecStates{
        static_cast<char*>(s.data), s.slot_stride * size, s.column_stride * size, s.indices, s.first_slot, bool{s}};
  };
  UpdateVecParams params{};
  params.initial = states(in.initial);
  params.final = states(p.final);
  params.x = rows(in.x);
  params.y = rows(p.y);
  params.weight = static_cast<const char*>(in.weight.data);
  params.bias = static_cast<const char*>(in.bias.data);
  params.accepted = p.previous_accept_lengths;
  params.channels = in.channels;
  params.tokens = static_cast<int32_t>(in.sequences.tokens);
  params.columns = static_cast<int32_t>(in.initial ? in.initial.columns : p.final.columns);
  params.wide_filters = in.weight.dtype == GD_F32;
  params.has_bias = bool{in.bias};
  params.silu = in.silu;
  params.has_padding = in.initial.indices && p.final.indices;
  return params;
}

}  // namespace gatedelta::cuda
