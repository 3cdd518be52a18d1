// One row of the gated norm in the registers of kLanes neighbouring lanes:
//   r = (mean x^2 + eps)^-1/2,  n = r x,  a = w n,  y = a act(z)
// Lanes hold zeros past the end of the row.
#pragma once

#include "cuda/device/packets.cuh"
#include "cuda/gated_norm/config.hpp"

namespace gatedelta::cuda {

// The smaller number, NaN if either is.
GD_DEVICE float min_or_nan(float x, float y) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(x), "f"(y));
  return smaller;
}

// Sum over the lanes of a row, the same bits in each.
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

// The types that n and a are rounded to before the gate; GD_F32 = no rounding.
struct NormRounding {
  gd_dtype n = GD_F32, a = GD_F32;

  NormRounding() = default;
  GD_DEVICE explicit NormRounding(const GatedNorm& in)
      : n(in.round_before_gate ? in.x.dtype : GD_F32), a(in.product_dtype()) {}
};
// a = w n, with n rounded first.
template <int kCount>
GD_DEVICE void apply_weight(float (&a)[kCount], float (&n)[kCount], const float (&w)[kCount], NormRounding rounding) {
  round_to(n, rounding.n);
#pragma unroll
  for (int i = 0; i < kCount; ++i) a[i] = n[i] * w[i];
  round_to(a, rounding.a);
}

// act(z), and its derivative. With e = exp(-z), 1 - sigmoid(z) is e / (1 + e): nothing cancels. e is bounded, so the
// result is finite for every z; NaN stays NaN.
struct NormGate {
  float value, slope;
};
GD_DEVICE NormGate norm_gate(float z, bool sigmoid_alone) {
  constexpr float kLog2E = 1.44269504f, kMaxExp = 0x1p125f;
  const float e = min_or_nan(exp2_approx(-kLog2E * z), kMaxExp), sigmoid = reciprocal_approx(1.0f + e);
  const float rest = e * sigmoid;
  if (sigmoid_alone) return {sigmoid, sigmoid * rest};
  const float value = z * sigmoid;
  return {value, sigmoid + value * rest};
}

// x becomes y.
template <int kLanes, int kCount>
GD_DEVICE void gated_norm_row(float (&x)[kCount], const float (&z)[kCount], const float (&w)[kCount], bool has_gate,
                              bool sigmoid, NormRounding rounding, float inverse_dim, float eps) {
  const float r = inverse_rms<kLanes>(x, inverse_dim, eps);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= r;
  apply_weight(x, x, w, rounding);
  if (!has_gate) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= norm_gate(z[i], sigmoid).value;
}
template <int kLanes, int kCount>
GD_DEVICE void gated_norm_row(float (&x)[kCount], const float (&z)[kCount], const float (&w)[kCount],
                              const GatedNorm& in, float inverse_dim) {
  gated_norm_row<kLanes>(x, z, w, static_cast<bool>(in.z), in.activation == GD_NORM_SIGMOID, NormRounding(in),
                         inverse_dim, in.eps);
}

// A lane's numbers of a row, as loaded.
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
