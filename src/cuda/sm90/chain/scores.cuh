// scores: builds R = gates o (tril(Q K^T) T). Its first two warps, which have the fewest blocks of R, also load.
#pragma once

#include "cuda/sm90/chain/chain.cuh"

namespace gatedelta::cuda::sm90 {

// K and Q are loaded one chunk ahead of V, in merges two chunks ahead: they do little else.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::run_scores() const {
  LoadStage load;
  OperandStage operand;
  ScoreStage score;
  Loader loader{};
  if (warp == kLoadsKeysQueries) {
    if constexpr (kHasDryRun) {
      publish_dry_run(loader);
    } else {
      get_initial_work(loader);
    }
  }
  WorkPipelineState work;
  for (int i = get_next_work(work); i != kEndOfWork; i = get_next_work(work)) {
    const bool is_merge = work_item(i).kind == kMerge, is_dry_run = kHasDryRun && work_item(i).kind == kDryRun;
    int state_only = state_only_tokens(work_item(i)), warmup_tokens = work_item(i).warmup_tokens;
#pragma unroll 1
    for (int left = work_item(i).tokens; left > 0;
         left -= kChunkTokens, state_only -= kChunkTokens, warmup_tokens -= kChunkTokens) {
      if (warp == kLoadsKeysQueries) load_ahead(loader, load, is_merge ? 3 : 2);
      if (warp == kLoadsValues) {
        if (is_dry_run) {
          barrier_arrive(value_pipe.full(load.stage));
        } else {
          load_values(Chunk::of(work_item(i), left), load);
        }
      }
      if (kPass == Pass::kStates && warmup_tokens <= 0) {
        build_writes(load, operand);
      } else if (kPass == Pass::kStates || state_only > 0) {
        load_pipe.wait_full(load);
        if (is_merge) {
          warp_arrive(load_pipe.empty(load.stage));
        } else {
          operand_pipe.wait_empty(operand);
          publish_operand(load.stage, operand.stage);
        }
      } else {
        build_r(load, score, operand);
        score.advance();
      }
      load.advance();
      if (!is_merge) operand.advance();
    }
    if (is_dry_run) {
      wait_for_previous_kernel();
      if (warp == kLoadsKeysQueries) get_initial_work(loader);
    }
  }
}

// States chain: beta^-1 T_g beta in R's place, for chunks past the warm-up. Its diagonal is exactly 1. Where beta is
// negligible its row is zero, and so is what the chunk writes there.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::build_writes(const LoadStage& load, const OperandStage& operand) const {
  load_pipe.wait_full(load);
  RowFactors factors;
  float t[32];
  with_warp(warp, [&](auto w) {
    find_factors<decltype(w)::value>(factors, load.stage);
    load_inverse<decltype(w)::value>(t, load.stage);
  });
  operand_pipe.wait_empty(operand);
  with_warp(warp, [&](auto w) { store_r<decltype(w)::value>(t, factors, operand.stage, load.stage); });
  publish_operand(load.stage, operand.stage);
}

