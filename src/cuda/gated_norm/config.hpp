// How the gated norm's rows are split between lanes and CTAs, which kernels support a call, and their parameters: plain
// arithmetic, shared by the limits, the launches, the kernels and host tests.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/device/divider.hpp"
#include "cuda/device/pdl.hpp"
#include "cuda/device/rows32.hpp"

namespace gatedelta::cuda {

constexpr int kNormVector = 8;  // numbers per access: 16 bytes of 16-bit ones, twice that of fp32

// kLanes lanes of a warp share a row. Chunk c of a lane is the eight numbers from (c kLanes + lane) 8 on.
template <int kLanesOf, int kChunksOf>
struct NormConfig {
  static constexpr int kLanes = kLanesOf, kChunks = kChunksOf;
  static constexpr int kNumbers = kChunks * kNormVector;  // per lane
  static constexpr int kMaxDim = kLanes * kNumbers;
  static constexpr bool kHasFast = kChunks == 1 && kLanes >= 8;  // head sizes of layers
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
constexpr int kNormBackwardCtas = 3;       // of a fast backward on a multiprocessor; nothing spills
constexpr int64_t kMaxNormPartials = 396;  // CTAs of a backward: three per multiprocessor of an H200
constexpr int64_t kMaxNormRows = (int64_t{1} << 31) - 4096;  // row indices of a grid's last CTA stay below 2^31

// CTAs of a backward. CTA i computes blocks of rows i, i + CTAs, ... The number follows from the shape alone, and so
// does the order of the sums of dweight.
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
// The type of all rows of a call, if it is one 16-bit type and they allow accesses of 16 bytes; otherwise none.
inline gd_dtype common_type(const GatedNorm& in, std::initializer_list<const TokenRows*> others) {
  if (in.x.dtype == GD_F32 || !is_aligned(in) || (in.z && in.z.dtype != in.x.dtype)) return GD_DTYPE_NONE;
  for (const TokenRows* rows : others)
    if (*rows && (rows->dtype != in.x.dtype || !is_aligned(*rows))) return GD_DTYPE_NONE;
  return in.x.dtype;
}

// What the fast kernels support: rows of 64, 128 or 256 numbers of one 16-bit type that allow accesses of 16 bytes, and
// whose tokens have one stride through the whole batch, with a weight of that type, fp32 or none. Strides are 31 bits
// wide in bytes.
inline bool has_even_tokens(const GatedNorm& in, const TokenRows& rows) {
  return in.batch == 1 || in.tokens == 1 || rows.batch_stride == in.tokens * rows.token_stride;
}
inline bool supports_fast_norm(const GatedNorm& in, std::initializer_list<const TokenRows*> others) {
  if (in.dim != 64 && in.dim != 128 && in.dim != 256) return false;
  if (common_type(in, others) == GD_DTYPE_NONE) return false;
  if (in.weight && in.weight.dtype != GD_F32 && in.weight.dtype != in.x.dtype) return false;
  const auto supported = [&](const TokenRows& rows) {
    return !rows || (fits_32bit(rows) && has_even_tokens(in, rows));
  };
  return supported(in.x) && supported(in.z) &&
         std::all_of(others.begin(), others.end(), [&](const auto* r) { return supported(*r); });
}

// A tensor for the fast kernels, its tokens counted through the batch; strides in bytes.
struct FastNormRows {
  char* data = nullptr;
  uint32_t token_stride = 0, head_stride = 0;

  FastNormRows() = default;
  FastNormRows(const GatedNorm& in, const TokenRows& rows) {
    const Rows32 all(rows);
    data = all.data, head_stride = all.head_stride;
    token_stride = in.tokens == 1 ? all.batch_stride : all.token_stride;
  }
  GD_HOST_DEVICE char* at(uint32_t token, uint32_t head) const {
    return data + uint64_t{token} * token_stride + uint64_t{head} * head_stride;
  }
  GD_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

// Arguments of the fast kernels. Every line of them is a cold miss of each launch, so they are few, and those of the
// first address come first.
struct FastNormParams {
  Divider heads;
  uint32_t last = 0;  // row
  FastNormRows x, z;
  const char* weight = nullptr;  // optional
  float eps = 0, inverse_dim = 0;
  bool wide_weight = false, round_before_gate = false;
  bool gated = false, sigmoid = false;
  Pdl pdl = Pdl::kOff;  // of the forward

  FastNormParams() = default;
  explicit FastNormParams(const GatedNorm& in)
      : heads(static_cast<uint32_t>(in.heads)),
        last(static_cast<uint32_t>(in.rows() - 1)),
        x(in, in.x),
        z(in, in.z),
        weight(static_cast<const char*>(in.weight.data)),
        eps(in.eps),
        inverse_dim(1.0f / static_cast<float>(in.dim)),
        wide_weight(in.weight.dtype == GD_F32),
        round_before_gate(in.round_before_gate),
        gated(in.z),
        sigmoid(in.activation == GD_NORM_SIGMOID) {}
};
struct FastNormForwardParams : FastNormParams {
  FastNormRows y;

  FastNormForwardParams(const GatedNormProblem& p, Pdl with_pdl) : FastNormParams(p.in), y(p.in, p.y) {
    pdl = with_pdl;
  }
};
struct FastNormBackwardParams : FastNormParams {
  FastNormRows d_y, dx, dz;
  float* partials;  // [CTAs][D]; null without dweight

  FastNormBackwardParams(const GatedNormBackwardProblem& p, float* partials)
      : FastNormParams(p.in), d_y(p.in, p.d_y), dx(p.in, p.dx), dz(p.in, p.dz), partials(partials) {}
};

// Arguments of the kernels for any call.
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
