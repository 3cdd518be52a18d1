// What the forward's kernels are told, by value: the graph that captures a call holds all of it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/forward/layout.hpp"
#include "cuda/forward/schedule.hpp"

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

}  // namespace gatedelta::cuda
