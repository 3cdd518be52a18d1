// What the prepare kernel leaves for one chunk and value head, and its launch and shared-memory plan.
#pragma once

#include "cuda/device/sequences.hpp"
#include "cuda/sm90/tiles.hpp"

namespace gatedelta::cuda::sm90 {

// Prepare's output per chunk and value head: T as a tile ready for wgmma, then vectors of 64 floats.
constexpr int kInverseBytes = kTriangleBytes;
constexpr int kVectorBytes = kChunkTokens * 4;
enum ChunkVector {
  kLogGamma,    // b_i, cumulated gate in units of log 2
  kReadKey,     // gamma_i r^k_i: what K S is scaled by
  kReadQuery,   // s gamma_i r^q_i: what Q S is scaled by
  kBeta,        // beta_j
  kBetaTail,    // beta_j e^{b_e - b_j}, e the last token of j's block of 16
  kScoreScale,  // s r^q_i: what R's rows are scaled by
  kForwardVectors,
  kKeyNorm = kForwardVectors,  // r^k_i, for a backward only
  kVectors
};
constexpr int kVectorsBytes = kVectors * kVectorBytes;
constexpr int kPreparedBytes = kInverseBytes + kForwardVectors * kVectorBytes;
constexpr int kBackwardPreparedBytes = kInverseBytes + kVectorsBytes;

constexpr int kPrepareThreads = 128;
constexpr int kPrepareBlocksPerSm = 7;
constexpr int kBlockRowsReady = 1;  // named barrier: D and M of all block rows are stored

struct PrepareSmem {
  static constexpr int kKeys = 0;  // two tiles [64 tokens][64]
  // Reuses K's tiles once K K^T is done. Two T buffers and two exchange buffers (D_I and M_IJ for I < 3, fp16)
  // alternate between heads, so that a head can start before the previous T has been stored.
  static constexpr int kInverse = 0;
  static constexpr int kExchange = kInverse + 2 * kInverseBytes;
  static constexpr int kExchangeBytes = 6 * kBlockBytes;
  static constexpr int kOffDiagonal = 3 * kBlockBytes;  // of the M_IJ in an exchange buffer
  static_assert(kExchange + 2 * kExchangeBytes <= 2 * kTileBytes);
  static constexpr int kProducts = kInverse + kInverseBytes;  // K K^T off the diagonal; overwritten by the second head
  static_assert(6 * kBlockBytes <= kInverseBytes);
  static constexpr int kDiagonals =
      kKeys + 2 * kTileBytes;  // per warp, of two heads: two 8 x 8 of D, then of D beta, fp16
  static constexpr int kDiagonalBytes = 2 * 8 * 8 * 2, kScaled = 2 * kDiagonalBytes,
                       kDiagonalsBytes = 4 * kDiagonalBytes;
  static constexpr int kTriangles =
      kDiagonals + 4 * kDiagonalsBytes;  // per warp: two 8 x 8 of K K^T below the diagonal, fp32
  static constexpr int kBelowBytes = 28 * 4;
  static constexpr int kNorms = kTriangles + 8 * kBelowBytes;  // r^k, r^q
  static constexpr int kLengths = kNorms + 2 * kVectorBytes;   // |k|^2, of the normalised keys with l2norm
  static constexpr int kBarrier = kLengths + kVectorBytes;
  static constexpr int kGates = kBarrier + 16;  // [group] of log2 of the decay, then [group] of beta
  static constexpr int allocated(int group) { return kGates + 2 * group * kVectorBytes + kTileAlign; }
};

}  // namespace gatedelta::cuda::sm90
