// Prepare: everything of a chunk that is small and does not depend on the state. One CTA of four warps per (chunk, key
// head): K K^T once, then for every value head of the group
//   T = (I + stril(beta K K^T))^-1      (K normalised; rows of T scaled by r^k, so that T^T K needs no normalised K)
// the row vectors (config.hpp) and the decay record (schedule/warmup.hpp). A few more CTAs estimate cuts or
// list the sequences.
//
// The inverse, in 16 x 16 blocks, warp I owning block row I:
//   D_I = (I + L_II)^-1                 two 8 x 8 substitutions in fp32, joined by fp16 products
//   M_IJ = D_I L_IJ                     so that T = (I + M)^-1 D; L_IJ = beta_I (K K^T)_IJ, and D takes the betas
//   T'_IJ = -(M_IJ + sum_{J<K<I} T'_IK M_KJ),   T_IJ = T'_IJ D_J
// A warp needs only M and D of the block rows above it: one exchange. K K^T is symmetric: warp J's accumulators of
// block (J, I) have the register layout of the operand that warp I needs.
#pragma once

#include "cuda/sm90/lists/cut_search.cuh"
#include "cuda/sm90/prepare/gates.cuh"
#include "cuda/sm90/prepare/inverse.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace gatedelta::cuda::sm90 {

static_assert(sizeof(CutSmem) <= PrepareSmem::allocated(1));
static_assert(kMaxPlannedSequences <= kPrepareThreads);

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
    if (helper == 0) return init_from_lengths<kPrepareThreads>(p);
    if (p.list == kPlannedList)
      return choose_cut<kPrepareThreads>(p, helper - 1, *reinterpret_cast<CutSmem*>(dynamic_smem));
    constexpr int kWarps = kPrepareThreads / 32;
    return list_uncut(p, (helper - 1) * kWarps + warp, (kPrepareHelpers - 1) * kWarps, lane,
                      p.list == kEvenList ? p.even_parts : 1);
  }

  const int block = static_cast<int>(blockIdx.x) - kPrepareHelpers;
  const int chunk_index = static_cast<int>(static_cast<uint32_t>(block) / static_cast<uint32_t>(p.key_heads));
  const int key_head = block - chunk_index * p.key_heads;
  const auto [n, batch, token, rows, chunk] = locate_chunk(p.sequences, chunk_index, lane);
  if (rows <= 0 || (chunk == 0 && p.is_short(rows))) return;
  if (p.is_padding(n)) {
    if (p.o) zero_rows(p, batch, token, rows, key_head);
    return;
  }
  if (p.is_prepared) return;

  // K by TMA; gates load meanwhile.
  const uint32_t barrier = smem + PrepareSmem::kBarrier, norms = smem + PrepareSmem::kNorms;
  const bool whole = rows == kChunkTokens;
  if (!whole) {
    load_ragged_rows(smem + PrepareSmem::kKeys, true, kTileBytes,
                     static_cast<const uint16_t*>(p.k.data) + p.k.offset(batch, token, key_head), p.k.token_stride,
                     rows, tid, kPrepareThreads);
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
  __syncthreads();  // K's tiles are free
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

}  // namespace gatedelta::cuda::sm90
