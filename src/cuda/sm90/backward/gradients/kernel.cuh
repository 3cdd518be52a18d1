// The gradients kernel, and the kernel that sums dA_log and d_dt_bias.
#pragma once

#include "cuda/sm90/backward/gradients/gates.cuh"
#include "cuda/sm90/backward/gradients/loads.cuh"
#include "cuda/sm90/backward/gradients/products.cuh"
#include "cuda/sm90/backward/gradients/rows.cuh"
#include "cuda/sm90/backward/gradients/store.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem>
__global__ void __launch_bounds__(kGradientThreads, 1) gradients_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ uint8_t dynamic_smem[];
  using Registers = GradientRegisters;
  uint32_t smem = tile_aligned(shared_address(dynamic_smem));
  asm volatile("" : "+r"(smem));  // NOTE(ptxas): keeps the address in a register instead of recomputing it at each use
  const Gradients<Elem> of(p, __shfl_sync(~0u, smem, 0));
  if (threadIdx.x == 0) of.init_barriers();
  __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernel();
  const auto role = static_cast<GradientWarpgroup>(__shfl_sync(~0u, threadIdx.x / 128, 0));
  if (role == GradientWarpgroup::kAux) {
    shrink_registers<Registers::kAux>();
    if (of.warp == kLoads) {
      of.run_loads();
    } else if (of.warp == kGates) {
      of.run_gates();
    } else {
      of.run_inner_products(of.warp - kInnerProducts0);
    }
    if (p.slice.begin == 0) of.zero_unused_tokens();
    return;
  }
  grow_registers<Registers::kProducts>();
  of.run_rows(role);
}

// dA_log and d_dt_bias of one value head per block: chunks in a fixed order.
__global__ void __launch_bounds__(256, 1) head_sums_kernel(const __grid_constant__ BackwardParams p) {
  __shared__ double sums[2][256];
  wait_for_previous_kernel();
  const int head = static_cast<int>(blockIdx.x), tid = threadIdx.x;
  double a = 0, b = 0;
  for (int64_t chunk_index = tid; chunk_index < p.sequences.workspace_chunks(); chunk_index += 256) {
    const float2 x = p.head_sums[chunk_index * p.value_heads + head];
    a += x.x;
    b += x.y;
  }
  sums[0][tid] = a;
  sums[1][tid] = b;
  __syncthreads();
  for (int step = 128; step > 0; step /= 2) {
    if (tid < step) {
      sums[0][tid] += sums[0][tid + step];
      sums[1][tid] += sums[1][tid + step];
    }
    __syncthreads();
  }
  const auto store = [&](const HeadVector& to, double x) {
    if (to.data) store_number(const_cast<void*>(to.data), to.dtype, head * to.stride, static_cast<float>(x));
  };
  if (tid == 0) {
    store(p.dA_log, sums[0][0]);
    store(p.d_dt_bias, sums[1][0]);
  }
}

}  // namespace gatedelta::cuda::sm90
