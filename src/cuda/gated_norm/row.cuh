// One row of the gated norm in the registers of kLanes neighbouring lanes:
//   r = (mean x^2 + eps)^-1/2,  n = r x,  a = w n,  y = a act(z)
// Lanes hold zeros past the end of the row.
#pragma once

#include "cuda/decode/numbers.cuh"
#include "cuda/gated_norm/config.hpp"

namespace gatedelta::cuda {

// Sum over the lanes of a row. All of them get the same bits.
template <int kLanes>
GD_DEVICE float sum_of_row(float x) {
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}

template <int kLanes, int kCount>
GD_DEVICE float inverse_rms(const float (&x)[kCount], float inverse_dim, float eps) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) squares += x[i] * x[i];
  return rsqrtf(sum_of_row<kLanes>(squares) * inverse_dim + eps);
}

template <int kCount>
GD_DEVICE void round_to(float (&x)[kCount], gd_dtype dtype) {
  if (dtype == GD_BF16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __bfloat162float(__float2bfloat16_rn(x[i]));
  } else if (dtype == GD_F16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __half2float(__float2half_rn(x[i]));
  }
}

// a = w n with the roundings before the gate. n becomes what the weight multiplies.
template <int kCount>
GD_DEVICE void apply_weight(float (&a)[kCount], float (&n)[kCount], const float (&w)[kCount], const GatedNorm& in) {
  if (in.round_before_gate) round_to(n, in.x.dtype);
#pragma unroll
  for (int i = 0; i < kCount; ++i) a[i] = n[i] * w[i];
  if (in.round_before_gate) round_to(a, in.product_dtype());
}

// act(z), and its derivative. e <= 1: no z is too large, and 1 - sigmoid(z) has no cancellation.
struct NormGate {
  float value, slope;
};
GD_DEVICE NormGate norm_gate(float z, gd_norm_activation activation) {
  const float e = __expf(-fabsf(z)), q = __fdividef(1.0f, 1.0f + e);
  const float sigmoid = z < 0 ? e * q : q, rest = z < 0 ? q : e * q;
  if (activation == GD_NORM_SIGMOID) return {sigmoid, sigmoid * rest};
  return {z * sigmoid, sigmoid + z * sigmoid * rest};
}

// x becomes y.
template <int kLanes, int kCount>
GD_DEVICE void gated_norm_row(float (&x)[kCount], const float (&z)[kCount], const float (&w)[kCount],
                              const GatedNorm& in, float inverse_dim) {
  const float r = inverse_rms<kLanes>(x, inverse_dim, in.eps);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= r;
  apply_weight(x, x, w, in);
  if (!in.z) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= norm_gate(z[i], in.activation).value;
}

// A lane's numbers of a row on their way from memory.
template <class Config>
struct RawNumbers {
  Raw<kNormVector> chunks[Config::kChunks];

  GD_DEVICE static int begin(int chunk, int lane) { return (chunk * Config::kLanes + lane) * kNormVector; }

  GD_DEVICE void load(const char* row, gd_dtype dtype, bool aligned, int lane, int dim) {
    with_load(dtype, aligned, [&](gd_dtype type, bool whole) {
#pragma unroll
      for (int c = 0; c < Config::kChunks; ++c) {
        chunks[c].clear();
        if (begin(c, lane) < dim) chunks[c].load(element(row, type, begin(c, lane)), type, whole);
      }
    });
  }
  GD_DEVICE void widen(float (&x)[Config::kNumbers], gd_dtype dtype) const {
    with_dtype(dtype, [&](gd_dtype type) {
#pragma unroll
      for (int c = 0; c < Config::kChunks; ++c) chunks[c].widen(x + c * kNormVector, type);
    });
  }
};

template <class Config>
GD_DEVICE void store_row(char* row, gd_dtype dtype, const float (&x)[Config::kNumbers], bool aligned, int lane,
                         int dim) {
  with_dtype(dtype, [&](gd_dtype type) {
#pragma unroll
    for (int c = 0; c < Config::kChunks; ++c) {
      const int begin = RawNumbers<Config>::begin(c, lane);
      if (begin >= dim) continue;
      store_numbers<kNormVector>(const_cast<char*>(element(row, type, begin)), type, x + c * kNormVector, aligned);
    }
  });
}

}  // namespace gatedelta::cuda
