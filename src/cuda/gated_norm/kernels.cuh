// The gated norm's kernels. kFixed is the type of all rows, which then allow accesses of 16 bytes; GD_DTYPE_NONE: each
// tensor has its own, known at run time.
#pragma once

#include "cuda/gated_norm/row.cuh"

namespace gatedelta::cuda {

template <gd_dtype kFixed>
GD_DEVICE gd_dtype type_of(const TokenRows& rows) {
  return kFixed == GD_DTYPE_NONE ? rows.dtype : kFixed;
}

// Where a row is in each tensor.
struct RowPlace {
  uint32_t batch, token, head;

  template <class Params>
  GD_DEVICE RowPlace(const Params& p, uint32_t row) {
    const uint32_t both = p.heads.quotient(row);
    head = p.heads.remainder(row, both);
    batch = p.tokens.quotient(both);
    token = p.tokens.remainder(both, batch);
  }
  template <gd_dtype kFixed>
  GD_DEVICE char* in(const TokenRows& rows) const {
    return const_cast<char*>(element(rows.data, type_of<kFixed>(rows), rows.offset(batch, token, head)));
  }
};

template <class Config>
GD_DEVICE void load_weight(float (&w)[Config::kNumbers], const GatedNorm& in, bool aligned, int lane) {
#pragma unroll
  for (int i = 0; i < Config::kNumbers; ++i) w[i] = 1;
  if (!in.weight) return;
  RawNumbers<Config> raw;
  raw.load(static_cast<const char*>(in.weight.data), in.weight.dtype, aligned, lane, in.dim);
  raw.widen(w, in.weight.dtype);
}

// Every group of lanes has kRows rows. All loads of rows are issued before the first number is used. Shuffles need
// whole warps, so groups without a row repeat the last one and store nothing.
template <class Config, gd_dtype kFixed, int kRows>
__global__ void __launch_bounds__(kNormThreads) norm_forward_kernel(const __grid_constant__ NormParams p) {
  constexpr int kGroups = kNormThreads / Config::kLanes;
  const GatedNorm& in = p.problem.in;
  const TokenRows& y = p.problem.y;
  const bool aligned = kFixed != GD_DTYPE_NONE || p.aligned;
  const int lane = static_cast<int>(threadIdx.x) % Config::kLanes;
  const uint32_t first = blockIdx.x * (kGroups * kRows) + threadIdx.x / Config::kLanes;
  const auto last = static_cast<uint32_t>(in.rows() - 1);

  RawNumbers<Config> x_raw[kRows], z_raw[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const RowPlace place(p, min(first + i * kGroups, last));
    x_raw[i].load(place.in<kFixed>(in.x), type_of<kFixed>(in.x), aligned, lane, in.dim);
    if (in.z) z_raw[i].load(place.in<kFixed>(in.z), type_of<kFixed>(in.z), aligned, lane, in.dim);
  }
  float w[Config::kNumbers];
  load_weight<Config>(w, in, p.aligned, lane);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float x[Config::kNumbers], z[Config::kNumbers];
    x_raw[i].widen(x, type_of<kFixed>(in.x));
    if (in.z) z_raw[i].widen(z, type_of<kFixed>(in.z));
    gated_norm_row<Config::kLanes>(x, z, w, in, p.inverse_dim);
    const uint32_t row = first + i * kGroups;
    if (row <= last) store_row<Config>(RowPlace(p, row).in<kFixed>(y), type_of<kFixed>(y), x, aligned, lane, in.dim);
  }
}

// What a backward reads of a row.
template <class Config, gd_dtype kFixed>
struct RawBackwardRow {
  RawNumbers<Config> x, z, d_y;

  GD_DEVICE void load(const NormBackwardParams& p, uint32_t row, bool aligned, int lane) {
    const GatedNorm& in = p.problem.in;
    const TokenRows& gradient = p.problem.d_y;
    const RowPlace place(p, row);
    x.load(place.in<kFixed>(in.x), type_of<kFixed>(in.x), aligned, lane, in.dim);
    if (in.z) z.load(place.in<kFixed>(in.z), type_of<kFixed>(in.z), aligned, lane, in.dim);
    d_y.load(place.in<kFixed>(gradient), type_of<kFixed>(gradient), aligned, lane, in.dim);
  }
};

