// The gradients kernel in numbers: shared-memory plan, registers, roles and barriers.
#pragma once

#include "cuda/sm90/prepare/config.hpp"
#include "cuda/sm90/schedule/work_item.hpp"
#include "cuda/sm90/tiles.hpp"

namespace gatedelta::cuda::sm90 {

enum class GradientWarpgroup {
  kQueries,  // F, dQ
  kReads,    // E, dK^read
  kWrites,   // dK^written; adds both parts of dK
  kAux,      // its warps: see AuxWarp
};
enum AuxWarp { kLoads, kInnerProducts0, kInnerProducts1, kGates };  // inputs; <G, S>, half each; dg and dbeta
constexpr int kGradientThreads = 512;

// Registers per thread. The sum over the warpgroups must fit what the launch allocates, or setmaxnreg deadlocks.
struct GradientRegisters {
  static constexpr int kLaunch = 128, kProducts = 152, kAux = 56;
  static_assert(3 * kProducts + kAux <= 4 * kLaunch);
};

enum GradientBarrier {
  kUnitDone = 1,   // queries, reads and writes have finished a unit: Q, K, F and E may be overwritten
  kHandOver,       // half of dK^read is in F's and E's tiles, or has been read from there
  kQueriesStaged,  // dQ is in Q's tiles
  kKeysStaged,     // dK is in K's tiles
};

// Offsets, not a struct: as constants they end up in the instructions.
struct GradientSmem {
  // Tiles [64 tokens][64], two per operand unless noted.
  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + 2 * kTileBytes;
  enum Row { kUpdates, kOutputs, kValues, kRowCount };  // U, dO, dV
  static constexpr int kRowStages = 2;
  static constexpr int kRows = kKeys + 2 * kTileBytes;
  static constexpr int kStates = kRows + kRowStages * kRowCount * 2 * kTileBytes;  // S^T, see tiles.hpp
  static constexpr int kGradients = kStates + kStateTileBytes;                     // G^T likewise
  static constexpr int kF = kGradients + kStateTileBytes;                          // one tile
  static constexpr int kE = kF + kTileBytes;                                       // one tile
  static constexpr int kUnscaledE = kE + kTileBytes;        // one tile: E without the beta still to be applied
  static constexpr int kVectors = kUnscaledE + kTileBytes;  // [kRowStages]
  enum Sum { kQueryDot, kReadDot, kWriteDot, kKappa, kUpdateDot, kOutputDot, kSumCount };
  static constexpr int kSums = kVectors + kRowStages * kVectorsBytes;              // [kRowStages], by row
  static constexpr int kProducts = kSums + kRowStages * kSumCount * kVectorBytes;  // [kRowStages] of <G, S> by warp
  static constexpr int kUnitStages = 2;
  static constexpr int kUnits = kProducts + kRowStages * 2 * 4;
  static constexpr int kUnitBytes = 32;
  static constexpr int kBarriers = kUnits + kUnitStages * kUnitBytes;
  static constexpr int kBytes = kBarriers + 2 * 8 * (kUnitStages + 2 * kRowStages + 5);
  static constexpr int kAllocated = kBytes + kTileAlign;
};
static_assert(GradientSmem::kAllocated <= kMaxSharedBytes);

}  // namespace gatedelta::cuda::sm90
