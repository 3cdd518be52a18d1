// Prepare: everything of a chunk that does not depend on the state. One CTA of four warps per (chunk, key head). Per
// step of 32 tokens and value head, with K K^T and Q K^T shared by the heads of a group:
//   T = (I + stril(beta K K^T))^-1      N = stril(Gamma o T)      P = s Gamma o tril(Q K^T)
// N and P are rounded to 16 bits, T is not rounded before it is multiplied by Gamma. The T of 32 tokens is a block on
// the diagonal of the T of 64. With l2norm K and Q are normalised here, in the products; the tensors stay as they are,
// and the vectors (StepVector) have r^k and r^q in them.
#pragma once

#include "cuda/portable/prepare/gates.cuh"
#include "cuda/portable/prepare/lengths.cuh"

namespace gatedelta::cuda::portable {

// K K^T as an operand is scaled by 1/8: keys that are not normalised may be long, and so may D beta.
constexpr float kProductScale = 1.0f / 8;

GD_DEVICE uint32_t pack_half(float first, float second) { return pack<Fp16>(first, second); }
GD_DEVICE void load_four(float* to, uint32_t from) {
  const float4 x = load_shared4(from);
  to[0] = x.x;
  to[1] = x.y;
  to[2] = x.z;
  to[3] = x.w;
}

template <class Config>
struct Prepare {
  using Elem = typename Config::Elem;
  using Smem = typename Config::Smem;
  static constexpr int kThreads = Config::kThreads;
  static_assert(kThreads == kRanksPerCta && kThreads / 32 == 2 * kStepsPerChunk);

  GD_DEVICE static void run(const Params& p, int cta, int tid) {
    if (cta < p.prepare_helpers) return rank_sequences(p, cta, tid);
    const uint32_t smem = shared_base();
    const int lane = tid & 31, warp = shuffle(tid >> 5, 0);
    const int item = cta - p.prepare_helpers, chunk_index = item / p.key_heads,
              key_head = item - chunk_index * p.key_heads;
    const auto [n, batch, token, rows] = locate_chunk(p.sequences, chunk_index, lane);
    if (rows <= 0) return;
    if (p.is_padding(n)) {
      if (p.o) zero_rows(p, batch, token, rows, key_head, tid);
      return;
    }
    if (p.has_prepared) return;

    const int first_head = key_head * p.group;
    load_rows(p.k, p.k_stride, p.key_dim, batch, token, rows, key_head, smem + Smem::kK, tid);
    load_rows(p.q, p.q_stride, p.key_dim, batch, token, rows, key_head, smem + Smem::kQ, tid);
    copy_commit();
    load_gates(p, batch, token, rows, first_head, Smem::heads(p.group), smem + Smem::kGates, tid, kThreads);
    copy_wait<0>();
    sync_cta();
    find_norms(p, chunk_index, key_head, smem, tid);
    // Two warps share a step: one computes K K^T and the other Q K^T, then each takes every other value head.
    const int step = warp >> 1, turn = warp & 1;
    float c[2][4][4];
    multiply(c, smem, step, turn == 1, lane);
    if (turn == 0) needs_error_feedback(c, rows - step * kStep, smem + Smem::kErrorFeedback + step * 4, lane);
    sync_cta();  // K and Q are not read any more, and the norms are there
    if (p.l2norm) normalise(c, smem, step, turn == 1, lane);
    if (turn == 1) {
      store_scores(c, smem + Smem::kScores + step * Smem::kScoreBytes, lane);
    } else {
      store_products(c, smem, step, lane);
    }
    sync_cta();
    Operands operands;
    load_operands(operands, smem, step, lane);
#pragma unroll 1
    for (int first = 0; first < p.group; first += Config::kHeadsAtOnce) {
      const int heads = min(p.group - first, Config::kHeadsAtOnce);
      if (first > 0) {
        sync_cta();  // the gates are not read any more
        load_gates(p, batch, token, rows, first_head + first, heads, smem + Smem::kGates, tid, kThreads);
        sync_cta();
      }
      if (step * kStep >= rows) continue;
      const uint32_t gates = smem + Smem::kGates + step * kStep * 4;
      if (p.decays)
#pragma unroll 1
        for (int v = turn; v < heads; v += 2)
          store_decay(p.step_decays(chunk_index, first_head + first + v) + step, gates + v * kChunkTokens * 4,
                      heads * kChunkTokens * 4, smem, step, lane);
#pragma unroll 1
      for (int v = turn; v < heads; v += 2)
        solve(p, operands, chunk_index, first_head + first + v,
              smem + Smem::kGates + (v * kChunkTokens + step * kStep) * 4, heads * kChunkTokens * 4, smem, step, warp,
              lane);
    }
  }

