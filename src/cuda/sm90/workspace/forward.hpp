// Sizes of a forward: CTAs, list entries, workspace and saved layout. Pure host arithmetic.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/sm90/prepare/config.hpp"
#include "cuda/sm90/schedule/cost_model.hpp"
#include "cuda/sm90/schedule/recompute.hpp"

namespace gatedelta::cuda::sm90 {

// Limits of the kernels' 32-bit arithmetic and shared memory; validation enforces them.
constexpr int64_t kMaxSeqHeads = INT_MAX / 2;   // N * Hv: room for a stride
constexpr int64_t kMaxPrepareBlocks = INT_MAX;  // of one launch
constexpr int64_t kMaxSlots = INT_MAX;          // of initial states: a work item holds its own
constexpr int64_t kMaxGroup = 256;              // Hv / Hk: prepare holds the betas of a group

// One per chunk and key head, after the helpers that list and plan.
inline int64_t prepare_blocks(const ChunkedSequences& s, int64_t key_heads) {
  return s.workspace_chunks() * key_heads + kPrepareHelpers;
}
inline int64_t prepare_blocks(const Layer& layer) {
  return prepare_blocks(sequences_of(layer.sequences), layer.key_heads);
}

// ---- what may be cut -----------------------------------------------------------------------------------------------

// Within these bounds a list is planned. Beyond them there is enough work, and nothing is cut.
inline bool is_planned(int64_t sequences, int64_t value_heads) {
  return sequences <= kMaxPlannedSequences && sequences * value_heads <= kMaxPlannedSeqHeads;
}
inline bool supports_cut(const ForwardProblem& p) {
  return p.context_parallel && !p.batch_invariant && is_planned(p.in.sequences.count, p.in.value_heads);
}
// ChunkedSequences so short that planning costs more than it gains, unless a backward needs the plan. For a pack, the
// sum of all tokens.
constexpr int64_t kShortTokens = 14 * kChunkTokens;
inline bool are_short(const ForwardProblem& p) { return p.in.sequences.tokens <= kShortTokens && !p.saved; }
// Items per head if shapes alone show that nothing is cut: short sequences, or a dense batch that fills the GPU. 0: may
// be cut.
inline int even_parts(const ForwardProblem& p, int blocks) {
  const int64_t seq_heads = p.in.sequences.count * p.in.value_heads;
  if (p.segment_chunks) return 0;
  if (are_short(p)) return 2 * seq_heads <= blocks && is_planned(p.in.sequences.count, p.in.value_heads) ? 2 : 1;
  if (p.in.sequences.offsets) return 0;
  if (seq_heads > 8 * int64_t{blocks}) return 1;
  const int parts = busy_parts(static_cast<int>(seq_heads), ChunkedSequences::chunks(p.in.sequences.tokens), blocks);
  // Where nothing is planned, the list has room for whole heads only (max_entries).
  return parts == 2 && !is_planned(p.in.sequences.count, p.in.value_heads) ? 1 : parts;
}
inline ListMode list_mode(const ForwardProblem& p, int blocks) {
  if (even_parts(p, blocks) > 0) return kEvenList;
  return is_planned(p.in.sequences.count, p.in.value_heads) ? kPlannedList : kSortedList;
}
// By segment_chunks and what goes with it; zero lengths: not forced.
inline Cut forced_cut(const ForwardProblem& p) {
  const int64_t persistent = p.persistent_segment_chunks ? p.persistent_segment_chunks : p.segment_chunks;
  return {static_cast<int>(p.segment_chunks), static_cast<int>(persistent), p.segment_halves};
}
// Capacity of the work list: halves of all heads, and as many segments as a GPU can use.
inline int64_t max_entries(const ForwardProblem& p) {
  const int64_t seq_heads = p.in.sequences.count * p.in.value_heads;
  if (!is_planned(p.in.sequences.count, p.in.value_heads)) return seq_heads;
  const int64_t chunk_count = sequences_of(p.in.sequences).workspace_chunks(), chunks = chunk_count * p.in.value_heads;
  // A backward with saved states cuts at save intervals, whatever else is cut (recompute.hpp).
  const int64_t recomputed = !p.saved ? 0 : chunks < kMaxPlannedEntries ? chunks : kMaxPlannedEntries;
  constexpr int64_t kPacketsPerRow = kMaxPlannedEntries - 2 * kMaxPlannedSeqHeads;
  const int64_t pieces = !supports_cut(p) ? 0 : 3 * chunks < kPacketsPerRow ? 3 * chunks : kPacketsPerRow;
  // Forced: outputs, perhaps in halves, and two transitions per segment, rounded up per sequence.
  const Cut forced = forced_cut(p);
  const int shortest = forced.decaying < forced.persistent ? forced.decaying : forced.persistent;
  const int64_t entries =
      p.segment_chunks ? (forced.halves ? 4 : 3) * p.in.value_heads * (chunk_count / shortest + p.in.sequences.count)
                       : 2 * seq_heads + pieces;
  return entries > recomputed ? entries : recomputed;
}

// The most entries this call can have, which also bounds its CTAs.
inline int64_t list_entries(const ForwardProblem& p, int blocks) {
  const int parts = p.saved ? 0 : even_parts(p, blocks);  // a backward may still cut, at save intervals
  return parts > 0 ? p.in.sequences.count * p.in.value_heads * parts : max_entries(p);
}

// Whether there may be a balanced list (schedule/balanced_list.hpp): heads for every CTA, and room for it. A backward
// reads from what was saved how the forward's list was made, and knows no balanced one. Lengths decide on the device.
inline bool may_balance(const ForwardProblem& p, const Limits& limits) {
  const int64_t seq_heads = p.in.sequences.count * p.in.value_heads;
  const int borders = limits.blocks - 1;
  return supports_cut(p) && !p.saved && !p.segment_chunks && seq_heads >= limits.blocks && borders <= kMostBorders &&
         borders <= limits.boundaries && seq_heads + borders <= limits.entries;
}

// ---- memory --------------------------------------------------------------------------------------------------------

// What a forward saves for its backward: prepare's results, and the state after every kSaveInterval chunks.
constexpr int64_t kSaveIntervalTokens = kSaveInterval * kChunkTokens;
constexpr int64_t kStateBytes = int64_t{kHeadDim} * kHeadDim * 4;
constexpr int64_t kCutsBytes = kShares * kCutBlocks * int64_t{sizeof(CutCost)};
struct SavedLayout {
  size_t prepared = 0;          // [chunk_count][Hv][kBackwardPreparedBytes]
  size_t decays = 0;            // ChunkDecay [Hv][chunk_count]
  size_t order = 0;             // int [N], sequences, longest first
  size_t first_checkpoint = 0;  // as in the workspace
  size_t cuts = 0;              // the same
  size_t list = 0;              // SavedList
  size_t states = 0;            // fp32 [intervals][Hv][K][V], or [V][K]
  size_t bytes = 0;
};
inline SavedLayout saved_layout(const Layer& in) {
  const int64_t chunks = sequences_of(in.sequences).workspace_chunks() * in.value_heads;
  const int64_t intervals = in.sequences.offsets ? in.sequences.tokens / kSaveIntervalTokens
                                                 : in.sequences.count * (in.sequences.tokens / kSaveIntervalTokens);
  SavedLayout saved;
  const auto take = [&](int64_t bytes) {
    const size_t at = saved.bytes;
    saved.bytes += (static_cast<size_t>(bytes) + 63) / 64 * 64;
    return at;
  };
  saved.prepared = take(chunks * kBackwardPreparedBytes);
  saved.decays = take(chunks * int64_t{sizeof(ChunkDecay)});
  saved.order = take(in.sequences.count * int64_t{sizeof(int)});
  saved.first_checkpoint = take(in.sequences.count * int64_t{sizeof(int64_t)});
  saved.cuts = take(kCutsBytes);
  saved.list = take(kSavedListBytes);
  saved.states = take(intervals * in.value_heads * kStateBytes);
  return saved;
}

// Offsets of the workspace's parts from its first 128-byte boundary, and its whole size.
struct ForwardWorkspace {
  static constexpr size_t kAlign = 128;        // of every part
  static constexpr size_t kCallersAlign = 64;  // of the memory itself

