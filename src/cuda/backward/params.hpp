// What the backward's kernels are told beyond what the forward's are.
#pragma once

#include <vector_types.h>

#include "cuda/backward/windows.hpp"
#include "cuda/forward/params.hpp"

namespace gatedelta::cuda {

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
