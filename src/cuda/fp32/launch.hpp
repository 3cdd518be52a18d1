// Launches that the forward and the backward share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/fp32/config.hpp"
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"

namespace gatedelta::cuda::fp32 {

// A loop over tokens. CTAs: one per sequence, value head and part of its columns.
template <class Config, template <class> class Loop>
__global__ void __launch_bounds__(kThreads, Config::Shape::kCtasPerSm)
    fp32_loop_kernel(const __grid_constant__ Params p) {
  Loop<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}
template <class Config, template <class> class Loop>
cudaError_t launch_loop(const Params& p, int device, cudaStream_t stream) {
  const int64_t ctas = int64_t{p.sequences.count} * p.value_heads * p.parts;
  if (ctas == 0) return cudaSuccess;
  return launch_large<fp32_loop_kernel<Config, Loop>>(Pdl::kOff, ctas, kThreads, Config::kBytes, device, stream, p);
}

// Kernels without a state.
template <class Kernel>
__global__ void __launch_bounds__(kThreads) fp32_chunk_kernel(const __grid_constant__ Params p) {
  Kernel::run(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}
template <class Kernel>
cudaError_t launch_chunks(const Params& p, int64_t ctas, cudaStream_t stream) {
  if (ctas == 0) return cudaSuccess;
  return launch_kernel(Pdl::kOff, fp32_chunk_kernel<Kernel>, ctas, kThreads, 0, stream, p);
}

cudaError_t launch_prepare(const Params& p, cudaStream_t stream);
cudaError_t launch_reads(const Params& p, int device, cudaStream_t stream);  // the forward loop without outputs

}  // namespace gatedelta::cuda::fp32
