// Prepare: everything of a chunk that does not see the state, except what the main kernel makes of it on the fly.
// One block of four warps per (chunk, key head): K K^T once, then for every value head of the group
//   T = (I + stril(beta K K^T))^-1      (K normalised; rows of T scaled by r^k, so that T^T K needs no normalised K)
// and the vectors of layout.hpp, and how much of an older state is left after the chunk (schedule.hpp). Some blocks
// more sort the sequences and see how they are best cut.
//
// The inverse, in 16 x 16 blocks, warp I owning block row I:
//   D_I = (I + L_II)^-1                 two 8 x 8 substitutions in fp32, joined by fp16 products
//   M_IJ = D_I L_IJ                     so that T = (I + M)^-1 D; L_IJ = beta_I (K K^T)_IJ, and D takes the betas
//   T'_IJ = -(M_IJ + sum_{J<K<I} T'_IK M_KJ),   T_IJ = T'_IJ D_J
// Only M and D of the rows above are needed from other warps: one exchange. K K^T is symmetric: what warp J has of
// block (J, I) is, as it lies in registers, the operand that warp I needs.
#pragma once

#include <type_traits>

#include "cuda/forward/params.hpp"
#include "cuda/forward/schedule.cuh"
#include "cuda/wgmma.cuh"
#include "gatedelta/gatedelta.h"

