// Steps, tiles in shared memory, and the layout of prepare's results: plain arithmetic that needs no CUDA.
#pragma once

#include <cstdint>

#include "cuda/device/host_device.hpp"
#include "cuda/device/sequences.hpp"

namespace gatedelta::cuda::portable {

constexpr int kStep = 32;  // tokens of a chain's step; a chunk is two steps
constexpr int kStepsPerChunk = kChunkTokens / kStep;

// ---- tiles in shared memory -----------------------------------------------------------------------------------------

// A tile has a row for each token, of 64 columns (128 bytes). The index of a 16-byte packet is XORed with the row's
// lowest three bits: ldmatrix has no bank conflicts, transposed or not.
constexpr int kTileColumns = 64;
constexpr int kTileRowBytes = 128;
GD_HOST_DEVICE constexpr uint32_t tile_offset(int row, int packet) {
  return static_cast<uint32_t>(row * kTileRowBytes + ((packet ^ (row & 7)) * kPacketBytes));
}
// A warp's own values: rows of 16 or 32 columns, which are two or four packets.
template <int kColumns>
GD_HOST_DEVICE constexpr uint32_t values_offset(int row, int packet) {
  constexpr int kPackets = kColumns / kPacketColumns;
  return static_cast<uint32_t>(row * kColumns * 2 + ((packet ^ (row / (8 / kPackets) % kPackets)) * kPacketBytes));
}
// A lower triangular matrix without its zero blocks: 16 x 16 blocks (0,0), (1,0), (1,1). A block is four 8 x 8 matrices
// of 128 bytes, by rows: one register of a fragment each.
constexpr int kMatrixBytes = 128, kBlockBytes = 4 * kMatrixBytes;
GD_HOST_DEVICE constexpr uint32_t triangle_block(int I, int J) {
  return static_cast<uint32_t>(I * (I + 1) / 2 + J) * kBlockBytes;
}

// ---- prepare's results for a step and value head --------------------------------------------------------------------

enum StepVector {
  kBeta,       // beta_i
  kReadKey,    // beta_i gamma_i r^k_i, the factor of K S
  kReadQuery,  // s gamma_i r^q_i, the factor of Q S
  kTail,       // delta_i r^k_i, the factor of U in the state's update
  kVectors
};
// For the gradients of a chunk and value head: the logarithms (base 2) of gamma, and beta.
enum ChunkVector { kLogGamma, kChunkBeta, kChunkVectors };
// Of a step and value head. gamma and delta begin with each step. Without l2norm r is 1.
struct Prepared {
  static constexpr int kTriangleBytes = 3 * kBlockBytes;
  static constexpr int kVectorBytes = kStep * 4;
  static constexpr int kN = 0;                                    // stril(Gamma o T)
  static constexpr int kP = kN + kTriangleBytes;                  // s Gamma o tril(Q K^T), Q and K normalised
  static constexpr int kVector = kP + kTriangleBytes;             // [kVectors][kStep]
  static constexpr int kEnd = kVector + kVectors * kVectorBytes;  // gamma of the step's last token
  static constexpr int kErrorFeedback = kEnd + 4;                 // 1: the step has error feedback; otherwise 0
  static constexpr int kBytes = kEnd + kPacketBytes;
  static_assert(kBytes % kPacketBytes == 0);
};

}  // namespace gatedelta::cuda::portable
