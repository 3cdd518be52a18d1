// Numbers in memory, of a type known at run time.
#pragma once

#include "core/tensors.hpp"
#include "cuda/device/ptx.cuh"

namespace gatedelta::cuda {

GD_DEVICE float load_number(const void* data, gd_dtype dtype, int64_t at) {
  if (dtype == GD_F32) return static_cast<const float*>(data)[at];
  const uint32_t half = static_cast<const uint16_t*>(data)[at];
  return dtype == GD_BF16 ? unpack<Bf16>(half).x : unpack<Fp16>(half).x;
}
GD_DEVICE void store_number(void* data, gd_dtype dtype, int64_t at, float x) {
  if (dtype == GD_F32) {
    static_cast<float*>(data)[at] = x;
  } else {
    static_cast<uint16_t*>(data)[at] =
        static_cast<uint16_t>(dtype == GD_BF16 ? pack<Bf16>(x, 0.0f) : pack<Fp16>(x, 0.0f));
  }
}

// What a state tensor holds, so that one branch on its type stands around many accesses.
struct StoredFloat {
  using Word = float;
  GD_DEVICE static float widen(float x) { return x; }
  GD_DEVICE static float narrow(float x) { return x; }
};
template <class Elem>
struct StoredHalf {
  using Word = uint16_t;
  GD_DEVICE static float widen(uint16_t x) { return unpack<Elem>(x).x; }
  GD_DEVICE static uint16_t narrow(float x) { return static_cast<uint16_t>(pack<Elem>(x, 0.0f)); }
};
template <class F>
GD_DEVICE void with_stored(gd_dtype dtype, const F& f) {
  if (dtype == GD_F32) {
    f(StoredFloat{});
  } else if (dtype == GD_BF16) {
    f(StoredHalf<Bf16>{});
  } else {
    f(StoredHalf<Fp16>{});
  }
}

}  // namespace gatedelta::cuda
