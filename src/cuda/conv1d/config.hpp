// Which convolution kernel takes a call, and how its work is split into CTAs: plain arithmetic, shared by the limits,
// the workspace, the launches, the kernels and host tests. It depends on shapes, types and alignment alone.
//
//   update_vec  few tokens per sequence, in the usual orders of memory: a thread has 16 bytes of channels
//   update      few tokens per sequence: a thread has one channel, states go through shared memory
//   rows        channels are contiguous: a thread has kConvRowVector channels of some tokens
//   columns     tokens are contiguous, sequences are not packed: a lane has 16 bytes of a channel's tokens
//   any         everything else: a thread has one channel, token after token
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/conv1d.hpp"
#include "cuda/conv1d/update_vec.hpp"
#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda {

enum class ConvKernel { update_vec, update, rows, columns, any };

constexpr int kConvWarps = 4, kConvThreads = 32 * kConvWarps;  // per CTA
constexpr int64_t kConvAlign = 16;                             // bytes of the widest access
// Of `rows`: channels of a thread; tokens of a warp in the forward, which loads all of them at once; CTAs per SM that
// registers allow. The backward loads tokens in batches, through stages of shared memory.
constexpr int kConvRowVector = 4, kConvRowTokens = 8;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kConvRowCtas = 5, kConvColumnBackwardCtas = 6;  // ptxas spills with more
#else
constexpr int kConvRowCtas = 6, kConvColumnBackwardCtas = 8;
#endif
constexpr int conv_row_ctas(gd_dtype type) { return type == GD_F32 ? 4 : kConvRowCtas; }
constexpr int kConvRowBatch = 4, kConvRowBackwardCtas = 4;
constexpr int conv_row_stages(gd_dtype type) { return type == GD_F32 ? 2 : 3; }
// Numbers in a 16-byte access.
constexpr int conv_vector(gd_dtype dtype) { return static_cast<int>(kConvAlign) / (dtype == GD_F32 ? 4 : 2); }

