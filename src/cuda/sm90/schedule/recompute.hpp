// Recomputation of the states from those the forward saved every kSaveInterval chunks: in items that wait for nothing,
// and with small_workspace in two slices, one after the other.
#pragma once

#include "cuda/sm90/schedule/work_item.hpp"

namespace gatedelta::cuda::sm90 {

constexpr int kSaveInterval = 16;  // chunks between two states that a forward saves for its backward

// Chunks of one item: whole save intervals, few enough that every CTA gets several items.
constexpr int64_t kMostPieces = 6 * 132;
inline int64_t recompute_chunks(int64_t chunks, int64_t sequences, int64_t heads) {
  const int64_t intervals = (chunks / kSaveInterval + sequences) * heads / kMostPieces;
  return (intervals > 1 ? intervals : 1) * kSaveInterval;
}

// The chunks of all heads whose states are in the workspace at the same time. A slice consists of the items that start
// in it, so it ends where the last of them does.
struct Slice {
  int begin, end;  // chunk indices
};
constexpr int kMaxSlices = 2;

// The items, by slice, from the last chunk to the first, all heads of some chunks before the chunks before them. The
// gradients kernel starts with the first chunk, so it finds the states written last in L2. The tail of a sequence,
// shorter than an item, comes at the end of the list, so that all CTAs finish at about the same time.
struct RecomputePieces {
  int rank_of[kMaxPlannedSequences];     // a sequence; those of lower rank are longer
  int first[kMaxPlannedSequences];       // piece of a sequence, from the first chunk on
  int tail_place[kMaxPlannedSequences];  // in the list, by rank; negative: there is none
  bool is_tail_in_slice1[kMaxPlannedSequences];
  int sequences, heads, length;  // length in chunks
  int whole, whole_before;       // all pieces but rests, and those of the first slice
  int count[kMaxSlices];         // of pieces of a slice

  // The arguments give chunks, sequence and first chunk index by rank. The second slice starts at chunk index `split`.
  template <class Chunks, class SequenceOf, class FirstChunkIndex>
  GD_HOST_DEVICE void find(int sequence_count, int value_heads, int piece, int split, const Chunks& chunks,
                           const SequenceOf& sequence_of, const FirstChunkIndex& first_chunk_index) {
    sequences = sequence_count;
    heads = value_heads;
    length = piece;
    for (int rank = 0; rank < sequences; ++rank) rank_of[sequence_of(rank)] = rank;
    whole = whole_before = 0;
    for (int n = 0; n < sequences; ++n) {
      const int rank = rank_of[n], pieces = floor_div(chunks(rank), length), room = split - first_chunk_index(rank);
      const int fit = room <= 0 ? 0 : ceil_div(room, length);
      first[n] = whole;
      whole += pieces * heads;
      whole_before += (fit < pieces ? fit : pieces) * heads;
    }
    count[0] = whole_before;
    count[1] = whole - whole_before;
    for (int rank = 0; rank < sequences; ++rank) {
      const int begin = floor_div(chunks(rank), length) * length;
      const bool later = first_chunk_index(rank) + begin >= split;
      tail_place[rank] = -1;
      if (begin == chunks(rank)) continue;
      is_tail_in_slice1[rank] = later;
      tail_place[rank] = count[later];
      count[later] += heads;
    }
  }
  struct Piece {
    int rank, head, begin;
    int slice, place;  // in the slice's list; place < 0: there is no such piece
  };
  // Upper bound of item numbers; piece(i).place < 0 for numbers without an item.
  GD_HOST_DEVICE int numbers() const { return whole + sequences * heads; }
  template <class Chunks>
  GD_HOST_DEVICE Piece piece(int i, const Chunks& chunks) const {
    if (i >= whole) {
      const int rank = floor_div(i - whole, heads), head = i - whole - rank * heads, place = tail_place[rank];
      if (place < 0) return {rank, head, 0, 0, -1};
      return {rank, head, floor_div(chunks(rank), length) * length, is_tail_in_slice1[rank], place + head};
    }
    int n = 0;
    while (n + 1 < sequences && first[n + 1] <= i) ++n;
    const int within = i - first[n], number = floor_div(within, heads);
    const bool later = i >= whole_before;
    return {rank_of[n], within - number * heads, number * length, later, (later ? whole : whole_before) - 1 - i};
  }
};

}  // namespace gatedelta::cuda::sm90
