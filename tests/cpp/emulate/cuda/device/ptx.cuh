// The instructions of src/cuda/device/ptx.cuh on a CPU. The test's include path has this folder first, so the
// kernels' own text is compiled with these instead.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cuda/device/instances.hpp"
#include "testing/number.hpp"
#include "tests/cpp/emulate/cta.hpp"

#define GD_DEVICE inline

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

namespace gatedelta::cuda {

namespace emulated = ::gatedelta::testing::emulated;
using std::min;

// ---- numbers -------------------------------------------------------------------------------------------------------

template <class Elem>
float widen(uint16_t x) {
  if constexpr (std::is_same_v<Elem, Bf16>) return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
  static const std::vector<float> table = [] {
    std::vector<float> all(1 << 16);
    for (uint32_t i = 0; i < all.size(); ++i)
      all[i] = static_cast<float>(testing::decode_f16(static_cast<uint16_t>(i)));
    return all;
  }();
  return table[x];
}
template <class Elem>
uint16_t narrow(float x) {
  return std::is_same_v<Elem, Bf16> ? testing::encode_bf16(x) : testing::encode_f16(x);
}
template <class Elem>
uint32_t pack(float first, float second) {
  return narrow<Elem>(first) | static_cast<uint32_t>(narrow<Elem>(second)) << 16;
}
template <class Elem>
float2 unpack(uint32_t x) {
  return {widen<Elem>(static_cast<uint16_t>(x)), widen<Elem>(static_cast<uint16_t>(x >> 16))};
}
inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline float power_of_two_below(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7f800000u); }

// ---- shared memory -------------------------------------------------------------------------------------------------

inline uint32_t shared_base() { return 0; }
template <class T>
T load_from(uint32_t from) {
  T x;
  std::memcpy(&x, emulated::shared_memory(from, sizeof x), sizeof x);
  return x;
}
template <class T>
void store_to(uint32_t to, const T& x) {
  std::memcpy(emulated::shared_memory(to, sizeof x), &x, sizeof x);
}
inline float load_shared(uint32_t from) { return load_from<float>(from); }
inline float2 load_shared2(uint32_t from) { return load_from<float2>(from); }
inline float4 load_shared4(uint32_t from) { return load_from<float4>(from); }
inline uint4 load_shared_words(uint32_t from) { return load_from<uint4>(from); }
inline uint32_t load_shared_word(uint32_t from) { return load_from<uint32_t>(from); }
inline void store_shared_word(uint32_t to, uint32_t x) { store_to(to, x); }
inline void store_shared(uint32_t to, float x) { store_to(to, x); }
inline void store_shared4(uint32_t to, float a, float b, float c, float d) { store_to(to, float4{a, b, c, d}); }
inline void store_shared_words(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_to(to, uint4{a, b, c, d});
}

inline void copy_async(uint32_t to, const void* from, bool valid) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulated::fail("misaligned source of cp.async");
  const emulated::Copy copy{to, valid ? from : nullptr};
  if (emulated::copies_are_eager()) return emulated::perform(copy);
  emulated::thread(emulated::current_thread()).open.push_back(copy);
}
inline void copy_commit() {
  emulated::Thread& own = emulated::thread(emulated::current_thread());
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}
template <int kPending>
void copy_wait() {
  auto& groups = emulated::thread(emulated::current_thread()).groups;
  while (groups.size() > kPending) {
    for (const emulated::Copy& copy : groups.front()) emulated::perform(copy);
    groups.erase(groups.begin());
  }
}

// ---- what a warp does together: every lane brings its operands in its slots, the last one to come works for all
// ------

inline uint32_t* own_slots() { return emulated::thread(emulated::current_thread()).slots; }
inline uint32_t& slot_of(int thread, int i) { return emulated::thread(thread).slots[i]; }

template <bool kTransposed>
void load_matrices_either(uint32_t (&x)[4], uint32_t from) {
  own_slots()[0] = from;
  emulated::shared_memory(from, 16);
  emulated::meet_warp([](int first) {
    for (int m = 0; m < 4; ++m)
      for (int lane = 0; lane < 32; ++lane) {
        uint16_t two[2];
        for (int i = 0; i < 2; ++i) {
          const int row = kTransposed ? lane % 4 * 2 + i : lane / 4, column = kTransposed ? lane / 4 : lane % 4 * 2 + i;
          std::memcpy(&two[i], emulated::shared_memory(slot_of(first + 8 * m + row, 0), 16) + column * 2, 2);
        }
        slot_of(first + lane, 1 + m) = two[0] | static_cast<uint32_t>(two[1]) << 16;
      }
  });
  std::copy(own_slots() + 1, own_slots() + 5, x);
}
inline void load_matrices(uint32_t (&x)[4], uint32_t from) { load_matrices_either<false>(x, from); }
inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t from) { load_matrices_either<true>(x, from); }

