// `window_mma`: the states after tokens of a window.
#pragma once

#include "cuda/decode/window_mma_tile.cuh"

namespace gatedelta::cuda {

// Operand B of an update: the key of token 4 set + t, at column g of tile i. It is half g % 2 of pair i in the lane
// that has lane g / 2's part of this key. Tokens from `end` on are zero.
template <class Config>
GD_DEVICE void WindowMma<Config>::gather_keys(uint32_t (&keys)[kTiles][16], int end) const {
#pragma unroll
  for (int set = 0; set < kTiles; ++set) {
    const int token = 4 * set + t;
    const uint32_t upper_half = token < end ? (g % 2 ? 0x3244 : 0x1044) : 0x4444;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      keys[set][i] = __byte_perm(__shfl_sync(~0u, pairs[0][i], token * 4 + g / 2), 0, upper_half);
  }
}

// Applies decay and the tokens' updates to vector j of the state. Operand A is `amount`, with its high and low parts
// side by side in the contracted index: exact up to 2^-22.
template <class Config>
GD_DEVICE void WindowMma<Config>::update_vector(float (&x)[2][kVector], int j, float decay,
                                                const uint32_t (&keys)[kTiles][16], const float (&amount)[kTiles][2]) {
#pragma unroll
  for (int w = 0; w < kVector; w += 2) {
    float c[4] = {decay * x[0][w], decay * x[0][w + 1], decay * x[1][w], decay * x[1][w + 1]};
#pragma unroll
    for (int set = 0; set < kTiles; ++set) {
      const float key = widen_half<Input>(keys[set][(j * kVector + w) / 2], 1);
      mma_tf32(c, tf32_high(amount[set][0]), tf32_high(amount[set][1]), tf32_low(amount[set][0]),
               tf32_low(amount[set][1]), key, key);
    }
    x[0][w] = c[0], x[0][w + 1] = c[1], x[1][w] = c[2], x[1][w + 1] = c[3];
  }
}

// Computes S_m of this window, m >= 1, in shared memory, or stores it at `to`.
template <class Config>
template <bool kInShared>
GD_DEVICE void WindowMma<Config>::advance_to(int m, char* to) {
  uint32_t keys[kTiles][16];
  gather_keys(keys, m);
  float amount[kTiles][2];
#pragma unroll
  for (int set = 0; set < kTiles; ++set)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      amount[set][r] = 4 * set + t < m ? table.reach[m - 1][4 * set + t] * error_of(r, set) : 0.0f;
  const float decay = table.decay[m - 1];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float x[2][kVector];
    read_vector(j, x);
    update_vector(x, j, decay, keys, amount);
    if constexpr (kInShared) write_vector(j, x);
    if constexpr (!kInShared) store_vector(to, j, x);
  }
}

template <class Config>
GD_DEVICE void WindowMma<Config>::store_state(char* to) const {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float x[2][kVector];
    read_vector(j, x);
    store_vector(to, j, x);
  }
}

// Stores vector j of both rows in memory.
template <class Config>
GD_DEVICE void WindowMma<Config>::store_vector(char* to, int j, const float (&x)[2][kVector]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    store_numbers<kVector, Config::kStreaming>(to + r * kDecodeDim * sizeof(State) + j * 64, kDtype<State>, x[r], true);
}

}  // namespace gatedelta::cuda
