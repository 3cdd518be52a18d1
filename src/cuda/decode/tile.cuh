// The part of one state that a warp holds in registers, and its place in the grid of `generic`.
#pragma once

#include "cuda/decode/config.hpp"
#include "cuda/device/packets.cuh"

namespace gatedelta::cuda {

// A CTA of `generic` computes some value columns of one head of one sequence.
struct CtaPlace {
  int sequence, head, key_head, part;
};
GD_DEVICE CtaPlace locate(const DecodeParams& p, uint32_t cta) {
  const uint32_t pair = p.parts.quotient(cta), sequence = p.heads.quotient(pair);
  const uint32_t head = p.heads.remainder(pair, sequence);
  return {static_cast<int>(sequence), static_cast<int>(head), static_cast<int>(p.key_heads.of(head)),
          static_cast<int>(p.parts.remainder(cta, pair))};
}

// In [V, K] a row of memory holds a column's numbers of K, and the lanes of a column are neighbours. In [K, V] four
// neighbouring lanes belong to four groups and read neighbouring columns of one row.
template <class Config>
struct Tile {
  static constexpr bool kRowsOfK = Config::kLayout == GD_STATE_VK;
  static constexpr int kPerLane = Config::kPerLane, kColumns = Config::kColumns, kVector = Config::kVector;
  static constexpr int kAccess = kRowsOfK ? kVector : kColumns;  // numbers
  static constexpr int kAccesses = kColumns * kPerLane / kAccess;

  int share;   // index among the lanes of a column
  int group;   // of lanes with the same columns, in the warp
  int column;  // first column of this lane
  // The state. Before widen() it holds the words of each access as in memory, with two 16-bit numbers per word.
  float s[kColumns][kPerLane];

  GD_DEVICE Tile(uint32_t thread, uint32_t part) {
    const uint32_t lane = thread % 32;
    group = static_cast<int>(kRowsOfK ? lane / kLanesPerColumn : lane % kColumnGroups);
    share = static_cast<int>(kRowsOfK ? lane % kLanesPerColumn : lane / kColumnGroups);
    column = static_cast<int>(part * Config::kCtaColumns +
                              (thread / 32 * kColumnGroups + static_cast<uint32_t>(group)) * kColumns);
  }

  GD_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kColumns * kPerLane; ++i) s[i / kPerLane][i % kPerLane] = 0;
  }
  // Loads words of the matrix that begins at `state`, with zeros past K. kStreaming: no kernel reads them again soon.
  template <bool kStreaming = false>
  GD_DEVICE void load(const char* state, gd_dtype dtype, int key_dim, int value_dim, bool aligned) {
    if (key_dim < Config::kMaxKeyDim) clear();
    with_load(dtype, aligned, [&](gd_dtype type, bool whole) {
      for_each_access(key_dim, value_dim, [&](int i, int at) {
        Raw<kAccess> raw;
        raw.template load<kStreaming>(element(state, type, at), type, whole);
#pragma unroll
        for (int j = 0; j < (type == GD_F32 ? kAccess : raw.kPairs); ++j) number(i, j) = __uint_as_float(raw.words[j]);
      });
    });
  }
  // Converts words to fp32.
  GD_DEVICE void widen(gd_dtype dtype) {
    const auto from = [&](gd_dtype type) {
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        Raw<kAccess> raw;
        float x[kAccess];
#pragma unroll
        for (int j = 0; j < raw.kPairs; ++j) raw.words[j] = __float_as_uint(number(i, j));
        raw.widen(x, type);
#pragma unroll
        for (int j = 0; j < kAccess; ++j) number(i, j) = x[j];
      }
    };
    if (dtype == GD_BF16) from(GD_BF16);
    if (dtype == GD_F16) from(GD_F16);
  }
  // Stores `s`.
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
  // offsets in registers from token to token.
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
