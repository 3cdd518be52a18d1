// Which convolution kernel takes a call, and how its work is split into CTAs: plain arithmetic, shared by the limits,
// the workspace, the launches, the kernels and host tests. It depends on shapes, types and alignment alone.
//
//   rows     channels are contiguous: a thread has kConvRowVector channels and walks over tokens
//   columns  tokens are contiguous, sequences are not packed: a lane has 16 bytes of a channel's tokens
//   any      everything else: a thread has one channel and walks over tokens
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/conv1d.hpp"
#include "cuda/host_device.hpp"

namespace gatedelta::cuda {

enum class ConvKernel { rows, columns, any };

constexpr int kConvThreads = 64;    // per CTA of `rows` and `any`
constexpr int kConvWarps = 4;       // per CTA of `columns`
constexpr int kConvChannels = 8;    // per warp of `columns`, forward
constexpr int64_t kConvAlign = 16;  // bytes of the widest access

constexpr int kConvRowVector = 4;  // channels of a thread; with more, registers leave room for too few threads
// Numbers in a 16-byte access.
inline int conv_vector(gd_dtype dtype) { return static_cast<int>(kConvAlign / dtype_bytes(dtype)); }

inline bool is_conv_aligned(const TokenRows& rows, int64_t bytes) {
  const int64_t size = dtype_bytes(rows.dtype);
  const auto fits = [&](int64_t stride) { return stride == 1 || stride * size % bytes == 0; };
  return reinterpret_cast<uintptr_t>(rows.data) % static_cast<uintptr_t>(bytes) == 0 && fits(rows.batch_stride) &&
         fits(rows.token_stride) && fits(rows.head_stride);
}
// Whether a thread may take neighbouring channels, or `vector` neighbouring tokens, of these rows at once.
inline bool has_vectors_of_channels(const Conv1dInputs& in, const TokenRows& rows) {
  return !rows || (rows.dtype == in.x.dtype && rows.head_stride == 1 && in.channels % kConvRowVector == 0 &&
                   is_conv_aligned(rows, kConvRowVector * dtype_bytes(rows.dtype)));
}
inline bool has_vectors_of_tokens(const Conv1dInputs& in, const TokenRows& rows, int vector) {
  return !rows || (rows.dtype == in.x.dtype && rows.token_stride == 1 && !in.sequences.offsets &&
                   in.sequences.tokens % vector == 0 && is_conv_aligned(rows, vector * dtype_bytes(rows.dtype)));
}

// Tokens per sequence from which on reading and writing states costs little.
constexpr int64_t kConvLongSequence = 16;
// Whether a thread of `rows` can move states fast enough: in columns of neighbouring channels, or seldom.
inline bool suits_rows(const Conv1dInputs& in, const ConvStates& states) {
  return !states || states.channel_stride == 1 ||
         in.sequences.batch * in.sequences.tokens >= kConvLongSequence * in.sequences.count;
}

inline ConvKernel conv_kernel(const Conv1dProblem& p) {
  const Conv1dInputs& in = p.in;
  if (!p.y || p.steps) return ConvKernel::any;
  if (has_vectors_of_channels(in, in.x) && has_vectors_of_channels(in, p.y) && suits_rows(in, in.initial) &&
      suits_rows(in, p.final))
    return ConvKernel::rows;
  const int vector = conv_vector(in.x.dtype);
  if (has_vectors_of_tokens(in, in.x, vector) && has_vectors_of_tokens(in, p.y, vector) && !p.previous_accept_lengths)
    return ConvKernel::columns;
  return ConvKernel::any;
}
inline ConvKernel conv_kernel(const Conv1dBackwardProblem& p) {
  const Conv1dInputs& in = p.in;
  const int vector = conv_vector(in.x.dtype);
  const auto rows = [&](const TokenRows& t) { return has_vectors_of_channels(in, t); };
  const auto columns = [&](const TokenRows& t) { return has_vectors_of_tokens(in, t, vector); };
  if (rows(in.x) && rows(p.d_y) && rows(p.dx)) return ConvKernel::rows;
  if (columns(in.x) && columns(p.d_y) && columns(p.dx)) return ConvKernel::columns;
  return ConvKernel::any;
}

// Tokens of a batch row, or of the pack, are cut into chunks. CTAs are (slot, block of channels), channels fastest.
struct ConvGrid {
  int64_t chunk;           // tokens
  int64_t chunks_per_row;  // of each of B rows; at least one, because sequences without tokens have states, too
  int64_t chunks;
  int64_t channel_blocks;
  int64_t slots;  // a CTA of slot s takes chunks s, s + slots, ...; a backward has a partial sum for each slot

