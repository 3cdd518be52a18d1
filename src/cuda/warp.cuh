// Sums over the lanes of a warp.
#pragma once

#include <cuda_runtime.h>

namespace gatedelta::cuda {

// Sum of x over this lane and the lanes below it.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += before;
  }
  return x;
}
// The same from the other end: this lane and the lanes above it.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum_from_end(T x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T after = __shfl_down_sync(~0u, x, step);
    if (lane + step < 32) x += after;
  }
  return x;
}

}  // namespace gatedelta::cuda
