// Gates and betas of a chunk.
#pragma once

#include "cuda/device/gates.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/portable/params.hpp"

namespace gatedelta::cuda::portable {

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
