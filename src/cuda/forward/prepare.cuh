// Prepare: everything of a chunk that does not see the state, except what the main kernel makes of it on the fly.
// One block of four warps per (chunk, key head): K K^T once, then for every value head of the group
//   T = (I + stril(beta K K^T))^-1      (K normalised; rows of T scaled by r^k, so that T^T K needs no normalised K)
// and the vectors of layout.hpp, and how much of an older state is left after the chunk (schedule.hpp). Some blocks
// more sort the sequences and see how they are best cut.
//
// The inverse, in 16 x 16 blocks, warp I owning block row I:
//   D_I = (I + L_II)^-1                 two 8 x 8 substitutions in fp32, joined by fp16 products
//   M_IJ = D_I L_IJ                     so that T = (I + M)^-1 D
//   T'_IJ = -(M_IJ + sum_{J<K<I} T'_IK M_KJ),   T_IJ = T'_IJ D_J
// Only M and D of the rows above are needed from other warps: one exchange.
#pragma once

#include <type_traits>

#include "cuda/forward/params.hpp"
#include "cuda/forward/schedule.cuh"
#include "cuda/wgmma.cuh"
#include "gatedelta/gatedelta.h"

namespace gatedelta::cuda {

constexpr int kPrepareThreads = 128;
constexpr int kPrepareBlocksPerSm = 7;

struct PrepareSmem {
  static constexpr int kKeys = 0;      // two tiles [64 tokens][64]
  static constexpr int kProducts = 0;  // in their place once K K^T is done: its block rows up to the diagonal, by lane
  static constexpr int kInverse = kProducts + 10 * 1024;    // and a triangle
  static constexpr int kPairs = kKeys + 2 * kTileBytes;     // per warp: two 8 x 8 fp32
  static constexpr int kDiagonal = kPairs + 4 * 512;        // D_I, fp16, 8 x 8 parts
  static constexpr int kOffDiagonal = kDiagonal + 3 * 512;  // L_IJ, then M_IJ
  static_assert(kInverse + kInverseBytes <= kPairs);
  static constexpr int kNorms = kOffDiagonal + 6 * 512;       // r^k, r^q
  static constexpr int kLengths = kNorms + 2 * kVectorBytes;  // |k|^2, of the keys that are used
  static constexpr int kBarrier = kLengths + kVectorBytes;
  static constexpr int kGates = kBarrier + 16;  // [group] of log2 of the decay, then [group] of beta
  static constexpr int allocated(int group) { return kGates + 2 * group * kVectorBytes + kTileAlign; }
};
static_assert(sizeof(CutSmem) <= PrepareSmem::allocated(1));
static_assert(kCuts / kCutParts <= kPrepareThreads && kMaxPlannedSequences <= kPrepareThreads);

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

// K K^T of the normalised keys waits in shared memory for the heads of the group: block row I has 2 (I + 1) pieces of
// four accumulators.
GD_DEVICE constexpr uint32_t products_of(int I) { return static_cast<uint32_t>(I * (I + 1) / 2) * 1024; }
template <int I>
GD_DEVICE void store_products(uint32_t at, uint32_t norms, uint32_t lengths, const float (&kk)[32], int lane) {
  const int row = 16 * I + (lane >> 2);
  const float r0 = load_shared(norms + row * 4), r1 = load_shared(norms + (row + 8) * 4);
#pragma unroll
  for (int i = 0; i < 2 * (I + 1); ++i) {
    const float2 c = load_shared2(norms + (8 * i + 2 * (lane & 3)) * 4);
    store_shared4(at + products_of(I) + i * 512 + lane * 16, r0 * c.x * kk[4 * i], r0 * c.y * kk[4 * i + 1],
                  r1 * c.x * kk[4 * i + 2], r1 * c.y * kk[4 * i + 3]);
  }
  // The diagonal.
  const int g = lane >> 2, column = (lane & 3) * 2;
  if (column == (g & ~1)) {
    const float* own = kk + 8 * I;
    store_shared(lengths + row * 4, r0 * r0 * (g & 1 ? own[1] : own[0]));
    store_shared(lengths + (row + 8) * 4, r1 * r1 * (g & 1 ? own[7] : own[6]));
  }
}
template <int I>
GD_DEVICE void load_products(float (&kk)[32], uint32_t at, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * (I + 1); ++i) {
    const float4 v = load_shared4(at + products_of(I) + i * 512 + lane * 16);
    kk[4 * i] = v.x;
    kk[4 * i + 1] = v.y;
    kk[4 * i + 2] = v.z;
    kk[4 * i + 3] = v.w;
  }
}

