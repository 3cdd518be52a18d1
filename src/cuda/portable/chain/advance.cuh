// A step of the state alone, without outputs, as warm-ups, transitions and the states kernel take it.
#pragma once

#include "cuda/portable/chain/chain.cuh"

namespace gatedelta::cuda::portable {

// Adds this step's writes to the state, and loads V of the next step between the products. `rows`: rows of the sequence
// from the next step on.
template <class Config>
GD_DEVICE void Chain<Config>::add_to_state_and_load(const Operand& a, uint32_t X, int rows) {
  add_to_state(a, X, [&](int i) {
    const int part = i - kKeyBlocks / 2;
    if (part >= 0 && part < kValueParts) load_own_part(rows, part);
  });
  v += step_stride(p.v_stride);
  copy_commit();
}

// store(U) is called with U, what the step's tokens write.
template <class Config>
template <class Store>
GD_DEVICE void Chain<Config>::advance_state(int stage, int rows, const Store& store) {
  const uint32_t K = smem + Smem::kK + stage * Config::kTiles * Config::kTileBytes;
  const uint32_t prep = smem + Smem::kPrepared + stage * Prepared::kBytes;
  const float end = load_shared(prep + Prepared::kEnd);
  set_thread(opaque(tid));
  Tokens W;
  Operand packed;
#pragma unroll
  for (int kk = 0; kk < kKeyBlocks; ++kk) {
    uint32_t s[kI][4];
    pack_state(s, kk);
    scale_state(kk, end);
    multiply_rows(W, s, K, kk);  // (K S)^T
    load_next(stage, rows - kStep, stage ^ 1, kk);
  }
  copy_wait<1>();  // V of this step; the rows of the next one may still be on their way
  sync_warp();
  compute_w(W, prep);
  sync_warp();  // all lanes have read V
  pack_with_error_feedback(packed, W, load_shared(prep + Prepared::kErrorFeedback) > 0);
  multiply_triangle(W, packed, prep + Prepared::kN);  // U = W + N W
  store(W);
  scale(W, prep, kTail);
  pack_with_error_feedback(packed, W, load_shared(prep + Prepared::kErrorFeedback) > 0);
  add_to_state_and_load(packed, K, rows - kStep);
}

// Waits for the rows of a step.
template <class Config>
GD_DEVICE void Chain<Config>::begin_step() {
  copy_wait<1>();  // the rows of this step; its V may still be on its way
  sync_cta();      // of every thread; and the step before, whose stage is overwritten now, is over
}

}  // namespace gatedelta::cuda::portable
