// The states chain of the backward: recomputes the state before every chunk, and U, what each chunk writes. It is the
// forward's chain without Q. R's place holds beta^-1 T_g beta, so that O's place gets
//   e = beta^-1 T_g (beta o W)          what the state did not predict
//   U = beta o e                        stored where O would be
// The gradients kernel reads the states as wgmma operands.
#pragma once

#include "cuda/sm90/chain/roles.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem>
struct StatesChain : Chain<Elem, Pass::kStates> {
  using Base = Chain<Elem, Pass::kStates>;
  using Base::kEarly;
  using Base::load_pipe;
  using Base::operand_pipe;
  using Base::value_pipe;
  using typename Base::Chunk;
  using typename Base::LoadStage;
  using typename Base::Mma64;
  using typename Base::OperandStage;
  using typename Base::State;

  uint8_t* states;
  bool waits;

  GD_DEVICE StatesChain(const CallParams& params, uint32_t base, uint8_t* to, bool waits_for_previous)
      : Base(params, base), states(to), waits(waits_for_previous) {}

  // The previous kernel is the gradient chain. This kernel reads nothing of it, so it may start beside it and waits
  // only at its end, for whoever comes next. With two slices it writes where the previous kernel reads: then it waits
  // first.
  GD_DEVICE void begin() const {
    if (waits) wait_for_previous_kernel();
    __threadfence();
  }
  GD_DEVICE static void end() { wait_for_previous_kernel(); }

  // Over all items, every chunk is past its warm-up exactly once: each state is stored once.
  GD_DEVICE void run_math(int math_wg) const {
    this->for_each_item(math_wg, [&](int, const WorkItem& item, Chunk chunk, int half, bool is_identity, State& state,
                                     LoadStage& load, OperandStage& operand, int& storing_stage) {
      const int value_heads = this->p.value_heads;
      int prepared = item.prepared;
#pragma unroll 1
      for (; chunk.is_warmup(); chunk = chunk.next(), prepared += value_heads) {
        this->advance_warmup(state, math_wg, load, operand, !is_identity, storing_stage);
        load.advance();
        operand.advance();
      }
#pragma unroll 1
      for (const int first = chunk.token; chunk.tokens_left > 0; chunk = chunk.next(), prepared += value_heads) {
        advance_storing(state, math_wg, load, operand, chunk, chunk.token > first, prepared, storing_stage);
        load.advance();
        operand.advance();
      }
      if (item.kind == kOutputs) {
        this->release_value_stage(storing_stage);
        this->store_last_output(math_wg, chunk.before(), load.previous_stage());
        storing_stage = load.previous_stage();
      }
      if (is_identity) {
        this->store_transition(state, math_wg, half, load.previous_stage(), item.to);
      } else {
        this->end_state(state.s, math_wg, item, half);
      }
    });
  }

  GD_DEVICE void advance_storing(State& state, int math_wg, const LoadStage& load, const OperandStage& operand,
                                 const Chunk& chunk, bool has_before, int prepared, int& storing_stage) const {
    float ks[32], e[32];
    uint32_t w[16], v[16];
    float2 scale[8];
    // K S; half of the state is stored under it, V and its row scales load under it.
    load_pipe.wait_full(load);
    mma_fence();
    this->template multiply_state<64>(ks, state, this->key_tile(load.stage, 0));
    this->template store_packed<0, kEarly>(state.packed, states, prepared, this->half_of(chunk, math_wg));
    this->release_value_stage(storing_stage);
    storing_stage = -1;
    barrier_wait(value_pipe.full(load.stage), load.phase);
    this->load_values_transposed(v, this->value_tile(load.stage, math_wg) + state.value_offset);
    this->load_scales(scale, this->vector(load.stage, kReadKey) + state.vector_offset);
    mma_wait<0>();
    // W = V - gamma o (K S)
    this->subtract(w, v, scale, ks);
    this->materialize(w);
    // S <- gamma_L S + X^T W
    this->decay_state(state, load.stage);
    operand_pipe.wait_full(operand);
    mma_fence();
    this->add_written(state, w, operand.stage);
    // e = R W; the previous chunk's U leaves by TMA and the other half of the state is stored under it.
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Mma64::template rs<false>(e, w + 4 * step, tile_descriptor(this->r_tile(operand.stage), step * kStepContiguous),
                                step > 0);
    mma_commit();
    if (has_before) {
      this->store_output(math_wg, chunk.before(), load.previous_stage());
      storing_stage = load.previous_stage();
    }
    this->template store_packed<kEarly, 32>(state.packed, states, prepared, this->half_of(chunk, math_wg));
    mma_wait<1>();
    this->pack_state(state);
    this->materialize(state.packed);
    mma_wait<0>();
    warp_arrive(operand_pipe.empty(operand.stage));
    stage_written(e, this->vector(load.stage, kBeta) + state.vector_offset,
                  this->value_tile(load.stage, math_wg) + state.value_offset);
    warp_arrive(load_pipe.empty(load.stage));
  }
  // U = beta o e, to the stage that held V.
  GD_DEVICE static void stage_written(float (&e)[32], uint32_t betas, uint32_t to) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 beta = load_shared2(betas + n * 32);
      e[4 * n] *= beta.x;
      e[4 * n + 1] *= beta.y;
      e[4 * n + 2] *= beta.x;
      e[4 * n + 3] *= beta.y;
    }
    Base::stage_output(e, to);
  }
};

template <class Elem>
__global__ void __launch_bounds__(kChainThreads, 1)
    states_kernel(const __grid_constant__ CallParams p, uint8_t* states, bool waits) {
  run_roles<StatesChain<Elem>>(p, states, waits);
}

}  // namespace gatedelta::cuda::sm90
