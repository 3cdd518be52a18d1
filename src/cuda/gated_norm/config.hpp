// How the gated norm's rows are split between lanes and CTAs: plain arithmetic, shared by the limits, the launches, the
// kernels and host tests.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/decode/config.hpp"

namespace gatedelta::cuda {

constexpr int kNormVector = 8;  // numbers per access: 16 bytes of 16-bit ones, twice that of fp32

// kLanes lanes of a warp share a row. Chunk c of a lane are the eight numbers from (c kLanes + lane) 8 on.
template <int kLanesOf, int kChunksOf>
struct NormConfig {
  static constexpr int kLanes = kLanesOf, kChunks = kChunksOf;
  static constexpr int kNumbers = kChunks * kNormVector;  // per lane
  static constexpr int kMaxDim = kLanes * kNumbers;
  static constexpr bool kUsual = kChunks == 1 && kLanes >= 8;  // head sizes of layers: kernels with fixed types
};

// Calls f with the narrowest configuration that holds a row.
template <class F>
auto with_norm_config(int dim, const F& f) {
  if (dim <= 16) return f(NormConfig<2, 1>{});
  if (dim <= 32) return f(NormConfig<4, 1>{});
  if (dim <= 64) return f(NormConfig<8, 1>{});
  if (dim <= 128) return f(NormConfig<16, 1>{});
  if (dim <= 256) return f(NormConfig<32, 1>{});
  return f(NormConfig<32, 2>{});  // D <= 512
}

constexpr int kNormThreads = 128;          // of a forward's CTA: a single token's rows spread over many multiprocessors
constexpr int kNormBackwardThreads = 256;  // fewer, larger CTAs: each has a partial sum of dweight
constexpr int64_t kMaxNormPartials = 528;  // CTAs of a backward; four for each multiprocessor of an H200
constexpr int64_t kMaxNormRows = (int64_t{1} << 31) - 4096;  // row indices of a grid's last CTA stay below 2^31

// CTAs of a backward, each of which takes every so-many-th block of rows. They follow from the shape alone, as do the
// sums of dweight.
inline int64_t norm_backward_ctas(const GatedNorm& in) {
  const int rows =
      with_norm_config(in.dim, [](auto config) { return kNormBackwardThreads / decltype(config)::kLanes; });
  return std::min((in.rows() + rows - 1) / rows, kMaxNormPartials);
}
inline size_t norm_backward_workspace(const GatedNormBackwardProblem& p) {
  return p.dweight ? static_cast<size_t>(norm_backward_ctas(p.in) * p.in.dim) * sizeof(float) : 0;
}

inline bool is_aligned(const GatedNorm& in) {
  return is_aligned(in.x) && is_aligned(in.z) && is_aligned(in.weight.data);
}
// Type that all rows of a call have, if they are 16-bit and allow accesses of 16 bytes; otherwise none.
inline gd_dtype common_type(const GatedNorm& in, std::initializer_list<const TokenRows*> others) {
  if (in.x.dtype == GD_F32 || !is_aligned(in) || (in.z && in.z.dtype != in.x.dtype)) return GD_DTYPE_NONE;
  for (const TokenRows* rows : others)
    if (*rows && (rows->dtype != in.x.dtype || !is_aligned(*rows))) return GD_DTYPE_NONE;
  return in.x.dtype;
}

// Everything a kernel needs, as kernel arguments.
struct NormParams {
  GatedNormProblem problem;
  Divider heads, tokens;
  float inverse_dim;
  bool aligned;  // accesses of 16 bytes
};
struct NormBackwardParams {
  GatedNormBackwardProblem problem;
  Divider heads, tokens;
  float inverse_dim;
  bool aligned;
  float* partials;  // [CTAs][D]; null without dweight
};

}  // namespace gatedelta::cuda
