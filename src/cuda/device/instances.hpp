// What kernels are compiled for: number formats and head sizes. Plain types, because tests compile the portable kernels
// without CUDA's headers.
#pragma once

#include <type_traits>

#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda {

struct Bf16 {};
struct Fp16 {};

// Key sizes that the portable kernels are compiled for. A smaller K is padded with zeros inside the kernel.
GD_HOST_DEVICE constexpr int compiled_keys(int key_dim) { return key_dim <= 64 ? 64 : key_dim <= 128 ? 128 : 256; }
// Calls run(keys) with the compiled key size of key_dim as a compile-time constant.
template <class Run>
auto with_compiled_keys(int key_dim, const Run& run) {
  switch (compiled_keys(key_dim)) {
    case 64: return run(std::integral_constant<int, 64>{});
    case 128: return run(std::integral_constant<int, 128>{});
    default: return run(std::integral_constant<int, 256>{});
  }
}

constexpr int kPacketBytes = 16, kPacketColumns = 8;  // the widest access to memory, and its 16-bit numbers

}  // namespace gatedelta::cuda