GD_DEVICE uint32_t pack_half(float first, float second) { return pack<__half>(first, second); }
GD_DEVICE void store_block(uint32_t at, const float* c) {
  store_matrices(at, pack_half(c[0], c[1]), pack_half(c[2], c[3]), pack_half(c[4], c[5]), pack_half(c[6], c[7]));
}
GD_DEVICE constexpr uint32_t off_diagonal_slot(int I, int J) {
  return static_cast<uint32_t>(I * (I - 1) / 2 + J) * 512;
}

// kk: the warp's 16 rows of K K^T. On return kk[8 J ..] = M_IJ for J < I, diagonal = D_I in fp16, and both are where
// the warps below look for them.
template <int I>
GD_DEVICE void begin_block_row(float (&kk)[32], uint32_t (&diagonal)[4], uint32_t smem, uint32_t betas, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const uint32_t pairs = smem + PrepareSmem::kPairs + I * 512;
  const uint32_t diagonals = smem + PrepareSmem::kDiagonal + lane * 16;
  const uint32_t blocks = smem + PrepareSmem::kOffDiagonal + lane * 16;

  // L = beta_i (K K^T)_ij.
  const int row = 16 * I + g;
  const float f0 = load_shared(betas + row * 4), f1 = load_shared(betas + (row + 8) * 4);
#pragma unroll
  for (int n = 0; n < 2 * I + 2; ++n) {
    kk[4 * n] *= f0;
    kk[4 * n + 1] *= f0;
    kk[4 * n + 2] *= f1;
    kk[4 * n + 3] *= f1;
  }
  float* const own = kk + 8 * I;
  store_shared2(pairs + g * 32 + t * 8, own[0], own[1]);
  store_shared2(pairs + 256 + g * 32 + t * 8, own[6], own[7]);
  const uint32_t below = pack_half(own[2], own[3]);
#pragma unroll
  for (int J = 0; J < I; ++J) store_block(blocks + off_diagonal_slot(I, J), kk + 8 * J);
  __syncwarp();

  // Column (lane & 7) of both 8 x 8 inverses.
  float x[8];
  {
    const int column = lane & 7;
    const uint32_t L = pairs + (lane >> 3 & 1) * 256;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 1; i < 8; ++i) {
      const float4 a = load_shared4(L + i * 32);
      float sum = a.x * x[0];
      if (i > 1) sum += a.y * x[1];
      if (i > 2) sum += a.z * x[2];
      if (i > 3) sum += a.w * x[3];
      if (i > 4) {
        const float4 b = load_shared4(L + i * 32 + 16);
        sum += b.x * x[4];
        if (i > 5) sum += b.y * x[5];
        if (i > 6) sum += b.z * x[6];
      }
      x[i] -= sum;
    }
  }
  __syncwarp();
  if (lane < 16)
    store_shared_words(pairs + lane * 16, make_uint4(pack_half(x[0], x[1]), pack_half(x[2], x[3]),
                                                     pack_half(x[4], x[5]), pack_half(x[6], x[7])));
  __syncwarp();
  {
    uint32_t columns[2], rows[2];  // D11 and D22, by columns and by rows
    load_pair(columns, pairs + (lane & 15) * 16);
    load_pair_turned(rows, pairs + (lane & 15) * 16);
    float y[4] = {}, z[4] = {};
    mma_k8(y, columns[0], 0, below);               // (L21 D11)^T
    mma_k8(z, rows[1], 0, pack_half(y[0], y[1]));  // D22 L21 D11
    diagonal[0] = rows[0];
    diagonal[1] = pack_half(-z[0], -z[1]);
    diagonal[2] = 0;
    diagonal[3] = rows[1];
  }
  if constexpr (I < 3) store_matrices(diagonals + I * 512, diagonal[0], diagonal[1], diagonal[2], diagonal[3]);
  if constexpr (I > 0) {
#pragma unroll
    for (int J = 0; J < I; ++J) {
      uint32_t b[4];
      load_matrices_turned(b, blocks + off_diagonal_slot(I, J));
      float* c = kk + 8 * J;
#pragma unroll
      for (int i = 0; i < 8; ++i) c[i] = 0;
      mma_k16(c, diagonal, b[0], b[1]);
      mma_k16(c + 4, diagonal, b[2], b[3]);
    }
    if constexpr (I < 3) {
      __syncwarp();
#pragma unroll
      for (int J = 0; J < I; ++J) store_block(blocks + off_diagonal_slot(I, J), kk + 8 * J);
    }
  }
}

