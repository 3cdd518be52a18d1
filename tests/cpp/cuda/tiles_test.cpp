// Shared-memory tiles and register fragments against the PTX ISA.
#include "cuda/sm90/tiles.hpp"

#include <gtest/gtest.h>

#include <set>

namespace gatedelta::cuda::sm90 {
namespace {

constexpr int kLanes = 32, kRows = 128;  // the tallest operand is X^T, two tiles

// Where register r of lane `lane` lies within its 8 x 8 matrix (ldmatrix, stmatrix and mma alike): row lane / 4, two
// neighbours from column 2 (lane % 4).
constexpr Place in_matrix(int lane, int j) { return {lane / 4, lane % 4 * 2 + j}; }

TEST(Tiles, SwizzleIsAnInvolutionWithinRows) {
  for (uint32_t at = 0; at < kRows * kTileRowBytes; ++at) {
    EXPECT_EQ(swizzled(swizzled(at)), at);
    EXPECT_EQ(swizzled(at) / kTileRowBytes, at / kTileRowBytes);
    EXPECT_EQ(swizzled(at) % 16, at % 16);  // 16-byte chunks move as a whole
  }
}

TEST(Tiles, SwizzleIsThatOfTma) {  // 128-byte mode: chunk c of row r is at chunk c ^ (r % 8)
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk)
      EXPECT_EQ(tile_offset(row, chunk * 8), static_cast<uint32_t>(row * 128 + (chunk ^ row % 8) * 16));
  }
}

TEST(Tiles, EightRowsOfAMatrixAreInEightDifferentBanks) {
  for (int row = 0; row < kRows; row += 8) {
    for (int column = 0; column < kTileColumns; column += 8) {
      std::set<uint32_t> chunks;
      for (int i = 0; i < 8; ++i) chunks.insert(tile_offset(row + i, column) / 16 % 8);  // of the 32 banks of 4 bytes
      EXPECT_EQ(chunks.size(), 8u);
    }
  }
}

TEST(Tiles, StepsOfABlockRowAreExclusiveOrs) {  // how the kernels step along a row, and down the rows
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int row = 0; row < kRows; row += 16) {
      const int own = row + block_row(lane), column = block_column(lane);
      for (int J = 0; J < 4; ++J) EXPECT_EQ(tile_offset(own, column) ^ (J * 32), tile_offset(own, column + 16 * J));
    }
    for (int column = 0; column < kTileColumns; column += 16) {
      const int row = transposed_row(lane), own = column + transposed_column(lane);
      for (int n = 0; n < 8; ++n) EXPECT_EQ(tile_offset(row, own) + n * 1024, tile_offset(row + 8 * n, own));
    }
  }
}

// PTX ISA, wgmma.mma_async with .m64nNk16, accumulator D: T0 holds d0, d1 in row 0, columns 0, 1; d2, d3 in row 8; d4,
// d5 in row 0, columns 8, 9; a warp has 16 rows.
TEST(Fragments, Accumulator) {
  static_assert(accumulator_place(0, 0).row == 0 && accumulator_place(0, 0).column == 0);
  static_assert(accumulator_place(0, 1).row == 0 && accumulator_place(0, 1).column == 1);
  static_assert(accumulator_place(0, 2).row == 8 && accumulator_place(0, 2).column == 0);
  static_assert(accumulator_place(0, 4).row == 0 && accumulator_place(0, 4).column == 8);
  static_assert(accumulator_place(1, 0).row == 0 && accumulator_place(1, 0).column == 2);
  static_assert(accumulator_place(4, 0).row == 1 && accumulator_place(4, 0).column == 0);
  static_assert(accumulator_place(31, 7).row == 15 && accumulator_place(31, 7).column == 15);
  static_assert(accumulator_place(31, 63).row == 15 && accumulator_place(31, 63).column == 127);
  for (const int n : {16, 32, 48, 64, 128}) {
    std::set<int> places;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < n / 2; ++i) {
        const Place place = accumulator_place(lane, i);
        EXPECT_TRUE(place.row >= 0 && place.row < 16 && place.column >= 0 && place.column < n);
        places.insert(place.row * n + place.column);
      }
    }
    EXPECT_EQ(places.size(), static_cast<size_t>(16 * n));
  }
}