  int64_t ctas() const { return slots * channel_blocks; }
};

inline int64_t conv_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline ConvGrid conv_grid_of(const Conv1dInputs& in, int64_t chunk, int64_t cta_channels, int64_t most_ctas) {
  ConvGrid grid{};
  grid.chunk = chunk;
  grid.chunks_per_row = in.sequences.tokens > chunk ? conv_ceil(in.sequences.tokens, chunk) : 1;
  grid.chunks = in.sequences.batch * grid.chunks_per_row;
  grid.channel_blocks = conv_ceil(in.channels, cta_channels);
  const int64_t most = most_ctas > grid.channel_blocks ? most_ctas / grid.channel_blocks : 1;
  grid.slots = grid.chunks < most ? grid.chunks : most;
  return grid;
}

constexpr int64_t kMaxConvCtas = (int64_t{1} << 31) - 1;  // of a grid

inline int64_t conv_cta_channels(ConvKernel kernel, bool backward) {
  if (kernel == ConvKernel::columns) return backward ? kConvWarps : kConvWarps * kConvChannels;
  return kernel == ConvKernel::rows ? kConvThreads * kConvRowVector : kConvThreads;
}

// A chunk long enough for the taps - 1 tokens read twice to cost little, and short enough for every multiprocessor to
// have some CTAs. In a pack not longer than a few sequences: a thread takes those of its chunk one after the other.
inline ConvGrid conv_grid(const Conv1dProblem& p) {
  const Conv1dInputs& in = p.in;
  const ConvKernel kernel = conv_kernel(p);
  const int64_t cta_channels = conv_cta_channels(kernel, false);
  if (kernel == ConvKernel::columns) return conv_grid_of(in, 32 * conv_vector(in.x.dtype), cta_channels, kMaxConvCtas);
  constexpr int64_t kWantedCtas = 2048, kLongest = 64;
  const int64_t tokens = in.sequences.batch * in.sequences.tokens;
  int64_t longest = kLongest;
  if (in.sequences.offsets) longest = 4 * conv_ceil(in.sequences.tokens + 1, in.sequences.count + 1);
  int64_t chunk = in.sequences.offsets ? 1 : 4;  // without offsets a chunk holds the taps - 1 tokens that need a state
  while (2 * chunk <= longest && 2 * chunk <= kLongest &&
         tokens * conv_ceil(in.channels, cta_channels) >= kWantedCtas * 2 * chunk)
    chunk *= 2;
  return conv_grid_of(in, chunk, cta_channels, kMaxConvCtas);
}

// A fixed number of CTAs at most: each has partial sums of dweight and dbias.
constexpr int64_t kConvBackwardChunk = 64, kConvBackwardCtas = 4096;
inline ConvGrid conv_backward_grid(const Conv1dInputs& in, ConvKernel kernel) {
  // The last lane of a warp of `columns` only looks ahead.
  const int64_t chunk = kernel == ConvKernel::columns ? 31 * conv_vector(in.x.dtype) : kConvBackwardChunk;
  return conv_grid_of(in, chunk, conv_cta_channels(kernel, true), kConvBackwardCtas);
}
inline ConvGrid conv_grid(const Conv1dBackwardProblem& p) { return conv_backward_grid(p.in, conv_kernel(p)); }

inline bool has_partial_sums(const Conv1dBackwardProblem& p) { return p.dweight || p.dbias; }
// Partial sums, [slots][W + 1][D] in fp32, of the kernel that has the most: which one runs depends on the alignment of
// addresses, and a query has none.
inline size_t conv1d_backward_workspace(const Conv1dBackwardProblem& p) {
  if (!has_partial_sums(p)) return 0;
  int64_t slots = 0;
  for (const ConvKernel kernel : {ConvKernel::rows, ConvKernel::columns, ConvKernel::any})
    slots = std::max(slots, conv_backward_grid(p.in, kernel).slots);
  return sizeof(float) * static_cast<size_t>(slots * (p.in.taps + 1) * p.in.channels);
}

}  // namespace gatedelta::cuda