// da = dy act(z),  dz = dy a act'(z),  dw = sum of da n over rows,  dn = w da,  dx = r (dn - n mean(dn n))
template <class Config, gd_dtype kFixed>
__global__ void __launch_bounds__(kNormBackwardThreads)
    norm_backward_kernel(const __grid_constant__ NormBackwardParams p) {
  constexpr int kNumbers = Config::kNumbers, kLanes = Config::kLanes, kWarps = kNormBackwardThreads / 32;
  constexpr uint32_t kGroups = kNormBackwardThreads / kLanes;
  constexpr bool kPrefetch = Config::kChunks == 1;  // registers allow the next row to be on its way
  const GatedNormBackwardProblem& problem = p.problem;
  const GatedNorm& in = problem.in;
  const bool aligned = kFixed != GD_DTYPE_NONE || p.aligned;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const auto last = static_cast<uint32_t>(in.rows() - 1);

  float w[kNumbers], dw[kNumbers] = {};
  load_weight<Config>(w, in, p.aligned, lane);
  RawBackwardRow<Config, kFixed> raw;
  // Of the CTA's first row in a block: the same for all its lanes, so that warps stay whole.
  uint32_t base = blockIdx.x * kGroups;
  const uint32_t group = threadIdx.x / kLanes, step = gridDim.x * kGroups;
  raw.load(p, min(base + group, last), aligned, lane);
#pragma unroll 1
  for (;;) {
    float n[kNumbers], factor[kNumbers], a[kNumbers], z[kNumbers], dn[kNumbers];
    raw.x.widen(n, type_of<kFixed>(in.x));
    if (in.z) raw.z.widen(z, type_of<kFixed>(in.z));
    raw.d_y.widen(dn, type_of<kFixed>(problem.d_y));
    const uint32_t row = base + group;
    const bool has_next = last - base >= step;  // base <= last; their sum could leave 32 bits
    base += step;
    if (kPrefetch && has_next) raw.load(p, min(base + group, last), aligned, lane);

    const float r = inverse_rms<kLanes>(n, p.inverse_dim, in.eps);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) factor[i] = n[i] *= r;
    apply_weight(a, factor, w, in);
    if (in.z) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        const NormGate gate = norm_gate(z[i], in.activation);
        z[i] = dn[i] * a[i] * gate.slope;
        dn[i] *= gate.value;
      }
    }
    float mean = 0;
    if (row <= last) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) dw[i] += dn[i] * factor[i];
    }
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      dn[i] *= w[i];
      mean += dn[i] * n[i];
    }
    mean = sum_of_row<kLanes>(mean) * p.inverse_dim;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) dn[i] = r * (dn[i] - mean * n[i]);
    if (row <= last) {
      const RowPlace place(p, row);
      if (problem.dz)
        store_row<Config>(place.in<kFixed>(problem.dz), type_of<kFixed>(problem.dz), z, aligned, lane, in.dim);
      if (problem.dx)
        store_row<Config>(place.in<kFixed>(problem.dx), type_of<kFixed>(problem.dx), dn, aligned, lane, in.dim);
    }
    if (!has_next) break;
    if (!kPrefetch) raw.load(p, min(base + group, last), aligned, lane);
  }
  if (!p.partials) return;

  // The rows of a warp, then the warps of the CTA, always in this order.
  __shared__ float sums[kWarps][Config::kMaxDim];
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
#pragma unroll
    for (int bit = kLanes; bit < 32; bit *= 2) dw[i] += __shfl_xor_sync(~0u, dw[i], bit);
    if (threadIdx.x % 32 < kLanes)
      sums[warp][RawNumbers<Config>::begin(i / kNormVector, lane) + i % kNormVector] = dw[i];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < in.dim; i += kNormBackwardThreads) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) sum += sums[j][i];
    p.partials[int64_t{blockIdx.x} * in.dim + i] = sum;
  }
}

// dweight from the partial sums, eight columns per CTA: a sector of each row of partials.
constexpr int kSumColumns = 8, kSumRows = 64;
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    norm_sum_kernel(const float* partials, int count, int dim, HeadVector dweight) {
  __shared__ float sums[kSumRows][kSumColumns];
  const int x = static_cast<int>(threadIdx.x) % kSumColumns, y = static_cast<int>(threadIdx.x) / kSumColumns;
  const int column = static_cast<int>(blockIdx.x) * kSumColumns + x;  // D is a multiple of 8
  float sum = 0;
  for (int i = y; i < count; i += kSumRows) sum += partials[int64_t{i} * dim + column];
  sums[y][x] = sum;
  __syncthreads();
#pragma unroll
  for (int half = kSumRows / 2; half > 0; half /= 2) {
    if (y < half) sums[y][x] += sums[y + half][x];
    __syncthreads();
  }
  if (y == 0)
    store_numbers<1>(const_cast<char*>(element(dweight.data, dweight.dtype, column)), dweight.dtype, &sums[0][x], true);
}

}  // namespace gatedelta::cuda
