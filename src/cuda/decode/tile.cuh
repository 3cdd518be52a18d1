// The part of one state that a warp holds in registers, and where the warp stands in the grid.
#pragma once

#include "cuda/decode/config.hpp"
#include "cuda/decode/numbers.cuh"

namespace gatedelta::cuda {

// What a CTA computes: some value columns of one head of one sequence.
struct CtaPlace {
  int sequence, head, key_head, part;
};
GD_DEVICE CtaPlace locate(const DecodeParams& p, uint32_t cta) {
  const uint32_t pair = p.parts.quotient(cta), sequence = p.heads.quotient(pair);
  const uint32_t head = p.heads.remainder(pair, sequence);
  return {static_cast<int>(sequence), static_cast<int>(head), static_cast<int>(p.group.quotient(head)),
          static_cast<int>(p.parts.remainder(cta, pair))};
}

// Lanes of a column are neighbours in [V, K], where a row of memory is a column's numbers of K. In [K, V] the groups
// are: four lanes read neighbouring columns of one row.
template <class Config>
struct Tile {
  static constexpr bool kRowsOfK = Config::kLayout == GD_STATE_VK;
  static constexpr int kPerLane = Config::kPerLane, kColumns = Config::kColumns, kVector = Config::kVector;
  static constexpr int kAccess = kRowsOfK ? kVector : kColumns;  // numbers
  static constexpr int kAccesses = kColumns * kPerLane / kAccess;

  int share;   // index among the lanes of a column
  int column;  // first column of this lane
  Raw<kAccess> raw[kAccesses];
  float s[kColumns][kPerLane];

  GD_DEVICE Tile(int thread, int part) {
    const int lane = thread % 32;
    const int group = kRowsOfK ? lane / kLanesPerColumn : lane % kColumnGroups;
    share = kRowsOfK ? lane % kLanesPerColumn : lane / kColumnGroups;
    column = part * Config::kCtaColumns + (thread / 32 * kColumnGroups + group) * kColumns;
  }

  // To `raw`: zeros, or the matrix that begins at `state`, with zeros past K.
  GD_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) raw[i].clear();
  }
  GD_DEVICE void load(const char* state, gd_dtype dtype, int key_dim, int value_dim, bool aligned) {
    if (key_dim < Config::kMaxKeyDim) clear();
    with_load(dtype, aligned, [&](gd_dtype type, bool whole) {
      for_each_access(key_dim, value_dim, [&](int i, int at) { raw[i].load(element(state, type, at), type, whole); });
    });
  }
  // From `raw` to `s`.
  GD_DEVICE void widen(gd_dtype dtype) {
    with_dtype(dtype, [&](gd_dtype type) {
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        float x[kAccess];
        raw[i].widen(x, type);
#pragma unroll
        for (int j = 0; j < kAccess; ++j) number(i, j) = x[j];
      }
    });
  }
  // From `s` to memory.
  template <bool kStreaming = false>
  GD_DEVICE void store(char* state, gd_dtype dtype, int key_dim, int value_dim, bool aligned) {
    with_dtype(dtype, [&](gd_dtype type) {
      for_each_access(key_dim, value_dim, [&](int i, int at) {
        float x[kAccess];
#pragma unroll
        for (int j = 0; j < kAccess; ++j) x[j] = number(i, j);
        store_numbers<kAccess, kStreaming>(const_cast<char*>(element(state, type, at)), type, x, aligned);
      });
    });
  }

 private:
  // Number j of access i.
  GD_DEVICE float& number(int i, int j) {
    if constexpr (kRowsOfK) return s[i / (kPerLane / kVector)][i % (kPerLane / kVector) * kVector + j];
    return s[j][i];
  }

  // Calls f(access, offset); there is no access past K. The first offset is opaque: otherwise the compiler keeps all
  // offsets in registers while tokens go by.
  template <class F>
  GD_DEVICE void for_each_access(int key_dim, int value_dim, const F& f) const {
    if constexpr (kRowsOfK) {
      const int first = opaque(column * key_dim + share * kVector);
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        const int c = i / (kPerLane / kVector), begin = i % (kPerLane / kVector) * kVector * kLanesPerColumn;
        if (begin + share * kVector < key_dim) f(i, first + c * key_dim + begin);
      }
    } else {
      int at = opaque(share * kVector * value_dim + column);
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        if ((i / kVector * kLanesPerColumn + share) * kVector < key_dim) f(i, at);
        at += (i % kVector == kVector - 1 ? (kLanesPerColumn - 1) * kVector + 1 : 1) * value_dim;
      }
    }
  }
};

}  // namespace gatedelta::cuda
