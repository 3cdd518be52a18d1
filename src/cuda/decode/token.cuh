// One token's update of the columns a lane holds:
//   [x_k x_q] = S^T [k q],  e = v - alpha x_k,  o = s (alpha x_q + beta (k.q) e),  S <- alpha S + beta k e^T
// NOTE: every product and sum here names its rounding. The compiler would contract them as each kernel's surroundings
// suggest, and kernels that must agree in every bit would not.
#pragma once

#include "cuda/decode/config.hpp"
#include "cuda/decode/numbers.cuh"

namespace gatedelta::cuda {

// Sum over the eight lanes of a column. All of them get the same bits.
template <gd_state_layout kLayout>
GD_DEVICE float sum_of_lanes(float x) {
  constexpr int kFirst = kLayout == GD_STATE_VK ? 1 : kColumnGroups;
#pragma unroll
  for (int bit = kFirst; bit < kFirst * kLanesPerColumn; bit *= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}

GD_DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
GD_DEVICE float sigmoid(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

// e^g. A gate of -inf gives 0.
GD_DEVICE float decay_of(const Layer& in, int64_t batch, int64_t token, int head) {
  float g = load_number(in.g.data, in.g.dtype, in.g.offset(batch, token, head));
  if (in.gate == GD_GATE_RAW) {
    if (in.dt_bias) g = __fadd_rn(g, load_number(in.dt_bias.data, in.dt_bias.dtype, head * in.dt_bias.stride));
    const float rate = expf(load_number(in.A_log.data, in.A_log.dtype, head * in.A_log.stride));
    g = -__fmul_rn(rate, softplus(g));
  }
  return expf(g);
}

GD_DEVICE float write_strength_of(const Layer& in, int64_t batch, int64_t token, int head) {
  const float x = load_number(in.beta.data, in.beta.dtype, in.beta.offset(batch, token, head));
  if (in.beta_kind == GD_BETA_VALUE) return x;
  const float y = sigmoid(x);
  return in.beta_kind == GD_BETA_LOGIT ? y : __fmul_rn(2.0f, y);
}

template <class Config>
struct Token {
  static constexpr int kPerLane = Config::kPerLane, kColumns = Config::kColumns, kVector = Config::kVector;

  float k[kPerLane], q[kPerLane];  // this lane's share; 0 past K
  float v[kColumns];
  float alpha, beta, kq;

  // `share` is the lane's index among the eight of a column, `column` its first column.
  GD_DEVICE void load(const Layer& in, int64_t batch, int64_t token, int head, int key_head, int share, int column,
                      int key_dim, bool aligned) {
    load_row(k, in.k, in.k.offset(batch, token, key_head), share, key_dim, aligned);
    load_row(q, in.q, in.q.offset(batch, token, key_head), share, key_dim, aligned);
    with_elements(in.v.data, in.v.dtype, in.v.offset(batch, token, head) + column,
                  [&](const auto* from) { load_numbers<kColumns>(v, from, aligned); });
    alpha = decay_of(in, batch, token, head);
    beta = write_strength_of(in, batch, token, head);
  }

  GD_DEVICE void prepare(bool l2norm) {
    if (l2norm) {
      normalise(k);
      normalise(q);
    }
    kq = dot(k, q);
  }

  // s: [kColumns][kPerLane]. o: this lane's columns.
  GD_DEVICE void advance(float (&s)[kColumns][kPerLane], float scale, float (&o)[kColumns]) const {
    float x_k[kColumns], x_q[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      x_k[c] = x_q[c] = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        x_k[c] = __fmaf_rn(k[i], s[c][i], x_k[c]);
        x_q[c] = __fmaf_rn(q[i], s[c][i], x_q[c]);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      x_k[c] = sum_of_lanes<Config::kLayout>(x_k[c]);
      x_q[c] = sum_of_lanes<Config::kLayout>(x_q[c]);
    }
    const float beta_kq = __fmul_rn(beta, kq);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float e = __fmaf_rn(-alpha, x_k[c], v[c]);
      o[c] = __fmul_rn(scale, __fmaf_rn(beta_kq, e, __fmul_rn(alpha, x_q[c])));
      const float write = __fmul_rn(beta, e);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) s[c][i] = __fmaf_rn(k[i], write, __fmul_rn(alpha, s[c][i]));
    }
  }

 private:
  GD_DEVICE static void load_row(float (&x)[kPerLane], const TokenRows& rows, int64_t at, int share, int key_dim,
                                 bool aligned) {
    with_elements(rows.data, rows.dtype, at, [&](const auto* from) {
#pragma unroll
      for (int i = 0; i < kPerLane; i += kVector) {
        const int begin = i * kLanesPerColumn + share * kVector;
        if (begin < key_dim) {
          load_numbers<kVector>(x + i, from + begin, aligned);
        } else {
#pragma unroll
          for (int j = 0; j < kVector; ++j) x[i + j] = 0;
        }
      }
    });
  }
  GD_DEVICE static float dot(const float (&x)[kPerLane], const float (&y)[kPerLane]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum = __fmaf_rn(x[i], y[i], sum);
    return sum_of_lanes<Config::kLayout>(sum);
  }
  GD_DEVICE static void normalise(float (&x)[kPerLane]) {
    const float r = rsqrtf(__fadd_rn(dot(x, x), 1e-6f));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = __fmul_rn(x[i], r);
  }
};

}  // namespace gatedelta::cuda