namespace gatedelta::cuda {

constexpr int kPrepareThreads = 128;
constexpr int kPrepareBlocksPerSm = 7;
constexpr int kBlockRowsReady = 1;  // the named barrier of warps that are at the code of their block rows

struct PrepareSmem {
  static constexpr int kKeys = 0;  // two tiles [64 tokens][64]
  // In their place once K K^T is done. Heads take turns with two triangles and two exchanges, of D_I and M_IJ for I < 3
  // in fp16, so that a head may begin before the last one's triangle has left.
  static constexpr int kInverse = 0;
  static constexpr int kExchange = kInverse + 2 * kInverseBytes;
  static constexpr int kExchangeBytes = 6 * kBlockBytes;
  static constexpr int kOffDiagonal = 3 * kBlockBytes;  // where the M_IJ begin in one
  static_assert(kExchange + 2 * kExchangeBytes <= 2 * kTileBytes);
  static constexpr int kProducts = kInverse + kInverseBytes;  // K K^T off the diagonal; gone when a second head begins
  static_assert(6 * kBlockBytes <= kInverseBytes);
  static constexpr int kDiagonals =
      kKeys + 2 * kTileBytes;  // per warp, of two heads: two 8 x 8 of D, then of D beta, fp16
  static constexpr int kDiagonalBytes = 2 * 8 * 8 * 2, kScaled = 2 * kDiagonalBytes,
                       kDiagonalsBytes = 4 * kDiagonalBytes;
  static constexpr int kTriangles =
      kDiagonals + 4 * kDiagonalsBytes;  // per warp: two 8 x 8 of K K^T below the diagonal, fp32
  static constexpr int kBelowBytes = 28 * 4;
  static constexpr int kNorms = kTriangles + 8 * kBelowBytes;  // r^k, r^q
  static constexpr int kLengths = kNorms + 2 * kVectorBytes;   // |k|^2, of the keys that are used
  static constexpr int kBarrier = kLengths + kVectorBytes;
  static constexpr int kGates = kBarrier + 16;  // [group] of log2 of the decay, then [group] of beta
  static constexpr int allocated(int group) { return kGates + 2 * group * kVectorBytes + kTileAlign; }
};
static_assert(sizeof(CutSmem) <= PrepareSmem::allocated(1));
static_assert(kMaxPlannedSequences <= kPrepareThreads);

GD_DEVICE float load_number(const void* data, int dtype, int64_t i) {
  if (dtype == GD_F32) return static_cast<const float*>(data)[i];
  if (dtype == GD_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  return __half2float(static_cast<const __half*>(data)[i]);
}

// Calls f with the warp's number as a compile-time constant: the inverse is straight-line code for each block row.
template <class F>
GD_DEVICE void with_warp(int warp, const F& f) {
  switch (warp) {
    case 0: return f(std::integral_constant<int, 0>{});
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    default: return f(std::integral_constant<int, 3>{});
  }
}

GD_DEVICE uint32_t pack_half(float first, float second) { return pack<__half>(first, second); }
GD_DEVICE constexpr uint32_t off_diagonal_offset(int I, int J) {
  return static_cast<uint32_t>(I * (I - 1) / 2 + J) * kBlockBytes;
}

// K K^T is kept in fp16, as an eighth: keys may be far longer than 1, and so may what D beta becomes with them.
constexpr float kProductScale = 1.0f / 8;

// A warp's 16 rows of K K^T, the keys normalised, to where the substitutions and the warps below look for them. Returns
// the lower left quarter of the diagonal block.
template <int I>
GD_DEVICE uint32_t store_products(float (&kk)[32], bool normalise, uint32_t smem, int lane) {
  const int g = lane >> 2, t = lane & 3, row = 16 * I + g;
  const uint32_t norms = smem + PrepareSmem::kNorms;
  if (normalise) {
    const float r0 = load_shared(norms + row * 4), r1 = load_shared(norms + (row + 8) * 4);
#pragma unroll
    for (int n = 2 * I; n < 8; ++n) {
      const float2 c = load_shared2(norms + (8 * n + 2 * t) * 4);
      kk[4 * n] *= r0 * c.x;
      kk[4 * n + 1] *= r0 * c.y;
      kk[4 * n + 2] *= r1 * c.x;
      kk[4 * n + 3] *= r1 * c.y;
    }
  }
  const uint32_t products = smem + PrepareSmem::kProducts + lane * 16;
#pragma unroll
  for (int J = I + 1; J < 4; ++J) {
    const auto part = [&](int i) {
      return pack_half(kProductScale * kk[8 * J + i], kProductScale * kk[8 * J + i + 1]);
    };
    store_shared_words(products + off_diagonal_offset(J, I), make_uint4(part(0), part(4), part(2), part(6)));
  }
  const float* const own = kk + 8 * I;
  const uint32_t triangle =
      smem + PrepareSmem::kTriangles + 2 * I * PrepareSmem::kBelowBytes + (g * (g - 1) / 2 + 2 * t) * 4;
  if (2 * t < g) {
    store_shared(triangle, own[0]);
    store_shared(triangle + PrepareSmem::kBelowBytes, own[6]);
  }
  if (2 * t + 1 < g) {
    store_shared(triangle + 4, own[1]);
    store_shared(triangle + PrepareSmem::kBelowBytes + 4, own[7]);
  }
  if (t == g / 2) {
    store_shared(smem + PrepareSmem::kLengths + row * 4, g & 1 ? own[1] : own[0]);
    store_shared(smem + PrepareSmem::kLengths + (row + 8) * 4, g & 1 ? own[7] : own[6]);
  }
  return pack_half(kProductScale * own[2], kProductScale * own[3]);
}

GD_DEVICE void load_four(float* to, uint32_t from) {
  const float4 v = load_shared4(from);
  to[0] = v.x;
  to[1] = v.y;
  to[2] = v.z;
  to[3] = v.w;
}
GD_DEVICE void store_column(uint32_t to, const float (&x)[8]) {
  store_shared_words(
      to, make_uint4(pack_half(x[0], x[1]), pack_half(x[2], x[3]), pack_half(x[4], x[5]), pack_half(x[6], x[7])));
}

// The 8 x 8 inverses on the diagonal, of two heads at once: lanes have a head, a part and a column each. betas: of the
// lane's head.
template <int I>
GD_DEVICE void substitute(uint32_t smem, uint32_t betas, int lane) {
  const int column = lane & 7, part = lane >> 3 & 1;
  const uint32_t triangle = smem + PrepareSmem::kTriangles + (2 * I + part) * PrepareSmem::kBelowBytes;
  const uint32_t own_betas = betas + (16 * I + 8 * part) * 4;
  float products[28], beta[4], x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i % 4 == 0) load_four(beta, own_betas + i * 4);
    const int first = i * (i - 1) / 2;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < i; ++j) {
      if ((first + j) % 4 == 0) load_four(products + first + j, triangle + (first + j) * 4);
      sum += products[first + j] * x[j];
    }
    x[i] = (i == column ? 1.0f : 0.0f) - beta[i % 4] * sum;
  }
  const float scale = load_shared(own_betas + column * 4) / kProductScale;
  const uint32_t seq_heads = smem + PrepareSmem::kDiagonals + I * PrepareSmem::kDiagonalsBytes + lane * 16;
  store_column(seq_heads, x);
