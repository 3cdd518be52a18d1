// Parameters of the kernels, and the records of segments that they share.
#pragma once

#include "core/problem.hpp"
#include "cuda/device/decay.hpp"
#include "cuda/portable/tiles.hpp"

namespace gatedelta::cuda::portable {

// ---- segments -------------------------------------------------------------------------------------------------------

// Sequences that are cut have segments of equal length, except the last one. Segments are numbered sequence by
// sequence; a sequence without tokens has one, too. The host knows only the largest possible number, which is reached
// where one sequence has all tokens: the last segments may be empty.
struct SegmentLength {
  int64_t tokens;  // of a segment

  GD_HOST_DEVICE int64_t most_segments(const ChunkedSequences& s) const {
    return s.offsets ? s.count + (s.tokens - 1) / tokens : s.count * ((s.tokens + tokens - 1) / tokens);
  }
};
// The segments of a sequence.
struct alignas(8) SegmentRange {
  int first, count;
};

// The work of a chain's CTA for a value head. In the gradient chain "before" means later in time.
struct alignas(16) Segment {
  static constexpr int kFromBoundary = -1;
  int sequence;       // negative: no work
  int chunk, chunks;  // the first chunk with outputs, and their number
  int warmup;         // chunks before them, which begin with no state; kFromBoundary: the boundary state instead;
                      // 0: the first segment, which begins with the caller's state
  GD_HOST_DEVICE bool begins_at_boundary() const { return warmup == kFromBoundary; }
  GD_HOST_DEVICE int warmup_chunks() const { return warmup > 0 ? warmup : 0; }
};

// ---- kernel parameters ----------------------------------------------------------------------------------------------

// Passed by value: a graph that captures a call holds all of it.
struct Params {
  TokenRows q, k, v, o, g, beta;
  HeadVector A_log, dt_bias;
  ChunkedSequences sequences;
  int key_heads, value_heads, group, key_dim, value_dim;
  int prepare_helpers;                              // CTAs
  bool has_prepared;                                // a summary has prepared the chunks
  int log2_ctas_per_head;                           // of a chain kernel
  uint32_t q_stride, k_stride, v_stride, o_stride;  // from token to token
  gd_gate gate;
  gd_beta beta_kind;
  bool l2norm;
  float scale;
  StateRows initial, final, checkpoints;
  int key_state_stride, value_state_stride;  // inside a matrix
  int64_t checkpoint_every;                  // tokens; 0 = none
  IndexRows checkpoint_offsets;
  // Prepare's results are those of all heads of the call, also where the kernels run for some of them.
  int prepared_heads, prepared_key_heads;
  uint8_t* prepared;          // [chunks][prepared_heads][kStepsPerChunk][Prepared::kBytes]
  float* vectors;             // for a backward: [chunks][prepared_heads][kChunkVectors][64]
  float* norms;               // for a backward: [chunks][prepared_key_heads][2][64], r^k, then r^q
  uint8_t* snapshots;         // of a pass of the backward: [chunks][value_heads][V][K], see Chain::store_snapshot
  int* longest_first;         // [N] sequences; null = in their own order
  int64_t* first_checkpoint;  // [N] index of a packed sequence's first checkpoint
  // Of a call that cuts sequences:
  int segment_chunks;            // 0 = none is cut
  int first_transition_column;   // of transitions: the column of a head that is the first one of M; otherwise 0
  ChunkDecay* decays;            // [value_heads][chunks][kStepsPerChunk], of the steps
  void* initial_copy;            // [N][value_heads][K V] as p.initial; null = the initial states stay as they are
  SegmentRange* segment_ranges;  // [N]; without segments: sequences with a range belong to the other grid
  Segment* segments;             // [segments][value_heads]; null = none is cut
  float* boundary_states;        // [segments][value_heads][K V], in the caller's layout
  float* transitions;            // [segments][value_heads][K][K], M^T of a segment
  // The same of the gradient chain; its transitions are M.
  Segment* gradient_segments;
  float *gradient_boundary_states, *gradient_transitions;
  // Of a summary:
  int summaries;         // sequences that have a segment each; otherwise 0
  StateRows transition;  // M; S_loc, or G_loc, is `final`
  GD_HOST_DEVICE SegmentLength segment_length() const { return {int64_t{segment_chunks} * kChunkTokens}; }
  GD_HOST_DEVICE int64_t state_numbers() const { return int64_t{key_dim} * value_dim; }
  GD_HOST_DEVICE ChunkDecay* step_decays(int64_t chunk_index, int head) const {
    return decays + (head * sequences.workspace_chunks() + chunk_index) * kStepsPerChunk;
  }
  GD_HOST_DEVICE bool is_padding(int n) const {
    if (n == sequences.count) return true;
    return initial.indices && final.indices && initial.slot(n) < 0 && final.slot(n) < 0;
  }
  GD_HOST_DEVICE int64_t snapshot_bytes() const { return int64_t{2} * key_dim * value_dim; }
  GD_HOST_DEVICE float* chunk_vectors(int64_t chunk_index, int head) const {
    return vectors + (chunk_index * prepared_heads + head) * kChunkVectors * kChunkTokens;
  }
  GD_HOST_DEVICE float* chunk_norms(int64_t chunk_index, int key_head) const {
    return norms + (chunk_index * prepared_key_heads + key_head) * 2 * kChunkTokens;
  }
  GD_HOST_DEVICE uint8_t* prepared_step(int64_t chunk_index, int head, int step) const {
    return prepared + ((chunk_index * prepared_heads + head) * kStepsPerChunk + step) * int64_t{Prepared::kBytes};
  }
};

}  // namespace gatedelta::cuda::portable