// ldmatrix/stmatrix .x4: lanes 8 m .. 8 m + 7 name the rows of matrix m, whose elements are in register m. A 16 x 16
// block of an accumulator, packed in pairs, must land where it came from.
TEST(Fragments, BlocksAreStoredWhereTheyBelong) {
  for (int m = 0; m < 4; ++m) {
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(block_row(8 * m + i), block_row(8 * m) + i);
      EXPECT_EQ(block_column(8 * m + i), block_column(8 * m));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int j = 0; j < 2; ++j) {
        const Place from = accumulator_place(lane, 2 * m + j), in = in_matrix(lane, j);
        EXPECT_EQ(from.row, block_row(8 * m) + in.row);
        EXPECT_EQ(from.column, block_column(8 * m) + in.column);
      }
    }
  }
}

// With .trans a lane holds element [column][row] of the stored matrix: rows of memory are columns of the fragment.
TEST(Fragments, BlocksLoadedWithTransAreTransposed) {
  for (int m = 0; m < 4; ++m) {
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(transposed_row(8 * m + i), transposed_row(8 * m) + i);
      EXPECT_EQ(transposed_column(8 * m + i), transposed_column(8 * m));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int j = 0; j < 2; ++j) {
        const Place of = accumulator_place(lane, 2 * m + j), in = in_matrix(lane, j);
        EXPECT_EQ(of.column, transposed_row(8 * m) + in.column);
        EXPECT_EQ(of.row, transposed_column(8 * m) + in.row);
      }
    }
  }
}

// PTX ISA, matrix descriptor: address >> 4 in bits 0-13, leading offset >> 4 in 16-29, stride offset >> 4 in 32-45,
// swizzle in 62-63 with 1 = 128 bytes, 3 = 32 bytes.
TEST(Descriptors, Fields) {
  constexpr uint32_t kAddress = 0x1f000;
  static_assert((tile_descriptor_low(kAddress) & 0x3fff) == kAddress >> 4);
  static_assert((kTileDescriptorHigh & 0x3fff) << 4 == 8 * kTileRowBytes);
  static_assert(kTileDescriptorHigh >> 30 == 1);
  static_assert(kStepContiguous << 4 == 16 * 2 && kStepRows << 4 == 16 * kTileRowBytes);
  static_assert((triangle_descriptor_low(kAddress) & 0x3fff) == kAddress >> 4);
  static_assert((triangle_descriptor_low(kAddress) >> 16) << 4 == kBlockBytes);  // to the next 16 columns
  static_assert((kTriangleDescriptorHigh & 0x3fff) << 4 == kBlockBytes / 2);     // to the next 8 rows
  static_assert(kTriangleDescriptorHigh >> 30 == 3);
}

// A warp stores a packed state register by register, which gives the layout that wgmma reads: core matrices of 8 x 8
// elements, 128 bytes apart along the value columns and 256 along the key dimensions, as the descriptor says.
TEST(States, RegistersAreCoreMatrices) {
  EXPECT_EQ(state_descriptor_low(0x4000), (0x4000u >> 4) | (128u >> 4) << 16);
  EXPECT_EQ(kStateDescriptorHigh, 256u >> 4);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 64; ++i) {  // of a 64 x 128 accumulator
      const Place at = accumulator_place(lane, i);
      const int stored = i / 2 * 128 + lane * 4 + i % 2 * 2;
      EXPECT_EQ(stored, at.column / 8 * 256 + at.row / 8 * 128 + at.row % 8 * 16 + at.column % 8 * 2);
      EXPECT_LT(stored, kStateStepBytes);
    }
  }
}

TEST(Triangles, EveryElementHasItsPlace) {
  std::set<uint32_t> places;
  for (int row = 0; row < 64; ++row)
    for (int column = 0; column < (row / 16 + 1) * 16; ++column)
      places.insert(triangle_block(row / 16, column / 16) + block_offset(row % 16, column % 16));
  EXPECT_EQ(places.size(), kTriangleBytes / 2u);
  EXPECT_EQ(*places.rbegin(), kTriangleBytes - 2u);
}

TEST(Triangles, SwizzleIsThatOf32ByteRows) {  // bit 4 of an address is XORed with bit 7
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 16; ++column) {
      const uint32_t plain = row * 32 + column * 2;
      EXPECT_EQ(block_offset(row, column), plain ^ (plain >> 3 & 0x10));
    }
}

TEST(Triangles, EightRowsOfAMatrixAreInEightDifferentBanks) {
  for (int row = 0; row < 16; row += 8)
    for (int column = 0; column < 16; column += 8) {
      std::set<uint32_t> chunks;
      for (int i = 0; i < 8; ++i) chunks.insert(block_offset(row + i, column) / 16 % 8);
      EXPECT_EQ(chunks.size(), 8u);
    }
}

}  // namespace
}  // namespace gatedelta::cuda::sm90
