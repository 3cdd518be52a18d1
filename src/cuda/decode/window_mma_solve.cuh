// `window_mma`: inner products of the tokens of a window, products with the state, the triangular solve, outputs.
#pragma once

#include "cuda/decode/window_mma_tile.cuh"

namespace gatedelta::cuda {

// By the first warp. Column g of operand B is row g of operand A, so all inner products take eight or sixteen
// instructions.
template <class Config>
GD_DEVICE void WindowMma<Config>::fill_table(int count) {
  float alpha = 1, beta = 0;  // tokens past the last one change nothing
  if (lane < count) alpha = gates.alpha(p), beta = gates.strength(p);
  float c[4] = {}, d[4] = {};
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const uint32_t k0 = pairs[0][i], k1 = pairs[0][i + 1];
    if constexpr (kTokens == 4) {
      mma_halves<Input>(i % 4 ? d : c, k0, 0, k1, 0, k0, k1);
    } else {
      const uint32_t q0 = pairs[1][i], q1 = pairs[1][i + 1];
      mma_halves<Input>(c, k0, q0, k1, q1, k0, k1);
      mma_halves<Input>(d, q0, 0, q1, 0, q0, q1);
    }
  }
  if constexpr (kTokens == 4)
#pragma unroll
    for (int i = 0; i < 2; ++i) c[i] += d[i];
  // c: rows k_g and q_g (with four tokens row g alone), columns k_2t, k_2t+1. Norms stand on the diagonals.
  if (lane < kTokens) table.beta[lane] = beta;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (2 * t + i == g) {
      const auto norm = [&](float sum) { return p.l2norm ? rsqrtf(sum + 1e-6f) : 1.0f; };
      if constexpr (kTokens == 4) {
        (g < 4 ? table.r_k[g % 4] : table.r_q[g % 4]) = norm(c[i]) * (g < 4 ? 1.0f : p.scale);
      } else {
        table.r_k[g] = norm(c[i]), table.r_q[g] = norm(d[i]) * p.scale;
      }
    }
  __syncwarp();
  const int token = g % kTokens;
  float reach[2] = {1, 1}, decay = 1;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float factor = __shfl_sync(~0u, alpha, i);
    if (i <= token) {
      decay *= factor;
      if (i > 2 * t) reach[0] *= factor;
      if (i > 2 * t + 1) reach[1] *= factor;
    }
  }
  const float r_k = table.r_k[token], r_q = table.r_q[token];
  if (t == 0 && g < kTokens) {
    table.decay[token] = decay;
    table.x[token] = decay * r_k, table.y[token] = decay * r_q;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * t + i;
    if (j >= kTokens) continue;
    const float weight = j <= token ? reach[i] * (table.beta[j] * table.r_k[j]) : 0.0f;
    const auto times = [&](float factor, float product) { return j <= token ? weight * factor * product : 0.0f; };
    if constexpr (kTokens == 4) {
      if (g < 4) {
        table.reach[token][j] = weight, table.kk[token][j] = times(r_k, c[i]);
      } else {
        table.qk[token][j] = times(r_q, c[i]);
      }
    } else {
      table.reach[token][j] = weight, table.kk[token][j] = times(r_k, c[i]), table.qk[token][j] = times(r_q, c[2 + i]);
    }
  }
}

// products[tile][2 r + i]: row r with the token in column 2 t + i of the tile.
template <class Config>
GD_DEVICE void WindowMma<Config>::multiply(float (&products)[kTiles][4]) const {
  float part[2][kTiles][4] = {};  // two sums, shorter chains
  if constexpr (kPacked && std::is_same_v<State, Input>) {
#pragma unroll
    for (int i = 0; i < 16; i += 2)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        mma_halves<Input>(part[i / 2 % 2][tile], words[0][i], words[1][i], words[0][i + 1], words[1][i + 1],
                          pairs[tile][i], pairs[tile][i + 1]);
  } else {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float x[2][kVector];
      read_vector(j, x);
#pragma unroll
      for (int w = 0; w < kVector; w += 2)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint32_t pair = pairs[tile][(j * kVector + w) / 2];
          const float b0 = widen_half<Input>(pair, 0), b1 = widen_half<Input>(pair, 1);
          const float a0 = x[0][w], a1 = x[1][w], a2 = x[0][w + 1], a3 = x[1][w + 1];
          if constexpr (kPacked) {  // both operands are tf32 numbers as they are
            mma_tf32(part[w / 2 % 2][tile], a0, a1, a2, a3, b0, b1);
          } else {
            mma_tf32(part[0][tile], tf32_high(a0), tf32_high(a1), tf32_high(a2), tf32_high(a3), b0, b1);
            mma_tf32(part[1][tile], tf32_low(a0), tf32_low(a1), tf32_low(a2), tf32_low(a3), b0, b1);
          }
        }
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) products[i / 4][i % 4] = part[0][i / 4][i % 4] + part[1][i / 4][i % 4];
}

// e of both rows, in each of the four lanes that share them.
template <class Config>
GD_DEVICE void WindowMma<Config>::solve(const float (&products)[kTiles][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float first[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) first[i] = v[r][i] - table.x[own_token + i] * products[0][2 * r + i];
#pragma unroll
    for (int token = 0; token < kTokens; ++token)
      e[r][token] = __shfl_sync(~0u, first[token % 2], lane - t + token / 2);
  }
#pragma unroll
  for (int token = 1; token < kTokens; ++token)
#pragma unroll
    for (int j0 = 0; j0 < token; j0 += 4) {
      const float4 factors = *reinterpret_cast<const float4*>(&table.kk[token][j0]);
      const float factor[4] = {factors.x, factors.y, factors.z, factors.w};
#pragma unroll
      for (int j = j0; j < j0 + 4 && j < token; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) e[r][token] -= factor[j - j0] * e[r][j];
    }
}

template <class Config>
GD_DEVICE void WindowMma<Config>::store_outputs(const float (&products)[kTiles][4], uint32_t first, int count) const {
  if (!p.o) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = own_token + i;
    float o[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) o[r] = table.y[token] * products[kTiles - 1][2 * r + i];
#pragma unroll
    for (int j0 = 0; j0 < kTokens; j0 += 4) {
      const float4 factors = *reinterpret_cast<const float4*>(&table.qk[token][j0]);
      const float factor[4] = {factors.x, factors.y, factors.z, factors.w};
#pragma unroll
      for (int j = j0; j < j0 + 4; ++j)
        if (j <= token) {
#pragma unroll
          for (int r = 0; r < 2; ++r) o[r] += factor[j - j0] * e[r][j];
        }
    }
    if (stores_outputs && token < count) store_rows(first + token, o);
  }
}

template <class Config>
GD_DEVICE void WindowMma<Config>::store_rows(uint32_t token, const float (&o)[2]) const {
  char* const to = p.o.at(batch, begin + token, place.head);
  with_dtype(p.o.dtype,
             [&](gd_dtype type) { store_numbers<2>(const_cast<char*>(element(to, type, row)), type, o, true); });
}

template <class Config>
GD_DEVICE void WindowMma<Config>::clear_outputs() const {
  if (!p.o) return;
  const float zeros[2] = {};
#pragma unroll 1
  for (uint32_t token = t; token < length; token += 4) store_rows(token, zeros);
}

}  // namespace gatedelta::cuda
