// The gated norm's kernels for any call: types and strides are known at run time. fast.cuh has the kernels for the
// calls of layers.
#pragma once

#include "cuda/device/pdl.cuh"
#include "cuda/gated_norm/row.cuh"

namespace gatedelta::cuda {

// The place of a row in each tensor.
struct RowPlace {
  uint32_t batch, token, head;

  template <class Params>
  GD_DEVICE RowPlace(const Params& p, uint32_t row) {
    const uint32_t both = p.heads.quotient(row);
    head = p.heads.remainder(row, both);
    batch = p.tokens.quotient(both);
    token = p.tokens.remainder(both, batch);
  }
  GD_DEVICE char* in(const TokenRows& rows) const {
    return const_cast<char*>(element(rows.data, rows.dtype, rows.offset(batch, token, head)));
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

// A group of lanes has one row. Shuffles need whole warps, so groups without a row repeat the last row and store
// nothing.
template <class Config>
__global__ void __launch_bounds__(kNormThreads) norm_forward_kernel(const __grid_constant__ NormParams p) {
  const GatedNorm& in = p.problem.in;
  const TokenRows& y = p.problem.y;
  const int lane = static_cast<int>(threadIdx.x) % Config::kLanes;
  const uint32_t row = blockIdx.x * (kNormThreads / Config::kLanes) + threadIdx.x / Config::kLanes;
  const auto last = static_cast<uint32_t>(in.rows() - 1);
  const RowPlace place(p, min(row, last));

  RawNumbers<Config> x_raw, z_raw;
  x_raw.load(place.in(in.x), in.x.dtype, p.aligned, lane, in.dim);
  if (in.z) z_raw.load(place.in(in.z), in.z.dtype, p.aligned, lane, in.dim);
  float w[Config::kNumbers], x[Config::kNumbers], z[Config::kNumbers];
  load_weight<Config>(w, in, p.aligned, lane);
  x_raw.widen(x, in.x.dtype);
  if (in.z) z_raw.widen(z, in.z.dtype);
  gated_norm_row<Config::kLanes>(x, z, w, in, p.inverse_dim);
  if (row <= last) store_row<Config>(place.in(y), y.dtype, x, p.aligned, lane, in.dim);
}

// The inputs of a row in a backward.
template <class Config>
struct RawBackwardRow {
  RawNumbers<Config> x, z, d_y;

  GD_DEVICE void load(const NormBackwardParams& p, uint32_t row, int lane) {
    const GatedNorm& in = p.problem.in;
    const TokenRows& gradient = p.problem.d_y;
    const RowPlace place(p, row);
    x.load(place.in(in.x), in.x.dtype, p.aligned, lane, in.dim);
    if (in.z) z.load(place.in(in.z), in.z.dtype, p.aligned, lane, in.dim);
    d_y.load(place.in(gradient), gradient.dtype, p.aligned, lane, in.dim);
  }
};

// Stores the CTA's sum of dweight: over the rows of a warp, then over the warps, always in this order.
template <class Config>
GD_DEVICE void store_partial(float* partials, float (&dw)[Config::kNumbers], int dim, int lane) {
  constexpr int kWarps = kNormBackwardThreads / 32;
  __shared__ float sums[kWarps][Config::kMaxDim];
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < Config::kNumbers; ++i) {
#pragma unroll
    for (int bit = Config::kLanes; bit < 32; bit *= 2) dw[i] += __shfl_xor_sync(~0u, dw[i], bit);
    if (threadIdx.x % 32 < Config::kLanes)
      sums[warp][RawNumbers<Config>::begin(i / kNormVector, lane) + i % kNormVector] = dw[i];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kNormBackwardThreads) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) sum += sums[j][i];
    partials[int64_t{blockIdx.x} * dim + i] = sum;
  }
}

// da = dy act(z),  dz = dy a act'(z),  dw = sum of da n over rows,  dn = w da,  dx = r (dn - n mean(dn n))
template <class Config>
__global__ void __launch_bounds__(kNormBackwardThreads)
    norm_backward_kernel(const __grid_constant__ NormBackwardParams p) {
  constexpr int kNumbers = Config::kNumbers, kLanes = Config::kLanes;
  constexpr uint32_t kGroups = kNormBackwardThreads / kLanes;
  constexpr bool kPrefetch = Config::kChunks == 1;  // registers allow a prefetch of the next row
  const GatedNormBackwardProblem& problem = p.problem;
  const GatedNorm& in = problem.in;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const auto last = static_cast<uint32_t>(in.rows() - 1);

  allow_next_kernel();
  float w[kNumbers], dw[kNumbers] = {};
  load_weight<Config>(w, in, p.aligned, lane);
  RawBackwardRow<Config> raw;
  // The CTA's first row of a block, the same in all lanes, so that warps stay whole.
  uint32_t base = blockIdx.x * kGroups;
  const uint32_t group = threadIdx.x / kLanes, step = gridDim.x * kGroups;
  raw.load(p, min(base + group, last), lane);
#pragma unroll 1
  for (;;) {
    float n[kNumbers], factor[kNumbers], a[kNumbers], z[kNumbers], dn[kNumbers];
    raw.x.widen(n, in.x.dtype);
    if (in.z) raw.z.widen(z, in.z.dtype);
    raw.d_y.widen(dn, problem.d_y.dtype);
    const uint32_t row = base + group;
    const bool has_next = last - base >= step;  // base <= last; their sum could leave 32 bits
    base += step;
    if (kPrefetch && has_next) raw.load(p, min(base + group, last), lane);

    const float r = inverse_rms<kLanes>(n, p.inverse_dim, in.eps);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) factor[i] = n[i] *= r;
    apply_weight(a, factor, w, NormRounding(in));
    if (in.z) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        const NormGate gate = norm_gate(z[i], in.activation == GD_NORM_SIGMOID);
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
      if (problem.dz) store_row<Config>(place.in(problem.dz), problem.dz.dtype, z, p.aligned, lane, in.dim);
      if (problem.dx) store_row<Config>(place.in(problem.dx), problem.dx.dtype, dn, p.aligned, lane, in.dim);
    }
    if (!has_next) break;
    if (!kPrefetch) raw.load(p, min(base + group, last), lane);
  }
  if (p.partials) store_partial<Config>(p.partials, dw, in.dim, lane);
}

// dweight from the partial sums, eight columns per CTA: a sector of each row of partials. Launched with PDL where the
// device has it.
constexpr int kSumColumns = 8, kSumRows = 64;
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    norm_sum_kernel(const float* partials, int count, int dim, HeadVector dweight) {
  __shared__ float sums[kSumRows][kSumColumns];
  const int x = static_cast<int>(threadIdx.x) % kSumColumns, y = static_cast<int>(threadIdx.x) / kSumColumns;
  const int column = static_cast<int>(blockIdx.x) * kSumColumns + x;  // D is a multiple of 8
  float sum = 0;
  wait_for_previous_kernel();
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
