// The forward's math: outputs and states of a head's chunks, in order. Per chunk (docs/math.md, form C):
//   W = V - gamma o (K S)          S <- gamma_L S + X^T W          O = s gamma o (Q S) + R W
#pragma once

#include "cuda/sm90/chain/roles.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem>
struct ForwardChain : Chain<Elem, Pass::kForward> {
  using Base = Chain<Elem, Pass::kForward>;
  using Base::Base;
  using Base::load_pipe;
  using Base::operand_pipe;
  using Base::p;
  using Base::value_pipe;
  using typename Base::Chunk;
  using typename Base::LoadStage;
  using typename Base::Mma64;
  using typename Base::OperandStage;
  using typename Base::State;

  // The kernel for short sequences needs nothing of this one: it fills the SMs that this one leaves.
  GD_DEVICE void begin() const {
    if (p.short_tokens != CallParams::kNoneShort) allow_next_kernel();
  }

  GD_DEVICE void run_math(int math_wg) const {
    this->for_each_item(math_wg, [&](int i, const WorkItem& item, Chunk chunk, int half, bool is_identity, State& state,
                                     LoadStage& load, OperandStage& operand, int& storing_stage) {
#pragma unroll 1
      for (; chunk.is_warmup(); chunk = chunk.next()) {
        this->advance_warmup(state, math_wg, load, operand, !is_identity, storing_stage);
        load.advance();
        operand.advance();
      }
      // One inner loop per checkpoint interval: chunks need not branch around the code that stores a checkpoint.
      const int first = chunk.token;
#pragma unroll 1
      while (chunk.tokens_left > 0) {
        const int until = tokens_left_at_checkpoint(i, chunk);
#pragma unroll 1
        do {
          advance(state, math_wg, load, operand, chunk, chunk.token > first, storing_stage);
          load.advance();
          operand.advance();
          chunk = chunk.next();
        } while (chunk.tokens_left > until);
        if (p.checkpoints) store_checkpoint(state.s, i, math_wg, chunk);
      }
      const int64_t final_slot = p.final.slot(item.sequence);  // early: it arrives while the last O leaves
      if (item.kind == kOutputs) {
        this->release_value_stage(storing_stage);
        this->store_last_output(math_wg, chunk.before(), load.previous_stage());
        storing_stage = load.previous_stage();
      }
      if (item.kind == kDryRun) {
        storing_stage = load.previous_stage();
        wait_for_previous_kernel();
        if (!p.is_short(0)) this->copy_empty_sequences(state, math_wg);
      } else if (is_identity) {
        this->store_transition(state, math_wg, half, load.previous_stage(), item.to);
      } else {
        this->end_state(state.s, math_wg, item, half, [=] { return final_slot; });
      }
    });
  }

  GD_DEVICE void advance(State& state, int math_wg, const LoadStage& load, const OperandStage& operand,
                         const Chunk& chunk, bool has_before, int& storing_stage) const {
    float qk[64];  // (Q S)^T, the beginning of O, then (K S)^T
    uint32_t w[16], v[16];
    float2 scale[8];
    // K S; V and its row scales load under the product.
    load_pipe.wait_full(load);
    mma_fence();
    this->template multiply_state<64>(qk + 32, state, this->key_tile(load.stage, 0));
    this->release_value_stage(storing_stage);
    storing_stage = -1;
    barrier_wait(value_pipe.full(load.stage), load.phase);
    this->load_values_transposed(v, this->value_tile(load.stage, math_wg) + state.value_offset);
    this->load_scales(scale, this->vector(load.stage, kReadKey) + state.vector_offset);
    mma_wait<0>();
    // W = V - gamma o (K S)
    this->subtract(w, v, scale, qk + 32);
    this->materialize(w);
    // Q S; S *= gamma_L under it. NOTE(ptxas): an earlier decay_state is moved down to here anyway.
    mma_fence();
    this->template multiply_state<64>(qk, state, this->query_tile(load.stage, 0));
    mma_wait<1>();
    this->decay_state(state, load.stage);
    // S += X^T W
    operand_pipe.wait_full(operand);
    mma_fence();
    this->add_written(state, w, operand.stage);
    // O = s gamma o (Q S) + R W. Without l2norm the row scales are W's times s.
    if (p.l2norm) {
      this->load_scales(scale, this->vector(load.stage, kReadQuery) + state.vector_offset);
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) scale[n] = make_float2(p.scale * scale[n].x, p.scale * scale[n].y);
    }
    mma_wait<1>();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      qk[4 * n] *= scale[n].x;
      qk[4 * n + 1] *= scale[n].y;
      qk[4 * n + 2] *= scale[n].x;
      qk[4 * n + 3] *= scale[n].y;
    }
    warp_arrive(load_pipe.empty(load.stage));
    mma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Mma64::template rs<false>(qk, w + 4 * step, tile_descriptor(this->r_tile(operand.stage), step * kStepContiguous),
                                true);
    mma_commit();
    // The previous chunk's O leaves by TMA under R W: the wait for the other warps is hidden there.
    if (has_before) {
      this->store_output(math_wg, chunk.before(), load.previous_stage());
      storing_stage = load.previous_stage();
    }
    // S is packed as the next chunk's operand under R W, too.
    mma_wait<1>();
    this->pack_state(state);
    this->materialize(state.packed);
    mma_wait<0>();
    warp_arrive(operand_pipe.empty(operand.stage));
    this->stage_output(qk, this->value_tile(load.stage, math_wg) + state.value_offset);
  }

  // Tokens left in the item at the next checkpoint; 0 if there is none. Reads the item from shared memory again: in
  // registers it would stay live through every chunk.
  GD_DEVICE int tokens_left_at_checkpoint(int i, const Chunk& chunk) const {
    if (!p.checkpoints) return 0;
    const WorkItem& item = this->work_item(i);
    const int64_t done = chunk.token - item.origin;
    const int64_t left = p.checkpoint_every ? p.checkpoint_every - done % p.checkpoint_every : offset_of(item) - done;
    return 0 < left && left < chunk.tokens_left ? chunk.tokens_left - static_cast<int>(left) : 0;
  }
  // Tokens of the sequence before its one checkpoint. A dry run, which has none, runs before these are known.
  GD_DEVICE int64_t offset_of(const WorkItem& item) const {
    return item.kind == kDryRun ? 0 : p.first_checkpoint[item.sequence];
  }
  // Stores the state before `chunk` if a checkpoint is due there.
  GD_DEVICE void store_checkpoint(const float (&s)[64], int i, int math_wg, const Chunk& chunk) const {
    const WorkItem& item = this->work_item(i);
    const int64_t done = chunk.token - item.origin;
    if (chunk.tokens_left < 0) return;
    int64_t entry = item.sequence;
    if (p.checkpoint_every) {
      if (done % p.checkpoint_every != 0) return;
      entry = p.first_checkpoint[item.sequence] + done / p.checkpoint_every - 1;
    } else if (done != offset_of(item)) {
      return;
    }
    this->store_state(p.checkpoints, p.checkpoints.slot(entry), chunk.head, this->half_of(chunk, math_wg), s);
  }
};

template <class Elem>
__global__ void __launch_bounds__(kChainThreads, 1) forward_kernel(const __grid_constant__ CallParams p) {
  run_roles<ForwardChain<Elem>>(p);
}

}  // namespace gatedelta::cuda::sm90