  size_t prepared = 0;          // [chunk_count][Hv][prepared_bytes]
  size_t first_checkpoint = 0;  // int64_t [N], if there are checkpoints
  size_t decays = 0;            // ChunkDecay [Hv][chunk_count]
  size_t cuts = 0;              // CutCost [kShares][kCutBlocks]
  size_t schedule = 0;
  size_t work = 0;            // WorkItem [max_entries]
  size_t initial_read = 0;    // int [N][Hv], if there is a plan
  size_t boundary_ready = 0;  // int [boundary_count]
  size_t boundaries = 0;      // [boundary_count][kBoundaryBytes]
  int boundary_count = 0;
  size_t bytes = 0;
};

// Documented workspace bound: bytes per token and value head, plus a constant. Segment boundaries get what is left
// below it.
constexpr int64_t kBytesPerToken = 192, kFixedBytes = int64_t{1} << 20;
constexpr int kMaxBoundaries = 384;

inline ForwardWorkspace forward_layout(const ForwardProblem& p, int prepared_bytes = kPreparedBytes) {
  ForwardWorkspace w;
  const auto take = [&](int64_t bytes) {
    const size_t at = w.bytes;
    w.bytes += (static_cast<size_t>(bytes) + ForwardWorkspace::kAlign - 1) / ForwardWorkspace::kAlign *
               ForwardWorkspace::kAlign;
    return at;
  };
  const int64_t count = p.in.sequences.count, chunk_count = sequences_of(p.in.sequences).workspace_chunks();
  const bool saves = p.saved.present;  // these live in `saved` instead
  w.prepared = take(saves ? 0 : chunk_count * p.in.value_heads * prepared_bytes);
  const bool has_checkpoints = p.checkpoint_every || p.checkpoint_offsets;
  w.first_checkpoint = take(has_checkpoints && !saves ? count * int64_t{sizeof(int64_t)} : 0);
  w.decays = take(saves ? 0 : chunk_count * p.in.value_heads * int64_t{sizeof(ChunkDecay)});
  w.cuts = take(saves ? 0 : kCutsBytes);
  w.schedule = take(sizeof(Schedule));
  w.work = take(max_entries(p) * int64_t{sizeof(WorkItem)});
  if (is_planned(count, p.in.value_heads)) w.initial_read = take(count * p.in.value_heads * int64_t{sizeof(int)});
  if (supports_cut(p)) {
    const int64_t promised =
        kBytesPerToken * p.in.sequences.batch * p.in.sequences.tokens * p.in.value_heads + kFixedBytes;
    const int64_t left = promised - static_cast<int64_t>(w.bytes) - 2 * int64_t{ForwardWorkspace::kAlign};
    const int64_t room = left / (kBoundaryBytes + int64_t{sizeof(int)});
    w.boundary_count = static_cast<int>(room < 0 ? 0 : room < kMaxBoundaries ? room : kMaxBoundaries);
    w.boundary_ready = take(w.boundary_count * int64_t{sizeof(int)});
    w.boundaries = take(int64_t{w.boundary_count} * kBoundaryBytes);
  }
  w.bytes += ForwardWorkspace::kAlign - ForwardWorkspace::kCallersAlign;
  return w;
}

}  // namespace gatedelta::cuda::sm90
