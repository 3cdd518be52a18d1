// Gates and betas of a chunk.
#pragma once

#include "cuda/device/numbers.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/portable/params.hpp"

namespace gatedelta::cuda::portable {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowestGate = -128.0f;  // e^g is 0 in fp32 from here on, and -inf would make differences NaN

// NOTE: fmaxf would turn a NaN gate into the lowest one, and a poisoned input into a clean result.
GD_DEVICE float clamp_gate(float g) { return g < kLowestGate ? kLowestGate : g; }
GD_DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

GD_DEVICE float gate_of(const Params& p, float g, int head) {
  if (p.gate == GD_GATE_RAW) {
    if (p.dt_bias) g += load_number(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride);
    g = -expf(load_number(p.A_log.data, p.A_log.dtype, head * p.A_log.stride)) * softplus(g);
  }
  return clamp_gate(g);
}
GD_DEVICE float beta_of(const Params& p, float x) {
  if (p.beta_kind == GD_BETA_VALUE) return x;
  const float y = 1.0f / (1.0f + expf(-x));
  return p.beta_kind == GD_BETA_LOGIT ? y : 2.0f * y;
}

// Loads gates and betas of `heads` value heads from first_head on to shared memory: gates [heads][64] in units of log
// 2, then betas. Threads go through memory in order, the heads of a token side by side. Tokens past the end have g = 0
// and beta = 0.
GD_DEVICE void load_gates(const Params& p, int batch, int token, int rows, int first_head, int heads, uint32_t to,
                          int tid, int threads) {
  constexpr int kAtOnce = 2;  // loads in flight
#pragma unroll 1
  for (int first = tid; first < kChunkTokens * heads; first += kAtOnce * threads) {
    float g[kAtOnce] = {}, beta[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = first + i * threads, row = item / heads, head = first_head + item - row * heads;
      if (row >= rows) continue;
      g[i] = load_number(p.g.data, p.g.dtype, p.g.offset(batch, token + row, head));
      beta[i] = load_number(p.beta.data, p.beta.dtype, p.beta.offset(batch, token + row, head));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int item = first + i * threads, row = item / heads, v = item - row * heads;
      if (row >= kChunkTokens) continue;
      const bool here = row < rows;
      store_shared(to + (v * kChunkTokens + row) * 4, here ? gate_of(p, g[i], first_head + v) * kLog2e : 0.0f);
      store_shared(to + ((heads + v) * kChunkTokens + row) * 4, here ? beta_of(p, beta[i]) : 0.0f);
    }
  }
}

}  // namespace gatedelta::cuda::portable
