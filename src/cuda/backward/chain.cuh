// The chain of the gradients of states, from the last chunk to the first, with the operands of the forward. Per chunk
// and value head, G the gradient of the state after it (docs/math.md):
//   Z = X G + R^T dO                      what the forward's X and R carry over, transposed; here without their beta
//   G <- gamma_L G + K^T (-gamma beta o Z) + Q^T (s gamma o dO)
// and dV = beta o Z. G^T stays in registers as S^T does there. dO comes where V came, dV leaves where O left; keys and
// scores are the very same. G is kept for every chunk, as an operand of the gradients of the chunk.
// A segment, walked through backwards, is affine in G as one of the forward is in the state: G <- M^T G + G_loc, with
// M^T of the same chain, begun with the identity and without dO. Silent chunks move G, and keep neither it nor dV.
#pragma once

#include "cuda/backward/params.hpp"
#include "cuda/forward/kernel.cuh"

namespace gatedelta::cuda {

template <class Elem>
struct GradChain : Forward<Elem, Pass::kBackward> {
  using Base = Forward<Elem, Pass::kBackward>;
  using Base::Base;
  using typename Base::Chunk;
  using typename Base::State;
  using Mma64 = Wgmma<Elem, 64>;

  GD_DEVICE void run_chain(int math_wg) const {
    this->for_each_item(
        math_wg, [&](int i, const WorkItem& item, Chunk chunk, int half, bool is_identity, State& state,
                     PipelineState<kLoadStages>& load, PipelineState<kOperandStages>& operand, int& storing_stage) {
          int prepared = item.prepared;
          bool has_before = false;  // a chunk whose Z waits to be sent
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
            // This takes longer than the states' chain, which needs nothing of it, and may begin where a block has
            // nothing left to do.
            allow_next_kernel();
            this->copy_empty_sequences(state, math_wg);
          } else if (is_identity) {
            this->store_transition(state, math_wg, half, load.previous_stage(), item.to);
          } else {
            this->end_state(state.s, math_wg, item, half);
          }
        });
  }

  GD_DEVICE void advance_grad(State& state, int math_wg, const PipelineState<kLoadStages>& load,
                              const PipelineState<kOperandStages>& operand, const Chunk& chunk, bool has_before,
                              bool has_values, int prepared, int& storing_stage) const {
    float z[32];
    uint32_t d[16], y[16];
    this->release_value_stage(storing_stage);
    storing_stage = -1;
    this->load_pipe.wait_full(load);
    barrier_wait(this->value_pipe.full(load.stage), load.phase);
    this->load_values_transposed(d, this->value_tile(load.stage, math_wg) + state.value_offset);
#pragma unroll
    for (int n = 0; n < 16; ++n) d[n] = has_values ? d[n] : 0;  // whatever lies there
    this->operand_pipe.wait_full(operand);
    // Z = X G + R^T dO, transposed.
    mma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Mma64::template rs<true>(
          z, state.packed + 4 * step,
          tile_descriptor(this->x_tile(operand.stage) + step / 4 * kTileBytes, step % 4 * kStepRows), step > 0);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Mma64::template rs<true>(z, d + 4 * step, tile_descriptor(this->r_tile(operand.stage), step * kStepRows), true);
    mma_commit();
    if (has_before) {
      this->store_output(math_wg, chunk.before(), load.previous_stage());
      storing_stage = load.previous_stage();
    }
    if (!chunk.is_warmup())
      this->template store_packed<0, Base::kEarly>(state.packed, this->p.gradients, prepared,
                                                   this->half_of(chunk, math_wg));
    const uint32_t keys = this->vector(load.stage, kReadKey) + state.vector_offset;
    const uint32_t queries = this->vector(load.stage, kReadQuery) + state.vector_offset;
    float2 beta[8];
    this->load_scales(beta, this->vector(load.stage, kBeta) + state.vector_offset);
    mma_wait<0>();
    warp_arrive(this->operand_pipe.empty(operand.stage));
    if (chunk.is_warmup()) {
      storing_stage = load.stage;  // nothing but M^T may have to leave through it
    } else {
      store_values(z, beta, this->value_tile(load.stage, math_wg) + state.value_offset);
    }
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
      this->template store_packed<Base::kEarly, 32>(state.packed, this->p.gradients, prepared,
                                                    this->half_of(chunk, math_wg));
    mma_wait<0>();
    warp_arrive(this->load_pipe.empty(load.stage));
    this->pack_state(state);
  }

  // beta o Z, or Z where beta is small.
  GD_DEVICE static void store_values(const float (&z)[32], const float2 (&betas)[8], uint32_t to) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* c = z + 8 * n;
      const float2 a = saved_list(betas[2 * n]), b = saved_list(betas[2 * n + 1]);
      stmatrix_trans(to + n * 2048, pack<Elem>(a.x * c[0], a.y * c[1]), pack<Elem>(a.x * c[2], a.y * c[3]),
                     pack<Elem>(b.x * c[4], b.y * c[5]), pack<Elem>(b.x * c[6], b.y * c[7]));
    }
  }
  GD_DEVICE static float2 saved_list(float2 beta) {
    return make_float2(stores_unscaled(beta.x) ? 1.0f : beta.x, stores_unscaled(beta.y) ? 1.0f : beta.y);
  }
};

template <class Elem>
__global__ void __launch_bounds__(kChainThreads, 1) backward_chain_kernel(const __grid_constant__ CallParams p) {
  run_roles<GradChain<Elem>>(p, [](const GradChain<Elem>& chain, int math_wg) { chain.run_chain(math_wg); });
}

}  // namespace gatedelta::cuda
