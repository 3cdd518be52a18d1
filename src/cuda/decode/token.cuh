// One token's update of the columns a lane holds, for keys and queries as they lie in memory (not normalised):
//   [x_k x_q] = S^T [k q],  e = v - a x_k,  o = b x_q + c e,  S <- alpha S + k (w e)^T
// where a, b, c and w hold alpha, beta, the scale, k.q and the inverse norms r_k, r_q, which are 1 without l2norm.
// NOTE: every product and sum here names its rounding. Otherwise the compiler would contract them differently in each
// kernel, and kernels that must be bitwise equal would not be.
#pragma once

#include "cuda/decode/config.hpp"
#include "cuda/device/packets.cuh"

namespace gatedelta::cuda {

// Sum over the eight lanes of a column, the same bits in each.
template <gd_state_layout kLayout>
GD_DEVICE float sum_of_lanes(float x) {
  constexpr int kFirst = kLayout == GD_STATE_VK ? 1 : kColumnGroups;
#pragma unroll
  for (int bit = kFirst; bit < kFirst * kLanesPerColumn; bit *= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}

// ---- gates ----------------------------------------------------------------------------------------------------------

constexpr float kLog2E = 1.44269504f;

// max(x, 0) + log1p(y) with y = e^-|x| <= 1, and log1p(y) = 2 artanh(z) with z = y / (2 + y) <= 1/3: no branch, and
// relative errors of a few ulp also where the result is small.
GD_DEVICE float softplus(float x) {
  const float y = expf(-fabsf(x));
  const float z = __fmul_rn(y, reciprocal_approx(__fadd_rn(2.0f, y))), s = __fmul_rn(z, z);
  float series = 1 / 13.0f;
#pragma unroll
  for (int n = 11; n >= 1; n -= 2) series = __fmaf_rn(series, s, 1.0f / static_cast<float>(n));
  return __fmaf_rn(__fadd_rn(z, z), series, fmaxf(x, 0.0f));
}
GD_DEVICE float sigmoid(float x) { return reciprocal_approx(__fadd_rn(1.0f, exp2_approx(__fmul_rn(-kLog2E, x)))); }

// The inputs of the gates of one token and head, as loaded. `in`: a Layer or OneTokenParams.
struct RawGates {
  Scalar g, beta, A_log, dt_bias;

  template <class In>
  GD_DEVICE float alpha(const In& in) const {
    float x = g.value(in.g.dtype);
    if (in.gate == GD_GATE_RAW) {
      if (in.dt_bias) x = __fadd_rn(x, dt_bias.value(in.dt_bias.dtype));
      x = -__fmul_rn(expf(A_log.value(in.A_log.dtype)), softplus(x));
    }
    return exp2_approx(__fmul_rn(kLog2E, x));  // a gate of -inf gives 0
  }
  template <class In>
  GD_DEVICE float strength(const In& in) const {
    const float x = beta.value(in.beta.dtype);
    if (in.beta_kind == GD_BETA_VALUE) return x;
    const float y = sigmoid(x);
    return in.beta_kind == GD_BETA_LOGIT ? y : __fadd_rn(y, y);
  }
};

GD_DEVICE void request_gates(RawGates& gates, const Layer& in, int64_t batch, int64_t token, int64_t head) {
  const auto load = [&](Scalar& x, const auto& rows, int64_t at) {
    x.load(element(rows.data, rows.dtype, at), rows.dtype);
  };
  load(gates.g, in.g, in.g.offset(batch, token, head));
  load(gates.beta, in.beta, in.beta.offset(batch, token, head));
  if (in.gate != GD_GATE_RAW) return;
  load(gates.A_log, in.A_log, head * in.A_log.stride);
  if (in.dt_bias) load(gates.dt_bias, in.dt_bias, head * in.dt_bias.stride);
}
GD_DEVICE void request_gates(RawGates& gates, const OneTokenParams& p, uint32_t batch, uint32_t token, uint32_t head) {
  gates.g.load(p.g.at(batch, token, head), p.g.dtype);
  gates.beta.load(p.beta.at(batch, token, head), p.beta.dtype);
  gates.A_log.load(p.A_log.at(0, 0, head), p.A_log.dtype);
  gates.dt_bias.load(p.dt_bias.at(0, 0, head), p.dt_bias.dtype);
}

// ---- sums over K ----------------------------------------------------------------------------------------------------

// k.k, q.q and k.q.
struct KeySums {
  float kk, qq, kq;

  KeySums() = default;
  // Over a lane's share.
  template <int kPerLane>
  GD_DEVICE KeySums(const float (&k)[kPerLane], const float (&q)[kPerLane], bool l2norm) : kk(0), qq(0), kq(0) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) kq = __fmaf_rn(k[i], q[i], kq);
    if (!l2norm) return;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      kk = __fmaf_rn(k[i], k[i], kk);
      qq = __fmaf_rn(q[i], q[i], qq);
    }
  }
  // Over the lanes of a column.
  template <gd_state_layout kLayout>
  GD_DEVICE void sum_lanes(bool l2norm) {
    kq = sum_of_lanes<kLayout>(kq);
    if (!l2norm) return;
    kk = sum_of_lanes<kLayout>(kk);
    qq = sum_of_lanes<kLayout>(qq);
  }
};

