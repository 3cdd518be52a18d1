// Programmatic dependent launch, on devices that have it.
#pragma once

#include <cstdint>

#include "cuda/device/pdl.hpp"

namespace gatedelta::cuda {

// The next kernel's CTAs may start where there is room.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Everything the previous kernel wrote is visible from here on, and nothing of it still runs.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Begins a kernel that was launched with PDL. Its arguments, cold lines of constant memory, are read while the previous
// kernel ends; nothing else may be.
template <class Params>
__device__ __forceinline__ void begin_with_pdl(const Params& p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kLine = 64;
  const auto* const words = reinterpret_cast<const uint32_t*>(&p);
#pragma unroll
  for (int at = 0; at < static_cast<int>(sizeof(Params)); at += kLine) asm volatile("" ::"r"(words[at / 4]));
  wait_for_previous_kernel();
#endif
}

}  // namespace gatedelta::cuda
