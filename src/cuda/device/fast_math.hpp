// Division and powers of two in a few instructions, for the few threads that plan the work.
#pragma once

#include <cmath>

#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda {

// A few threads do a great deal of this arithmetic, and every instruction they fetch counts.
GD_HOST_DEVICE inline float fast_div(float a, float b) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return a * inverse;
#else
  return a / b;
#endif
}
GD_HOST_DEVICE inline float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}
GD_HOST_DEVICE inline int floor_div(int a, int b) {  // both non-negative
  const auto about = static_cast<int>(fast_div(static_cast<float>(a), static_cast<float>(b)));
  const int left = a - about * b;  // small, but it may exceed b or be negative
  const int q = about + static_cast<int>(fast_div(static_cast<float>(left), static_cast<float>(b)));
  const int rest = a - q * b;
  return q + (rest >= b) - (rest < 0);
}
GD_HOST_DEVICE inline int ceil_div(int items, int blocks) { return floor_div(items + blocks - 1, blocks); }

}  // namespace gatedelta::cuda
