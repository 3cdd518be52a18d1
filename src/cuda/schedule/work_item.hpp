// Work items: what a CTA of a chain kernel takes at a time, and the lists they stand in.
#pragma once

#include "cuda/schedule/fast_math.hpp"
#include "cuda/tensors.hpp"

namespace gatedelta::cuda {

// What the chain of chunks is for: outputs; the states before every chunk; or the gradients of states, from a
// sequence's last chunk to its first. Of those, `mirrored` chunk r is the one that has r after it, and everything here
// is said of mirrored chunks.
enum class Pass { kForward, kStates, kBackward };

enum WorkKind {
  kNoWork = -1,  // the end of the list
  kOutputs,      // chunks of a sequence, perhaps after some that only move the state
  kTransition,   // S_loc and M of a segment, S_out = M S_in + S_loc, for half of the columns of each
  kMerge,        // the states at the ends of segments, one after the other
  kDryRun,       // a chunk of nothing, of which nothing comes
};
enum Half { kWhole = -1, kNoValues = -2 };  // of the value columns; or 0, 1
// Or the number of a boundary. A window's end is one of the states that the forward has kept, `pair` its number.
enum From { kFromInitial = -1, kFromZero = -2, kFromSaved = -3 };
enum To { kToFinal = -1, kToNowhere = -2 };  // or the number of a boundary

// What a block of the main kernel takes at a time; all that is to be known of it, in a few loads.
struct alignas(64) WorkItem {
  int kind, sequence, head, key_head;  // key_head: of a join, the half it joins
  int half, batch, token, tokens;      // from its first token on; no rows: nothing to do
  int warmup_tokens;                   // tokens at its beginning without outputs
  int prepared;  // number of its first chunk and head in the workspace; of a join: its first image of M
  int from, to;
  int origin;    // first token of the sequence
  int seq_head;  // of sequence and head: which counter of readers
  int readers;   // warpgroups that have to have read the initial state before the final one may be in its place
  int unused;    // all 64 bytes are copied, a word per lane
};
static_assert(sizeof(WorkItem) == 64);

// A chunk of one value head, or of half of one; or a step of a join. Chunks are walked through forwards or, for
// gradients, backwards: then the ragged one comes first.
template <bool kReverse>
struct ChunkAt {
  int batch, token, tokens_left;  // rows the item has from here on; 0 or less = past the last chunk
  int warmup_tokens;              // chunks without outputs from here on, in tokens; 0 or less = none
  int head, half;                 // half: see schedule.hpp
  GD_HOST_DEVICE int tokens() const {
    return kReverse ? (tokens_left - 1) % kChunkTokens + 1 : tokens_left < kChunkTokens ? tokens_left : kChunkTokens;
  }
  GD_HOST_DEVICE bool is_whole() const {
    return kReverse ? tokens_left % kChunkTokens == 0 : tokens_left >= kChunkTokens;
  }
  GD_HOST_DEVICE bool is_warmup() const { return warmup_tokens > 0; }
  GD_HOST_DEVICE ChunkAt moved(int by) const {
    return {batch, token + by, tokens_left - by, warmup_tokens - by, head, half};
  }
  GD_HOST_DEVICE ChunkAt next() const {
    if constexpr (kReverse)
      return {batch, token - kChunkTokens, tokens_left - tokens(), warmup_tokens - kChunkTokens, head, half};
    return moved(kChunkTokens);
  }
  // The one before this, if that was whole.
  GD_HOST_DEVICE ChunkAt before() const {
    if constexpr (kReverse)
      return {batch, token + kChunkTokens, tokens_left + kChunkTokens, warmup_tokens + kChunkTokens, head, half};
    return moved(-kChunkTokens);
  }
  GD_HOST_DEVICE static ChunkAt first_of(const WorkItem& w) {
    return {w.batch, w.token, w.tokens, w.warmup_tokens, w.head, w.half};
  }
  // The item's chunk from which on there are so many tokens_left, if the ragged one came last.
  GD_HOST_DEVICE static ChunkAt of(const WorkItem& w, int left) {
    if (!kReverse) return first_of(w).moved(w.tokens - left);
    ChunkAt at = first_of(w);
    const int passed = w.tokens - left;  // whole chunks
    at.token -= passed;
    if (passed > 0) at.tokens_left = (w.tokens + kChunkTokens - 1) / kChunkTokens * kChunkTokens - passed;
    return at;
  }
};

// All chunks of a sequence, from the last to the first.
GD_HOST_DEVICE inline WorkItem mirrored(const WorkItem& whole, int value_heads) {
  WorkItem item = whole;
  const int before = floor_div(item.tokens + kChunkTokens - 1, kChunkTokens) - 1;
  item.token += before > 0 ? before * kChunkTokens : 0;
  item.prepared += before > 0 ? before * value_heads : 0;
  return item;
}

// Of an item of a whole sequence, the chunks from `start` to `end`.
template <Pass kPass>
GD_HOST_DEVICE void cut_item(WorkItem& item, int start, int end, int chunks, int value_heads) {
  if (end != chunks) item.to = kToNowhere;
  const int tokens = item.tokens;
  if constexpr (kPass == Pass::kBackward) {
    item = mirrored(item, value_heads);
    item.token -= start * kChunkTokens;
    item.prepared -= start * value_heads;
    item.tokens = (start == 0 ? tokens : (chunks - start) * kChunkTokens) - (chunks - end) * kChunkTokens;
  } else {
    item.token += start * kChunkTokens;
    item.prepared += start * value_heads;
    item.tokens = (end == chunks ? tokens : end * kChunkTokens) - start * kChunkTokens;
  }
}

struct Schedule {
  int count;         // of entries
  int next_ticket;   // entries that blocks took one after the other
  int static_items;  // and those before, of which each block has the one with its number
};

struct Limits {
  int blocks, entries, boundaries;
  GD_HOST_DEVICE bool operator==(const Limits& other) const {
    return blocks == other.blocks && entries == other.entries && boundaries == other.boundaries;
  }
};

// The list of the gradients of states as a forward has made it for its backward, which then need not; under the limits
// of which it was made. Entries come behind it.
struct alignas(64) SavedList {
  static constexpr int kNone = -1, kEntries = 1023;
  Schedule schedule;  // its count: kNone if there is no list, or if it would have been longer
  Limits limits;
  GD_HOST_DEVICE WorkItem* items() { return reinterpret_cast<WorkItem*>(this + 1); }
  GD_HOST_DEVICE const WorkItem* items() const { return reinterpret_cast<const WorkItem*>(this + 1); }
};
constexpr int kSavedListBytes = sizeof(SavedList) + SavedList::kEntries * sizeof(WorkItem);
static_assert(kSavedListBytes == 65536);

// A boundary between segments: M of the segment before it as two 16-bit parts, each a wgmma operand, and its S_loc,
// in whose place the state at its end comes.
constexpr int kStateTileBytes = 128 * 128 * 2;
constexpr int kBoundaryTiles = 4;  // M's upper part, its lower part, and two of floats
constexpr int kBoundaryBytes = kBoundaryTiles * kStateTileBytes;
constexpr int kMergeTiles = 3;  // that a join of half of the columns reads
// What a boundary's counter says: four warpgroups have written factors; and two a half of the state, each worth two.
enum Ready { kTransitionReady = 4, kStateReady = 8 };

// How the list of work comes to be: by a plan; or, where sequences are too many for that and work is enough, without
// one, the longest first; or, where they are as long as each other and fill the card as they are, or are too short to
// be cut, already during prepare.
enum ListMode { kPlannedList, kSortedList, kEvenList };
constexpr int kMaxSorted = 1024;  // sequences that are sorted by length; more of them balance themselves
// What is planned at most.
constexpr int kMaxPlannedSequences = 64, kMaxPlannedSeqHeads = 1024, kMaxPlannedEntries = 6144;

}  // namespace gatedelta::cuda
