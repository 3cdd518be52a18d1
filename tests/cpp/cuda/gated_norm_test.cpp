// How the gated norm's rows are split between lanes and CTAs.
#include "cuda/gated_norm/config.hpp"

#include <gtest/gtest.h>

namespace gatedelta::cuda {
namespace {

TEST(NormConfig, LanesHoldEveryRow) {
  for (int dim = 16; dim <= 512; dim += 16) {
    const auto [lanes, most] = with_norm_config(
        dim, [](auto config) { return std::pair(decltype(config)::kLanes, decltype(config)::kMaxDim); });
    EXPECT_GE(most, dim);
    EXPECT_TRUE(dim <= 16 || most < 2 * dim) << dim;  // the next narrower one would not do
    EXPECT_EQ(32 % lanes, 0);
  }
}

GatedNormBackwardProblem backward(int64_t rows, int dim) {
  GatedNormBackwardProblem p;
  p.in.batch = p.in.heads = 1;
  p.in.tokens = rows;
  p.in.dim = dim;
  p.in.x = {nullptr, GD_BF16, rows * dim, dim, dim};
  return p;
}

TEST(NormConfig, BackwardCtas) {
  EXPECT_EQ(norm_backward_ctas(backward(0, 128).in), 0);
  EXPECT_EQ(norm_backward_ctas(backward(1, 128).in), 1);
  EXPECT_EQ(norm_backward_ctas(backward(16, 128).in), 1);
  EXPECT_EQ(norm_backward_ctas(backward(17, 128).in), 2);
  EXPECT_EQ(norm_backward_ctas(backward(17, 512).in), 3);
  EXPECT_EQ(norm_backward_ctas(backward(kMaxNormRows, 16).in), kMaxNormPartials);
}

// A block's first row, and the first row of the block after the last one, are 32-bit numbers.
TEST(NormConfig, RowIndicesDoNotOverflow) {
  constexpr int64_t kForwardRows = kNormThreads / 2 * 4, kBackwardRows = kNormBackwardThreads / 2;
  EXPECT_LT(kMaxNormRows + kForwardRows, int64_t{1} << 31);
  EXPECT_LT(kMaxNormRows + kMaxNormPartials * kBackwardRows, int64_t{1} << 32);
}

TEST(NormConfig, WorkspaceIsForDweight) {
  GatedNormBackwardProblem p = backward(1000, 64);
  EXPECT_EQ(norm_backward_workspace(p), 0u);
  p.dweight = {nullptr, GD_F32, 1};
  EXPECT_EQ(norm_backward_workspace(p), 32 * 64 * sizeof(float));
}

TEST(NormConfig, CommonType) {
  GatedNormProblem p;
  p.in = backward(10, 128).in;
  p.y = p.in.z = p.in.x;
  EXPECT_EQ(common_type(p.in, {&p.y}), GD_BF16);
  p.in.z = {};
  p.in.weight = {nullptr, GD_F32, 1};
  EXPECT_EQ(common_type(p.in, {&p.y}), GD_BF16);
  p.y.dtype = GD_F32;
  EXPECT_EQ(common_type(p.in, {&p.y}), GD_DTYPE_NONE);
  p.y = p.in.x;
  p.y.token_stride += 1;
  EXPECT_EQ(common_type(p.in, {&p.y}), GD_DTYPE_NONE);
  p.y = p.in.x;
  p.in.weight.data = reinterpret_cast<void*>(8);
  EXPECT_EQ(common_type(p.in, {&p.y}), GD_DTYPE_NONE);
  p.in.weight = {};
  p.in.x.dtype = p.y.dtype = GD_F32;
  EXPECT_EQ(common_type(p.in, {&p.y}), GD_DTYPE_NONE);
}

GatedNormProblem forward(int64_t batch, int64_t tokens, int64_t heads, int dim) {
  GatedNormProblem p;
  p.in.batch = batch, p.in.tokens = tokens, p.in.heads = heads, p.in.dim = dim;
  p.in.x = p.in.z = p.y = {nullptr, GD_BF16, tokens * heads * dim, heads * dim, dim};
  p.in.weight = {nullptr, GD_BF16, 1};
  return p;
}
bool supports_fast(const GatedNormProblem& p) { return supports_fast_norm(p.in, {&p.y}); }

TEST(FastNorm, TakesWhatLayersHave) {
  for (const int dim : {64, 128, 256}) EXPECT_TRUE(supports_fast(forward(2, 3, 4, dim)));
  for (const int dim : {48, 96, 144, 272, 512}) EXPECT_FALSE(supports_fast(forward(2, 3, 4, dim))) << dim;
  GatedNormProblem p = forward(2, 3, 4, 128);
  p.in.z = {};
  EXPECT_TRUE(supports_fast(p));
  p.in.weight = {nullptr, GD_F32, 1};
  EXPECT_TRUE(supports_fast(p));
  p.in.weight = {};
  EXPECT_TRUE(supports_fast(p));
  p.in.weight = {nullptr, GD_F16, 1};
  EXPECT_FALSE(supports_fast(p));
  p = forward(2, 3, 4, 128);
  p.y.dtype = GD_F32;
  EXPECT_FALSE(supports_fast(p));
}

TEST(FastNorm, TokensHaveOneStride) {
  GatedNormProblem p = forward(2, 3, 4, 128);
  p.in.z.token_stride = 1024, p.in.z.batch_stride = 3072;  // a part of wider rows
  EXPECT_TRUE(supports_fast(p));
  p.in.z.batch_stride += 8;
  EXPECT_FALSE(supports_fast(p));
  p.in.batch = 1;
  EXPECT_TRUE(supports_fast(p));
  p = forward(2, 1, 4, 128);  // one token: its stride means nothing
  p.in.x.token_stride = 64, p.in.x.batch_stride = 1024;
  EXPECT_TRUE(supports_fast(p));
  EXPECT_EQ(FastNormParams(p.in).x.token_stride, 2048u);
  p = forward(1, 3, 4, 128);
  p.in.x.token_stride = int64_t{1} << 30;  // of 2^31 bytes
  EXPECT_FALSE(supports_fast(p));
}

// Two lines of constant memory: arguments begin 48 bytes before the second.
TEST(FastNorm, ArgumentsAreFew) {
  EXPECT_LE(sizeof(FastNormForwardParams), 48u + 64);
  EXPECT_LE(sizeof(FastNormBackwardParams), 48u + 2 * 64);
}

// The addresses of the fast kernels are those of the problem.
TEST(FastNorm, Addresses) {
  GatedNormProblem p = forward(3, 5, 4, 64);
  p.in.z.head_stride = 80, p.in.z.token_stride = 400, p.in.z.batch_stride = 2000;
  const FastNormForwardParams fast(p, Pdl::kOff);
  EXPECT_EQ(fast.last, 3u * 5 * 4 - 1);
  for (uint32_t row = 0; row <= fast.last; ++row) {
    const uint32_t token = fast.heads.quotient(row), head = fast.heads.remainder(row, token);
    EXPECT_EQ(fast.z.at(token, head) - fast.z.data, 2 * p.in.z.offset(token / 5, token % 5, head));
    EXPECT_EQ(fast.y.at(token, head) - fast.y.data, 2 * p.y.offset(token / 5, token % 5, head));
  }
}

}  // namespace
}  // namespace gatedelta::cuda
