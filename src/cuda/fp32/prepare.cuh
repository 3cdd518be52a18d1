// Prepare: gates, betas, norms and q.k of every token. One CTA per (chunk, key head); a warp has every fourth token.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/device/gates.cuh"
#include "cuda/fp32/config.hpp"

namespace gatedelta::cuda::fp32 {

GD_DEVICE int smaller(int a, int b) { return a < b ? a : b; }

GD_DEVICE float sum_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += shuffle_xor(x, step);
  return x;
}
GD_DEVICE Product sum_warp(const Product& x) { return {sum_warp(x.sum), sum_warp(x.squares)}; }
GD_DEVICE float add_square(float sum, float x) { return fmaf(x, x, sum); }
GD_DEVICE void add_term(Product& to, float x, float y) {
  to.sum = fmaf(x, y, to.sum);
  to.squares = add_square(to.squares, x * y);
}
GD_DEVICE const float* row_of(const TokenRows& rows, int64_t batch, int64_t token, int head) {
  return static_cast<const float*>(rows.data) + rows.offset(batch, token, head);
}
GD_DEVICE float dot_of_rows(const float* a, const float* b, int count, int lane) {
  float sum = 0;
  for (int i = lane; i < count; i += 32) sum = fmaf(a[i], b[i], sum);
  return sum_warp(sum);
}

struct Prepare {
  GD_DEVICE static void run(const Params& p, int cta, int tid) {
    const int lane = tid & 31, warp = shuffle(tid >> 5, 0);
    const int chunk_index = cta / p.key_heads, key_head = cta - chunk_index * p.key_heads;
    if (cta == 0 && p.first_checkpoint && tid == 0) count_checkpoints(p);
    const auto [n, batch, first, rows] = locate_chunk(p.sequences, chunk_index, lane);
#pragma unroll 1
    for (int row = warp; row < rows; row += kWarps) {
      if (p.is_padding(n)) {
        zero_outputs(p, batch, first + row, key_head, lane);
      } else {
        find_factors(p, batch, first + row, key_head, lane);
      }
    }
  }

  GD_DEVICE static void count_checkpoints(const Params& p) {
    int64_t total = 0;
    for (int n = 0; n < p.sequences.count; ++n) {
      p.first_checkpoint[n] = total;
      total += p.sequences[n].length / p.checkpoint_every;
    }
  }

  GD_DEVICE static void zero_outputs(const Params& p, int batch, int token, int key_head, int lane) {
    if (!p.o) return;
    for (int i = lane; i < p.group * p.value_dim; i += 32) {
      const int v = i / p.value_dim;
      auto* const row = static_cast<float*>(p.o.data) + p.o.offset(batch, token, key_head * p.group + v);
      row[i - v * p.value_dim] = 0;
    }
  }

  GD_DEVICE static void find_factors(const Params& p, int batch, int token, int key_head, int lane) {
    const float *const k = row_of(p.k, batch, token, key_head), *const q = row_of(p.q, batch, token, key_head);
    float r_k = 1, r_q = 1;
    if (p.l2norm) {
      r_k = 1.0f / sqrtf(dot_of_rows(k, k, p.key_dim, lane) + 1e-6f);
      r_q = 1.0f / sqrtf(dot_of_rows(q, q, p.key_dim, lane) + 1e-6f);
    }
    const float qk = dot_of_rows(q, k, p.key_dim, lane) * r_q * r_k * p.scale;
    for (int v = lane; v < p.group; v += 32) {
      const int head = key_head * p.group + v;
      float g = load_number(p.g.data, p.g.dtype, p.g.offset(batch, token, head));
      float beta = load_number(p.beta.data, p.beta.dtype, p.beta.offset(batch, token, head));
      if (p.gate == GD_GATE_RAW) {
        const RawGate raw(p, head);
        g = raw.value(g + raw.bias);
      }
      if (p.beta_kind != GD_BETA_VALUE) beta = sigmoid_of(beta);
      if (p.beta_kind == GD_BETA_LOGIT_DOUBLED) beta *= 2;
      p.factors[p.entry(batch, token, head)] = {expf(g), beta, r_k, r_q, qk, {}};
    }
  }
};

}  // namespace gatedelta::cuda::fp32