inline uint32_t transposed(uint32_t x) {
  own_slots()[0] = x;
  emulated::meet_warp([](int first) {
    for (int lane = 0; lane < 32; ++lane) {
      uint32_t y = 0;
      for (int i = 0; i < 2; ++i) {
        const int row = lane % 4 * 2 + i, column = lane / 4;  // of what comes in
        y |= (slot_of(first + row * 4 + column / 2, 0) >> (16 * (column % 2)) & 0xffff) << (16 * i);
      }
      slot_of(first + lane, 1) = y;
    }
  });
  return own_slots()[1];
}

template <class Elem>
void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  uint32_t* const own = own_slots();
  own[0] = a0, own[1] = a1, own[2] = a2, own[3] = a3, own[4] = b0, own[5] = b1;
  std::memcpy(own + 6, c, sizeof c);
  emulated::meet_warp([](int first) {
    double A[16][16], B[8][16], C[16][8] = {};
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 2; ++i) {
        const auto half = [&](int slot) {
          return widen<Elem>(static_cast<uint16_t>(slot_of(first + lane, slot) >> (16 * i)));
        };
        const int row = lane / 4, column = lane % 4 * 2 + i;
        A[row][column] = half(0), A[row + 8][column] = half(1);
        A[row][column + 8] = half(2), A[row + 8][column + 8] = half(3);
        B[row][column] = half(4), B[row][column + 8] = half(5);
      }
    for (int r = 0; r < 16; ++r)
      for (int n = 0; n < 8; ++n)
        for (int k = 0; k < 16; ++k) C[r][n] += A[r][k] * B[n][k];
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        uint32_t& sum = slot_of(first + lane, 6 + i);
        sum = std::bit_cast<uint32_t>(
            static_cast<float>(std::bit_cast<float>(sum) + C[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]));
      }
  });
  std::memcpy(c, own + 6, sizeof c);
}
template <class Elem>
void mma_first(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  std::fill(c, c + 4, 0.0f);
  mma<Elem>(c, a0, a1, a2, a3, b0, b1);
}

// ---- threads -------------------------------------------------------------------------------------------------------

inline int opaque(int x) { return x; }
inline void sync_cta() { emulated::meet_cta(); }
inline void sync_warp() {
  emulated::meet_warp([](int) {});
}
inline uint32_t shuffle_bits(uint32_t x, int lane) {
  own_slots()[0] = x;
  own_slots()[1] = static_cast<uint32_t>(lane & 31);
  emulated::meet_warp([](int first) {
    for (int i = 0; i < 32; ++i) slot_of(first + i, 2) = slot_of(first + static_cast<int>(slot_of(first + i, 1)), 0);
  });
  return own_slots()[2];
}
inline int own_lane() { return emulated::current_thread() % 32; }
inline int shuffle(int x, int lane) { return static_cast<int>(shuffle_bits(static_cast<uint32_t>(x), lane)); }
inline float shuffle(float x, int lane) { return std::bit_cast<float>(shuffle_bits(std::bit_cast<uint32_t>(x), lane)); }
inline int shuffle_up(int x, int by) { return shuffle(x, own_lane() < by ? own_lane() : own_lane() - by); }
inline float shuffle_up(float x, int by) { return shuffle(x, own_lane() < by ? own_lane() : own_lane() - by); }
inline float shuffle_xor(float x, int mask) { return shuffle(x, own_lane() ^ mask); }
inline uint32_t shuffle_xor(uint32_t x, int mask) { return shuffle_bits(x, own_lane() ^ mask); }
inline int count_lanes(bool yes) {
  own_slots()[0] = yes;
  emulated::meet_warp([](int first) {
    uint32_t count = 0;
    for (int i = 0; i < 32; ++i) count += slot_of(first + i, 0);
    for (int i = 0; i < 32; ++i) slot_of(first + i, 1) = count;
  });
  return static_cast<int>(own_slots()[1]);
}

}  // namespace gatedelta::cuda
