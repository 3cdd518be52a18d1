// Tensor maps.
#pragma once

#include <cuda.h>
#include <atomic>

#include "cuda/device/sequences.hpp"
#include "cuda/host/device.cuh"
#include "cuda/sm90/tiles.hpp"

namespace gatedelta::cuda::sm90 {

constexpr Capabilities kDevices = {9, 9, "Hopper's kernels support 9.0"};

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Boxes of 64 tokens and half of the columns of one head of [B, T, H, 128].
inline CUresult encode_rows(EncodeTiled encode, CUtensorMap* map, const TokenRows& rows, int heads, int64_t tokens,
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

// The driver's encoder of tensor maps; this library is not linked to the driver. Looked up once, like best_isa().
inline cudaError_t find_encoder(EncodeTiled& encode) {
  static std::atomic<EncodeTiled> found{nullptr};
  encode = found.load(std::memory_order_relaxed);
  if (encode) return cudaSuccess;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  if (error) return error;
  if (result != cudaDriverEntryPointSuccess || !function) return cudaErrorSymbolNotFound;
  encode = reinterpret_cast<EncodeTiled>(function);
  found.store(encode, std::memory_order_relaxed);
  return cudaSuccess;
}

// Tensor maps for TMA.
struct MappedTensor {
  const char* name;
  CUtensorMap* map;
  const TokenRows& rows;
  int heads;
};
inline Outcome encode_map(const MappedTensor& t, const ChunkedSequences& sequences, bool bf16) {
  EncodeTiled encode = nullptr;
  if (const cudaError_t error = find_encoder(encode)) return failure(error, "find the driver's cuTensorMapEncodeTiled");
  const TokenRows& rows = t.rows;
  if (const CUresult result = encode_rows(encode, t.map, rows, t.heads, sequences.tokens, sequences.batch, bf16))
    return failure(GD_UNSUPPORTED,
                   "%s: the driver's tensor maps (error %d) do not take strides of %lld, %lld and %lld elements",
                   t.name, static_cast<int>(result), static_cast<long long>(rows.batch_stride),
                   static_cast<long long>(rows.token_stride), static_cast<long long>(rows.head_stride));
  return {};
}

}  // namespace gatedelta::cuda::sm90
