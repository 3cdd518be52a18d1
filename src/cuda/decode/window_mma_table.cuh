// `window_mma`: shared memory of a CTA, and conversions to its operands' formats.
#pragma once

#include "cuda/decode/config.hpp"
#include "cuda/device/packets.cuh"

namespace gatedelta::cuda {

// Coefficients of a window, for all warps of a CTA.
template <int kTokens>
struct WindowTable {
  alignas(16) float kk[kTokens][kTokens];  // of e_j in e_t
  alignas(16) float qk[kTokens][kTokens];  // of e_j in o_t
  float reach[kTokens][kTokens];           // of k_j e_j in S_(t+1)
  float decay[kTokens];                    // of S in S_(t+1)
  float beta[kTokens], r_k[kTokens], r_q[kTokens];
  float x[kTokens], y[kTokens];  // of S^T k_t in e_t, of S^T q_t in o_t
};

// `held`: the state between windows, in fp32. Each lane reads and writes its own numbers alone, four side by side.
template <class Config>
struct WindowShared {
  WindowTable<Config::kTokens> table;
  float4 held[Config::kKind == WindowKind::any ? Config::kWarps * 2 * 8 * 32 : 1];
};

template <class T>
GD_DEVICE float widen_half(uint32_t pair, int which) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(which ? pair >> 16 : pair)));
  }
}
GD_DEVICE float tf32_high(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
GD_DEVICE float tf32_low(float x) { return x - tf32_high(x); }

}  // namespace gatedelta::cuda
