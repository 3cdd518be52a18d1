// The gradient chain of the backward: G, the gradient of the state, from a sequence's last chunk to its first, with the
// forward's operands. Per chunk and value head, G being the gradient of the state after it (docs/math.md):
//   Z = X G + R^T dO                    X and R are the forward's without beta
//   G <- gamma_L G + K^T (-gamma beta o Z) + Q^T (s gamma o dO)
//   dV = beta o Z
// G^T stays in registers as S^T does in the forward. dO takes V's place, dV takes O's; keys and scores are the
// forward's. The gradients kernel reads every chunk's G as a wgmma operand.
// A segment is affine in G as a forward segment is in S: G <- M^T G + G_loc, where M^T is this chain started from the
// identity without dO. Warm-up chunks advance G and store neither G nor dV.
#pragma once

#include "cuda/sm90/chain/roles.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem>
struct GradChain : Chain<Elem, Pass::kBackward> {
  using Base = Chain<Elem, Pass::kBackward>;
  using Base::Base;
  using Base::kEarly;
  using Base::load_pipe;
  using Base::operand_pipe;
  using Base::value_pipe;
  using typename Base::Chunk;
  using typename Base::LoadStage;
  using typename Base::Mma64;
  using typename Base::OperandStage;
  using typename Base::State;

  GD_DEVICE void run_math(int math_wg) const {
    this->for_each_item(math_wg, [&](int, const WorkItem& item, Chunk chunk, int half, bool is_identity, State& state,
                                     LoadStage& load, OperandStage& operand, int& storing_stage) {
      int prepared = item.prepared;
      bool has_before = false;  // the previous chunk's dV is staged and not yet stored
#pragma unroll 1
      for (; chunk.tokens_left > 0; chunk = chunk.next()) {
        const bool is_warmup = chunk.is_warmup();
        advance_grad(state, math_wg, load, operand, chunk, has_before, !is_identity, prepared, storing_stage);
        prepared -= this->p.value_heads;
        load.advance();
        operand.advance();
        has_before = !is_warmup && chunk.is_whole();
        if (has_before || is_warmup) continue;
        this->release_value_stage(storing_stage);
        this->store_last_output(math_wg, chunk, load.previous_stage());
        storing_stage = load.previous_stage();
      }
      if (has_before) {
        this->release_value_stage(storing_stage);
        this->store_last_output(math_wg, chunk.before(), load.previous_stage());
        storing_stage = load.previous_stage();
      }
      if (item.kind == kDryRun) {
        wait_for_previous_kernel();
        // The states chain reads nothing of this longer kernel: it may start wherever a CTA has no work left.
        allow_next_kernel();
        this->copy_empty_sequences(state, math_wg);
      } else if (is_identity) {
        this->store_transition(state, math_wg, half, load.previous_stage(), item.to);
      } else {
        this->end_state(state.s, math_wg, item, half);
      }
    });
  }

