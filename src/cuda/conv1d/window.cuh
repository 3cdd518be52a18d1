// One channel of the convolution: its filter, and the output of a window of inputs.
// NOTE: every product and sum of an output names its rounding, so all kernels give an output the same bits.
#pragma once

#include "core/conv1d.hpp"
#include "cuda/device/packets.cuh"

namespace gatedelta::cuda {

// Within a few units in the last place of fp32; 0 for large negative z.
GD_DEVICE float conv_sigmoid(float z) {
  constexpr float kLog2OfE = 1.4426950408889634f;
  return reciprocal_approx(__fadd_rn(1.0f, exp2_approx(__fmul_rn(-kLog2OfE, z))));
}
GD_DEVICE float conv_activate(float z, bool silu) { return silu ? __fmul_rn(z, conv_sigmoid(z)) : z; }

// Gradient of the sum before the activation, from the gradient of the output.
GD_DEVICE float conv_sum_gradient(float z, float dy, bool silu) {
  if (!silu) return dy;
  const float s = conv_sigmoid(z);
  return dy * s * fmaf(z, 1.0f - s, 1.0f);
}

// kMaxTaps taps. A filter of fewer lacks the first `skip` of them: their inputs are not used and may be NaN.
struct Filter {
  float weight[kMaxTaps], bias;

  // The sum before the activation, of the window and the newest input, oldest first.
  GD_DEVICE float sum(float x0, float x1, float x2, float x3, int skip = 0) const {
    float z = bias;
    if (skip < 1) z = __fmaf_rn(weight[0], x0, z);
    if (skip < 2) z = __fmaf_rn(weight[1], x1, z);
    z = __fmaf_rn(weight[2], x2, z);
    return __fmaf_rn(weight[3], x3, z);
  }
};

}  // namespace gatedelta::cuda