// After every warp has begun: kk[8 J ..] = T_IJ for J < I.
template <int I>
GD_DEVICE void finish_block_row(float (&kk)[32], uint32_t smem, int lane) {
  const uint32_t diagonals = smem + PrepareSmem::kDiagonal + lane * 16;
  const uint32_t blocks = smem + PrepareSmem::kOffDiagonal + lane * 16;
#pragma unroll
  for (int K = I - 1; K >= 0; --K) {
    float* c = kk + 8 * K;
    const uint32_t a[4] = {pack_half(-c[0], -c[1]), pack_half(-c[2], -c[3]), pack_half(-c[4], -c[5]),
                           pack_half(-c[6], -c[7])};
    uint32_t b[4];
#pragma unroll
    for (int J = 0; J < K; ++J) {
      load_matrices_turned(b, blocks + off_diagonal_slot(K, J));
      mma_k16(kk + 8 * J, a, b[0], b[1]);
      mma_k16(kk + 8 * J + 4, a, b[2], b[3]);
    }
    load_matrices_turned(b, diagonals + K * 512);
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = 0;
    mma_k16(c, a, b[0], b[1]);
    mma_k16(c + 4, a, b[2], b[3]);
  }
}

// The block row to its triangle, rows scaled by r^k.
template <int I, class Elem>
GD_DEVICE void store_inverse(const float (&T)[32], const uint32_t (&diagonal)[4], uint32_t triangle, uint32_t norms,
                             int lane) {
  const float r0 = load_shared(norms + (16 * I + (lane >> 2)) * 4),
              r1 = load_shared(norms + (16 * I + (lane >> 2) + 8) * 4);
  const uint32_t at = triangle + triangle_block(I, 0) + block_offset(block_row(lane), block_column(lane));
#pragma unroll
  for (int J = 0; J < I; ++J) {
    const float* c = T + 8 * J;
    store_matrices(at + J * kBlockBytes, pack<Elem>(r0 * c[0], r0 * c[1]), pack<Elem>(r1 * c[2], r1 * c[3]),
                   pack<Elem>(r0 * c[4], r0 * c[5]), pack<Elem>(r1 * c[6], r1 * c[7]));
  }
  const float2 a = unpack<__half>(diagonal[0]), b = unpack<__half>(diagonal[1]), d = unpack<__half>(diagonal[3]);
  store_matrices(at + I * kBlockBytes, pack<Elem>(r0 * a.x, r0 * a.y), pack<Elem>(r1 * b.x, r1 * b.y), 0,
                 pack<Elem>(r1 * d.x, r1 * d.y));
}

// ---- gates ---------------------------------------------------------------------------------------------------------

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowestGate = -128.0f;  // e^g is 0 in fp32 from here on, and -inf would make differences NaN

GD_DEVICE float gate_of(const ForwardParams& p, float g, int head) {
  if (p.gate == GD_GATE_RAW) {
    if (p.dt_bias.data) g += load_number(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride);
    const float softplus = g > 20.0f ? g : log1pf(expf(g));
    g = -expf(load_number(p.A_log.data, p.A_log.dtype, head * p.A_log.stride)) * softplus;
  }
  return fmaxf(g, kLowestGate);
}

GD_DEVICE float beta_of(const ForwardParams& p, float x) {
  if (p.beta_kind == GD_BETA_VALUE) return x;
  const float y = 1.0f / (1.0f + expf(-x));
  return p.beta_kind == GD_BETA_LOGIT ? y : 2.0f * y;
}

