// Host side of the forward: tensor maps, shared-memory limits, the two launches.
#pragma once

#include <cuda_runtime.h>

#include "cuda/forward/kernel.cuh"

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

template <class Elem, int kMath>
cudaError_t launch_main(const ForwardParams& p, int sms, cudaStream_t stream) {
  constexpr int kBytes = ForwardSmem<kMath>::kAllocated;
  if (const cudaError_t e =
          cudaFuncSetAttribute(forward_kernel<Elem, kMath>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes))
    return e;
  const int64_t items = int64_t{p.sequences.count} * p.value_heads * (2 / kMath);
  const int blocks = static_cast<int>(items < sms ? items : sms);
  // Its blocks may come to the card while the last of prepare's are still there; they wait before they read.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kForwardThreads<kMath>);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, forward_kernel<Elem, kMath>, p);
}

template <class Elem>
cudaError_t launch_prepare(const ForwardParams& p, cudaStream_t stream) {
  const int bytes = PrepareSmem::allocated(p.group);
  if (const cudaError_t e =
          cudaFuncSetAttribute(prepare_kernel<Elem>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  prepare_kernel<Elem>
      <<<static_cast<unsigned>(p.sequences.slots() * p.key_heads + 1), kPrepareThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace gatedelta::cuda
