// Work items: what a CTA of a chain kernel takes at a time, and the lists they stand in.
#pragma once

#include "cuda/device/decay.hpp"
#include "cuda/device/fast_math.hpp"
#include "cuda/device/sequences.hpp"
#include "cuda/sm90/tiles.hpp"

namespace gatedelta::cuda::sm90 {

enum WorkKind {
  kNoWork = -1,  // end of the list
  kOutputs,      // chunks of a sequence, perhaps after warm-up chunks
  kTransition,   // M and S_loc of a segment, S_out = M S_in + S_loc, half of the columns of each
  kMerge,        // states at segment boundaries, one after the other
  kDryRun,       // one chunk without data or results
};
enum Half { kWhole = -1, kNoValues = -2 };  // of the value columns; 0 and 1 are the halves
// Where an item's state comes from; 0 and up is a boundary. kFromSaved: a state saved by the forward, number seq_head.
enum From { kFromInitial = -1, kFromZero = -2, kFromSaved = -3 };
enum To { kToFinal = -1, kToNowhere = -2 };  // 0 and up is a boundary

// One entry of a work list.
struct alignas(64) WorkItem {
  int kind, sequence, head, key_head;  // key_head: in a merge, the half of the value columns
  int half, batch, token, tokens;      // token: its first; tokens: 0 = nothing to do
  int warmup_tokens;                   // leading tokens without outputs
  int prepared;  // chunk_index * heads + head of its first chunk; in a merge, its first boundary tile
  int from, to;
  int origin;        // first token of the sequence
  int seq_head;      // sequence * heads + head: which counter of readers
  int readers;       // warpgroups that must have read the initial state before the final one may overwrite it
  int initial_slot;  // of the forward; negative: the initial state is zero
};
static_assert(sizeof(WorkItem) == 64);

// Position of a chain in its item: a chunk of one value head or of half of one, or a step of a merge. The gradient
// chain walks backwards, so that a ragged chunk comes first.
template <bool kReverse>
struct ChunkAt {
  int batch, token, tokens_left;  // tokens_left: of the item, from here on; 0 or less = past the last chunk
  int warmup_tokens;              // warm-up left from here on; 0 or less = none
  int head, half;
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
  // The previous chunk, which must be whole.
  GD_HOST_DEVICE ChunkAt before() const {
    if constexpr (kReverse)
      return {batch, token + kChunkTokens, tokens_left + kChunkTokens, warmup_tokens + kChunkTokens, head, half};
    return moved(-kChunkTokens);
  }
  GD_HOST_DEVICE static ChunkAt first_of(const WorkItem& w) {
    return {w.batch, w.token, w.tokens, w.warmup_tokens, w.head, w.half};
  }
  // The chunk at which `left` tokens of the item are left, counted as if the ragged chunk came last.
  GD_HOST_DEVICE static ChunkAt of(const WorkItem& w, int left) {
    if (!kReverse) return first_of(w).moved(w.tokens - left);
    ChunkAt at = first_of(w);
    const int passed = w.tokens - left;  // whole chunks
    at.token -= passed;
    if (passed > 0) at.tokens_left = (w.tokens + kChunkTokens - 1) / kChunkTokens * kChunkTokens - passed;
    return at;
  }
};

// The same chunks from the last to the first.
GD_HOST_DEVICE inline WorkItem mirrored(const WorkItem& whole, int value_heads) {
  WorkItem item = whole;
  const int before = floor_div(item.tokens + kChunkTokens - 1, kChunkTokens) - 1;
  item.token += before > 0 ? before * kChunkTokens : 0;
  item.prepared += before > 0 ? before * value_heads : 0;
  return item;
}

// Cuts the item of a whole sequence down to chunks [start, end).
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
  int count;         // entries
  int next_ticket;   // entries that CTAs have taken by ticket
  int static_items;  // leading entries, assigned by blockIdx
};

// Halves are for GPUs with idle SMs: both halves read K and Q, and if all SMs do, that costs more than it saves. Merged
// segments of a forward may fill more of it: most of their halves wait for a state, and begin one after the other.
constexpr float kMostHalves = 0.6f, kMostMergedHalves = 1.0f;
struct Limits {
  int blocks, entries, boundaries;
  float merged_halves = kMostHalves;  // that start at once, in blocks
  GD_HOST_DEVICE bool operator==(const Limits& other) const {
    return blocks == other.blocks && entries == other.entries && boundaries == other.boundaries;
  }
};

// The gradient chain's list, made by the forward and saved for its backward, with the limits it was made under. Entries
// follow in memory.
struct alignas(64) SavedList {
  static constexpr int kNone = -1, kEntries = 1023;
  Schedule schedule;  // count is kNone if there is no list or it did not fit
  Limits limits;
  GD_HOST_DEVICE WorkItem* items() { return reinterpret_cast<WorkItem*>(this + 1); }
  GD_HOST_DEVICE const WorkItem* items() const { return reinterpret_cast<const WorkItem*>(this + 1); }
};
constexpr int kSavedListBytes = sizeof(SavedList) + SavedList::kEntries * sizeof(WorkItem);
static_assert(kSavedListBytes == 65536);

// A segment boundary in the workspace: M of the segment before it as two 16-bit wgmma operands (hi, lo), and its S_loc
// in fp32, which the merge overwrites with the state.
constexpr int kStateTileBytes = 128 * 128 * 2;
constexpr int kBoundaryTiles = 4;  // M hi, M lo, and two tiles of floats
constexpr int kBoundaryBytes = kBoundaryTiles * kStateTileBytes;
constexpr int kMergeTiles = 3;  // tiles that a merge of half of the value columns reads
// A boundary's counter. Four warpgroups add 1 each for the transition, then two add 2 each for the state.
enum Ready { kTransitionReady = 4, kStateReady = 8 };

// How the work list is made. Planned: the schedule kernel cuts. The others are uncut and made by the prepare kernel.
// Sorted: too many sequences to plan, work enough without. Even: equal lengths that fill the GPU, or sequences too
// short to cut.
enum ListMode { kPlannedList, kSortedList, kEvenList };
constexpr int kMaxSorted = 1024;  // sequences that are sorted by length; more of them balance themselves
// Limits of a plan.
constexpr int kMaxPlannedSequences = 64, kMaxPlannedSeqHeads = 1024, kMaxPlannedEntries = 6144;

}  // namespace gatedelta::cuda::sm90
