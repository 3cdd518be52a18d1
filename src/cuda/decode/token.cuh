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

// What the gate from raw `a` has of a head.
struct HeadGate {
  Scalar A_log, dt_bias;

  GD_DEVICE void load(const Layer& in, int head) {
    if (in.gate != GD_GATE_RAW) return;
    A_log.load(in.A_log.data, in.A_log.dtype, head * in.A_log.stride);
    if (in.dt_bias) dt_bias.load(in.dt_bias.data, in.dt_bias.dtype, head * in.dt_bias.stride);
  }
  // e^g. A gate of -inf gives 0.
  GD_DEVICE float decay(const Layer& in, float g) const {
    if (in.gate == GD_GATE_RAW) {
      if (in.dt_bias) g = __fadd_rn(g, dt_bias.value());
      g = -__fmul_rn(expf(A_log.value()), softplus(g));
    }
    return expf(g);
  }
};

GD_DEVICE float write_strength(const Layer& in, float x) {
  if (in.beta_kind == GD_BETA_VALUE) return x;
  const float y = sigmoid(x);
  return in.beta_kind == GD_BETA_LOGIT ? y : __fmul_rn(2.0f, y);
}

// A token's numbers on their way from memory: this lane's share of k and q, and its columns of v.
template <class Config>
struct RawToken {
  static constexpr int kVectors = Config::kPerLane / Config::kVector;
  Raw<Config::kVector> k[kVectors], q[kVectors];
  Raw<Config::kColumns> v;
  Scalar g, beta;

  // `share` is the lane's index among the eight of a column, `column` its first column. `dtype` is that of q, k and v.
  GD_DEVICE void load(const Layer& in, gd_dtype dtype, int64_t batch, int64_t token, int head, int key_head, int share,
                      int column, int key_dim, bool aligned) {
    const char* const k_row = element(in.k.data, dtype, in.k.offset(batch, token, key_head));
    const char* const q_row = element(in.q.data, dtype, in.q.offset(batch, token, key_head));
    with_load(dtype, aligned, [&](gd_dtype type, bool whole) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int begin = (i * kLanesPerColumn + share) * Config::kVector;
        if (begin < key_dim) {
          k[i].load(element(k_row, type, begin), type, whole);
          q[i].load(element(q_row, type, begin), type, whole);
        } else {
          k[i].clear();
          q[i].clear();
        }
      }
    });
    v.load(element(in.v.data, dtype, in.v.offset(batch, token, head) + column), dtype, aligned);
    g.load(in.g.data, in.g.dtype, in.g.offset(batch, token, head));
    beta.load(in.beta.data, in.beta.dtype, in.beta.offset(batch, token, head));
  }
};

template <class Config>
struct Token {
  static constexpr int kPerLane = Config::kPerLane, kColumns = Config::kColumns;

  float k[kPerLane], q[kPerLane];  // 0 past K
  float v[kColumns];
  float alpha, beta, kq;

  GD_DEVICE Token(const RawToken<Config>& raw, const Layer& in, gd_dtype dtype, const HeadGate& gate) {
    with_dtype(dtype, [&](gd_dtype type) {
#pragma unroll
      for (int i = 0; i < RawToken<Config>::kVectors; ++i) {
        raw.k[i].widen(k + i * Config::kVector, type);
        raw.q[i].widen(q + i * Config::kVector, type);
      }
      raw.v.widen(v, type);
    });
    alpha = gate.decay(in, raw.g.value());
    beta = write_strength(in, raw.beta.value());
    if (in.l2norm) {
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
