// Loads of tokens and states for `window_mma`, and the state in registers or shared memory.
#pragma once

#include "cuda/decode/window_mma_tile.cuh"

namespace gatedelta::cuda {

// Loads `count` tokens of a window; the others are zeros.
template <class Config>
GD_DEVICE void WindowMma<Config>::request_tokens(uint32_t first, int count) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const bool is_key = kTokens == 4 ? g < 4 : tile == 0;
    const int token = kTokens == 4 ? g % 4 : g;
    const Rows32& rows = is_key ? p.k : p.q;
#pragma unroll
    for (int i = 0; i < 16; ++i) pairs[tile][i] = 0;
    if (token < count) {
      const char* const from = rows.at(batch, begin + first + token, place.key_head) + t * kVector * 2;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const auto packet = *reinterpret_cast<const Packet<2 * kVector>*>(from + j * 8 * kVector);
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) pairs[tile][j * kVector / 2 + i] = packet.words[i];
      }
    }
  }
  uint32_t two[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (solves && own_token + i < count)
      two[i] = *reinterpret_cast<const uint32_t*>(p.v.at(batch, begin + first + own_token + i, place.head) + row * 2);
  if (threadIdx.x < count) request_gates(gates, p, batch, begin + first + lane, place.head);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) v[r][i] = widen_half<Input>(two[i], r);
}

// Loads the state into registers, or copies it to shared memory.
template <class Config>
GD_DEVICE void WindowMma<Config>::request_state(int32_t slot) {
  const char* const from = row_of(p.initial.at(slot, place.head));
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const char* const vector = from + r * kDecodeDim * sizeof(State) + j * 64;
      if constexpr (kIsShared) {
        copy_async(held(r, j * kVector / 4), vector);
      } else {
        const auto packet = *reinterpret_cast<const Packet<16>*>(vector);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[r][4 * j + i] = packet.words[i];
      }
    }
}

template <class Config>
GD_DEVICE void WindowMma<Config>::clear_state() {
  if constexpr (kIsShared) {
#pragma unroll
    for (int i = 0; i < 16; ++i) *held(i / 8, i % 8) = {};
  } else {
#pragma unroll
    for (int i = 0; i < 8 * kVectors; ++i) words[i / (4 * kVectors)][i % (4 * kVectors)] = 0;
  }
}

// Converts a state in shared memory to fp32.
template <class Config>
GD_DEVICE void WindowMma<Config>::widen_state() {
  if constexpr (kIsShared) wait_for_copies();
  if constexpr (kIsShared && !kIsFloat) widen_held();
}

template <class Config>
GD_DEVICE void WindowMma<Config>::widen_held() {
#pragma unroll
  for (int j = 0; j < 2 * kVectors; ++j) {
    const int r = j / kVectors, vector = j % kVectors;
    const float4 from = *held(r, 2 * vector);
    const uint32_t four[4] = {__float_as_uint(from.x), __float_as_uint(from.y), __float_as_uint(from.z),
                              __float_as_uint(from.w)};
    float x[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = widen_half<State>(four[i / 2], i % 2);
#pragma unroll
    for (int i = 0; i < kVector; i += 4)
      *held(r, (vector * kVector + i) / 4) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}

// Vector j of both rows, from registers or shared memory.
template <class Config>
GD_DEVICE void WindowMma<Config>::read_vector(int j, float (&x)[2][kVector]) const {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (kIsShared) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 four = *held(r, (j * kVector + i) / 4);
        x[r][i] = four.x, x[r][i + 1] = four.y, x[r][i + 2] = four.z, x[r][i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if constexpr (kIsFloat) x[r][i] = __uint_as_float(words[r][j * kVector + i]);
        if constexpr (!kIsFloat) x[r][i] = widen_half<State>(words[r][(j * kVector + i) / 2], i % 2);
      }
    }
  }
}

// Stores vector j of both rows in shared memory.
template <class Config>
GD_DEVICE void WindowMma<Config>::write_vector(int j, const float (&x)[2][kVector]) {
  static_assert(kIsShared);
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < kVector; i += 4)
      *held(r, (j * kVector + i) / 4) = make_float4(x[r][i], x[r][i + 1], x[r][i + 2], x[r][i + 3]);
}

}  // namespace gatedelta::cuda