#pragma unroll
  for (float& y : x) y *= scale;
  store_column(seq_heads + PrepareSmem::kScaled, x);
  __syncwarp();
}

// M[8 J ..] = M_IJ for J < I, diagonal = D_I in fp16, and both to where the warps below look for them. products: of
// K K^T, as store_products left them.
template <int I>
GD_DEVICE void begin_block_row(float* M, uint32_t (&diagonal)[4], const uint32_t* products, uint32_t below,
                               uint32_t seq_heads, uint32_t exchange, uint32_t betas, int lane) {
  uint32_t columns[2], rows[2], scaled[4];  // D11 and D22 by columns and by rows; D_I beta
  ldmatrix_x2(columns, seq_heads + (lane & 15) * 16);
  ldmatrix_x2_trans(rows, seq_heads + (lane & 15) * 16);
  ldmatrix_x2_trans(scaled, seq_heads + PrepareSmem::kScaled + (lane & 15) * 16);
  float y[4] = {}, z[4] = {};
  mma_k8(y, columns[0], 0, below);                 // (K K^T_21 D11)^T
  mma_k8(z, scaled[1], 0, pack_half(y[0], y[1]));  // D22 L21 D11
  diagonal[0] = rows[0];
  diagonal[1] = pack_half(-z[0], -z[1]);
  diagonal[2] = 0;
  diagonal[3] = rows[1];
  if constexpr (I < 3)
    stmatrix(exchange + I * kBlockBytes + lane * 16, diagonal[0], diagonal[1], diagonal[2], diagonal[3]);
  if constexpr (I > 0) {
    const float2 beta = load_shared2(betas + (16 * I + 2 * (lane & 3)) * 4);
    scaled[3] = scaled[1];
    scaled[1] = pack_half(-z[0] * (beta.x / kProductScale), -z[1] * (beta.y / kProductScale));
    scaled[2] = 0;
#pragma unroll
    for (int J = 0; J < I; ++J) {
      float* c = M + 8 * J;
#pragma unroll
      for (int i = 0; i < 8; ++i) c[i] = 0;
      mma_k16(c, scaled, products[4 * J], products[4 * J + 1]);
      mma_k16(c + 4, scaled, products[4 * J + 2], products[4 * J + 3]);
      if constexpr (I < 3)
        stmatrix(exchange + PrepareSmem::kOffDiagonal + off_diagonal_offset(I, J) + lane * 16, pack_half(c[0], c[1]),
                 pack_half(c[2], c[3]), pack_half(c[4], c[5]), pack_half(c[6], c[7]));
    }
  }
}

// After every warp has begun: T[8 J ..], which was M_IJ, = T_IJ for J < I.
template <int I>
GD_DEVICE void finish_block_row(float* T, uint32_t exchange, int lane) {
  const uint32_t diagonals = exchange + lane * 16, blocks = exchange + PrepareSmem::kOffDiagonal + lane * 16;
#pragma unroll
  for (int K = I - 1; K >= 0; --K) {
    float* c = T + 8 * K;
    const uint32_t a[4] = {pack_half(-c[0], -c[1]), pack_half(-c[2], -c[3]), pack_half(-c[4], -c[5]),
                           pack_half(-c[6], -c[7])};
    uint32_t b[4];
#pragma unroll
    for (int J = 0; J < K; ++J) {
      ldmatrix_trans(b, blocks + off_diagonal_offset(K, J));
      mma_k16(T + 8 * J, a, b[0], b[1]);
      mma_k16(T + 8 * J + 4, a, b[2], b[3]);
    }
    ldmatrix_trans(b, diagonals + K * kBlockBytes);
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = 0;
    mma_k16(c, a, b[0], b[1]);
    mma_k16(c + 4, a, b[2], b[3]);
  }
}

