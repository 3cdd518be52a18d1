// The sequences that a chunk of tokens overlaps.
#pragma once

#include "cuda/conv1d/config.hpp"
#include "cuda/device/packets.cuh"

namespace gatedelta::cuda {

// Tokens [from, to) of a sequence. from = 0: the chunk is that of the sequence's start, even of an empty one.
struct Segment {
  int64_t sequence;
  SequenceSpan span;
  int64_t from, to;
};

// The first index whose offset is at least `value`, or `count`. By a whole warp, 32 probes at a time.
GD_DEVICE int64_t find_offset(const IndexVector& offsets, int64_t count, int64_t value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t probe = low + lane * step;
    const int less = __popc(__ballot_sync(~0u, probe < high && offsets[probe] < value));
    if (less == 0) return low;
    const int64_t next = low + less * step;  // the first probe that is not less, if there is one
    low += (less - 1) * step + 1;
    high = next < high ? next : high;
  }
  return low;
}

// The sequence with all of the tokens [first, after) of a batch row or of the pack, or -1. By a whole warp.
GD_DEVICE int64_t sequence_of(const Sequences& sequences, int64_t row, int64_t first, int64_t after) {
  if (!sequences.offsets) return first >= 0 && after <= sequences.tokens ? row : -1;
  const int64_t next = find_offset(sequences.offsets, sequences.count + 1, first + 1);
  return next > 0 && next <= sequences.count && sequences.offsets[next] >= after ? next - 1 : -1;
}

// A chunk of tokens of a batch row or of the pack. The first `kept` tokens of a sequence belong to the chunk of its
// start, so that one chunk alone reads its state; without offsets a chunk has at least so many.
struct Chunk {
  const Sequences& sequences;
  int64_t row, begin, end;
  int64_t index = 0;  // of the sequence that is next

  GD_DEVICE Chunk(const Sequences& all, const ConvGrid& grid, int64_t number)
      : sequences(all), row(grid.chunks_per_row == grid.chunks ? 0 : number / grid.chunks_per_row) {
    begin = (number - row * grid.chunks_per_row) * grid.chunk;
    end = begin + grid.chunk < all.tokens ? begin + grid.chunk : all.tokens;
  }

  // Finds the first sequence of the chunk. By a whole warp.
  GD_DEVICE void find_sequences() {
    if (!sequences.offsets) return;
    index = find_offset(sequences.offsets, sequences.count, begin);
    if (index > 0) --index;  // it may continue in this chunk
  }
  // The sequences of the chunk, one after the other; false after the last one.
  GD_DEVICE bool next(Segment& s, int64_t kept) {
    const bool is_packed = static_cast<bool>(sequences.offsets);
    const bool is_last = end == sequences.tokens;  // it also has the empty sequences at the end
    const int64_t count = is_packed ? sequences.count : 1;
#pragma unroll 1
    while (index < count) {
      const int64_t i = index++;
      const int64_t start = is_packed ? sequences.offsets[i] : 0;
      const int64_t stop = is_packed ? sequences.offsets[i + 1] : sequences.tokens;
      const bool is_first = start >= begin;
      if (is_first && start >= end && !is_last) return false;
      const int64_t least = start + kept, own_begin = least > begin ? least : begin;
      const int64_t own_end = is_first && least > end ? least : end;
      s.sequence = is_packed ? i : row;
      s.span = {is_packed ? 0 : row, start, stop - start};
      s.from = is_first ? 0 : own_begin - start;
      s.to = (stop < own_end ? stop : own_end) - start;
      if (is_first || s.from < s.to) return true;
    }
    return false;
  }

  // The first token that belongs to no sequence.
  GD_DEVICE int64_t unused() const {
    const int64_t used = sequences.used_tokens();
    return used > begin ? used : begin;
  }
};

}  // namespace gatedelta::cuda
