// The part of one state that a warp holds in registers, and where the warp stands in the grid.
#pragma once

#include "cuda/decode/config.hpp"
#include "cuda/decode/numbers.cuh"

namespace gatedelta::cuda {

// What a CTA computes: some value columns of one head of one sequence.
struct Place {
  int sequence, head, key_head, part;
};
GD_DEVICE Place locate(const DecodeParams& p, uint32_t cta) {
  const uint32_t pair = p.parts.quotient(cta), sequence = p.heads.quotient(pair);
  const uint32_t head = p.heads.remainder(pair, sequence);
  return {static_cast<int>(sequence), static_cast<int>(head), static_cast<int>(p.group.quotient(head)),
          static_cast<int>(p.parts.remainder(cta, pair))};
}

// Lanes of a column are neighbours in [V, K], where a row of memory is a column's numbers of K. In [K, V] the groups
// are: four lanes read neighbouring columns of one row.
template <class Config>
struct Tile {
  static constexpr int kPerLane = Config::kPerLane, kColumns = Config::kColumns, kVector = Config::kVector;

  int share;   // index among the lanes of a column
  int column;  // first column of this lane
  float s[kColumns][kPerLane];

  GD_DEVICE Tile(int thread, int part) {
    const int lane = thread % 32;
    const int group = Config::kLayout == GD_STATE_VK ? lane / kLanesPerColumn : lane % kColumnGroups;
    share = Config::kLayout == GD_STATE_VK ? lane % kLanesPerColumn : lane / kColumnGroups;
    column = part * Config::kCtaColumns + (thread / 32 * kColumnGroups + group) * kColumns;
  }

  GD_DEVICE void clear() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) s[c][i] = 0;
  }

  // `state`: the first number of the matrix. Numbers past K are 0.
  template <class T>
  GD_DEVICE void load(const T* state, int key_dim, int value_dim, bool aligned) {
    clear();
    for_each_access(key_dim, value_dim, [&](int c, int i, int at) {
      if constexpr (Config::kLayout == GD_STATE_VK) {
        load_numbers<kVector>(&s[c][i], state + at, aligned);
      } else {
        float x[kColumns];
        load_numbers<kColumns>(x, state + at, aligned);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) s[j][i] = x[j];
      }
    });
  }
  template <bool kStreaming = false, class T>
  GD_DEVICE void store(T* state, int key_dim, int value_dim, bool aligned) const {
    for_each_access(key_dim, value_dim, [&](int c, int i, int at) {
      if constexpr (Config::kLayout == GD_STATE_VK) {
        store_numbers<kVector, kStreaming>(state + at, &s[c][i], aligned);
      } else {
        float x[kColumns];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) x[j] = s[j][i];
        store_numbers<kColumns>(state + at, x, aligned);
      }
    });
  }

 private:
  // Calls f(column, number, offset) for the first number of every access; there is none past K. The offset of the first
  // access is opaque: otherwise the compiler keeps all of them in registers while tokens go by.
  template <class F>
  GD_DEVICE void for_each_access(int key_dim, int value_dim, const F& f) const {
    if constexpr (Config::kLayout == GD_STATE_VK) {
      const int first = opaque(column * key_dim + share * kVector);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int i = 0; i < kPerLane; i += kVector)
          if (i * kLanesPerColumn + share * kVector < key_dim) f(c, i, first + c * key_dim + i * kLanesPerColumn);
    } else {
      int at = opaque(share * kVector * value_dim + column);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if ((i / kVector * kLanesPerColumn + share) * kVector < key_dim) f(0, i, at);
        at += (i % kVector == kVector - 1 ? (kLanesPerColumn - 1) * kVector + 1 : 1) * value_dim;
      }
    }
  }
};

}  // namespace gatedelta::cuda
