// Gates and betas from the numbers in memory, and the factors of their gradients.
#pragma once

#include "cuda/device/numbers.cuh"

namespace gatedelta::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowestGate = -128.0f;  // e^g is 0 in fp32 from here on, and -inf would make differences NaN

// NOTE: fmaxf would turn a NaN gate into the lowest one, and a poisoned input into a clean result.
GD_DEVICE float clamp_gate(float g) { return g < kLowestGate ? kLowestGate : g; }
GD_DEVICE float softplus_of(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
GD_DEVICE float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }
GD_DEVICE float softplus_slope(float x) { return x > 20.0f ? 1.0f : sigmoid_of(x); }

struct LoadNumber {
  GD_DEVICE float operator()(const HeadVector& from, int head) const {
    return load_number(from.data, from.dtype, head * from.stride);
  }
};
// g in memory -> the logarithm of alpha. `Params`: those of any kernel family.
template <class Params, class Load = LoadNumber>
GD_DEVICE float gate_of(const Params& p, float g, int head, const Load& load = {}) {
  if (p.gate == GD_GATE_RAW) {
    if (p.dt_bias) g += load(p.dt_bias, head);
    g = -expf(load(p.A_log, head)) * softplus_of(g);
  }
  return clamp_gate(g);
}
template <class Params>
GD_DEVICE float beta_of(const Params& p, float x) {
  if (p.beta_kind == GD_BETA_VALUE) return x;
  const float y = sigmoid_of(x);
  return p.beta_kind == GD_BETA_LOGIT ? y : 2.0f * y;
}

// A head's factors of raw gates; log gates use none of them.
struct RawGate {
  float decay, bias;  // -exp(A_log), dt_bias

  template <class Params>
  GD_DEVICE RawGate(const Params& p, int head) : decay(0), bias(0) {
    if (p.gate != GD_GATE_RAW) return;
    decay = -expf(LoadNumber{}(p.A_log, head));
    if (p.dt_bias) bias = LoadNumber{}(p.dt_bias, head);
  }
  // x: g in memory plus bias.
  GD_DEVICE float value(float x) const { return decay * softplus_of(x); }
  GD_DEVICE float slope(float x) const { return decay * softplus_slope(x); }
};

// The gradient of beta in memory, from that of beta's value.
template <class Params>
GD_DEVICE float beta_gradient(const Params& p, float beta, float gradient) {
  if (p.beta_kind == GD_BETA_LOGIT) gradient *= beta * (1.0f - beta);
  if (p.beta_kind == GD_BETA_LOGIT_DOUBLED) gradient *= beta * (1.0f - 0.5f * beta);
  return gradient;
}

}  // namespace gatedelta::cuda
