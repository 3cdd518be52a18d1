// The states before every chunk, once more, and what each chunk writes: the forward's chain with beta^-1 T_g beta in
// R's place and no Q, so that e = beta^-1 T_g (beta o W), what the state did not predict, comes where O did, and
// U = beta o e leaves. States are kept as operands of the gradients of their chunk.
#pragma once

#include "cuda/backward/params.hpp"
#include "cuda/forward/kernel.cuh"

namespace gatedelta::cuda {

template <class Elem>
struct StateChain : Forward<Elem, Pass::kStates> {
  using Base = Forward<Elem, Pass::kStates>;
  using typename Base::Chunk;
  using typename Base::State;

  uint8_t* states;
  bool waits;

  GD_DEVICE StateChain(const ForwardParams& params, uint32_t base, uint8_t* to, bool waits_for_place)
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
  GD_DEVICE void run_states(int m) const {
    this->for_each_item(m, [&](int i, const WorkItem& it, Chunk at, int half, bool is_identity, State& state,
                         Ring<kLoadSlots>& load, Ring<kOperandSlots>& operand, int& leaving) {
      int prepared = it.prepared;
#pragma unroll 1
      for (; at.is_silent(); at = at.next(), prepared += this->p.value_heads) {
        this->advance_silently(state, m, load, operand, !is_identity, leaving);
        load.next();
        operand.next();
      }
#pragma unroll 1
      for (const int first = at.token; at.rows > 0; at = at.next(), prepared += this->p.value_heads) {
        advance_keeping(state, m, load, operand, at, at.token > first, prepared, leaving);
        load.next();
        operand.next();
      }
      if (it.kind == kOutputs) {
        this->release_values(leaving);
        this->send_last_out(m, at.before(), load.previous());
        leaving = load.previous();
      }
      if (is_identity) {
        this->store_transition(state, m, half, load.previous(), it.to);
      } else {
        this->end_state(state.s, m, it, half);
      }
    });
  }

  GD_DEVICE void advance_keeping(State& state, int m, const Ring<kLoadSlots>& load, const Ring<kOperandSlots>& operand,
                                 const Chunk& at, bool has_before, int prepared, int& leaving) const {
    float ks[32], e[32];
    uint32_t w[16], v[16];
    float2 scale[8];
    this->loads.wait_full(load);
    mma_fence();
    this->template multiply_state<64>(ks, state, this->key_tile(load.slot, 0));
    this->template store_packed<0, Base::kEarly>(state.packed, states, prepared, this->half_of(at, m));
    this->release_values(leaving);
    leaving = -1;
    barrier_wait(this->values.full(load.slot), load.parity);
    this->load_values_turned(v, this->value_tile(load.slot, m) + state.turned);
    this->load_scales(scale, this->vector(load.slot, kReadKey) + state.columns);
    mma_wait<0>();
    this->subtract(w, v, scale, ks);
    this->settle(w);
    this->decay_state(state, load.slot);
    this->operands.wait_full(operand);
    mma_fence();
    this->add_written(state, w, operand.slot);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Base::Mma64::template rs<false>(e, w + 4 * step,
                                      tile_descriptor(this->r_tile(operand.slot), step * kStepContiguous), step > 0);
    mma_commit();
    if (has_before) {
      this->send_out(m, at.before(), load.previous());
      leaving = load.previous();
    }
    this->template store_packed<Base::kEarly, 32>(state.packed, states, prepared, this->half_of(at, m));
    mma_wait<1>();
    this->pack_state(state);
    this->settle(state.packed);
    mma_wait<0>();
    warp_arrive(this->operands.empty(operand.slot));
    store_written(e, this->vector(load.slot, kBeta) + state.columns, this->value_tile(load.slot, m) + state.turned);
    warp_arrive(this->loads.empty(load.slot));
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
    Base::store_out(e, to);
  }
};

template <class Elem>
__global__ void __launch_bounds__(kForwardThreads, 1)
    states_kernel(const __grid_constant__ ForwardParams p, uint8_t* states, bool waits) {
  run_roles<StateChain<Elem>>(
      p, [](const StateChain<Elem>& chain, int m) { chain.run_states(m); }, states, waits);
}

}  // namespace gatedelta::cuda
