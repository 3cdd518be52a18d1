// keys: builds tril(Q K^T) for scores, and X^T = K^T T with scaled columns.
#pragma once

#include "cuda/sm90/chain/chain.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::run_keys() const {
  LoadStage load;
  ScoreStage score;
  OperandStage operand;
  WorkPipelineState work;
  for (int i = get_next_work(work); i != kEndOfWork; i = get_next_work(work)) {
    const bool is_merge = work_item(i).kind == kMerge;
#pragma unroll 1
    for (int state_only = state_only_tokens(work_item(i)); state_only > 0; state_only -= kChunkTokens) {
      load_pipe.wait_full(load);
      if (is_merge) {
        warp_arrive(load_pipe.empty(load.stage));
      } else {
        build_x(load.stage, operand);
        operand.advance();
      }
      load.advance();
    }
    if constexpr (kPass != Pass::kStates) {
#pragma unroll 1
      for (int left = work_item(i).tokens - state_only_tokens(work_item(i)); left > 0; left -= kChunkTokens) {
        load_pipe.wait_full(load);
        build_scores(load.stage, score);
        build_x(load.stage, operand);
        load.advance();
        score.advance();
        operand.advance();
      }
    }
  }
}

// tril(Q K^T), stored by lane as the register operand of R's product.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::build_scores(int load, const ScoreStage& score) const {
  float qk[32];
  mma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step)
    Mma64::template ss<false, false>(
        qk, tile_descriptor(query_tile(load, 0), step / 4 * 2 * kStepTile + step % 4 * kStepContiguous),
        tile_descriptor(key_tile(load, 0), step / 4 * 2 * kStepTile + step % 4 * kStepContiguous), step > 0);
  mma_commit();
  score_pipe.wait_empty(score);
  mma_wait<0>();
  with_warp(warp, [&](auto w) { store_scores<decltype(w)::value>(qk, score.stage); });
  warp_arrive(score_pipe.full(score.stage));
}

template <class Elem, Pass kPass>
template <int I>
GD_DEVICE void Chain<Elem, kPass>::store_scores(const float (&qk)[32], int stage) const {
  const int g = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
  for (int J = 0; J < I; ++J) {
    const float* c = qk + 8 * J;
    stmatrix(score_block(stage, I, J), pack<Elem>(c[0], c[1]), pack<Elem>(c[2], c[3]), pack<Elem>(c[4], c[5]),
             pack<Elem>(c[6], c[7]));
  }
  const float* c = qk + 8 * I;
  stmatrix(score_block(stage, I, I), pack<Elem>(column <= g ? c[0] : 0.0f, column < g ? c[1] : 0.0f),
           pack<Elem>(c[2], c[3]), 0, pack<Elem>(column <= g ? c[6] : 0.0f, column < g ? c[7] : 0.0f));
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::build_x(int load, const OperandStage& operand) const {
  const uint32_t T = inverse_at(load);
  float2 scale[8];
  float x[32];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mma_fence();
    multiply_keys(x, load, half, T);
    if (half == 0) {
#pragma unroll
      for (int J = 0; J < 4; ++J) find_scale(scale[2 * J], scale[2 * J + 1], load, J);
      operand_pipe.wait_empty(operand);
    }
    mma_wait<0>();
#pragma unroll
    for (int J = 0; J < 4; ++J) store_x(x + 8 * J, scale[2 * J], scale[2 * J + 1], J, half, operand.stage);
  }
  publish_operand(load, operand.stage);
}

// Column scales of block J of X^T. The gradient chain leaves beta out and applies it to Z.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::find_scale(float2& a, float2& b, int load, int J) const {
  if constexpr (kReverse) {
    const uint32_t log_gamma = vector(load, kLogGamma), here = log_gamma + 8 * (lane & 3) + J * 64;
    const float last = load_shared(log_gamma + 63 * 4);
    const float2 first = load_shared2(here), second = load_shared2(here + 32);
    a = make_float2(exp2_approx(last - first.x), exp2_approx(last - first.y));
    b = make_float2(exp2_approx(last - second.x), exp2_approx(last - second.y));
    return;
  }
  const uint32_t tail = vector(load, kBetaTail) + 8 * (lane & 3) + J * 64;
  const float after = decay_after_block(load, J);
  const float2 first = load_shared2(tail), second = load_shared2(tail + 32);
  a = make_float2(first.x * after, first.y * after);
  b = make_float2(second.x * after, second.y * after);
}

// This warp has written its part of an operand and is done with K, Q and T.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::publish_operand(int load, int operand) const {
  fence_async_shared();
  __syncwarp();
  if (is_arriving()) {
    barrier_arrive(operand_pipe.full(operand));
    barrier_arrive(load_pipe.empty(load));
  }
}

// Rows [64 half, 64 half + 64) of K^T T. T is lower triangular: block row I holds I + 1 blocks. The full row goes first
// because it initialises the accumulators.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::multiply_keys(float (&x)[32], int load, int half, uint32_t T) const {
  const uint32_t K = key_tile(load, half);
  Mma64::template ss<true, true>(x, tile_descriptor(K, 3 * kStepRows), triangle_descriptor(T, 3), false);
  Wgmma<Elem, 48>::template ss<true, true>(x, tile_descriptor(K, 2 * kStepRows), triangle_descriptor(T, 2), true);
  Wgmma<Elem, 32>::template ss<true, true>(x, tile_descriptor(K, kStepRows), triangle_descriptor(T, 1), true);
  Wgmma<Elem, 16>::template ss<true, true>(x, tile_descriptor(K, 0), triangle_descriptor(T, 0), true);
  mma_commit();
}

// Decay from the last token of block J to the chunk's last token.
template <class Elem, Pass kPass>
GD_DEVICE float Chain<Elem, kPass>::decay_after_block(int load, int J) const {
  const uint32_t log_gamma = vector(load, kLogGamma);
  return J == 3 ? 1.0f : exp2_approx(load_shared(log_gamma + 63 * 4) - load_shared(log_gamma + (16 * J + 15) * 4));
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::store_x(const float* c, float2 a, float2 b, int J, int half, int operand) const {
  const uint32_t at =
      x_tile(operand) + half * kTileBytes + tile_offset(16 * warp + block_row(lane), block_column(lane));
  stmatrix(at ^ (J * 32), pack<Elem>(a.x * c[0], a.y * c[1]), pack<Elem>(a.x * c[2], a.y * c[3]),
           pack<Elem>(b.x * c[4], b.y * c[5]), pack<Elem>(b.x * c[6], b.y * c[7]));
}

}  // namespace gatedelta::cuda::sm90
