// gd_merge on CUDA: S <- M S + value over segments, in fp32 on the ordinary units. No instruction here is newer than
// compute capability 8.0.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"

namespace gatedelta::cuda {

namespace {

// A CTA merges 32 value columns of one head and result. A thread has 4 x 4 numbers of each block of 128 rows.
constexpr int kColumns = 32, kThreads = 256, kRows = 128;

// Calls f with the data as numbers of its type.
template <class F>
__device__ __forceinline__ void with_numbers(const void* data, gd_dtype dtype, const F& f) {
  if (dtype == GD_F32) return f(static_cast<const float*>(data));
  if (dtype == GD_BF16) return f(static_cast<const __nv_bfloat16*>(data));
  return f(static_cast<const __half*>(data));
}
__device__ __forceinline__ void store_float(void* data, gd_dtype dtype, int64_t i, float x) {
  if (dtype == GD_F32) {
    static_cast<float*>(data)[i] = x;
  } else if (dtype == GD_BF16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(x);
  } else {
    static_cast<__half*>(data)[i] = __float2half(x);
  }
}

// Place of a number that a thread loads, in kDepth columns of M: i is a row of the sums, j a row of S.
struct Place {
  int i, j;
};
template <bool kTransposed, int kMaxK, int kDepth>
__device__ __forceinline__ Place place_of(int n, int tid) {
  static_assert(kThreads % kMaxK == 0 && kThreads % kDepth == 0);
  if constexpr (kTransposed) return {tid % kMaxK, tid / kMaxK + n * (kThreads / kMaxK)};
  return {tid / kDepth + n * (kThreads / kDepth), tid % kDepth};
}
// NOTE: loads are unconditional: behind branches they would not overlap.
template <bool kTransposed, int kMaxK, int kDepth>
__device__ __forceinline__ void fetch(float (&next)[kDepth * kMaxK / kThreads], const float* transition, int j0, int K,
                                      int tid) {
#pragma unroll
  for (int n = 0; n < kDepth * kMaxK / kThreads; ++n) {
    const Place at = place_of<kTransposed, kMaxK, kDepth>(n, tid);
    const int i = at.i, j = j0 + at.j, row = min(kTransposed ? j : i, K - 1), column = min(kTransposed ? i : j, K - 1);
    const float x = transition[row * K + column];
    next[n] = i < K && j < K ? x : 0.0f;
  }
}

// kDepth: columns of M in shared memory at a time.
template <int kBlocks, int kDepth, bool kTransposed>
__global__ void __launch_bounds__(kThreads) state_merge_kernel(const __grid_constant__ MergeProblem p) {
  constexpr int kMaxK = kBlocks * kRows, kLoads = kDepth * kMaxK / kThreads;
  __shared__ alignas(16) float S[kMaxK][kColumns];
  __shared__ alignas(16) float M[kDepth][kMaxK + 4];  // M[j][i]: coefficient of S[j] in row i
  const int64_t head = static_cast<int64_t>(blockIdx.x) % p.heads, r = static_cast<int64_t>(blockIdx.x) / p.heads;
  const int tid = threadIdx.x, K = p.key_dim, V = p.value_dim, first_column = static_cast<int>(blockIdx.y) * kColumns;
  const int column = tid % 8 * 4, row = tid / 8 * 4;
  const bool is_kv = p.layout == GD_STATE_KV;
  const auto place = [&](int k, int v) { return is_kv ? k * V + v : v * K + k; };
  const int64_t first = p.first[r], count = p.count[r];

  for (int i = tid; i < kMaxK * kColumns; i += kThreads) S[i / kColumns][i % kColumns] = 0;
  for (int64_t step = 0; step < count; ++step) {
    const int64_t segment = kTransposed ? first + count - 1 - step : first + step;
    float acc[kBlocks][4][4];
    with_numbers(p.values.data, p.values.dtype, [&](const auto* from) {
      from += p.values.offset(segment, head);
#pragma unroll
      for (int n = 0; n < kBlocks * 16; ++n) {
        const int k = n / 16 * kRows + row + n / 4 % 4, v = first_column + column + n % 4;
        const auto x = from[place(min(k, K - 1), min(v, V - 1))];
        acc[n / 16][n / 4 % 4][n % 4] = k < K && v < V ? static_cast<float>(x) : 0.0f;
      }
    });
    if (step > 0) {
      const float* const transition =
          static_cast<const float*>(p.transitions.data) + p.transitions.offset(segment, head);
      // The loads of the next columns of M overlap with the products of these. Neighbouring threads read neighbouring
      // numbers: along a row of M, or (transposed) along a column of M^T.
      float next[kLoads];
      fetch<kTransposed, kMaxK, kDepth>(next, transition, 0, K, tid);
#pragma unroll 1
      for (int j0 = 0; j0 < K; j0 += kDepth) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kLoads; ++n) {
          const Place at = place_of<kTransposed, kMaxK, kDepth>(n, tid);
          M[at.j][at.i] = next[n];
        }
        __syncthreads();
        if (j0 + kDepth < K) fetch<kTransposed, kMaxK, kDepth>(next, transition, j0 + kDepth, K, tid);
#pragma unroll 4
        for (int j = 0; j < kDepth; ++j) {
          const float4 s = *reinterpret_cast<const float4*>(&S[(j0 + j) % kMaxK][column]);
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            const float4 m = *reinterpret_cast<const float4*>(&M[j][block * kRows + row]);
            const float rows[4] = {m.x, m.y, m.z, m.w}, columns[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int a = 0; a < 4; ++a)
#pragma unroll
              for (int b = 0; b < 4; ++b) acc[block][a][b] = fmaf(rows[a], columns[b], acc[block][a][b]);
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int a = 0; a < 4; ++a)
        *reinterpret_cast<float4*>(&S[block * kRows + row + a][column]) =
            make_float4(acc[block][a][0], acc[block][a][1], acc[block][a][2], acc[block][a][3]);
  }
  __syncthreads();
  const int64_t to = p.state.offset(r, head);
  for (int i = tid; i < K * kColumns; i += kThreads) {
    // Neighbouring threads write neighbouring numbers.
    const int k = is_kv ? i / kColumns : i % K, v = is_kv ? i % kColumns : i / K;
    if (first_column + v < V) store_float(p.state.data, p.state.dtype, to + place(k, first_column + v), S[k][v]);
  }
}

}  // namespace

Outcome launch(const MergeProblem& p, const Context& context) {
  return with_device(context.device, kAllDevices, [&](const DeviceFacts&) -> Outcome {
    if (p.results == 0) return {};
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const GridSize grid(p.results * p.heads, (p.value_dim + kColumns - 1) / kColumns);
    const auto launch = [&](auto kernel) { return launch_kernel(Pdl::kOff, kernel, grid, kThreads, 0, stream, p); };
    const bool is_small = p.key_dim <= kRows;
    const cudaError_t error =
        p.transposed ? launch(is_small ? state_merge_kernel<1, 16, true> : state_merge_kernel<2, 8, true>)
                     : launch(is_small ? state_merge_kernel<1, 16, false> : state_merge_kernel<2, 8, false>);
    if (error) return failure(error, "launch the merge");
    return {};
  });
}

}  // namespace gatedelta::cuda
