// bf16 products on Arm with BFMMLA: 2 x 2 += (2 x 4) * (2 x 4)^T (see engine_f32.hpp for the idea).
//   A form: row pairs, then groups of 4 columns:  [M / 2][K / 4][2][4]
//   B form: column pairs, then groups of 4 rows:  [32 / 2][K / 4][2][4]
#pragma once

#include <arm_neon.h>

#include "cpu/engine_f32.hpp"

namespace gatedelta::cpu::GD_ISA {

struct NeonBf16Engine {
  using Elem = uint16_t;
  static constexpr bool kExact = false;
  static constexpr int kTriangleRows = 8;
  static constexpr bool kTwinForms = true;
  struct Session {};

  static constexpr int64_t a_size(int m, int k) { return int64_t{m} * k; }
  static constexpr int64_t b_size(int k) { return int64_t{k} * kPanel; }

  static GD_ALWAYS_INLINE void put4(uint16_t* dst, float32x4_t x) {
    vst1_u16(dst, vreinterpret_u16_bf16(vcvt_bf16_f32(x)));
  }
  // Two rows, rounded or truncated.
  static GD_ALWAYS_INLINE uint16x8_t round_rows(float32x4_t a, float32x4_t b) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b));
  }
  static GD_ALWAYS_INLINE uint16x8_t truncate_rows(float32x4_t a, float32x4_t b) {
    return vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b));
  }

  static GD_ALWAYS_INLINE void store_a_row(uint16_t* GD_RESTRICT a, int k, int m, const float* GD_RESTRICT row) {
    uint16_t* dst = a + int64_t{m / 2} * k * 2 + (m % 2) * 4;
    for (int kk = 0; kk < k; kk += 4, dst += 8) put4(dst, vld1q_f32(row + kk));
  }

  // Columns [column, column + width) of a whole A form [rows x k], from src [rows][width].
  static GD_ALWAYS_INLINE void store_a_columns(uint16_t* GD_RESTRICT a, int k, int rows, int column, int width,
                                               const float* GD_RESTRICT src, int ld) {
    for (int m = 0; m < rows; m += 2) {
      const float *even = src + int64_t{m} * ld, *odd = even + ld;
      uint16_t* dst = a + int64_t{m} * k + column * 2;
      for (int j = 0; j < width; j += 4, dst += 8) vst1q_u16(dst, round_rows(vld1q_f32(even + j), vld1q_f32(odd + j)));
    }
  }

  // Rows [row, row + 4) of columns [n, n + 4), given as rows 0 and 1, rows 2 and 3.
  static GD_ALWAYS_INLINE void store_block(uint16_t* b, int k, int row, int n, uint16x8_t r01, uint16x8_t r23) {
    const uint16x8_t even = vzip1q_u16(r01, r23), odd = vzip2q_u16(r01, r23);
    uint16_t* first = b + int64_t{n / 2} * k * 2 + int64_t{row / 4} * 8;
    vst1q_u16(first, vzip1q_u16(even, odd));
    vst1q_u16(first + int64_t{k} * 2, vzip2q_u16(even, odd));  // the next pair of columns
  }

  static GD_ALWAYS_INLINE void store_b(uint16_t* GD_RESTRICT b, int k, int k0, int rows, const float* GD_RESTRICT src,
                                       int ld) {
    for (int r = 0; r < rows; r += 4)
      for (int n = 0; n < kPanel; n += 4) {
        const float* p = src + r * ld + n;
        store_block(b, k, k0 + r, n, round_rows(vld1q_f32(p), vld1q_f32(p + ld)),
                    round_rows(vld1q_f32(p + 2 * ld), vld1q_f32(p + 3 * ld)));
      }
  }

  // A form [k x rows] of the transpose, from A form [rows x k].
  static GD_ALWAYS_INLINE void transpose_a(uint16_t* GD_RESTRICT dst, const uint16_t* GD_RESTRICT src, int rows,
                                           int k) {
    for (int r = 0; r < rows; r += 4)
      for (int n = 0; n < k; n += 4) {
        const uint16_t* p = src + int64_t{r} * k + n * 2;
        store_block(dst, rows, r, n, vld1q_u16(p), vld1q_u16(p + int64_t{k} * 2));
      }
  }

  // A row that is bf16 already.
  static GD_ALWAYS_INLINE void copy_a_row(uint16_t* GD_RESTRICT a, int k, int m, const uint16_t* GD_RESTRICT row) {
    uint16_t* dst = a + int64_t{m / 2} * k * 2 + (m % 2) * 4;
    for (int kk = 0; kk < k; kk += 8, dst += 16) {
      const uint16x8_t x = vld1q_u16(row + kk);
      vst1_u16(dst, vget_low_u16(x));
      vst1_u16(dst + 8, vget_high_u16(x));
    }
  }

  // scale_r src_r as high + low, rows of src [rows][32]. The high part is truncated, so that it is exact; the low part
  // is rounded by an addition, because a conversion takes longer.
  static GD_ALWAYS_INLINE void store_b_hi_lo(uint16_t* GD_RESTRICT high, uint16_t* GD_RESTRICT low, int k, int rows,
                                             const float* GD_RESTRICT src, const float* GD_RESTRICT scale) {
    const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
    for (int r = 0; r < rows; r += 4)
      for (int n = 0; n < kPanel; n += 4) {
        float32x4_t x[4], h[4];
        for (int i = 0; i < 4; ++i) {
          x[i] = vmulq_n_f32(vld1q_f32(src + (r + i) * kPanel + n), scale[r + i]);
          h[i] = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x[i]), upper));
          x[i] = vsubq_f32(x[i], h[i]);
          x[i] = vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x[i]), vdupq_n_u32(0x8000u)));
        }
        store_block(high, k, r, n, truncate_rows(h[0], h[1]), truncate_rows(h[2], h[3]));
        store_block(low, k, r, n, truncate_rows(x[0], x[1]), truncate_rows(x[2], x[3]));
      }
  }

  static GD_ALWAYS_INLINE bfloat16x8_t get8(const uint16_t* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

  template <bool kAccumulate = false, int count>
  static void multiply(const Term<uint16_t> (&terms)[count], int k, int m0, int m1, int k0, int k1, float* c, int ldc,
                       int columns = kPanel) {
    for (int m = m0; m < m1; m += 8)
      for (int n = 0; n < columns; n += 8) {
        float32x4_t acc[4][4];  // 2 x 2 blocks
        for (int i = 0; i < 4; ++i)
          for (int j = 0; j < 4; ++j) {
            const float* p = c + int64_t{m + 2 * i} * ldc + n + 2 * j;
            acc[i][j] = kAccumulate ? vcombine_f32(vld1_f32(p), vld1_f32(p + ldc)) : vdupq_n_f32(0);
          }
        for (const Term<uint16_t>& term : terms) {
          const uint16_t* left = term.a + int64_t{m / 2} * k * 2;
          const uint16_t* right = term.b + int64_t{n / 2} * k * 2;
          for (int kk = k0 * 2; kk < k1 * 2; kk += 8) {
            bfloat16x8_t x[4], y[4];
            for (int i = 0; i < 4; ++i) x[i] = get8(left + int64_t{i} * k * 2 + kk);
            for (int j = 0; j < 4; ++j) y[j] = get8(right + int64_t{j} * k * 2 + kk);
            for (int i = 0; i < 4; ++i)
              for (int j = 0; j < 4; ++j) acc[i][j] = vbfmmlaq_f32(acc[i][j], x[i], y[j]);
          }
        }
        for (int i = 0; i < 4; ++i)
          for (int j = 0; j < 4; j += 2) {
            float* p = c + int64_t{m + 2 * i} * ldc + n + 2 * j;
            vst1q_f32(p, vcombine_f32(vget_low_f32(acc[i][j]), vget_low_f32(acc[i][j + 1])));
            vst1q_f32(p + ldc, vcombine_f32(vget_high_f32(acc[i][j]), vget_high_f32(acc[i][j + 1])));
          }
      }
  }
};

}  // namespace gatedelta::cpu::GD_ISA
