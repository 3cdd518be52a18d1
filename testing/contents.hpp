// Shared by the files of the generator: its random numbers by tensor.
#pragma once

#include <cstdint>
#include <functional>

#include "testing/number.hpp"

namespace gatedelta::testing {

// Streams of the random numbers: one per tensor.
enum Stream : uint64_t { sQ, sK, sV, sG, sBeta, sA, sBias, sH0, sDo, sDht, sCommon, sLength, sSlots, sOffsets };
uint64_t bits_at(uint64_t seed, uint64_t stream, uint64_t index);

inline constexpr char kPoison = static_cast<char>(0xff);  // NaN in every float type, negative in every integer type

inline void fill(const gd_tensor& t, const std::function<double(int64_t)>& value) {
  for_each_element(t, [&](int64_t offset, int64_t i) { store(t.data, t.dtype, offset, value(i)); });
}

}  // namespace gatedelta::testing
