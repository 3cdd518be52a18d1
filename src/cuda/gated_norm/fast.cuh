// The gated norm's kernels for the calls of layers (supports_fast_norm): the arithmetic of kernels.cuh with few
// instructions around it. A backward of kernels.cuh is bound by instructions, not by memory.
#pragma once

#include "cuda/device/pdl.cuh"
#include "cuda/gated_norm/kernels.cuh"

namespace gatedelta::cuda {

// A lane's 8 numbers of a row.
template <gd_dtype kType>
struct FastNumbers {
  Raw<kNormVector> raw;

  GD_DEVICE void load(const char* row, int lane) { raw.load(row + lane * kNormVector * 2, kType, true); }
  // Zeros if not present.
  GD_DEVICE void load_if(bool present, const char* row, int lane) {
    if (present) {
      load(row, lane);
    } else {
      raw.clear();
    }
  }
  GD_DEVICE void widen(float (&x)[kNormVector]) const { raw.widen(x, kType); }
};

template <gd_dtype kType>
GD_DEVICE uint32_t narrow_pair(float x, float y) {
  uint32_t pair;
  if constexpr (kType == GD_BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  }
  return pair;
}
template <gd_dtype kType>
GD_DEVICE void store_fast(char* row, int lane, const float (&x)[kNormVector]) {
  Packet<2 * kNormVector> packet;
#pragma unroll
  for (int i = 0; i < kNormVector / 2; ++i) packet.words[i] = narrow_pair<kType>(x[2 * i], x[2 * i + 1]);
  store_packet<2 * kNormVector, false>(row + lane * kNormVector * 2, packet);
}

// The weight as loaded, of the rows' type or fp32. Each type has its own registers: two loads into one register are not
// in flight together.
template <gd_dtype kType>
struct FastWeight {
  Raw<kNormVector> wide, narrow;

  GD_DEVICE void load(const FastNormParams& p, int lane) {
    if (!p.weight) return;
    if (p.wide_weight) {
      wide.load(p.weight + lane * kNormVector * 4, GD_F32, true);
    } else {
      narrow.load(p.weight + lane * kNormVector * 2, kType, true);
    }
  }
  GD_DEVICE void widen(float (&w)[kNormVector], const FastNormParams& p) const {
    if (p.weight) return p.wide_weight ? wide.widen(w, GD_F32) : narrow.widen(w, kType);
#pragma unroll
    for (int i = 0; i < kNormVector; ++i) w[i] = 1;
  }
};

template <gd_dtype kType>
GD_DEVICE NormRounding rounding_of(const FastNormParams& p) {
  NormRounding rounding;
  rounding.n = p.round_before_gate ? kType : GD_F32;
  rounding.a = p.round_before_gate && p.weight && !p.wide_weight ? kType : GD_F32;
  return rounding;
}

// A group of lanes has one row: a second row in flight gains nothing, and loses time with few rows. Shuffles need whole
// warps, so groups without a row repeat the last row and store nothing.
template <class Config, gd_dtype kType>
__global__ void __launch_bounds__(kNormThreads) fast_norm_kernel(const __grid_constant__ FastNormForwardParams p) {
  if (p.pdl != Pdl::kOff) begin_with_pdl(p);
  constexpr int kLanes = Config::kLanes;
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const uint32_t row = blockIdx.x * (kNormThreads / kLanes) + threadIdx.x / kLanes, valid = min(row, p.last);
  const uint32_t token = p.heads.quotient(valid), head = p.heads.remainder(valid, token);
  FastNumbers<kType> x_raw, z_raw;
  FastWeight<kType> w_raw;
  x_raw.load(p.x.at(token, head), lane);
  z_raw.load_if(p.gated, p.z.at(token, head), lane);
  w_raw.load(p, lane);
  float x[kNormVector], z[kNormVector], w[kNormVector];
  w_raw.widen(w, p);
  x_raw.widen(x);
  z_raw.widen(z);
  gated_norm_row<kLanes>(x, z, w, p.gated, p.sigmoid, rounding_of<kType>(p), p.inverse_dim, p.eps);
  if (row <= p.last) store_fast<kType>(p.y.at(token, head), lane, x);
}

// The inputs of a row in a backward. Past the last row the gradient is 0, and so is its term of dweight.
template <gd_dtype kType>
struct FastBackwardRow {
  FastNumbers<kType> x, z, d_y;

