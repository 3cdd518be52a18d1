// Shared-memory tiles and register fragments, as plain constexpr arithmetic: the kernels use it on the device, the
// tests prove it on the host.
#pragma once

#include <cstdint>

#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda::sm90 {

constexpr int kHeadDim = 128;  // K = V

// A tile is rows of 128 bytes (64 elements of 16 bits), 1024-byte aligned, with the 128-byte swizzle of TMA and wgmma:
// the 16-byte chunk index is XORed with the row's lowest three bits.
constexpr int kTileRowBytes = 128;
constexpr int kTileColumns = 64;
constexpr int kTileBytes = 64 * kTileRowBytes;
constexpr int kTileAlign = 1024;
GD_HOST_DEVICE constexpr uint32_t tile_aligned(uint32_t address) {
  return (address + kTileAlign - 1) & ~uint32_t{kTileAlign - 1};
}
constexpr int kMaxSharedBytes = 232448;  // shared memory of a CTA on Hopper

GD_HOST_DEVICE constexpr uint32_t swizzled(uint32_t byte_offset) { return byte_offset ^ ((byte_offset >> 3) & 0x70); }
GD_HOST_DEVICE constexpr uint32_t tile_offset(int row, int column) {
  return swizzled(static_cast<uint32_t>(row * kTileRowBytes + column * 2));
}

// A lower triangular 64 x 64 matrix without its zero blocks: ten blocks of 16 x 16, block row after block row. A block
// is two groups of eight rows of 32 bytes, with the 32-byte swizzle: the upper four rows of a group swap their halves.
constexpr int kBlockBytes = 512;
constexpr int kTriangleBytes = 10 * kBlockBytes;
GD_HOST_DEVICE constexpr uint32_t triangle_block(int I, int J) {
  return static_cast<uint32_t>(I * (I + 1) / 2 + J) * kBlockBytes;
}
// Within a block; column is 0 or 8 (a 16-byte half) or inside one.
GD_HOST_DEVICE constexpr uint32_t block_offset(int row, int column) {
  return static_cast<uint32_t>(row * 32 + (((column >> 3) ^ (row >> 2)) & 1) * 16 + (column & 7) * 2);
}

// wgmma matrix descriptors: address and leading offset in the lower word, stride offset and swizzle in the upper one,
// all in units of 16 bytes. Tiles: 1024 bytes between groups of eight rows, 128-byte swizzle; the leading offset only
// counts for operands wider than one tile in the contiguous direction: from one tile to the next. Triangles: 256 bytes
// between groups of eight rows, 512 between blocks of 16 columns, 32-byte swizzle.
constexpr uint32_t kTileDescriptorHigh = (1024 >> 4) | (1u << 30);
constexpr uint32_t kTriangleDescriptorHigh = (256 >> 4) | (3u << 30);
GD_HOST_DEVICE constexpr uint32_t tile_descriptor_low(uint32_t address) { return (address >> 4) | (1u << 16); }
GD_HOST_DEVICE constexpr uint32_t wide_descriptor_low(uint32_t address) {
  return (address >> 4) | ((kTileBytes >> 4) << 16);
}
GD_HOST_DEVICE constexpr uint32_t triangle_descriptor_low(uint32_t address) {
  return (address >> 4) | ((kBlockBytes >> 4) << 16);
}
// A state snapshot as the backward stores it: the registers of a packed accumulator, one after the other, each a core
// matrix of eight value columns by eight key dimensions. Two groups of eight value columns follow each other, then the
// next eight key dimensions: 16 x 128 elements of a warp are 4096 bytes. No swizzle.
constexpr int kStateStepBytes = 4096;
constexpr uint32_t kStateDescriptorHigh = 256 >> 4;
GD_HOST_DEVICE constexpr uint32_t state_descriptor_low(uint32_t address) { return (address >> 4) | ((128 >> 4) << 16); }
// Steps of 16 along the contracted dimension of a tile, in descriptor units.
constexpr uint32_t kStepContiguous = 32 >> 4;    // contracted dimension runs inside the rows
constexpr uint32_t kStepRows = (16 * 128) >> 4;  // contracted dimension runs over the rows (transposed operand)
constexpr uint32_t kStepTile = kTileBytes >> 4;  // from a tile to the next one

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
GD_HOST_DEVICE constexpr int transposed_row(int lane) { return (lane & 7) + (lane >> 4) * 8; }
GD_HOST_DEVICE constexpr int transposed_column(int lane) { return (lane >> 3 & 1) * 8; }

}  // namespace gatedelta::cuda::sm90
