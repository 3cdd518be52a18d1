// The states before every chunk, once more, and what each chunk writes: the forward's chain with beta^-1 T_g beta in
// R's place and no Q, so that e = beta^-1 T_g (beta o W), what the state did not predict, comes where O did, and
// U = beta o e leaves. States are kept as operands of the gradients of their chunk.
#pragma once

#include "cuda/backward/params.hpp"
#include "cuda/forward/kernel.cuh"

namespace gatedelta::cuda {

template <class Elem>
struct StatesChain : Forward<Elem, Pass::kStates> {
  using Base = Forward<Elem, Pass::kStates>;
  using typename Base::Chunk;
  using typename Base::State;

  uint8_t* states;
  bool waits;

  GD_DEVICE StatesChain(const CallParams& params, uint32_t base, uint8_t* to, bool waits_for_place)
      : Base(params, base), states(to), waits(waits_for_place) {}

  // The kernel before is the chain of gradients, of which this one reads nothing: what this one reads was there before
  // that began. Only who comes next has to wait for both. Unless what this one writes has the place of what that one
  // reads, as in slices.
  GD_DEVICE void begin() const {
    if (waits) wait_for_previous_kernel();
    __threadfence();
  }
  GD_DEVICE static void end() { wait_for_previous_kernel(); }

  // A state is kept for each chunk that is not silent: over all items, for each chunk once.
  GD_DEVICE void run_states(int math_wg) const {
    this->for_each_item(
        math_wg, [&](int i, const WorkItem& item, Chunk chunk, int half, bool is_identity, State& state,
                     PipelineState<kLoadStages>& load, PipelineState<kOperandStages>& operand, int& storing_stage) {
          int prepared = item.prepared;
#pragma unroll 1
          for (; chunk.is_warmup(); chunk = chunk.next(), prepared += this->p.value_heads) {
            this->advance_warmup(state, math_wg, load, operand, !is_identity, storing_stage);
            load.advance();
            operand.advance();
          }
#pragma unroll 1
          for (const int first = chunk.token; chunk.tokens_left > 0;
               chunk = chunk.next(), prepared += this->p.value_heads) {
            advance_keeping(state, math_wg, load, operand, chunk, chunk.token > first, prepared, storing_stage);
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

  GD_DEVICE void advance_keeping(State& state, int math_wg, const PipelineState<kLoadStages>& load,
                                 const PipelineState<kOperandStages>& operand, const Chunk& chunk, bool has_before,
                                 int prepared, int& storing_stage) const {
    float ks[32], e[32];
    uint32_t w[16], v[16];
    float2 scale[8];
    this->load_pipe.wait_full(load);
    mma_fence();
    this->template multiply_state<64>(ks, state, this->key_tile(load.stage, 0));
    this->template store_packed<0, Base::kEarly>(state.packed, states, prepared, this->half_of(chunk, math_wg));
    this->release_value_stage(storing_stage);
    storing_stage = -1;
    barrier_wait(this->value_pipe.full(load.stage), load.phase);
    this->load_values_transposed(v, this->value_tile(load.stage, math_wg) + state.value_offset);
    this->load_scales(scale, this->vector(load.stage, kReadKey) + state.vector_offset);
    mma_wait<0>();
    this->subtract(w, v, scale, ks);
    this->materialize(w);
    this->decay_state(state, load.stage);
    this->operand_pipe.wait_full(operand);
    mma_fence();
    this->add_written(state, w, operand.stage);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Base::Mma64::template rs<false>(e, w + 4 * step,
                                      tile_descriptor(this->r_tile(operand.stage), step * kStepContiguous), step > 0);
    mma_commit();
    if (has_before) {
      this->store_output(math_wg, chunk.before(), load.previous_stage());
      storing_stage = load.previous_stage();
    }
    this->template store_packed<Base::kEarly, 32>(state.packed, states, prepared, this->half_of(chunk, math_wg));
    mma_wait<1>();
    this->pack_state(state);
    this->materialize(state.packed);
    mma_wait<0>();
    warp_arrive(this->operand_pipe.empty(operand.stage));
    store_written(e, this->vector(load.stage, kBeta) + state.vector_offset,
                  this->value_tile(load.stage, math_wg) + state.value_offset);
    warp_arrive(this->load_pipe.empty(load.stage));
  }
  // U = beta o e, in the slot V came in.
  GD_DEVICE static void store_written(float (&e)[32], uint32_t betas, uint32_t to) {
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
  run_roles<StatesChain<Elem>>(
      p, [](const StatesChain<Elem>& chain, int math_wg) { chain.run_states(math_wg); }, states, waits);
}

}  // namespace gatedelta::cuda
