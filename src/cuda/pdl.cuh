// Programmatic dependent launch, on devices that have it.
#pragma once

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

}  // namespace gatedelta::cuda