// Gates and betas of the chunk to shared memory, four heads beside each other: that is how they lie in memory. Tokens
// past the end have g = 0 and beta = 0.
GD_DEVICE void load_gates(const ForwardParams& p, int batch, int token, int rows, int first_head, uint32_t smem) {
  const int row = static_cast<int>(threadIdx.x) / 4, lane_head = threadIdx.x % 4;
#pragma unroll 1
  for (int v = lane_head; v < p.group; v += 4) {
    const int head = first_head + v;
    const uint32_t at = smem + PrepareSmem::kGates + v * kVectorBytes + row * 4;
    float g[2], beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      g[i] = beta[i] = 0;
      if (row + 32 * i >= rows) continue;
      g[i] = load_number(p.g.data, p.g.dtype, p.g.offset(batch, token + row + 32 * i, head));
      beta[i] = load_number(p.beta.data, p.beta.dtype, p.beta.offset(batch, token + row + 32 * i, head));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool here = row + 32 * i < rows;
      store_shared(at + i * 128, here ? gate_of(p, g[i], head) * kLog2e : 0.0f);
      store_shared(at + p.group * kVectorBytes + i * 128, here ? beta_of(p, beta[i]) : 0.0f);
    }
  }
}

// The vectors of one value head, by one warp, two tokens a lane.
GD_DEVICE void prepare_vectors(const ForwardParams& p, float* vectors, ChunkDecay* decay, uint32_t smem, uint32_t gates,
                               uint32_t betas, int lane) {
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

// ---- the kernel ----------------------------------------------------------------------------------------------------

// The sequence a slot belongs to: the last one that begins at or before it. The warp tries 32 places at a time.
GD_DEVICE int sequence_of_slot(const Sequences& s, int64_t slot, int lane) {
  if (!s.offsets.data)
    return static_cast<int>(static_cast<uint32_t>(slot) / static_cast<uint32_t>(Sequences::chunks(s.tokens)));
  int low = 0, count = s.count + 1;  // s.count = past the last offset
  while (count > 1) {
    const int step = (count + 31) / 32, tried = low + lane * step;
    const bool begins = lane * step < count && s.first_slot(tried) <= slot;
    const int found = __popc(__ballot_sync(~0u, begins)) - 1;
    low += found * step;
    count = min(step, count - found * step);
  }
  return low;
}

GD_DEVICE void zero_rows(const ForwardParams& p, int batch, int64_t token, int rows, int key_head) {
  constexpr int kPieces = kHeadDim * 2 / 16;
  const int per_token = p.group * kPieces;
  for (int i = threadIdx.x; i < rows * per_token; i += kPrepareThreads) {
    const int64_t at = p.o.offset(batch, token + i / per_token, key_head * p.group + i % per_token / kPieces);
    reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.o.data) + at)[i % kPieces] = make_uint4(0, 0, 0, 0);
  }
}

template <class Elem>
GD_DEVICE float sum_of_squares(uint4 v) {
  const float2 a = unpack<Elem>(v.x), b = unpack<Elem>(v.y), c = unpack<Elem>(v.z), d = unpack<Elem>(v.w);
  return a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y + c.x * c.x + c.y * c.y + d.x * d.x + d.y * d.y;
}

GD_DEVICE void load_ragged_keys(const ForwardParams& p, int batch, int token, int rows, int key_head, uint32_t smem) {
  constexpr int kPieces = kHeadDim * 2 / 16;
  const auto* k = static_cast<const uint16_t*>(p.k.data) + p.k.offset(batch, token, key_head);
#pragma unroll 1
  for (int i = threadIdx.x; i < kChunkTokens * kPieces; i += kPrepareThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool valid = row < rows;
    copy_async16(smem + PrepareSmem::kKeys + piece / 8 * kTileBytes + tile_offset(row, piece % 8 * 8),
                 k + (valid ? row * p.k.token_stride : 0) + piece * 8, valid);
  }
}

