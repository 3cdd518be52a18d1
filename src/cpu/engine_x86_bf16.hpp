// bf16 products on x86: AVX512-BF16 dot products and AMX tiles share one packing (see engine_f32.hpp for the idea).
//   A form: tiles of 16 rows x 32 columns, row-major inside, 1 KiB each
//   B form: tiles of 32 rows x 16 columns, consecutive row pairs interleaved, 1 KiB each
#pragma once

#include <immintrin.h>

#include "cpu/engine_f32.hpp"

namespace gatedelta::cpu::GD_ISA {

constexpr int kTile = 512;  // elements of a tile

struct X86Bf16Packing {
  using Elem = uint16_t;
  static constexpr bool kExact = false;
  static constexpr int kTriangleRows = 32;
  static constexpr bool kTwinForms = false;

  static constexpr int64_t a_size(int m, int k) { return int64_t{m} * k; }
  static constexpr int64_t b_size(int k) { return int64_t{k} * kPanel; }

  static GD_ALWAYS_INLINE void store_a_row(uint16_t* GD_RESTRICT a, int k, int m, const float* GD_RESTRICT row) {
    uint16_t* dst = a + int64_t{m / 16} * (k / 32) * kTile + (m % 16) * 32;
    for (int kk = 0; kk < k; kk += 32, dst += kTile) {
      const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + kk + 16), _mm512_loadu_ps(row + kk));
      _mm512_storeu_si512(dst, reinterpret_cast<__m512i>(pair));
    }
  }

  static GD_ALWAYS_INLINE void store_b(uint16_t* GD_RESTRICT b, int /*k*/, int k0, int rows,
                                       const float* GD_RESTRICT src, int ld) {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int r = 0; r < rows; r += 2) {
      uint16_t* dst = b + int64_t{(k0 + r) / 32} * 2 * kTile + ((k0 + r) % 32) * 16;
      const float *even = src + r * ld, *odd = even + ld;
      for (int n = 0; n < kPanel; n += 16, dst += kTile) {
        const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(odd + n), _mm512_loadu_ps(even + n));
        _mm512_storeu_si512(dst, _mm512_permutexvar_epi16(interleave, reinterpret_cast<__m512i>(pair)));
      }
    }
  }

  // A row that is bf16 already.
  static GD_ALWAYS_INLINE void copy_a_row(uint16_t* GD_RESTRICT a, int k, int m, const uint16_t* GD_RESTRICT row) {
    uint16_t* dst = a + int64_t{m / 16} * (k / 32) * kTile + (m % 16) * 32;
    for (int kk = 0; kk < k; kk += 32, dst += kTile) _mm512_storeu_si512(dst, _mm512_loadu_si512(row + kk));
  }

  // scale_r src_r as high + low, rows of src [rows][32]. Both are truncated, not rounded: they lie in the upper half of
  // a float, where interleaving two rows is a shift and a merge.
  static GD_ALWAYS_INLINE void store_b_hi_lo(uint16_t* GD_RESTRICT high, uint16_t* GD_RESTRICT low, int /*k*/, int rows,
                                             const float* GD_RESTRICT src, const float* GD_RESTRICT scale) {
    constexpr uint32_t kUpper = 0xffff0000u, kHalf = 0x8000u;
    const auto bits = [](Vec x) { return reinterpret_cast<WordVec>(x); };
    const auto merge = [](uint16_t* dst, WordVec even, WordVec odd) {
      const WordVec pairs = (even >> 16) | (odd & kUpper);
      std::memcpy(dst, &pairs, sizeof pairs);
    };
    for (int r = 0; r < rows; r += 2) {
      const int64_t at = int64_t{r / 32} * 2 * kTile + (r % 32) * 16;
      for (int n = 0; n < kPanel; n += 16) {
        const Vec even = scale[r] * load(src + r * kPanel + n), odd = scale[r + 1] * load(src + (r + 1) * kPanel + n);
        const Vec even_rest = even - reinterpret_cast<Vec>(bits(even) & kUpper);
        const Vec odd_rest = odd - reinterpret_cast<Vec>(bits(odd) & kUpper);
        const int64_t tile = at + n / 16 * kTile;
        merge(high + tile, bits(even), bits(odd));
        merge(low + tile, bits(even_rest) + kHalf, bits(odd_rest) + kHalf);
      }
    }
  }
};

