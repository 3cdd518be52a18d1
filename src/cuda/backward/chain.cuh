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
struct BackwardChain : Forward<Elem, Pass::kBackward> {
  using Base = Forward<Elem, Pass::kBackward>;
  using Base::Base;
  using typename Base::Chunk;
  using typename Base::State;
  using Mma64 = Wgmma<Elem, 64>;

  GD_DEVICE void run_chain(int m) const {
    this->for_each_item(m, [&](int i, const WorkItem& it, Chunk at, int half, bool is_identity, State& state,
                         Ring<kLoadSlots>& load, Ring<kOperandSlots>& operand, int& leaving) {
      int prepared = it.prepared;
      bool has_before = false;  // a chunk whose Z waits to be sent
#pragma unroll 1
      for (; at.rows > 0; at = at.next()) {
        const bool is_silent = at.is_silent();
        advance_back(state, m, load, operand, at, has_before, !is_identity, prepared, leaving);
        prepared -= this->p.value_heads;
        load.next();
        operand.next();
        has_before = !is_silent && at.is_whole();
        if (has_before || is_silent) continue;
        this->release_values(leaving);
        this->send_last_out(m, at, load.previous());
        leaving = load.previous();
      }
      if (has_before) {
        this->release_values(leaving);
        this->send_last_out(m, at.before(), load.previous());
        leaving = load.previous();
      }
      if (it.kind == kRehearsal) {
        wait_for_previous_kernel();
        // This takes longer than the states' chain, which needs nothing of it, and may begin where a block has nothing
        // left to do.
        allow_next_kernel();
        this->copy_empty(state, m);
      } else if (is_identity) {
        this->store_transition(state, m, half, load.previous(), it.to);
      } else {
        this->end_state(state.s, m, it, half);
      }
    });
  }

  GD_DEVICE void advance_back(State& state, int m, const Ring<kLoadSlots>& load, const Ring<kOperandSlots>& operand,
                              const Chunk& at, bool has_before, bool has_values, int prepared, int& leaving) const {
    float z[32];
    uint32_t d[16], y[16];
    this->release_values(leaving);
    leaving = -1;
    this->loads.wait_full(load);
    barrier_wait(this->values.full(load.slot), load.parity);
    this->load_values_turned(d, this->value_tile(load.slot, m) + state.turned);
#pragma unroll
    for (int n = 0; n < 16; ++n) d[n] = has_values ? d[n] : 0;  // whatever lies there
    this->operands.wait_full(operand);
    // Z = X G + R^T dO, transposed.
    mma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Mma64::template rs<true>(
          z, state.packed + 4 * step,
          tile_descriptor(this->x_tile(operand.slot) + step / 4 * kTileBytes, step % 4 * kStepRows), step > 0);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Mma64::template rs<true>(z, d + 4 * step, tile_descriptor(this->r_tile(operand.slot), step * kStepRows), true);
    mma_commit();
    if (has_before) {
      this->send_out(m, at.before(), load.previous());
      leaving = load.previous();
    }
    if (!at.is_silent())
      this->template store_packed<0, Base::kEarly>(state.packed, this->p.gradients, prepared, this->half_of(at, m));
    const uint32_t keys = this->vector(load.slot, kReadKey) + state.columns;
    const uint32_t queries = this->vector(load.slot, kReadQuery) + state.columns;
    float2 beta[8];
    this->load_scales(beta, this->vector(load.slot, kBeta) + state.columns);
    mma_wait<0>();
    warp_arrive(this->operands.empty(operand.slot));
    if (at.is_silent()) {
      leaving = load.slot;  // nothing but M^T may have to leave through it
    } else {
      store_values(z, beta, this->value_tile(load.slot, m) + state.turned);
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
    this->decay_state(state, load.slot);
    mma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < 4; ++step)
        Mma64::template rs<true>(state.s + 32 * half, y + 4 * step,
                                 tile_descriptor(this->key_tile(load.slot, half), step * kStepRows), true);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        Mma64::template rs<true>(state.s + 32 * half, d + 4 * step,
                                 tile_descriptor(this->query_tile(load.slot, half), step * kStepRows), true);
    }
    mma_commit();
    if (!at.is_silent())
      this->template store_packed<Base::kEarly, 32>(state.packed, this->p.gradients, prepared, this->half_of(at, m));
    mma_wait<0>();
    warp_arrive(this->loads.empty(load.slot));
    this->pack_state(state);
  }

  // beta o Z, or Z where beta is small.
  GD_DEVICE static void store_values(const float (&z)[32], const float2 (&betas)[8], uint32_t to) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* c = z + 8 * n;
      const float2 a = kept(betas[2 * n]), b = kept(betas[2 * n + 1]);
      store_matrices_turned(to + n * 2048, pack<Elem>(a.x * c[0], a.y * c[1]), pack<Elem>(a.x * c[2], a.y * c[3]),
                            pack<Elem>(b.x * c[4], b.y * c[5]), pack<Elem>(b.x * c[6], b.y * c[7]));
    }
  }
  GD_DEVICE static float2 kept(float2 beta) {
    return make_float2(stores_plain(beta.x) ? 1.0f : beta.x, stores_plain(beta.y) ? 1.0f : beta.y);
  }
};

template <class Elem>
__global__ void __launch_bounds__(kForwardThreads, 1) backward_chain_kernel(const __grid_constant__ ForwardParams p) {
  run_roles<BackwardChain<Elem>>(p, [](const BackwardChain<Elem>& chain, int m) { chain.run_chain(m); });
}

}  // namespace gatedelta::cuda
