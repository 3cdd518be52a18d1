// Host side of the forward: tensor maps, shared-memory limits, the launches.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "cuda/forward/kernel.cuh"
#include "cuda/forward/plan.hpp"

namespace gatedelta::cuda {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Boxes of 64 tokens and half of the columns of one head of [B, T, H, 128].
inline CUresult encode_rows(EncodeTiled encode, CUtensorMap* map, const Rows& rows, int heads, int64_t tokens,
                            int batch, bool bf16) {
  const cuuint64_t sizes[5] = {kTileColumns, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens),
                               static_cast<cuuint64_t>(batch), kHeadDim / kTileColumns};
  const cuuint64_t strides[4] = {static_cast<cuuint64_t>(rows.head_stride) * 2,
                                 static_cast<cuuint64_t>(rows.token_stride) * 2,
                                 static_cast<cuuint64_t>(rows.batch_stride) * 2, kTileRowBytes};
  const cuuint32_t box[5] = {kTileColumns, 1, kChunkTokens, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode(map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, rows.data, sizes,
                strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Lets a kernel have as much shared memory as any block of it may ask for. A fact of the kernel on a device: asked for
// once for each of the first 64.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int bytes, int device, std::atomic<uint64_t>& allowed) {
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (!error) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Blocks of the next kernel may come to the card while the last of this one's are still there; they wait before they
// read.
template <class Kernel>
cudaError_t launch_early(Kernel kernel, const ForwardParams& p, int blocks, int threads, int bytes,
                         cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <class Elem>
cudaError_t launch_prepare(const ForwardParams& p, int device, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed{0};
  if (const cudaError_t e =
          allow_shared_memory(prepare_kernel<Elem>, PrepareSmem::allocated(kMaxGroup), device, allowed))
    return e;
  const auto blocks = static_cast<unsigned>(prepare_blocks(p.sequences, p.key_heads));
  prepare_kernel<Elem><<<blocks, kPrepareThreads, PrepareSmem::allocated(p.group), stream>>>(p);
  return cudaGetLastError();
}

inline cudaError_t launch_schedule(const ForwardParams& p, cudaStream_t stream) {
  return launch_early(schedule_kernel, p, p.list == kPlannedList ? 1 : kScheduleBlocks, kScheduleThreads, 0, stream);
}

template <class Elem>
cudaError_t launch_main(const ForwardParams& p, int device, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed{0};
  if (const cudaError_t e = allow_shared_memory(forward_kernel<Elem>, ForwardSmem::kAllocated, device, allowed))
    return e;
  return launch_early(forward_kernel<Elem>, p, p.main_blocks(), kForwardThreads, ForwardSmem::kAllocated, stream);
}

}  // namespace gatedelta::cuda
