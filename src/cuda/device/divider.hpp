// Division by a number the host knows.
#pragma once

#include <cstdint>

#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda {

// One multiplication on the device. For numerators below 2^31.
struct Divider {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  Divider() = default;
  explicit Divider(uint32_t by) : divisor(by) {
    while ((uint64_t{1} << shift) < by) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - by) << 32) / by) + 1;
  }
  GD_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return (static_cast<uint32_t>(uint64_t{n} * multiplier >> 32) + n) >> shift;
  }
  GD_HOST_DEVICE uint32_t remainder(uint32_t n, uint32_t quotient) const { return n - quotient * divisor; }
};

}  // namespace gatedelta::cuda
