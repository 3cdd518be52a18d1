// bf16 and fp16 as bit patterns, with defined rounding (nearest, ties to even). Branch-free, so loops over them
// vectorise.
#pragma once

#include <bit>
#include <cstdint>

#include "core/problem.hpp"

namespace gatedelta::cpu {

GD_ALWAYS_INLINE float bf16_to_f32(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

GD_ALWAYS_INLINE uint16_t f32_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

GD_ALWAYS_INLINE float f16_to_f32(uint16_t x) {
  const uint32_t magnitude = (x & 0x7fffu) << 13;
  // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalises subnormals on the way.
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u | magnitude : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(special | (static_cast<uint32_t>(x & 0x8000u) << 16));
}

GD_ALWAYS_INLINE uint16_t f32_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebias and round by integer arithmetic; a carry into the exponent is the right answer.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 puts the last bit of the result at the float's last bit, so the hardware rounds.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // rounds past the largest finite fp16
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

}  // namespace gatedelta::cpu