  GD_DEVICE void load(const FastNormBackwardParams& p, uint32_t row, int lane) {
    const uint32_t valid = min(row, p.last), token = p.heads.quotient(valid), head = p.heads.remainder(valid, token);
    x.load(p.x.at(token, head), lane);
    z.load_if(p.gated, p.z.at(token, head), lane);
    d_y.load_if(row <= p.last, p.d_y.at(token, head), lane);
  }
};

// On entry dn is dy. z becomes dz, dn becomes dy act(z) w, and dw accumulates. Each kind of gate has its own code: a
// branch per number would take as long as the arithmetic.
enum class GateKind { none, silu, sigmoid };
template <gd_dtype kType, bool kRounds, GateKind kGate>
GD_DEVICE void gate_gradients(const float (&n)[kNormVector], const float (&w)[kNormVector], float (&z)[kNormVector],
                              float (&dn)[kNormVector], float (&dw)[kNormVector], bool rounds_product) {
#pragma unroll
  for (int i = 0; i < kNormVector; ++i) {
    float factor[1] = {n[i]};
    if constexpr (kRounds) round_to(factor, kType);
    if constexpr (kGate != GateKind::none) {
      float a[1] = {factor[0] * w[i]};
      if (kRounds && rounds_product) round_to(a, kType);
      const NormGate gate = norm_gate(z[i], kGate == GateKind::sigmoid);
      z[i] = dn[i] * a[0] * gate.slope;
      dn[i] *= gate.value;
    }
    dw[i] += dn[i] * factor[0];
    dn[i] *= w[i];
  }
}
template <gd_dtype kType, bool kRounds>
GD_DEVICE void gate_gradients(const FastNormParams& p, const float (&n)[kNormVector], const float (&w)[kNormVector],
                              float (&z)[kNormVector], float (&dn)[kNormVector], float (&dw)[kNormVector]) {
  const bool rounds_product = p.weight && !p.wide_weight;
  if (!p.gated) return gate_gradients<kType, kRounds, GateKind::none>(n, w, z, dn, dw, rounds_product);
  if (p.sigmoid) return gate_gradients<kType, kRounds, GateKind::sigmoid>(n, w, z, dn, dw, rounds_product);
  gate_gradients<kType, kRounds, GateKind::silu>(n, w, z, dn, dw, rounds_product);
}

template <class Config, gd_dtype kType>
__global__ void __launch_bounds__(kNormBackwardThreads, kNormBackwardCtas)
    fast_norm_backward_kernel(const __grid_constant__ FastNormBackwardParams p) {
  constexpr int kLanes = Config::kLanes;
  constexpr uint32_t kGroups = kNormBackwardThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  allow_next_kernel();
  float w[kNormVector], dw[kNormVector] = {};
  FastBackwardRow<kType> raw;
  uint32_t base = blockIdx.x * kGroups;  // the CTA's first row of a block
  const uint32_t group = threadIdx.x / kLanes, step = gridDim.x * kGroups;
  raw.load(p, base + group, lane);
  FastWeight<kType> w_raw;
  w_raw.load(p, lane);
  w_raw.widen(w, p);
#pragma unroll 1
  for (;;) {
    const uint32_t row = base + group;
    const bool has_next = p.last - base >= step;  // base <= last; their sum could leave 32 bits
    float n[kNormVector], z[kNormVector], dn[kNormVector];
    raw.x.widen(n);
    raw.z.widen(z);
    raw.d_y.widen(dn);
    if (has_next) raw.load(p, row + step, lane);
    const float r = inverse_rms<kLanes>(n, p.inverse_dim, p.eps);
#pragma unroll
    for (int i = 0; i < kNormVector; ++i) n[i] *= r;
    p.round_before_gate ? gate_gradients<kType, true>(p, n, w, z, dn, dw)
                        : gate_gradients<kType, false>(p, n, w, z, dn, dw);
    float mean = 0;
#pragma unroll
    for (int i = 0; i < kNormVector; ++i) mean += dn[i] * n[i];
    mean = sum_of_row<kLanes>(mean) * p.inverse_dim;
#pragma unroll
    for (int i = 0; i < kNormVector; ++i) dn[i] = r * (dn[i] - mean * n[i]);
    if (row <= p.last) {
      const uint32_t token = p.heads.quotient(row), head = p.heads.remainder(row, token);
      if (p.dz) store_fast<kType>(p.dz.at(token, head), lane, z);
      if (p.dx) store_fast<kType>(p.dx.at(token, head), lane, dn);
    }
    if (!has_next) break;
    base += step;
  }
  if (p.partials) store_partial<Config>(p.partials, dw, Config::kMaxDim, lane);
}

}  // namespace gatedelta::cuda