  GD_DEVICE void advance_grad(State& state, int math_wg, const LoadStage& load, const OperandStage& operand,
                              const Chunk& chunk, bool has_before, bool has_values, int prepared,
                              int& storing_stage) const {
    float z[32];
    uint32_t d[16], y[16];
    // dO
    this->release_value_stage(storing_stage);
    storing_stage = -1;
    load_pipe.wait_full(load);
    barrier_wait(value_pipe.full(load.stage), load.phase);
    this->load_values_transposed(d, this->value_tile(load.stage, math_wg) + state.value_offset);
#pragma unroll
    for (int n = 0; n < 16; ++n) d[n] = has_values ? d[n] : 0;  // the stage holds garbage if there is no dO
    operand_pipe.wait_full(operand);
    // Z = X G + R^T dO, transposed.
    mma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Mma64::template rs<true>(
          z, state.packed + 4 * step,
          tile_descriptor(this->x_tile(operand.stage), step / 4 * kStepTile + step % 4 * kStepRows), step > 0);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Mma64::template rs<true>(z, d + 4 * step, tile_descriptor(this->r_tile(operand.stage), step * kStepRows), true);
    mma_commit();
    // Under Z: the previous chunk's dV leaves by TMA, half of G is stored, row scales load.
    if (has_before) {
      this->store_output(math_wg, chunk.before(), load.previous_stage());
      storing_stage = load.previous_stage();
    }
    if (!chunk.is_warmup())
      this->template store_packed<0, kEarly>(state.packed, this->p.gradients, prepared, this->half_of(chunk, math_wg));
    const uint32_t keys = this->vector(load.stage, kReadKey) + state.vector_offset;
    const uint32_t queries = this->vector(load.stage, kReadQuery) + state.vector_offset;
    float2 beta[8];
    this->load_scales(beta, this->vector(load.stage, kBeta) + state.vector_offset);
    mma_wait<0>();
    warp_arrive(operand_pipe.empty(operand.stage));
    // dV = beta o Z, to the stage that held dO.
    if (chunk.is_warmup()) {
      storing_stage = load.stage;  // store_transition may need it
    } else {
      stage_values(z, beta, this->value_tile(load.stage, math_wg) + state.value_offset);
    }
    // -gamma beta o Z, s gamma o dO
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 k = load_shared2(keys + n * 32);
      const float2 a = make_float2(k.x * beta[n].x, k.y * beta[n].y), b = load_shared2(queries + n * 32);
      const float* c = z + 4 * n;
      y[2 * n] = pack<Elem>(-a.x * c[0], -a.y * c[1]);
      y[2 * n + 1] = pack<Elem>(-a.x * c[2], -a.y * c[3]);
      const float2 d0 = unpack<Elem>(d[2 * n]), d1 = unpack<Elem>(d[2 * n + 1]);
      d[2 * n] = pack<Elem>(b.x * d0.x, b.y * d0.y);
      d[2 * n + 1] = pack<Elem>(b.x * d1.x, b.y * d1.y);
    }
    // G <- gamma_L G + K^T (-gamma beta o Z) + Q^T (s gamma o dO); the other half of the old G is stored under it.
    this->decay_state(state, load.stage);
    mma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < 4; ++step)
        Mma64::template rs<true>(state.s + 32 * half, y + 4 * step,
                                 tile_descriptor(this->key_tile(load.stage, half), step * kStepRows), true);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        Mma64::template rs<true>(state.s + 32 * half, d + 4 * step,
                                 tile_descriptor(this->query_tile(load.stage, half), step * kStepRows), true);
    }
    mma_commit();
    if (!chunk.is_warmup())
      this->template store_packed<kEarly, 32>(state.packed, this->p.gradients, prepared, this->half_of(chunk, math_wg));
    mma_wait<0>();
    warp_arrive(load_pipe.empty(load.stage));
    this->pack_state(state);
  }

  // beta o Z, or Z itself where beta is small (stores_unscaled).
  GD_DEVICE static void stage_values(const float (&z)[32], const float2 (&betas)[8], uint32_t to) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* c = z + 8 * n;
      const float2 a = stored_scale(betas[2 * n]), b = stored_scale(betas[2 * n + 1]);
      stmatrix_trans(to + n * 2048, pack<Elem>(a.x * c[0], a.y * c[1]), pack<Elem>(a.x * c[2], a.y * c[3]),
                     pack<Elem>(b.x * c[4], b.y * c[5]), pack<Elem>(b.x * c[6], b.y * c[7]));
    }
  }
  GD_DEVICE static float2 stored_scale(float2 beta) {
    return make_float2(stores_unscaled(beta.x) ? 1.0f : beta.x, stores_unscaled(beta.y) ? 1.0f : beta.y);
  }
};

template <class Elem>
__global__ void __launch_bounds__(kChainThreads, 1) backward_chain_kernel(const __grid_constant__ CallParams p) {
  run_roles<GradChain<Elem>>(p);
}

}  // namespace gatedelta::cuda::sm90