struct Avx512Bf16Engine : X86Bf16Packing {
  struct Session {};

  template <bool kAccumulate = false, int n>
  static void multiply(const Term<uint16_t> (&terms)[n], int k, int m0, int m1, int k0, int k1, float* c, int ldc) {
    constexpr int kRows = 8;
    for (int m = m0; m < m1; m += kRows) {
      __m512 acc[kRows][2];
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < 2; ++j)
          acc[i][j] = kAccumulate ? _mm512_loadu_ps(c + (m + i) * ldc + 16 * j) : _mm512_setzero_ps();
      for (const Term<uint16_t>& term : terms)
        for (int kk = k0; kk < k1; kk += 32) {
          const uint16_t* left = term.a + (int64_t{m / 16} * (k / 32) + kk / 32) * kTile + (m % 16) * 32;
          const uint16_t* right = term.b + int64_t{kk / 32} * 2 * kTile;
          for (int p = 0; p < 16; ++p) {  // row pairs
            const __m512bh b0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(right + p * 32));
            const __m512bh b1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(right + kTile + p * 32));
            for (int i = 0; i < kRows; ++i) {
              int32_t pair;
              std::memcpy(&pair, left + i * 32 + p * 2, sizeof pair);
              const __m512bh x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
              acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, b0);
              acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, b1);
            }
          }
        }
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < 2; ++j) _mm512_storeu_ps(c + (m + i) * ldc + 16 * j, acc[i][j]);
    }
  }
};

#ifdef GD_AMX
struct AmxEngine : X86Bf16Packing {
  // All eight tile registers as 16 rows of 64 bytes. Released at the end: idle tile state costs every context switch.
  struct Session {
    Session() {
      struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } config;
      asm volatile("" : : "r"(&config) : "memory");
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // 32 x 32 blocks: four accumulator tiles (0..3), two A tiles (4, 5), two B tiles (6, 7).
  template <bool kAccumulate = false, int n>
  static __attribute__((noinline)) void multiply(const Term<uint16_t> (&terms)[n], int k, int m0, int m1, int k0,
                                                 int k1, float* c, int ldc) {
    asm volatile("" ::: "memory");  // the tile intrinsics of GCC 12 do not say that they read memory
    const int64_t c_stride = int64_t{ldc} * 4, a_step = int64_t{k / 32} * kTile;
    for (int m = m0; m < m1; m += 32) {
      float *top = c + int64_t{m} * ldc, *bottom = top + 16 * int64_t{ldc};
      if constexpr (kAccumulate) {
        _tile_loadd(0, top, c_stride);
        _tile_loadd(1, top + 16, c_stride);
        _tile_loadd(2, bottom, c_stride);
        _tile_loadd(3, bottom + 16, c_stride);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (const Term<uint16_t>& term : terms) {
        const uint16_t* left = term.a + (m / 16) * a_step + int64_t{k0 / 32} * kTile;
        const uint16_t* right = term.b + int64_t{k0 / 32} * 2 * kTile;
        for (int kk = k0; kk < k1; kk += 32, left += kTile, right += 2 * kTile) {
          _tile_loadd(4, left, 64);
          _tile_loadd(6, right, 64);
          _tile_loadd(7, right + kTile, 64);
          _tile_loadd(5, left + a_step, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, top, c_stride);
      _tile_stored(1, top + 16, c_stride);
      _tile_stored(2, bottom, c_stride);
      _tile_stored(3, bottom + 16, c_stride);
    }
    asm volatile("" ::: "memory");
  }
};
#endif

}  // namespace gatedelta::cpu::GD_ISA
