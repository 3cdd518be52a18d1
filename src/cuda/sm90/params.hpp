// Kernel parameters, passed by value: a graph that captures a call holds all of them.
#pragma once

#include <cuda.h>
#include <vector_types.h>
#include <cmath>
#include <cstdint>

#include "cuda/device/sequences.hpp"
#include "cuda/sm90/schedule/cost_model.hpp"
#include "cuda/sm90/schedule/recompute.hpp"

namespace gatedelta::cuda::sm90 {

struct CallParams {
  CUtensorMap q_map, k_map, v_map, o_map;
  TokenRows q, k, v, o, g, beta;
  HeadVector A_log, dt_bias;
  ChunkedSequences sequences;
  int key_heads, value_heads, group;
  int gate, beta_kind;
  bool l2norm, state_value_first;
  float scale;
  StateRows initial, final, checkpoints;
  int short_tokens;          // sequences of at most so many tokens are another kernel's, empty ones included
  int64_t checkpoint_every;  // tokens; 0 = none
  IndexRows checkpoint_offsets;
  uint8_t* prepared;  // [chunks][value_heads][prepared_bytes]
  int prepared_bytes;
  bool has_saved;             // a backward with the forward's saved results
  bool is_prepared;           // a summary has prepared the chunks: prepare's helpers alone run
  int* order;                 // [N] sequences, longest first; inside `saved`, null without it
  int64_t* first_checkpoint;  // [N] its number; with checkpoint_offsets, after how many tokens it is
  ChunkDecay* decays;         // [value_heads][chunks]
  CutCost* cuts;              // [kShares][kCutBlocks]
  SavedList* saved_list;      // likewise
  bool saves_list;            // the forward writes it, the backward copies it if present
  Schedule* schedule;
  WorkItem* work;       // [schedule->count]
  uint8_t* boundaries;  // [limits.boundaries][kBoundaryBytes]
  uint8_t* gradients;   // [chunks][value_heads][kStateTileBytes], of states, in a backward
  int* boundary_ready;  // [limits.boundaries], see Ready
  int* initial_read;    // [N * value_heads]: warpgroups that have read the initial state of a sequence that is cut
  Limits limits;
  ListMode list;
  bool supports_cut;
  bool may_balance;  // lengths may ask for a balanced list; only in a forward
  int even_parts;    // items per head of an even list
  Cut forced;        // by segment_chunks; zero lengths: not forced

  GD_HOST_DEVICE int main_blocks() const { return limits.entries < limits.blocks ? limits.entries : limits.blocks; }
  GD_HOST_DEVICE bool is_padding(int n) const {
    if (n == sequences.count) return true;
    return initial.indices && final.indices && initial.slot(n) < 0 && final.slot(n) < 0;
  }
  static constexpr int kNoneShort = -1;
  GD_HOST_DEVICE bool is_short(int64_t length) const { return length <= short_tokens; }
  GD_HOST_DEVICE uint8_t* prepared_chunk(int64_t chunk_index, int head) const {
    return prepared + (chunk_index * value_heads + head) * prepared_bytes;
  }
};

struct BackwardParams : CallParams {
  CUtensorMap d_o_map, dq_map, dk_map, dv_map, u_map;
  TokenRows d_o, dq, dk, dv, dg, dbeta;
  TokenRows u;  // what each token writes: beta (v - k S)
  HeadVector dA_log, d_dt_bias;
  StateRows d_final, d_initial;
  uint8_t* states;    // [chunks][value_heads][kStateTileBytes], before each chunk, of one slice
  float2* head_sums;  // [chunks][value_heads], of dA_log and d_dt_bias; null = not wanted
  // Chunks per item of the states' list; chunk index of the second slice, if there are two.
  int recompute_chunks, split;
  Slice slice;  // of this launch of the gradients kernel
  Schedule* slice1_schedule;
  WorkItem* slice1_work;
  // The gradient chain's list and its boundary counters.
  Schedule* grad_schedule;
  WorkItem* grad_work;
  uint8_t* grad_boundaries;
  int* grad_boundary_ready;
};

}  // namespace gatedelta::cuda::sm90
