// Sums over the lanes of a warp.
#pragma once

#include "cuda/device/ptx.cuh"

namespace gatedelta::cuda {

// Sum of x over this lane and the lanes below it.
template <class T>
GD_DEVICE T warp_inclusive_sum(T x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T before = shuffle_up(x, step);
    if (lane >= step) x += before;
  }
  return x;
}
// The same from the other end: this lane and the lanes above it.
template <class T>
GD_DEVICE T warp_inclusive_sum_from_end(T x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T after = shuffle_down(x, step);
    if (lane + step < 32) x += after;
  }
  return x;
}

}  // namespace gatedelta::cuda
