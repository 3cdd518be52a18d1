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

}  // namespace
}  // namespace gatedelta::cuda
