// One channel of the convolution: a window of inputs, and what a new one makes of it.
// NOTE: every product and sum of an output names its rounding, so all kernels give an output the same bits.
#pragma once

#include "cuda/decode/numbers.cuh"

namespace gatedelta::cuda {

// Within a few units in the last place of fp32; 0 for large negative z.
GD_DEVICE float conv_sigmoid(float z) { return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-z))); }

template <int kTaps>
struct Filter {
  float weight[kTaps], bias;

  // The sum before the activation, of the window (oldest first) and the newest input.
  GD_DEVICE float sum(const float (&window)[kTaps - 1], float x) const {
    float z = bias;
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) z = __fmaf_rn(weight[i], window[i], z);
    return __fmaf_rn(weight[kTaps - 1], x, z);
  }
  GD_DEVICE static float activate(float z, bool silu) { return silu ? __fmul_rn(z, conv_sigmoid(z)) : z; }
  GD_DEVICE static void push(float (&window)[kTaps - 1], float x) {
#pragma unroll
    for (int i = 0; i + 2 < kTaps; ++i) window[i] = window[i + 1];
    window[kTaps - 2] = x;
  }
  // The output of input x, which enters the window.
  GD_DEVICE float step(float (&window)[kTaps - 1], float x, bool silu) const {
    const float y = activate(sum(window, x), silu);
    push(window, x);
    return y;
  }
  // Gradient of the sum, from that of the output.
  GD_DEVICE static float sum_gradient(float z, float dy, bool silu) {
    if (!silu) return dy;
    const float s = conv_sigmoid(z);
    return dy * (s + z * s * (1.0f - s));
  }
};

}  // namespace gatedelta::cuda
