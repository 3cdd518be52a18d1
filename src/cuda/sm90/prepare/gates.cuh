// Gates, betas and the vectors made of them.
#pragma once

#include "cuda/device/gates.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sm90/device.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/prepare/config.hpp"

namespace gatedelta::cuda::sm90 {

// NOTE: the conversions of these loads are other instructions than those of device/numbers.cuh.
GD_DEVICE float gate_of(const CallParams& p, float g, int head) {
  return cuda::gate_of(
      p, g, head, [](const HeadVector& from, int i) { return load_number(from.data, from.dtype, i * from.stride); });
}

// Loads gates and betas of the chunk to shared memory in memory order: up to four heads side by side. With one head per
// group, half of the threads load gates and half betas. Tokens past the end have g = 0 and beta = 0.
GD_DEVICE void load_gates(const CallParams& p, int batch, int token, int rows, int first_head, uint32_t smem) {
  const int tid = static_cast<int>(threadIdx.x);
  const auto put = [&](int v, int row, float x) {
    store_shared(smem + PrepareSmem::kGates + (v * kChunkTokens + row) * 4, x);
  };
  if (p.group == 1) {
    const int row = tid % kChunkTokens;
    const bool is_gate = tid < kChunkTokens;
    const TokenRows& from = is_gate ? p.g : p.beta;
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
  const float sum = warp_inclusive_sum(g.x + g.y, lane);
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
  if (lane == 0) *decay = decay_of(end, growth, written);
}

}  // namespace gatedelta::cuda::sm90