// alpha and the header's a, b, c, w.
struct TokenFactors {
  float alpha, a, b, c, w;

  TokenFactors() = default;
  GD_DEVICE TokenFactors(float alpha_of, float beta, const KeySums& sums, bool l2norm, float scale) : alpha(alpha_of) {
    const float r_k = l2norm ? rsqrtf(__fadd_rn(sums.kk, 1e-6f)) : 1.0f;
    const float r_q = __fmul_rn(l2norm ? rsqrtf(__fadd_rn(sums.qq, 1e-6f)) : 1.0f, scale);
    a = __fmul_rn(alpha, r_k);
    b = __fmul_rn(alpha, r_q);
    w = __fmul_rn(beta, r_k);
    c = __fmul_rn(__fmul_rn(sums.kq, r_q), w);
  }
};

// s: [kColumns][kPerLane], updated. x_k, x_q: sums over this lane's share.
template <int kColumns, int kPerLane>
GD_DEVICE void sum_states(const float (&s)[kColumns][kPerLane], const float (&k)[kPerLane], const float (&q)[kPerLane],
                          float (&x_k)[kColumns], float (&x_q)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    x_k[c] = x_q[c] = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      x_k[c] = __fmaf_rn(k[i], s[c][i], x_k[c]);
      x_q[c] = __fmaf_rn(q[i], s[c][i], x_q[c]);
    }
  }
}
// x_k, x_q: sums over K. v becomes o.
template <int kColumns, int kPerLane>
GD_DEVICE void update_states(float (&s)[kColumns][kPerLane], const float (&k)[kPerLane], const TokenFactors& f,
                             const float (&x_k)[kColumns], const float (&x_q)[kColumns], float (&v)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const float e = __fmaf_rn(-f.a, x_k[c], v[c]), write = __fmul_rn(f.w, e);
    v[c] = __fmaf_rn(f.c, e, __fmul_rn(f.b, x_q[c]));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) s[c][i] = __fmaf_rn(k[i], write, __fmul_rn(f.alpha, s[c][i]));
  }
}
template <gd_state_layout kLayout, int kColumns, int kPerLane>
GD_DEVICE void advance(float (&s)[kColumns][kPerLane], const float (&k)[kPerLane], const float (&q)[kPerLane],
                       const TokenFactors& f, float (&v)[kColumns]) {
  float x_k[kColumns], x_q[kColumns];
  sum_states(s, k, q, x_k, x_q);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    x_k[c] = sum_of_lanes<kLayout>(x_k[c]);
    x_q[c] = sum_of_lanes<kLayout>(x_q[c]);
  }
  update_states(s, k, f, x_k, x_q, v);
}

}  // namespace gatedelta::cuda