inline bool is_conv_aligned(const TokenRows& rows, int64_t bytes) {
  const int64_t size = dtype_bytes(rows.dtype);
  const auto fits = [&](int64_t stride) { return stride == 1 || stride * size % bytes == 0; };
  return reinterpret_cast<uintptr_t>(rows.data) % static_cast<uintptr_t>(bytes) == 0 && fits(rows.batch_stride) &&
         fits(rows.token_stride) && fits(rows.head_stride);
}
// Whether a channel has four contiguous taps, aligned as a whole.
inline bool has_packed_taps(const Conv1dInputs& in) {
  const TapWeights& w = in.weight;
  return in.taps == kMaxTaps && w.tap_stride == 1 && w.channel_stride % kMaxTaps == 0 &&
         reinterpret_cast<uintptr_t>(w.data) % static_cast<uintptr_t>(kMaxTaps * dtype_bytes(w.dtype)) == 0;
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

constexpr int kUpdateTokens = 8, kUpdateColumns = 16;  // at most, of a sequence and of a state of `update`
// The host does not know the lengths of packed sequences; windows of drafts are short.
inline bool supports_update(const Conv1dProblem& p) {
  const bool is_short =
      p.in.sequences.offsets ? bool{p.previous_accept_lengths} : p.in.sequences.tokens <= kUpdateTokens;
  return is_short && p.in.initial.columns <= kUpdateColumns && p.final.columns <= kUpdateColumns;
}

inline ConvKernel conv_kernel(const Conv1dProblem& p) {
  const Conv1dInputs& in = p.in;
  if (supports_update_vec(p)) return ConvKernel::update_vec;
  if (supports_update(p)) return ConvKernel::update;
  if (!p.y || p.steps || !has_packed_taps(in)) return ConvKernel::any;
  if (has_vectors_of_channels(in, in.x) && has_vectors_of_channels(in, p.y)) return ConvKernel::rows;
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
  if (!has_packed_taps(in)) return ConvKernel::any;
  if (rows(in.x) && rows(p.d_y) && rows(p.dx)) return ConvKernel::rows;
  if (columns(in.x) && columns(p.d_y) && columns(p.dx)) return ConvKernel::columns;
  return ConvKernel::any;
}

// Tokens of a batch row, or of the pack, are cut into chunks. CTAs are (group, block of channels), channels fastest.
struct ConvGrid {
  int64_t chunk;           // tokens
  int64_t chunks_per_row;  // of each of B rows; at least one, because sequences without tokens have states, too
  int64_t chunks;
  int64_t channel_blocks;
  int64_t groups;  // group i has chunks i, i + groups, ...; a backward has a partial sum of each group

  int64_t ctas() const { return groups * channel_blocks; }
};

inline int64_t conv_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// group_chunks: chunks that the warps of a CTA compute at the same time.
inline ConvGrid conv_grid_of(const Conv1dInputs& in, int64_t chunk, int64_t cta_channels, int64_t most_ctas,
                             int64_t group_chunks = 1) {
  ConvGrid grid{};
  grid.chunk = chunk;
  grid.chunks_per_row = in.sequences.tokens > chunk ? conv_ceil(in.sequences.tokens, chunk) : 1;
  grid.chunks = in.sequences.batch * grid.chunks_per_row;
  grid.channel_blocks = conv_ceil(in.channels, cta_channels);
  const int64_t most = most_ctas > grid.channel_blocks ? most_ctas / grid.channel_blocks : 1;
  grid.groups = std::min(conv_ceil(grid.chunks, group_chunks), most);
  return grid;
}

constexpr int64_t kMaxConvCtas = (int64_t{1} << 31) - 1;  // of a grid

// A chunk of `columns`: whole pieces of 32 vectors, as many as leave this number of warps some work.
inline int64_t conv_column_chunk(const Conv1dInputs& in, int64_t wanted_warps) {
  const int64_t piece = 32 * conv_vector(in.x.dtype), pieces = conv_ceil(in.sequences.tokens, piece);
  const int64_t chunks = std::max<int64_t>(1, wanted_warps / std::max<int64_t>(1, in.channels * in.sequences.batch));
  return piece * std::max<int64_t>(1, conv_ceil(pieces, chunks));
}

// `rows` is fastest with whole chunks. In a pack of shorter sequences a chunk has about one sequence: a thread computes
// the sequences of its chunk one after the other.
inline int64_t conv_row_chunk(const Sequences& sequences) {
  int64_t chunk = kConvRowTokens;
  while (sequences.offsets && chunk > 1 && sequences.tokens < chunk * sequences.count) chunk /= 2;
  return chunk;
}
// Of `any`: chunks so long that the taps - 1 tokens that are read twice cost little, and so short that every
// multiprocessor has some CTAs.
inline int64_t conv_any_chunk(const Conv1dInputs& in) {
  constexpr int64_t kWantedCtas = 2048, kLongest = 64;
  const Sequences& sequences = in.sequences;
  const int64_t work = sequences.batch * sequences.tokens * conv_ceil(in.channels, kConvThreads);
  int64_t longest = kLongest;
  if (sequences.offsets) longest = std::min(longest, 4 * conv_ceil(sequences.tokens + 1, sequences.count + 1));
  int64_t chunk = sequences.offsets ? 1 : 4;  // without offsets a chunk holds the taps - 1 tokens that need a state
  while (2 * chunk <= longest && work >= kWantedCtas * 2 * chunk) chunk *= 2;
  return chunk;
}

inline ConvGrid conv_grid(const Conv1dProblem& p) {
  constexpr int64_t kWantedWarps = 8192;
  const Conv1dInputs& in = p.in;
  const ConvKernel kernel = conv_kernel(p);
  if (kernel == ConvKernel::columns)
    return conv_grid_of(in, conv_column_chunk(in, kWantedWarps), kConvWarps, kMaxConvCtas);
  if (kernel == ConvKernel::rows)
    return conv_grid_of(in, conv_row_chunk(in.sequences), kConvThreads, kMaxConvCtas, kConvWarps);
  return conv_grid_of(in, conv_any_chunk(in), kConvThreads, kMaxConvCtas);
}

// Whether the inputs beyond a sequence's ends count as zeros, and nothing of them has a gradient.
GD_ALWAYS_INLINE bool has_plain_ends(const Conv1dBackwardProblem& p) {
  return !p.in.sequences.offsets && !p.in.initial && !p.d_initial && !p.d_final;
}

// SiLU, no bias, no states: the calls of models.
inline bool is_usual(const Conv1dBackwardProblem& p) {
  return has_plain_ends(p) && p.in.silu && !p.in.bias && !p.dbias;
}

// At most a fixed number of CTAs: each has partial sums of dweight and dbias. The warps of a CTA have the same channels
// and different chunks; those of `columns` have different channels.
constexpr int64_t kConvBackwardCtas = 4096;
inline ConvGrid conv_backward_grid(const Conv1dInputs& in, ConvKernel kernel, bool plain_ends) {
  constexpr int64_t kWantedWarps = 8192, kShortest = 16, kLongest = 64;
  if (kernel == ConvKernel::columns)
    return conv_grid_of(in, conv_column_chunk(in, kWantedWarps), kConvWarps, kConvBackwardCtas);
  // A CTA of both has kConvThreads channels. A CTA of `any` has one chunk, a CTA of `rows` one per warp.
  const int64_t work = in.sequences.batch * in.sequences.tokens * conv_ceil(in.channels, kConvThreads);
  int64_t chunk = kShortest;
  if (kernel == ConvKernel::rows && plain_ends) {
    // All chunks take the same time. Two CTAs per multiprocessor of an H200 saturate its memory; slightly more would
    // leave a tail.
    constexpr int64_t kFewWarps = 1024, kLongestOfFew = 512, kOtherwise = 128;
    chunk = std::max(kShortest, conv_ceil(conv_ceil(work, kFewWarps), kConvRowBatch) * kConvRowBatch);
    if (chunk > kLongestOfFew) chunk = kOtherwise;
    return conv_grid_of(in, chunk, kConvThreads, kConvBackwardCtas, kConvWarps);
  }
  while (2 * chunk <= kLongest && work >= kWantedWarps * 2 * chunk) chunk *= 2;
  return conv_grid_of(in, chunk, kConvThreads, kConvBackwardCtas, kernel == ConvKernel::rows ? kConvWarps : 1);
}
inline ConvGrid conv_grid(const Conv1dBackwardProblem& p) {
  return conv_backward_grid(p.in, conv_kernel(p), has_plain_ends(p));
}

inline bool has_partial_sums(const Conv1dBackwardProblem& p) { return p.dweight || p.dbias; }
// Partial sums, [groups][kConvSums][D] in fp32, of the kernel that has the most: the choice depends on the alignment of
// addresses, which a query does not have. Chunks are shortest where ends are not plain.
constexpr int kConvSums = kMaxTaps + 1;
inline size_t conv1d_backward_workspace(const Conv1dBackwardProblem& p) {
  if (!has_partial_sums(p)) return 0;
  int64_t groups = 0;
  for (const ConvKernel kernel : {ConvKernel::rows, ConvKernel::columns, ConvKernel::any})
    groups = std::max(groups, conv_backward_grid(p.in, kernel, false).groups);
  return sizeof(float) * static_cast<size_t>(groups * kConvSums * p.in.channels);
}

// A CTA of `update` has kConvThreads channels of some sequences; in a pack one more group has the tokens of no
// sequence.
struct UpdateGrid {
  int64_t sequences;  // of a CTA
  int64_t groups, channel_blocks;

  int64_t ctas() const { return groups * channel_blocks; }
};
// The channels of a CTA of one state in shared memory.
struct UpdateTile {
  int bytes;
  int channel_stride, column_stride;
  bool vectors;    // moved 16 bytes at a time, by all threads
  bool by_column;  // the channels of a column are neighbours

  GD_ALWAYS_INLINE int at(int channel, int column) const { return channel * channel_stride + column * column_stride; }
};

inline UpdateTile update_tile(const Conv1dInputs& in, const ConvStates& states) {
  UpdateTile tile{};
  if (!states) return tile;
  const int64_t size = dtype_bytes(states.dtype);
  const bool is_aligned = reinterpret_cast<uintptr_t>(states.data) % static_cast<uintptr_t>(kConvAlign) == 0 &&
                          states.slot_stride * size % kConvAlign == 0;
  const bool by_channel = states.column_stride == 1 && states.channel_stride == states.columns;
  tile.by_column = !by_channel && states.channel_stride == 1;
  const int64_t run = in.channels * size * (tile.by_column ? 1 : states.columns);
  tile.vectors = is_aligned && run % kConvAlign == 0 &&
                 (by_channel || (tile.by_column && states.column_stride * size % kConvAlign == 0));
  tile.channel_stride = tile.by_column ? 1 : static_cast<int>(states.columns);
  tile.column_stride = tile.by_column ? kConvThreads : 1;
  tile.bytes = static_cast<int>(kConvThreads * states.columns * size);
  return tile;
}

constexpr int kUpdateInputBytes = kUpdateTokens * kConvThreads * static_cast<int>(sizeof(float));
constexpr int kUpdateTileBytes = 32 << 10;  // of shared memory, or one sequence's if that is more

inline UpdateGrid update_grid(const Conv1dProblem& p) {
  constexpr int64_t kWantedCtas = 1024;
  const Conv1dInputs& in = p.in;
  UpdateGrid grid{};
  grid.channel_blocks = conv_ceil(in.channels, kConvThreads);
  grid.sequences = 1;
  if (in.sequences.offsets) {
    grid.groups = in.sequences.count + 1;
    return grid;
  }
  const int64_t tile = update_tile(in, in.initial).bytes + update_tile(in, p.final).bytes;
  while (2 * grid.sequences * std::max<int64_t>(in.sequences.tokens, 1) <= kUpdateTokens &&
         2 * grid.sequences * tile <= kUpdateTileBytes &&
         in.sequences.count * grid.channel_blocks >= kWantedCtas * 2 * grid.sequences)
    grid.sequences *= 2;
  grid.groups = conv_ceil(in.sequences.count, grid.sequences);
  return grid;
}

}  // namespace gatedelta::cuda
