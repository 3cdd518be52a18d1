// Kernel parameters, passed by value: a graph that captures a call holds all of them.
#pragma once

#include <cuda.h>
#include <vector_types.h>
#include <cmath>
#include <cstdint>

#include "cuda/schedule/cost_model.hpp"
#include "cuda/schedule/recompute.hpp"
#include "cuda/tensors.hpp"

namespace gatedelta::cuda {

struct CallParams {
  CUtensorMap q_map, k_map, v_map, o_map;
  Rows q, k, v, o, g, beta;
  HeadScalars A_log, dt_bias;
  Sequences sequences;
  int key_heads, value_heads, group;
  int gate, beta_kind;
  bool l2norm, state_value_first;
  float scale;
  States initial, final, checkpoints;
  int64_t checkpoint_every;  // tokens; 0 = none
  uint8_t* prepared;         // [slots][value_heads][prepared_bytes]
  int prepared_bytes;
  bool has_saved;             // by the forward of this backward
  int* order;                 // [N] sequences, longest first
  int64_t* first_checkpoint;  // [N]
  ChunkDecay* decays;         // [value_heads][slots]
  CutCost* cuts;              // [kShares][kCutParts]
  SavedList* saved_list;      // in what is saved; null = nothing is
  bool saves_list;            // the forward makes one, the backward takes it if it is there
  Schedule* schedule;
  WorkItem* work;       // [schedule->count]
  uint8_t* boundaries;  // [limits.boundaries][kBoundaryBytes]
  uint8_t* gradients;   // [slots][value_heads][kImageBytes], of states, in a backward
  int* boundary_ready;  // [limits.boundaries], see Ready
  int* initial_read;    // [N * value_heads]: warpgroups that have read the initial state of a sequence that is cut
  Limits limits;
  ListMode list;
  bool may_cut;
  int even_parts;  // of a head, in a list that is even
  Cut forced;      // if its segments have a length

  GD_HOST_DEVICE int main_blocks() const { return limits.entries < limits.blocks ? limits.entries : limits.blocks; }
  GD_HOST_DEVICE bool is_padding(int n) const {
    if (n == sequences.count) return true;
    return initial.data && final.data && initial.indices.data && final.indices.data && initial.indices[n] < 0 &&
           final.indices[n] < 0;
  }
  GD_HOST_DEVICE uint8_t* prepared_chunk(int64_t chunk_index, int head) const {
    return prepared + (chunk_index * value_heads + head) * prepared_bytes;
  }
};

// Rows whose beta is small leave the chain as Z, not as dV = beta o Z, which would have lost bits, or all of them.
constexpr float kSmallBeta = 1.0f / 64;
GD_HOST_DEVICE inline bool stores_unscaled(float beta) { return fabsf(beta) < kSmallBeta; }

struct BackwardParams : CallParams {
  CUtensorMap d_o_map, dq_map, dk_map, dv_map, u_map;
  Rows d_o, dq, dk, dv, dg, dbeta;
  Rows u;  // what chunks write: beta o (v - k S), token by token
  HeadScalars dA_log, d_dt_bias;
  States d_final, d_initial;
  uint8_t* states;    // [slots][value_heads][kImageBytes], before each chunk; what there is of it is that of a slice
  float2* head_sums;  // [slots][value_heads], of dA_log and d_dt_bias; null = not wanted
  // The states are listed in pieces of so many chunks, and in two slices if `split` is one of the slots.
  int recompute_chunks, split;
  Slice slice;  // that of the gradients
  Schedule* slice1_schedule;
  WorkItem* slice1_work;
  // The second list of work, of gradients of states, and the counters of its boundaries.
  Schedule* grad_schedule;
  WorkItem* grad_work;
  uint8_t* grad_boundaries;
  int* grad_boundary_ready;
};

}  // namespace gatedelta::cuda
