// The gradients kernel in numbers: shared-memory plan, registers, roles and barriers.
#pragma once

#include "cuda/schedule/work_item.hpp"
#include "cuda/sm90/prepare/config.hpp"
#include "cuda/sm90/tiles.hpp"

namespace gatedelta::cuda {

constexpr int kGradientThreads = 512;

struct GradientRegisters {
  static constexpr int kLaunch = 128, kProducts = 152, kAux = 56;
  static_assert(3 * kProducts + kAux <= 4 * kLaunch);
};

struct GradientSmem {
  // Tiles [64 tokens][64], two side by side, unless it says otherwise.
  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + 2 * kTileBytes;
  enum Row { kUpdates, kOutputs, kValues, kRowCount };  // U, dO, dV
  static constexpr int kRowStages = 2;
  static constexpr int kRows = kKeys + 2 * kTileBytes;
  static constexpr int kStates = kRows + kRowStages * kRowCount * 2 * kTileBytes;  // S^T, see tiles.hpp
  static constexpr int kGradients = kStates + kStateTileBytes;                     // G^T likewise
  static constexpr int kF = kGradients + kStateTileBytes;                          // one tile
  static constexpr int kE = kF + kTileBytes;                                       // one tile
  static constexpr int kUnscaledE = kE + kTileBytes;                               // likewise, of rows as they come
  static constexpr int kVectors = kUnscaledE + kTileBytes;                         // [kRowSlots]
  enum Sum { kQueryDot, kReadDot, kWriteDot, kKappa, kUpdateDot, kOutputDot, kSumCount };
  static constexpr int kSums = kVectors + kRowStages * kVectorsBytes;              // [kRowSlots], by row
  static constexpr int kProducts = kSums + kRowStages * kSumCount * kVectorBytes;  // [kRowSlots] of <G, S> by warp
  static constexpr int kUnitStages = 2;
  static constexpr int kUnits = kProducts + kRowStages * 2 * 4;
  static constexpr int kUnitBytes = 32;
  static constexpr int kBarriers = kUnits + kUnitStages * kUnitBytes;
  static constexpr int kBytes = kBarriers + 2 * 8 * (kUnitStages + 2 * kRowStages + 5);
  static constexpr int kAllocated = kBytes + kTileAlign;
};
static_assert(GradientSmem::kAllocated <= kMaxSharedBytes);

}  // namespace gatedelta::cuda
