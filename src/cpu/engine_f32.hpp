// Products of packed tiles in fp32, for every ISA: C [M x 32] (+)= sum of A [M x K] * B [K x 32].
//
// An engine fixes how an operand lies in memory ("A form" for the left, "B form" for the right) and multiplies:
//   A form of [M x K]  rows are stored one at a time by store_a_row
//   B form of [K x 32] one panel of 32 columns, stored by store_b four rows at a time
// K and M are multiples of 32. Sums are fp32.
#pragma once

#include "cpu/simd.hpp"

namespace gatedelta::cpu::GD_ISA {

constexpr int kPanel = 32;  // columns of a B panel and of every product

template <class Elem>
struct Term {
  const Elem *a, *b;
};

struct F32Engine {
  using Elem = float;
  static constexpr bool kExact = true;       // operands keep all bits of fp32
  static constexpr int kTriangleRows = 8;    // rows of a triangular operand that end at the same column
  static constexpr bool kTwinForms = false;  // whether the B form of X is the A form of X^T
  // Rows x vectors of the register block; 16 vectors of accumulators where the ISA has 32 registers.
  static constexpr int kRows = GD_F32_BLOCK_ROWS, kVectors = 2;

  struct Session {};  // nothing to set up per thread

  static constexpr int64_t a_size(int m, int k) { return int64_t{m} * k; }
  static constexpr int64_t b_size(int k) { return int64_t{k} * kPanel; }

  static GD_ALWAYS_INLINE void store_a_row(float* GD_RESTRICT a, int k, int m, const float* GD_RESTRICT row) {
    std::memcpy(a + int64_t{m} * k, row, sizeof(float) * k);
  }

  // Rows [k0, k0 + rows) of the panel from src [rows][32], leading dimension ld. rows is a multiple of 4.
  static GD_ALWAYS_INLINE void store_b(float* GD_RESTRICT b, int /*k*/, int k0, int rows, const float* GD_RESTRICT src,
                                       int ld) {
    for (int r = 0; r < rows; ++r) std::memcpy(b + (k0 + r) * kPanel, src + r * ld, sizeof(float) * kPanel);
  }

  // Rows [m0, m1) of C, contracting over [k0, k1); c points at row 0. Only the first columns are needed.
  template <bool kAccumulate = false, int n>
  static void multiply(const Term<float> (&terms)[n], int k, int m0, int m1, int k0, int k1, float* c, int ldc,
                       int columns = kPanel) {
    for (int m = m0; m < m1; m += kRows)
      for (int column = 0; column < columns; column += kVectors * kVector) {
        Vec acc[kRows][kVectors];
        for (int i = 0; i < kRows; ++i)
          for (int j = 0; j < kVectors; ++j)
            acc[i][j] = kAccumulate ? load(c + (m + i) * ldc + column + j * kVector) : Vec{};
        for (const Term<float>& term : terms)
          for (int kk = k0; kk < k1; ++kk) {
            Vec right[kVectors];
            for (int j = 0; j < kVectors; ++j) right[j] = load(term.b + kk * kPanel + column + j * kVector);
            for (int i = 0; i < kRows; ++i) {
              const float left = term.a[int64_t{m + i} * k + kk];
              for (int j = 0; j < kVectors; ++j) acc[i][j] += left * right[j];
            }
          }
        for (int i = 0; i < kRows; ++i)
          for (int j = 0; j < kVectors; ++j) store(c + (m + i) * ldc + column + j * kVector, acc[i][j]);
      }
  }
};

}  // namespace gatedelta::cpu::GD_ISA