// The block row to its triangle, rows scaled by r^k.
template <int I, class Elem>
GD_DEVICE void store_inverse(const float* T, const uint32_t (&diagonal)[4], uint32_t triangle, float r0, float r1,
                             int lane) {
  const uint32_t at = triangle + triangle_block(I, 0) + block_offset(block_row(lane), block_column(lane));
#pragma unroll
  for (int J = 0; J < I; ++J) {
    const float* c = T + 8 * J;
    stmatrix(at + J * kBlockBytes, pack<Elem>(r0 * c[0], r0 * c[1]), pack<Elem>(r1 * c[2], r1 * c[3]),
             pack<Elem>(r0 * c[4], r0 * c[5]), pack<Elem>(r1 * c[6], r1 * c[7]));
  }
  const float2 a = unpack<__half>(diagonal[0]), b = unpack<__half>(diagonal[1]), d = unpack<__half>(diagonal[3]);
  stmatrix(at + I * kBlockBytes, pack<Elem>(r0 * a.x, r0 * a.y), pack<Elem>(r1 * b.x, r1 * b.y), 0,
           pack<Elem>(r1 * d.x, r1 * d.y));
}

// ---- gates ---------------------------------------------------------------------------------------------------------

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowestGate = -128.0f;  // e^g is 0 in fp32 from here on, and -inf would make differences NaN

GD_DEVICE float gate_of(const CallParams& p, float g, int head) {
  if (p.gate == GD_GATE_RAW) {
    if (p.dt_bias.data) g += load_number(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride);
    const float softplus = g > 20.0f ? g : log1pf(expf(g));
    g = -expf(load_number(p.A_log.data, p.A_log.dtype, head * p.A_log.stride)) * softplus;
  }
  return fmaxf(g, kLowestGate);
}

GD_DEVICE float beta_of(const CallParams& p, float x) {
  if (p.beta_kind == GD_BETA_VALUE) return x;
  const float y = 1.0f / (1.0f + expf(-x));
  return p.beta_kind == GD_BETA_LOGIT ? y : 2.0f * y;
}

// Gates and betas of the chunk to shared memory, as they lie in memory: up to four heads beside each other. Of one head
// alone, half of the threads take the gates and half the betas. Tokens past the end have g = 0 and beta = 0.
GD_DEVICE void load_gates(const CallParams& p, int batch, int token, int rows, int first_head, uint32_t smem) {
  const int tid = static_cast<int>(threadIdx.x);
  const auto put = [&](int v, int row, float x) {
    store_shared(smem + PrepareSmem::kGates + (v * kChunkTokens + row) * 4, x);
  };
  if (p.group == 1) {
    const int row = tid % kChunkTokens;
    const bool is_gate = tid < kChunkTokens;
    const Rows& from = is_gate ? p.g : p.beta;
    float x = 0;
    if (row < rows) {
      x = load_number(from.data, from.dtype, from.offset(batch, token + row, first_head));
      x = is_gate ? gate_of(p, x, first_head) * kLog2e : beta_of(p, x);
    }
    return put(is_gate ? 0 : 1, row, x);
  }
  constexpr int kStep = kChunkTokens / 2;
  const int row = tid / 4;
#pragma unroll 1
  for (int v = tid % 4; v < p.group; v += 4) {
    const int head = first_head + v;
    const int64_t at_g = p.g.offset(batch, token + row, head), at_beta = p.beta.offset(batch, token + row, head);
    float g[2] = {}, beta[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + i * kStep >= rows) continue;
      g[i] = load_number(p.g.data, p.g.dtype, at_g + i * kStep * p.g.token_stride);
      beta[i] = load_number(p.beta.data, p.beta.dtype, at_beta + i * kStep * p.beta.token_stride);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool here = row + i * kStep < rows;
      put(v, row + i * kStep, here ? gate_of(p, g[i], head) * kLog2e : 0.0f);
      put(p.group + v, row + i * kStep, here ? beta_of(p, beta[i]) : 0.0f);
    }
  }
}

