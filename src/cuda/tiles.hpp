// Shared-memory tiles and register fragments, as plain constexpr arithmetic: the kernels use it on the device, the tests
// prove it on the host.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define GD_HOST_DEVICE __host__ __device__
#else
#define GD_HOST_DEVICE
#endif

namespace gatedelta::cuda {

// A tile is rows of 128 bytes (64 elements of 16 bits), 1024-byte aligned, with the 128-byte swizzle of TMA and wgmma:
// the 16-byte chunk index is XORed with the row's lowest three bits.
constexpr int kTileRowBytes = 128;
constexpr int kTileColumns = 64;

GD_HOST_DEVICE constexpr uint32_t swizzled(uint32_t byte_offset) {
  return byte_offset ^ ((byte_offset >> 3) & 0x70);
}
GD_HOST_DEVICE constexpr uint32_t tile_offset(int row, int column) {
  return swizzled(static_cast<uint32_t>(row * kTileRowBytes + column * 2));
}

// wgmma matrix descriptors. The upper word is the same for every operand here: 1024 bytes between groups of eight rows,
// 128-byte swizzle. The lower word is the address in units of 16 bytes; the leading offset in its upper half only counts
// for operands wider than one tile in the contiguous direction, which none here is.
constexpr uint32_t kDescriptorHigh = (1024 >> 4) | (1u << 30);
GD_HOST_DEVICE constexpr uint32_t descriptor_low(uint32_t address) { return (address >> 4) | (1u << 16); }
// Steps of 16 along the contracted dimension, in descriptor units.
constexpr uint32_t kStepContiguous = 32 >> 4;     // contracted dimension runs inside the rows
constexpr uint32_t kStepRows = (16 * 128) >> 4;  // contracted dimension runs over the rows ("transposed" operand)

// A 64 x n accumulator: lane's (row, column) of element i, within the warp's 16 rows.
struct Place {
  int row, column;
};
GD_HOST_DEVICE constexpr Place accumulator_place(int lane, int i) {
  return {(lane >> 2) + (i / 2 % 2) * 8, i / 4 * 8 + (lane & 3) * 2 + i % 2};
}

// Which row and 16-byte column a lane names to stmatrix/ldmatrix for a 16 x 16 block whose four 8 x 8 parts follow each
// other down the rows first (parts 0, 1: columns 0..7; parts 2, 3: columns 8..15).
GD_HOST_DEVICE constexpr int block_row(int lane) { return lane & 15; }
GD_HOST_DEVICE constexpr int block_column(int lane) { return (lane >> 4) * 8; }
// The same for a transposed access: parts follow each other along the columns first.
GD_HOST_DEVICE constexpr int turned_row(int lane) { return (lane & 7) + (lane >> 4) * 8; }
GD_HOST_DEVICE constexpr int turned_column(int lane) { return (lane >> 3 & 1) * 8; }

}  // namespace gatedelta::cuda