  // ---- loads (loads.cuh) --------------------------------------------------------------------------------------------

  GD_DEVICE static void load_rows(const TokenRows& rows_of, uint32_t stride, int key_dim, int batch, int token,
                                  int rows, int head, uint32_t to, int tid);
  GD_DEVICE static void find_norms(const Params& p, int chunk_index, int key_head, uint32_t smem, int tid);
  GD_DEVICE static uint32_t norms_of(uint32_t smem, bool is_query, int step) {
    return smem + Smem::kNorms + ((is_query ? kChunkTokens : 0) + step * kStep) * 4;
  }

  // ---- products (products.cuh) --------------------------------------------------------------------------------------

  // What all heads of the group use, by lane.
  struct Operands {
    float qk[3][8];     // Q K^T: blocks (0,0), (1,0), (1,1); rows g, g + 8 of the first eight columns, then the others
    uint32_t above[4];  // K K^T: the upper right 16 x 16, the right operand of two products
    uint32_t below[2];  // the lower left 8 x 8 of either 16 x 16 block on the diagonal
  };
  GD_DEVICE static void multiply(float (&c)[2][4][4], uint32_t smem, int step, bool is_query, int lane);
  GD_DEVICE static void needs_error_feedback(const float (&c)[2][4][4], int rows, uint32_t to, int lane);
  GD_DEVICE static void normalise(float (&c)[2][4][4], uint32_t smem, int step, bool is_query, int lane);
  GD_DEVICE static void store_scores(const float (&c)[2][4][4], uint32_t to, int lane);
  GD_DEVICE static void store_products(const float (&c)[2][4][4], uint32_t smem, int step, int lane);
  GD_DEVICE static void load_operands(Operands& o, uint32_t smem, int step, int lane);

  // ---- inverse (inverse.cuh) ----------------------------------------------------------------------------------------

  GD_DEVICE static void solve(const Params& p, const Operands& in, int chunk_index, int head, uint32_t gates,
                              int to_betas, uint32_t smem, int step, int warp, int lane);
  GD_DEVICE static void substitute(uint32_t triangles, uint32_t betas, float own_beta, uint32_t to, int lane);

  // ---- outputs (outputs.cuh) ----------------------------------------------------------------------------------------

  GD_DEVICE static void zero_rows(const Params& p, int batch, int token, int rows, int key_head, int tid);
  GD_DEVICE static void store_vectors(const Params& p, uint8_t* out, float gate, float beta, uint32_t logs,
                                      uint32_t smem, int step, int lane);
  GD_DEVICE static void store_decay(ChunkDecay* to, uint32_t gates, int to_betas, uint32_t smem, int step, int lane);
  GD_DEVICE static void store_triangles(const Params& p, const Operands& in, uint8_t* out, const float (&T)[2][4],
                                        const uint32_t (&rows)[4], const uint32_t (&corner)[2], uint32_t logs,
                                        int lane);
  GD_DEVICE static void gather_errors(uint8_t* out, const float (&T)[2][4], const uint32_t (&rows)[4],
                                      const uint32_t (&corner)[2], uint32_t logs, int lane);
};

}  // namespace gatedelta::cuda::portable