// The vectors of one value head, by one warp, two tokens a lane.
GD_DEVICE void prepare_vectors(const CallParams& p, int chunk_index, int head, uint32_t smem, uint32_t gates,
                               uint32_t betas, int lane) {
  auto* const vectors = reinterpret_cast<float*>(p.prepared_chunk(chunk_index, head) + kInverseBytes);
  ChunkDecay* const decay = p.decays + head * p.sequences.workspace_chunks() + chunk_index;
  const float2 g = load_shared2(gates + lane * 8), beta = load_shared2(betas + lane * 8);
  float sum = g.x + g.y;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  const float block_end = __shfl_sync(~0u, sum, lane | 7);
  const float b[2] = {sum - g.y, sum};
  const float2 rk = load_shared2(smem + PrepareSmem::kNorms + lane * 8);
  const float2 rq = load_shared2(smem + PrepareSmem::kNorms + kVectorBytes + lane * 8);
  const float2 gamma = make_float2(exp2_approx(b[0]), exp2_approx(b[1]));
  const float2 s = make_float2(p.scale * rq.x, p.scale * rq.y);
  const auto put = [&](ChunkVector v, float x, float y) {
    reinterpret_cast<float2*>(vectors + v * kChunkTokens)[lane] = make_float2(x, y);
  };
  put(kLogGamma, b[0], b[1]);
  put(kReadKey, gamma.x * rk.x, gamma.y * rk.y);
  put(kReadQuery, gamma.x * s.x, gamma.y * s.y);
  put(kBeta, beta.x, beta.y);
  put(kBetaTail, beta.x * exp2_approx(block_end - b[0]), beta.y * exp2_approx(block_end - b[1]));
  put(kScoreScale, s.x, s.y);
  if (p.prepared_bytes == kBackwardPreparedBytes) put(kKeyNorm, rk.x, rk.y);

  const float end = __shfl_sync(~0u, sum, 31);
  const float2 length = load_shared2(smem + PrepareSmem::kLengths + lane * 8);
  float written = beta.x * exp2_approx(end - b[0]) + beta.y * exp2_approx(end - b[1]);
  const float most = fmaxf(fabsf(1.0f - beta.x * length.x), 1.0f) * fmaxf(fabsf(1.0f - beta.y * length.y), 1.0f);
  float growth = log2f(most);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    written += __shfl_xor_sync(~0u, written, step);
    growth += __shfl_xor_sync(~0u, growth, step);
  }
  if (lane == 0) *decay = {end + growth, growth > 0 || !(written >= 0) ? -1.0f : written};
}

