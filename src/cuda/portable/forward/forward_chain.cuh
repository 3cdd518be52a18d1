// The forward kernel: carries the state through all steps of a sequence or of a segment, and computes outputs. N is
// Gamma o T without its diagonal, and W has beta in it:
//   W = beta o V - beta gamma o (K S)    U = W + N W    O = s gamma o (Q S) + P U    S <- gamma_L S + K^T (delta o U)
// The identity in T is not rounded: only N W is a product of 16-bit operands.
//
// cp.async groups are counted per thread and alternate: rows that the CTA shares, the warp's own V. So both waits are
// for all groups but the last one.
#pragma once

#include "cuda/portable/chain/advance.cuh"
#include "cuda/portable/chain/loads.cuh"
#include "cuda/portable/chain/products.cuh"
#include "cuda/portable/chain/rounding.cuh"
#include "cuda/portable/chain/state.cuh"

namespace gatedelta::cuda::portable {

// Where sequences are cut, a CTA has a segment (cut/segments.cuh), perhaps after warm-up steps without outputs.
template <class Config>
struct Forward : Chain<Config> {
  using Base = Chain<Config>;
  using Base::kI, Base::p, Base::smem;
  using typename Base::Operand, typename Base::Place, typename Base::Smem, typename Base::Tokens;
  static constexpr int kWarpColumns = Config::kWarpColumns;

  GD_DEVICE Forward(const Params& params, int cta, int tid) : Base(params, cta, tid) {}

  GD_DEVICE void run() {
    const Segment segment = this->segment();
    if (segment.sequence < 0 || p.is_padding(segment.sequence)) return;  // prepare has zeroed its outputs
    const Place at = this->place_in(segment);
    if (at.column - this->warp * kWarpColumns >= p.value_dim)
      return;  // CTAs of a head are a power of two: these are surplus
    const int warmup = segment.warmup_chunks(), first = segment.chunk - warmup;
    this->set_rows(at, first * kStepsPerChunk, segment.chunk * kStepsPerChunk);
    int rows = static_cast<int>(Base::end_of(segment, at)) - first * kChunkTokens;
    this->load_first(rows);
    this->load_boundary_state(segment, at);
#pragma unroll 1
    for (int step = 0; step < warmup * kStepsPerChunk; ++step, rows -= kStep) {
      this->begin_step();
      this->advance_state(step & 1, rows, [](const Tokens&) {});
    }
    int stage = 0;
    // The code that stores states is long, so it is outside of the loop over steps. That loop ends after one step where
    // a checkpoint may be due.
#pragma unroll 1
    while (true) {
      if (rows <= 0 || p.checkpoints) store_states(rows);
      if (rows <= 0) return;
#pragma unroll 1
      do {
        this->begin_step();
        advance(stage, rows);
        stage ^= 1;
        rows -= kStep;
      } while (rows > 0 && !p.checkpoints);
    }
  }

  GD_DEVICE void advance(int stage, int rows) {
    const uint32_t K = smem + Smem::kK + stage * Config::kTiles * Config::kTileBytes, Q = K + (Smem::kQ - Smem::kK);
    const uint32_t prep = smem + Smem::kPrepared + stage * Prepared::kBytes;
    const float end = load_shared(prep + Prepared::kEnd);
    this->set_thread(opaque(this->tid));
    Tokens W, O;
    Operand packed;
#pragma unroll
    for (int kk = 0; kk < Base::kKeyBlocks; ++kk) {
      uint32_t s[kI][4];
      this->pack_state(s, kk);
      this->scale_state(kk, end);
      this->multiply_rows(W, s, K, kk);  // (K S)^T
      this->load_next(stage, rows - kStep, stage ^ 1, kk);
      if (kk == Base::kKeyBlocks - 1) {
        copy_wait<1>();  // V of this step; the rows of the next one may still be on their way
        sync_warp();
      }
      this->multiply_rows(O, s, Q, kk);  // (Q S)^T
    }
    this->compute_w(W, prep);
    sync_warp();  // all lanes have read V
    this->pack_with_error_feedback(packed, W, load_shared(prep + Prepared::kErrorFeedback) > 0);
    this->multiply_triangle(W, packed, prep + Prepared::kN);  // U = W + N W
    this->scale(O, prep, kReadQuery);
    Base::pack_tokens(packed, W);
    this->multiply_triangle(O, packed, prep + Prepared::kP);
    this->scale(W, prep, kTail);
    this->pack_with_error_feedback(packed, W, load_shared(prep + Prepared::kErrorFeedback) > 0);
    this->add_to_state_and_load(packed, K, rows - kStep);
    this->store_outputs(O, rows);
  }

  // ---- states that are due before a step ----------------------------------------------------------------------------

  // Slot of the checkpoint after `done` tokens of a sequence; negative = none.
  GD_DEVICE int64_t checkpoint_slot(const Place& at, int64_t done) const {
    if (!p.checkpoints || done > at.span.length || done == 0) return -1;
    const int n = at.sequence;
    if (p.checkpoint_offsets) return p.checkpoint_offsets[n] == done ? p.checkpoints.slot(n) : -1;
    if (done % p.checkpoint_every != 0) return -1;
    const int64_t first = p.first_checkpoint ? p.first_checkpoint[n] : n * (p.sequences.tokens / p.checkpoint_every);
    return p.checkpoints.slot(first + done / p.checkpoint_every - 1);
  }
  // One loop for checkpoints and the final state, because the code that stores is long. The segment that begins at a
  // boundary stores the checkpoint there.
  GD_DEVICE void store_states(int rows) {
    const Segment segment = this->segment();
    const Place at = this->place_in(segment);
    const int64_t end = Base::end_of(segment, at);
    if (rows <= 0 && end < at.span.length) return;
#pragma unroll 1
    for (int is_final = 0; is_final < 2; ++is_final) {
      const int64_t slot = !is_final ? checkpoint_slot(at, end - rows) : rows <= 0 ? p.final.slot(at.sequence) : -1;
      if (slot < 0) continue;
      this->store_state(is_final ? p.final.data : p.checkpoints.data, is_final ? p.final.dtype : p.checkpoints.dtype,
                        is_final ? p.final.offset(slot, at.head) : p.checkpoints.offset(slot, at.head), at.column);
    }
  }
};

}  // namespace gatedelta::cuda::portable
