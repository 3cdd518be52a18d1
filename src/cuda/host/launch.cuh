// Launches.
#pragma once

#include <cuda_runtime.h>
#include <atomic>
#include <cstdint>

#include "cuda/device/pdl.hpp"

namespace gatedelta::cuda {

// Raises a kernel's shared-memory limit to the most any launch needs. Done once per device for the first 64 devices.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes, int device) {
  static std::atomic<uint64_t> allowed{0};
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (!error) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

struct GridSize {
  GridSize(int64_t columns, int64_t rows = 1) : size(static_cast<unsigned>(columns), static_cast<unsigned>(rows)) {}
  GridSize(const dim3& grid) : size(grid) {}
  dim3 size;
};

template <class Kernel, class... Args>
cudaError_t launch_kernel(Pdl pdl, Kernel kernel, GridSize grid, int threads, int bytes, cudaStream_t stream,
                          const Args&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid.size;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = pdl == Pdl::kOn ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}
// Shared memory of a launch, in bytes, and the most of all launches of its kernel.
struct SharedMemory {
  SharedMemory(int bytes_) : SharedMemory(bytes_, bytes_) {}
  SharedMemory(int bytes_, int most_) : bytes(bytes_), most(most_) {}
  int bytes, most;
};
template <auto kKernel, class... Args>
cudaError_t launch_large(Pdl pdl, GridSize grid, int threads, SharedMemory memory, int device, cudaStream_t stream,
                         const Args&... args) {
  if (const cudaError_t error = allow_shared_memory<kKernel>(memory.most, device)) return error;
  return launch_kernel(pdl, kKernel, grid, threads, memory.bytes, stream, args...);
}
template <class Kernel, class... Args>
cudaError_t launch_with_pdl(Kernel kernel, int64_t blocks, int threads, int bytes, cudaStream_t stream,
                            const Args&... args) {
  return launch_kernel(Pdl::kOn, kernel, blocks, threads, bytes, stream, args...);
}

}  // namespace gatedelta::cuda