// The block row's part in the inverses of all heads of the group. Heads' triangles leave when every warp has come to
// the next head's barrier.
template <int I, class Elem>
GD_DEVICE void invert(const CallParams& p, int chunk_index, int first_head, uint32_t smem, uint32_t betas,
                      uint32_t below, int thread_lane) {
  uint32_t products[4 * I + 1];
#pragma unroll
  for (int J = 0; J < I; ++J) {
    const uint4 v = load_shared_words(smem + PrepareSmem::kProducts + off_diagonal_offset(I, J) + thread_lane * 16);
    products[4 * J] = v.x;
    products[4 * J + 1] = v.y;
    products[4 * J + 2] = v.z;
    products[4 * J + 3] = v.w;
  }
  const bool sends = I == 0 && thread_lane == 0;
  const auto send = [&](int v) {
    bulk_store(p.prepared_chunk(chunk_index, first_head + v), smem + PrepareSmem::kInverse + v % 2 * kInverseBytes,
               kInverseBytes);
    store_commit();
  };
#pragma unroll 1
  for (int v = 0; v < p.group; ++v) {
    const int lane = opaque(thread_lane);
    const uint32_t exchange = smem + PrepareSmem::kExchange + v % 2 * PrepareSmem::kExchangeBytes;
    if (v % 2 == 0) substitute<I>(smem, betas + min(v + (lane >> 4), p.group - 1) * kVectorBytes, lane);
    float M[8 * I + 1];
    uint32_t diagonal[4];
    begin_block_row<I>(
        M, diagonal, products, below,
        smem + PrepareSmem::kDiagonals + I * PrepareSmem::kDiagonalsBytes + v % 2 * PrepareSmem::kDiagonalBytes,
        exchange, betas + v * kVectorBytes, lane);
    if (sends) store_wait_read<0>();  // the triangle before the last one
    named_barrier_sync_divergent(kBlockRowsReady, kPrepareThreads);
    if (sends && v > 0) send(v - 1);
    finish_block_row<I>(M, exchange, lane);
    const uint32_t norms = smem + PrepareSmem::kNorms + (16 * I + (lane >> 2)) * 4;
    store_inverse<I, Elem>(M, diagonal, smem + PrepareSmem::kInverse + v % 2 * kInverseBytes, load_shared(norms),
                           load_shared(norms + 32), lane);
    fence_async_shared();
  }
  named_barrier_sync_divergent(kBlockRowsReady, kPrepareThreads);
  if (sends) {
    send(p.group - 1);
    store_wait_read<0>();
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

struct ChunkPlace {
  int sequence, batch, token, rows, chunk;  // the sequence past the last one owns what is past the last offset
};
// The chunk of a slot: its sequence is the last one that begins at or before it. The warp tries 32 places at a time.
GD_DEVICE ChunkPlace locate_chunk(const Sequences& s, int chunk_index, int lane) {
  const int tokens = static_cast<int>(s.tokens);
  if (!s.offsets.data) {
    const int chunks = static_cast<int>(Sequences::chunks(s.tokens));
    const int n = static_cast<int>(static_cast<uint32_t>(chunk_index) / static_cast<uint32_t>(chunks));
    const int chunk = chunk_index - n * chunks, token = chunk * kChunkTokens;
    return {n, n, token, min(tokens - token, kChunkTokens), chunk};
  }
  const auto first_chunk_index = [](int begin, int n) {
    return static_cast<int>(Sequences::first_chunk_index_at(static_cast<uint32_t>(begin), n));
  };
  int low = 0, count = s.count + 1, step, found, begin;
  do {
    step = (count + 31) / 32;
    const int tried = min(low + lane * step, s.count);
    begin = static_cast<int>(s.offsets[tried]);
    const bool begins = lane * step < count && first_chunk_index(begin, tried) <= chunk_index;
    found = __popc(__ballot_sync(~0u, begins)) - 1;
    low += found * step;
    count = min(step, count - found * step);
  } while (step > 1);
  int end = __shfl_sync(~0u, begin, found + 1);
  begin = __shfl_sync(~0u, begin, found);
  if (low == s.count)
    end = tokens;
  else if (found == 31)
    end = static_cast<int>(s.offsets[low + 1]);
  const int chunk = chunk_index - first_chunk_index(begin, low), token = begin + chunk * kChunkTokens;
  return {low, 0, token, min(end - token, kChunkTokens), chunk};
}

GD_DEVICE void zero_rows(const CallParams& p, int batch, int64_t token, int rows, int key_head) {
  constexpr int kPacketsPerRow = kHeadDim * 2 / 16;
  const int per_token = p.group * kPacketsPerRow;
  for (int i = threadIdx.x; i < rows * per_token; i += kPrepareThreads) {
    const int64_t at = p.o.offset(batch, token + i / per_token, key_head * p.group + i % per_token / kPacketsPerRow);
    reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.o.data) + at)[i % kPacketsPerRow] = make_uint4(0, 0, 0, 0);
  }
}

template <class Elem>
GD_DEVICE float sum_of_squares(uint4 v) {
  const float2 a = unpack<Elem>(v.x), b = unpack<Elem>(v.y), c = unpack<Elem>(v.z), d = unpack<Elem>(v.w);
  return a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y + c.x * c.x + c.y * c.y + d.x * d.x + d.y * d.y;
}

GD_DEVICE void load_ragged_keys(const CallParams& p, int batch, int token, int rows, int key_head, uint32_t smem) {
  constexpr int kPacketsPerRow = kHeadDim * 2 / 16;
  const auto* k = static_cast<const uint16_t*>(p.k.data) + p.k.offset(batch, token, key_head);
#pragma unroll 1
  for (int i = threadIdx.x; i < kChunkTokens * kPacketsPerRow; i += kPrepareThreads) {
    const int row = i / kPacketsPerRow, piece = i % kPacketsPerRow;
    const bool valid = row < rows;
    copy_async16(smem + PrepareSmem::kKeys + piece / 8 * kTileBytes + tile_offset(row, piece % 8 * 8),
                 k + (valid ? row * p.k.token_stride : 0) + piece * 8, valid);
  }
}