template <class Elem, Pass kPass>
template <int I>
GD_DEVICE void Chain<Elem, kPass>::load_inverse(float (&t)[32], int stage) const {
  const int lane = opaque_lane();
  const uint32_t from = inverse_at(stage) + triangle_block(I, 0) + block_offset(block_row(lane), block_column(lane));
#pragma unroll
  for (int J = 0; J <= I; ++J) {
    uint32_t block[4];
    ldmatrix(block, from + J * kBlockBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack<Elem>(block[i]);
      t[8 * J + 2 * i] = two.x;
      t[8 * J + 2 * i + 1] = two.y;
    }
  }
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::build_r(const LoadStage& load, const ScoreStage& score,
                                           const OperandStage& operand) const {
  load_pipe.wait_full(load);
  RowFactors factors;  // computed before the scores arrive: little is left to do after the product
  with_warp(warp, [&](auto w) { find_factors<decltype(w)::value>(factors, load.stage); });
  score_pipe.wait_full(score);
  uint32_t a[16];
  with_warp(warp, [&](auto w) { load_scores<decltype(w)::value>(a, score.stage); });
  const uint32_t T = inverse_at(load.stage);
  float r[32];
  mma_fence();
  Mma64::template rs<true>(r, a + 12, triangle_descriptor(T, 3), false);
  Wgmma<Elem, 48>::template rs<true>(r, a + 8, triangle_descriptor(T, 2), true);
  Wgmma<Elem, 32>::template rs<true>(r, a + 4, triangle_descriptor(T, 1), true);
  Wgmma<Elem, 16>::template rs<true>(r, a, triangle_descriptor(T, 0), true);
  mma_commit();
  warp_arrive(score_pipe.empty(score.stage));
  operand_pipe.wait_empty(operand);
  mma_wait<0>();
  with_warp(warp, [&](auto w) { store_r<decltype(w)::value>(r, factors, operand.stage, load.stage); });
  publish_operand(load.stage, operand.stage);
}

template <class Elem, Pass kPass>
template <int I>
GD_DEVICE void Chain<Elem, kPass>::load_scores(uint32_t (&a)[16], int stage) const {
#pragma unroll
  for (int J = 0; J < 4; ++J) {
    uint32_t block[4] = {0, 0, 0, 0};
    if (J <= I) ldmatrix(block, score_block(stage, I, J));
#pragma unroll
    for (int i = 0; i < 4; ++i) a[4 * J + i] = block[i];
  }
}

// Row scale of R: s r^q; for the states chain 1 / (beta r^k), or 0 where beta is negligible.
template <class Elem, Pass kPass>
GD_DEVICE float Chain<Elem, kPass>::row_scale(int load, int row) const {
  if constexpr (kPass == Pass::kStates) {
    constexpr float kNothing = 1e-20f;
    const float beta = load_shared(vector(load, kBeta) + row * 4);
    return fabsf(beta) < kNothing ? 0.0f : __fdividef(1.0f, beta * load_shared(vector(load, kKeyNorm) + row * 4));
  }
  return load_shared(vector(load, kScoreScale) + row * 4);
}

// Scales of block row I of R left of its diagonal block. e^{b_i - b_j} is split at the last token of j's block and at
// the first of i's: no factor exceeds 1, and there are fewer of them.
template <class Elem, Pass kPass>
template <int I>
GD_DEVICE void Chain<Elem, kPass>::find_factors(RowFactors& f, int load) const {
  if constexpr (I > 0) {
    const int lane = opaque_lane(), row = 16 * I + (lane >> 2), column = (lane & 3) * 2;
    const uint32_t log_gamma = vector(load, kLogGamma);
    const float reference = load_shared(log_gamma + 16 * I * 4);
    f.rows = make_float2(row_scale(load, row) * exp2_approx(load_shared(log_gamma + row * 4) - reference),
                         row_scale(load, row + 8) * exp2_approx(load_shared(log_gamma + (row + 8) * 4) - reference));
#pragma unroll
    for (int J = 0; J < I; ++J) {
      const float between = exp2_approx(reference - load_shared(log_gamma + (16 * J + 15) * 4));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = (16 * J + 8 * half + column) * 4;
        if constexpr (kReverse) {
          const float2 b = load_shared2(log_gamma + at);
          f.columns[J][half] = make_float2(exp2_approx(reference - b.x), exp2_approx(reference - b.y));
        } else {
          const float2 tail = load_shared2(vector(load, kBetaTail) + at);
          f.columns[J][half] = make_float2(between * tail.x, between * tail.y);
        }
      }
    }
  }
}

// Block row I of R to its tile. NOTE: what lies above the diagonal is dropped by selection: multiplying an overflowed
// factor by 0 would give NaN.
template <class Elem, Pass kPass>
template <int I>
GD_DEVICE void Chain<Elem, kPass>::store_r(const float (&r)[32], const RowFactors& f, int operand, int load) const {
  const int lane = opaque_lane(), g = lane >> 2, column = (lane & 3) * 2, row = 16 * I + g, here = 16 * I + column;
  const uint32_t at = r_tile(operand) + tile_offset(16 * I + block_row(lane), block_column(lane));
  const uint32_t log_gamma = vector(load, kLogGamma), beta = vector(load, kBeta);
  const float b0 = load_shared(log_gamma + row * 4), b1 = load_shared(log_gamma + (row + 8) * 4);
  const float s0 = row_scale(load, row), s1 = row_scale(load, row + 8);
  const float2 b = load_shared2(log_gamma + here * 4), d = load_shared2(log_gamma + (here + 8) * 4);
  float2 w = make_float2(1, 1), x = w;
  if constexpr (!kReverse) {
    w = load_shared2(beta + here * 4);
    x = load_shared2(beta + (here + 8) * 4);
  }
#pragma unroll
  for (int J = 0; J < I; ++J) {
    const float* c = r + 8 * J;
    const float2 i = f.rows, p = f.columns[J][0], q = f.columns[J][1];
    stmatrix(at ^ (J * 32), pack<Elem>(c[0] * (i.x * p.x), c[1] * (i.x * p.y)),
             pack<Elem>(c[2] * (i.y * p.x), c[3] * (i.y * p.y)), pack<Elem>(c[4] * (i.x * q.x), c[5] * (i.x * q.y)),
             pack<Elem>(c[6] * (i.y * q.x), c[7] * (i.y * q.y)));
  }
  const float* c = r + 8 * I;
  float e0 = column <= g ? c[0] * s0 * w.x * exp2_approx(b0 - b.x) : 0.0f;
  float e1 = column < g ? c[1] * s0 * w.y * exp2_approx(b0 - b.y) : 0.0f;
  float e6 = column <= g ? c[6] * s1 * x.x * exp2_approx(b1 - d.x) : 0.0f;
  float e7 = column < g ? c[7] * s1 * x.y * exp2_approx(b1 - d.y) : 0.0f;
  if constexpr (kPass == Pass::kStates) {
    if (column == g) e0 = e6 = 1;
    if (column + 1 == g) e1 = e7 = 1;
  }
  stmatrix(at ^ (I * 32), pack<Elem>(e0, e1),
           pack<Elem>(c[2] * s1 * w.x * exp2_approx(b1 - b.x), c[3] * s1 * w.y * exp2_approx(b1 - b.y)), 0,
           pack<Elem>(e6, e7));
}

}  // namespace gatedelta::cuda::sm90
