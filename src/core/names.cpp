#include "core/names.hpp"

#include "gatedelta/gatedelta.h"

namespace gatedelta {

const char* dtype_name(int64_t dtype) {
  constexpr const char* kNames[] = {"none", "float32", "bfloat16", "float16", "int32", "int64"};
  return dtype >= 0 && dtype <= GD_I64 ? kNames[dtype] : "unknown";
}

const char* device_name(int64_t device) { return device == GD_CPU ? "cpu" : device == GD_CUDA ? "cuda" : "unknown"; }

}  // namespace gatedelta