// r^k and r^q: two threads a row, one tile each.
template <class Elem>
GD_DEVICE void find_norms(const CallParams& p, int batch, int token, int rows, int key_head, uint32_t smem) {
  const int row = static_cast<int>(threadIdx.x) / 2, half = threadIdx.x % 2;
  float sum_k = 0, sum_q = 0;
  const uint32_t at = smem + PrepareSmem::kKeys + half * kTileBytes + row * kTileRowBytes;
  const auto* q = static_cast<const uint16_t*>(p.q.data) + p.q.offset(batch, token + row, key_head);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum_k += sum_of_squares<Elem>(load_shared_words(at + (i ^ (row % 8)) * 16));
    if (row < rows) sum_q += sum_of_squares<Elem>(reinterpret_cast<const uint4*>(q)[half * 8 + i]);
  }
  sum_k += __shfl_xor_sync(~0u, sum_k, 1);
  sum_q += __shfl_xor_sync(~0u, sum_q, 1);
  if (half == 0) store_shared(smem + PrepareSmem::kNorms + row * 4, rsqrtf(sum_k + 1e-6f));
  if (half == 1) store_shared(smem + PrepareSmem::kNorms + kVectorBytes + row * 4, rsqrtf(sum_q + 1e-6f));
}

template <class Elem>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocksPerSm)
    prepare_kernel(const __grid_constant__ CallParams p) {
  extern __shared__ uint8_t dynamic_smem[];
  const uint32_t smem = tile_aligned(shared_address(dynamic_smem));
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0);
  allow_next_kernel();
  if (blockIdx.x < kPrepareHelpers) {
    const int helper = static_cast<int>(blockIdx.x);
    if (helper == 0) return sort_sequences<kPrepareThreads>(p);
    if (p.list == kEvenList)
      return list_uncut(p, (helper - 1) * kPrepareThreads + tid, (kPrepareHelpers - 1) * kPrepareThreads, p.even_parts,
                        [](int rank) { return rank; });
    if (p.list == kPlannedList) choose_cut<kPrepareThreads>(p, helper - 1, *reinterpret_cast<CutSmem*>(dynamic_smem));
    return;
  }

  const int block = static_cast<int>(blockIdx.x) - kPrepareHelpers;
  const int chunk_index = static_cast<int>(static_cast<uint32_t>(block) / static_cast<uint32_t>(p.key_heads));
  const int key_head = block - chunk_index * p.key_heads;
  const auto [n, batch, token, rows, chunk] = locate_chunk(p.sequences, chunk_index, lane);
  if (rows <= 0) return;
  if (p.is_padding(n)) {
    if (p.o.data) zero_rows(p, batch, token, rows, key_head);
    return;
  }

  // K to its tiles, gates meanwhile.
  const uint32_t barrier = smem + PrepareSmem::kBarrier, norms = smem + PrepareSmem::kNorms;
  const bool whole = rows == kChunkTokens;
  if (!whole) {
    load_ragged_keys(p, batch, token, rows, key_head, smem);
  } else if (tid == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(barrier, 2 * kTileBytes);
    for (int half = 0; half < 2; ++half)
      tma_load(smem + PrepareSmem::kKeys + half * kTileBytes, &p.k_map, barrier, key_head, token, batch, half);
  }
  const int first_head = key_head * p.group;
  load_gates(p, batch, token, rows, first_head, smem);
  if (!p.l2norm) store_shared(norms + tid * 4, 1.0f);
  if (!whole) copy_async_wait();
  fence_async_shared();
  __syncthreads();
  if (whole) barrier_wait(barrier, 0);
  if (p.l2norm) {
    find_norms<Elem>(p, batch, token, rows, key_head, smem);
    __syncthreads();
  }

  float kk[32];
  mma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint64_t at = tile_descriptor(smem + PrepareSmem::kKeys + step / 4 * kTileBytes, step % 4 * kStepContiguous);
    Wgmma<Elem, 64>::template ss<false, false>(kk, at, at, step > 0);
  }
  mma_commit();
  mma_wait<0>();
  __syncthreads();  // K is not read any more
  uint32_t below;
  with_warp(warp, [&](auto w) { below = store_products<decltype(w)::value>(kk, p.l2norm, smem, lane); });
  __syncthreads();
  const uint32_t gates = smem + PrepareSmem::kGates, betas = gates + p.group * kVectorBytes;
#pragma unroll 1
  for (int v = warp; v < p.group; v += 4)
    prepare_vectors(p, chunk_index, first_head + v, smem, gates + v * kVectorBytes, betas + v * kVectorBytes, lane);
  with_warp(warp,
            [&](auto w) { invert<decltype(w)::value, Elem>(p, chunk_index, first_head, smem, betas, below, lane); });
}

}  // namespace gatedelta::cuda
