// Exact decoding and round-to-nearest-even encoding of the storage types, and element access to a gd_tensor.
// Kept apart from the library's own conversions on purpose: the truth shares no code with what it judges.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gatedelta/gatedelta.h"

namespace gatedelta::testing {

inline double decode_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline double decode_f16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

inline uint16_t encode_bf16(double value) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t encode_f16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (magnitude >= 65520) return sign | 0x7c00;  // half way to the first value that is not there
  if (magnitude < 0x1p-25) return sign;
  const int exponent = std::max(std::ilogb(magnitude), -14);
  // Quantised to 2^(exponent-10); a carry into the next binade gives the right bits by itself.
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<uint16_t>(sign | (units + (static_cast<uint32_t>(exponent + 14) << 10)));
}

inline int64_t element_bytes(int32_t dtype) {
  return dtype == GD_I64 ? 8 : dtype == GD_F32 || dtype == GD_I32 ? 4 : dtype == GD_BF16 || dtype == GD_F16 ? 2 : 0;
}

inline double load(const void* data, int32_t dtype, int64_t index) {
  switch (dtype) {
    case GD_F32: return static_cast<const float*>(data)[index];
    case GD_BF16: return decode_bf16(static_cast<const uint16_t*>(data)[index]);
    case GD_F16: return decode_f16(static_cast<const uint16_t*>(data)[index]);
    case GD_I32: return static_cast<const int32_t*>(data)[index];
    case GD_I64: return static_cast<double>(static_cast<const int64_t*>(data)[index]);
    default: return std::nan("");
  }
}

inline void store(void* data, int32_t dtype, int64_t index, double value) {
  switch (dtype) {
    case GD_F32: static_cast<float*>(data)[index] = static_cast<float>(value); break;
    case GD_BF16: static_cast<uint16_t*>(data)[index] = encode_bf16(value); break;
    case GD_F16: static_cast<uint16_t*>(data)[index] = encode_f16(value); break;
    case GD_I32: static_cast<int32_t*>(data)[index] = static_cast<int32_t>(value); break;
    case GD_I64: static_cast<int64_t*>(data)[index] = static_cast<int64_t>(value); break;
    default: break;
  }
}

inline int64_t element_count(const gd_tensor& t) {
  if (t.dtype == GD_DTYPE_NONE) return 0;
  int64_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[i];
  return count;
}

// Calls visit(offset in elements, logical index) for every element, last axis fastest.
template <class Visit>
void for_each_element(const gd_tensor& t, Visit&& visit) {
  const int64_t count = element_count(t);
  int64_t position[GD_MAX_RANK] = {}, offset = 0;
  for (int64_t i = 0; i < count; ++i) {
    visit(offset, i);
    for (int axis = t.rank - 1; axis >= 0; --axis) {
      offset += t.stride[axis];
      if (++position[axis] < t.shape[axis]) break;
      offset -= t.shape[axis] * t.stride[axis];
      position[axis] = 0;
    }
  }
}

// The tensor as contiguous doubles.
inline std::vector<double> to_doubles(const gd_tensor& t) {
  std::vector<double> values(static_cast<size_t>(element_count(t)));
  for_each_element(t, [&](int64_t offset, int64_t i) { values[i] = load(t.data, t.dtype, offset); });
  return values;
}

}  // namespace gatedelta::testing
