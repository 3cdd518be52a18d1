// The first pass of a backward: the forward kernel without outputs. The state before every chunk and U, what tokens
// write, go to memory for the gradients.
#pragma once

#include "cuda/portable/chain.cuh"

namespace gatedelta::cuda::portable {

template <class Config>
struct States : Chain<Config> {
  using Base = Chain<Config>;
  using Base::kI, Base::p, Base::smem;
  using typename Base::Operand, typename Base::Place, typename Base::Smem, typename Base::Tokens;

  uint32_t* snapshot;

  GD_DEVICE States(const Params& params, int cta, int tid) : Base(params, cta, tid) {}

  GD_DEVICE void run() {
    const Place at = this->place();
    if (at.column - this->warp * Config::kRows >= p.value_dim) return;  // the power of two is larger than needed
    int rows = static_cast<int>(at.span.length);
    if (rows <= 0) return;
    this->set_rows(at);
    snapshot = this->snapshot_at(at, 0);
    this->load_shared_rows(0, rows);
    this->next_prepared(0);
    copy_commit();
    this->load_own_values(rows);
    copy_commit();
    this->load_state(at);
#pragma unroll 1
    for (int stage = 0; rows > 0; stage ^= 1, rows -= kStep) {
      copy_wait<1>();  // the rows of this step; its V may still be on its way
      sync_cta();      // of every thread; and the step before, whose stage is overwritten now, is over
      if (rows > kStep) {
        this->load_shared_rows(stage ^ 1, rows - kStep);
        this->next_prepared(stage ^ 1);
      }
      copy_commit();
      advance(stage, rows);
    }
  }

  GD_DEVICE void advance(int stage, int rows) {
    const uint32_t K = smem + Smem::kK + stage * Config::kTiles * Config::kTileBytes;
    const uint32_t prep = smem + Smem::kPrepared + stage * Prepared::kBytes;
    const float end = load_shared(prep + Prepared::kEnd);
    this->set_thread(opaque(this->tid));
    const bool begins_chunk = stage == 0;
    Tokens W;
    Operand packed;
#pragma unroll
    for (int kk = 0; kk < Config::kKeys / 16; ++kk) {
      uint32_t s[kI][4];
      this->pack_state(s, kk);
      if (begins_chunk) this->keep_state(snapshot, s, kk);
      this->scale_state(kk, end);
      this->multiply_rows(W, s, K, kk);  // (K S)^T
    }
    if (begins_chunk) this->next_snapshot(snapshot);
    copy_wait<1>();  // V of this step; the rows of the next one may still be on their way
    sync_warp();
    this->find_values(W, prep);
    Base::pack_summed(packed, W, load_shared(prep + Prepared::kCarry) > 0);
    sync_warp();  // all lanes have read V
    if (rows > kStep) this->load_own_values(rows - kStep);
    copy_commit();
    this->multiply_triangle(W, packed, prep + Prepared::kN);  // U = W + N W
    this->store_outputs(W, rows);
    this->scale(W, prep, kTail);
    Base::pack_summed(packed, W, load_shared(prep + Prepared::kCarry) > 0);
    this->add_to_state(packed, K);
  }
};

}  // namespace gatedelta::cuda::portable