// r^k and r^q: two threads a row, one tile each.
template <class Elem>
GD_DEVICE void find_norms(const ForwardParams& p, int batch, int token, int rows, int key_head, uint32_t smem) {
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
    prepare_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ uint8_t dynamic_smem[];
  const uint32_t smem = tile_aligned(shared_address(dynamic_smem));
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0);
  allow_next_kernel();
  if (blockIdx.x < kPrepareHelpers) {
    const int helper = static_cast<int>(blockIdx.x);
    if (helper == 0) return sort_sequences<kPrepareThreads>(p);
    if (p.list == kEvenList)
      return list_all(p, (helper - 1) * kPrepareThreads + tid, (kPrepareHelpers - 1) * kPrepareThreads, p.even_parts,
                      [](int rank) { return rank; });
    if (p.list == kPlannedList) choose_cut<kPrepareThreads>(p, helper - 1, *reinterpret_cast<CutSmem*>(dynamic_smem));
    return;
  }

  const int block = static_cast<int>(blockIdx.x) - kPrepareHelpers;
  const int slot = static_cast<int>(static_cast<uint32_t>(block) / static_cast<uint32_t>(p.key_heads));
  const int key_head = block - slot * p.key_heads;
  const int n = sequence_of_slot(p.sequences, slot, lane);
  const bool past_the_end = n == p.sequences.count;
  const int64_t used = past_the_end ? p.sequences.offsets[n] : 0;
  const Span span = past_the_end ? Span{0, used, p.sequences.tokens - used} : p.sequences[n];
  const int chunk = slot - static_cast<int>(p.sequences.first_slot(n));
  const int left = static_cast<int>(span.length) - chunk * kChunkTokens;
  if (left <= 0) return;
  const int rows = left < kChunkTokens ? left : kChunkTokens;
  const int token = static_cast<int>(span.begin) + chunk * kChunkTokens;
  if (p.is_nobody(n)) {
    if (p.o.data) zero_rows(p, span.batch, token, rows, key_head);
    return;
  }

  // K to its tiles, gates meanwhile.
  const uint32_t barrier = smem + PrepareSmem::kBarrier, norms = smem + PrepareSmem::kNorms;
  const bool whole = rows == kChunkTokens;
  if (!whole) {
    load_ragged_keys(p, span.batch, token, rows, key_head, smem);
  } else if (tid == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(barrier, 2 * kTileBytes);
    for (int half = 0; half < 2; ++half)
      load_box(smem + PrepareSmem::kKeys + half * kTileBytes, &p.k_map, barrier, key_head, token, span.batch, half);
  }
  const int first_head = key_head * p.group;
  load_gates(p, span.batch, token, rows, first_head, smem);
  if (!p.l2norm) store_shared(norms + tid * 4, 1.0f);
  if (!whole) copy_async_wait();
  fence_async_reads();
  __syncthreads();
  if (whole) barrier_wait(barrier, 0);
  if (p.l2norm) {
    find_norms<Elem>(p, span.batch, token, rows, key_head, smem);
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
  with_warp(warp, [&](auto w) {
    store_products<decltype(w)::value>(smem + PrepareSmem::kProducts, norms, smem + PrepareSmem::kLengths, kk, lane);
  });
  __syncthreads();
  const uint32_t gates = smem + PrepareSmem::kGates, betas = gates + p.group * kVectorBytes;
#pragma unroll 1
  for (int v = warp; v < p.group; v += 4) {
    const int head = first_head + v;
    prepare_vectors(p, reinterpret_cast<float*>(p.prepared_chunk(slot, head) + kInverseBytes),
                    p.decays + head * p.sequences.slots() + slot, smem, gates + v * kVectorBytes,
                    betas + v * kVectorBytes, lane);
  }

  const uint32_t triangle = smem + PrepareSmem::kInverse;
#pragma unroll 1
  for (int v = 0; v < p.group; ++v) {
    uint32_t diagonal[4];
    if (tid == 0) store_wait_read<0>();  // the last head's triangle; the others learn of it at the next barrier
    with_warp(warp, [&](auto w) {
      constexpr int I = decltype(w)::value;
      load_products<I>(kk, smem + PrepareSmem::kProducts, lane);
      begin_block_row<I>(kk, diagonal, smem, betas + v * kVectorBytes, lane);
    });
    __syncthreads();
    with_warp(warp, [&](auto w) {
      constexpr int I = decltype(w)::value;
      finish_block_row<I>(kk, smem, lane);
      store_inverse<I, Elem>(kk, diagonal, triangle, norms, lane);
    });
    fence_async_reads();
    __syncthreads();
    if (tid == 0) {
      store_bulk(p.prepared_chunk(slot, first_head + v), triangle, kInverseBytes);
      store_commit();
    }
  }
  if (tid == 0) store_wait_read<0>();
}

}  // namespace gatedelta::cuda
