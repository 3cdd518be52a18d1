// `update_vec`: states whose channels have neighbouring columns, in registers or in shared memory.
#pragma once

#include <type_traits>

#include "cuda/conv1d/access.cuh"
#include "cuda/conv1d/update_vec.hpp"

namespace gatedelta::cuda {

// 16-bit number i in the lower half, number k in the upper one.
GD_DEVICE uint32_t pair_halves(const uint32_t* words, int i, int k) {
  return __byte_perm(words[i / 2], words[k / 2], (i % 2 ? 0x32u : 0x10u) | (k % 2 ? 0x7600u : 0x5400u));
}

// A state whose channels have kColumns neighbouring numbers each, in registers: a thread's channels are kColumns pieces
// of kUpdateVecBytes. The pieces of a warp go through shared memory: its accesses are then contiguous, and it writes
// full sectors.
template <gd_dtype kType, int kColumns>
struct ChannelStates {
  static constexpr int kVector = vec_channels(kType), kRow = kUpdateVecBytes / 4, kWords = kColumns * kRow;
  using Row = Numbers<kVector, kType>;
  using Piece = Packet<kUpdateVecBytes>;
  char* const warp_state;  // of the warp's first channel
  Piece* const shared;     // [32 * kColumns]
  const int lane, pieces;  // of the warp

  GD_DEVICE int place(int i) const { return i * 32 + lane; }  // of the i-th piece that the thread loads or stores
  GD_DEVICE void read(Row (&columns)[kColumns]) const {
    uint32_t words[kWords] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (place(i) >= pieces) continue;
      const Piece piece = *reinterpret_cast<const Piece*>(warp_state + place(i) * kUpdateVecBytes);
#pragma unroll
      for (int w = 0; w < kRow; ++w) words[i * kRow + w] = piece.words[w];
    }
    exchange(words, true);
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int w = 0; w < kRow; ++w) {
        if constexpr (kType == GD_F32) {
          columns[column].packet.words[w] = words[w * kColumns + column];
        } else {
          columns[column].packet.words[w] =
              pair_halves(words, 2 * w * kColumns + column, (2 * w + 1) * kColumns + column);
        }
      }
    }
  }
  // Converts the pieces from the warp's order to the thread's, or back.
  GD_DEVICE void exchange(uint32_t (&words)[kWords], bool to_thread) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      Piece piece;
#pragma unroll
      for (int w = 0; w < kRow; ++w) piece.words[w] = words[i * kRow + w];
      shared[to_thread ? place(i) : lane * kColumns + i] = piece;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const Piece piece = shared[to_thread ? lane * kColumns + i : place(i)];
#pragma unroll
      for (int w = 0; w < kRow; ++w) words[i * kRow + w] = piece.words[w];
    }
    __syncwarp();
  }
  GD_DEVICE void write(const Row (&columns)[kColumns]) const {
    uint32_t words[kWords], by_column[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) by_column[i] = columns[i / kRow].packet.words[i % kRow];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kType == GD_F32) {
        words[i] = by_column[i % kColumns * kRow + i / kColumns];
      } else {
        const auto at = [](int n) { return n % kColumns * kVector + n / kColumns; };
        words[i] = pair_halves(by_column, at(2 * i), at(2 * i + 1));
      }
    }
    exchange(words, false);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (place(i) >= pieces) continue;
      Piece piece;
#pragma unroll
      for (int w = 0; w < kRow; ++w) piece.words[w] = words[i * kRow + w];
      *reinterpret_cast<Piece*>(warp_state + place(i) * kUpdateVecBytes) = piece;
    }
  }
};

// The states of a warp's channels in shared memory, of any number of columns. The channels of neighbouring lanes are an
// odd number of words apart, so there are no bank conflicts.
template <gd_dtype kType>
struct SharedStates {
  static constexpr int kVector = vec_channels(kType), kRow = kUpdateVecBytes / 4, kBatch = 4;
  static constexpr int kWords = 32 * (kUpdateVecColumns * kRow + 1);  // of a warp, at most
  using Row = Numbers<kVector, kType>;
  using Piece = Packet<kUpdateVecBytes>;
  using Number = std::conditional_t<kType == GD_F32, uint32_t, uint16_t>;
  uint32_t* const shared;
  const int lane, columns, pieces;  // pieces of kUpdateVecBytes, of the warp

  // Calls move(word in shared memory, piece in memory or a number past the last one) for kBatch pieces of this lane.
  template <class Move>
  GD_DEVICE void for_pieces(const Move& move) const {
    const int turn = 32 / columns, rest = 32 % columns;
    int owner = lane / columns, column = lane % columns;
#pragma unroll 1
    for (int first = 0; first < columns; first += kBatch) {
      int word[kBatch], piece[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        word[i] = owner * (columns * kRow + 1) + column * kRow;
        piece[i] = first + i < columns ? (first + i) * 32 + lane : pieces;
        owner += turn, column += rest;
        if (column >= columns) column -= columns, ++owner;
      }
      move(word, piece);
    }
  }
  GD_DEVICE void read(const char* warp_state) const {
    for_pieces([&](const int(&word)[kBatch], const int(&piece)[kBatch]) {
      Piece found[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (piece[i] < pieces) found[i] = *reinterpret_cast<const Piece*>(warp_state + piece[i] * kUpdateVecBytes);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int w = 0; w < kRow; ++w)
          if (piece[i] < pieces) shared[word[i] + w] = found[i].words[w];
      }
    });
    __syncwarp();
  }
  GD_DEVICE void write(char* warp_state) const {
    __syncwarp();
    for_pieces([&](const int(&word)[kBatch], const int(&piece)[kBatch]) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (piece[i] >= pieces) continue;
        Piece found;
#pragma unroll
        for (int w = 0; w < kRow; ++w) found.words[w] = shared[word[i] + w];
        *reinterpret_cast<Piece*>(warp_state + piece[i] * kUpdateVecBytes) = found;
      }
    });
  }
  GD_DEVICE void clear() const {
#pragma unroll 1
    for (int i = 0; i < columns * kRow; ++i) shared[lane * (columns * kRow + 1) + i] = 0;
  }

  // A column of this lane's channels.
  GD_DEVICE Number* numbers(int column) const {
    return reinterpret_cast<Number*>(shared + lane * (columns * kRow + 1)) + column;
  }
  GD_DEVICE void load(Row& row, int column) const {
    const Number* const from = numbers(column);
#pragma unroll
    for (int w = 0; w < kRow; ++w) {
      if constexpr (kType == GD_F32) {
        row.packet.words[w] = from[w * columns];
      } else {
        row.packet.words[w] = from[2 * w * columns] | static_cast<uint32_t>(from[(2 * w + 1) * columns]) << 16;
      }
    }
  }
  GD_DEVICE void store(const Row& row, int column) const {
    Number* const to = numbers(column);
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      to[v * columns] = static_cast<Number>(kType == GD_F32 ? row.packet.words[v / (kVector / kRow)]
                                                            : row.packet.words[v / 2] >> (v % 2 * 16));
  }
};

}  // namespace gatedelta::cuda
