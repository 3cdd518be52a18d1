// The C++ face. This file is compiled with the warnings a careful user has on.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gatedelta/gatedelta.hpp"

namespace gatedelta::test {

TEST(CppFace, TensorsOfEachElementType) {
  float f = 0;
  const bf16 b = {0};
  f16 h = {0};
  std::int32_t i = 0;
  const std::int64_t l = 0;
  EXPECT_EQ(tensor(&f, {1}).dtype, GD_F32);
  EXPECT_EQ(tensor(&b, {1}).dtype, GD_BF16);
  EXPECT_EQ(tensor(&h, {1}).dtype, GD_F16);
  EXPECT_EQ(tensor(&i, {1}).dtype, GD_I32);
  EXPECT_EQ(tensor(&l, {1}).dtype, GD_I64);
  EXPECT_EQ(tensor(&f, GD_BF16, {1}).dtype, GD_BF16);
}

TEST(CppFace, TensorStrides) {
  float data = 0;
  const gd_tensor contiguous = tensor(&data, {2, 3, 4});
  EXPECT_EQ(contiguous.rank, 3);
  EXPECT_EQ(contiguous.data, &data);
  EXPECT_EQ(contiguous.shape[0], 2);
  EXPECT_EQ(contiguous.stride[0], 12);
  EXPECT_EQ(contiguous.stride[1], 4);
  EXPECT_EQ(contiguous.stride[2], 1);
  const gd_tensor strided = tensor(&data, {2, 3}, {100, 7});
  EXPECT_EQ(strided.stride[0], 100);
  EXPECT_EQ(strided.stride[1], 7);
  EXPECT_THROW(tensor(&data, {1, 1, 1, 1, 1, 1}), Error);
  EXPECT_THROW(tensor(&data, {2, 3}, {1}), Error);
}

TEST(CppFace, WorkspaceGrowsAndMoves) {
  Workspace a;
  EXPECT_EQ(a.data(), nullptr);
  a.reserve(100);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data()) % 64, 0u);
  void* const first = a.data();
  a.reserve(50);
  EXPECT_EQ(a.data(), first);
  EXPECT_EQ(a.size(), 100u);
  Workspace b = std::move(a);
  EXPECT_EQ(b.data(), first);
  a = std::move(b);
  EXPECT_EQ(a.size(), 100u);
}

TEST(CppFace, ThreadPoolAppliesAndMoves) {
  ThreadPool pool(2);
  ThreadPool moved = std::move(pool);
  gd_exec exec = {};
  moved.apply(exec);
  EXPECT_EQ(exec.num_threads, 2);
  EXPECT_EQ(exec.parallel_for, &gd_thread_pool_parallel_for);
  EXPECT_NE(exec.parallel_for_context, nullptr);
}

TEST(CppFace, ErrorCarriesStatusAndMessage) {
  ForwardArgs args;
  try {
    forward(args);
    FAIL() << "an empty call was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), GD_INVALID_ARGUMENT);
    EXPECT_STREQ(error.what(), "q is missing");
  }
  EXPECT_THROW(saved_size(args), Error);
  EXPECT_THROW(ThreadPool(-1), Error);
}

// One sequence of a layer with constant inputs.
struct Layer {
  static constexpr std::int64_t kT = 100, kH = 2, kD = 16;
  std::vector<float> q, k, v, g, beta;
  Layer()
      : q(kT * kH * kD, 0.1f), k(kT * kH * kD, 0.1f), v(kT * kH * kD, 1.0f), g(kT * kH, -0.05f), beta(kT * kH, 0.5f) {}
  void give(gd_inputs& in) const {
    in.q = tensor(q.data(), {1, kT, kH, kD});
    in.k = tensor(k.data(), {1, kT, kH, kD});
    in.v = tensor(v.data(), {1, kT, kH, kD});
    in.g = tensor(g.data(), {1, kT, kH});
    in.beta = tensor(beta.data(), {1, kT, kH});
  }
};

TEST(CppFace, WorkspaceIsForTheCpu) {
  ForwardArgs args;
  Workspace workspace;
  args.exec.device = GD_CUDA;
  try {
    forward(args, workspace);
    FAIL() << "host memory was taken for a device's workspace";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), GD_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.what()).find("a Workspace is CPU memory"), std::string::npos) << error.what();
  }
}

TEST(CppFace, OperationsAgree) {
  const Layer layer;
  const ThreadPool pool(2);
  Workspace workspace;
  std::vector<float> o(layer.v.size()), steps(layer.v.size()), dv(layer.v.size()), dv_recomputed(layer.v.size());

  ForwardArgs chunked;
  layer.give(chunked.in);
  pool.apply(chunked.exec);
  chunked.out = tensor(o.data(), {1, Layer::kT, Layer::kH, Layer::kD});
  const Workspace saved(saved_size(chunked));
  chunked.saved = saved.data();
  chunked.saved_bytes = saved.size();
  forward(chunked, workspace);

  RecurrentArgs stepwise;
  layer.give(stepwise.in);
  stepwise.out = tensor(steps.data(), {1, Layer::kT, Layer::kH, Layer::kD});
  recurrent(stepwise, workspace);
  for (std::size_t i = 0; i < o.size(); ++i) ASSERT_NEAR(o[i], steps[i], 1e-5f * (1 + std::fabs(o[i])));

  BackwardArgs gradient;
  layer.give(gradient.in);
  pool.apply(gradient.exec);
  gradient.do_ = tensor(layer.v.data(), {1, Layer::kT, Layer::kH, Layer::kD});
  gradient.dv = tensor(dv.data(), {1, Layer::kT, Layer::kH, Layer::kD});
  gradient.saved = saved.data();
  gradient.saved_bytes = saved.size();
  gradient.saved_call = saved_call(chunked);
  backward(gradient, workspace);
  gradient.saved = nullptr;
  gradient.saved_bytes = 0;
  gradient.saved_call = {};
  gradient.dv = tensor(dv_recomputed.data(), {1, Layer::kT, Layer::kH, Layer::kD});
  backward(gradient, workspace);
  EXPECT_EQ(std::memcmp(dv.data(), dv_recomputed.data(), dv.size() * sizeof(float)), 0);
}

// Rows of equal numbers have the norm 1, and z = 0 halves them.
TEST(CppFace, GatedNorm) {
  constexpr std::int64_t kT = 3, kH = 2, kD = 16;
  const std::vector<float> x(kT * kH * kD, 4.0f), z(x.size(), 0.0f), weight(kD, 6.0f);
  std::vector<float> y(x.size()), dz(x.size()), dweight(kD);
  Workspace workspace;
  GatedNormArgs args;
  args.x = tensor(x.data(), {1, kT, kH, kD});
  args.gate = tensor(z.data(), {1, kT, kH, kD});
  args.weight = tensor(weight.data(), {kD});
  args.out = tensor(y.data(), {1, kT, kH, kD});
  args.activation = GD_NORM_SIGMOID;
  gated_norm(args, workspace);
  for (const float value : y) ASSERT_NEAR(value, 3.0f, 1e-5f);

  GatedNormBackwardArgs gradient;
  gradient.x = args.x;
  gradient.gate = args.gate;
  gradient.weight = args.weight;
  gradient.activation = args.activation;
  gradient.dy = args.x;
  gradient.dgate = tensor(dz.data(), {1, kT, kH, kD});
  gradient.dweight = tensor(dweight.data(), {kD});
  gated_norm_backward(gradient, workspace);
  EXPECT_GT(workspace.size(), 0u);
  for (const float value : dz) ASSERT_NEAR(value, 4.0f * 6.0f * 0.25f, 1e-4f);
  for (const float value : dweight) ASSERT_NEAR(value, 4.0f * 0.5f * (kT * kH), 1e-4f);
  gradient.dy.shape[1] = kT + 1;
  EXPECT_THROW(gated_norm_backward(gradient), Error);
}

// Without decay and l2norm, and with taps that pass the newest input on: o = scale (q . k) beta v, rows of equal
// numbers, whose norm is 1.
TEST(CppFace, LayerStep) {
  constexpr std::int64_t kHeads = 1, kDim = 16, kChannels = 3 * kHeads * kDim, kTaps = 2;
  const std::vector<float> x(kChannels, 0.5f), zero(1, 0.0f), one(1, 1.0f), z(kDim, 0.0f);
  std::vector<float> taps(kChannels * kTaps, 0.0f), window(kChannels, 0.0f), state(kDim * kDim, 0.0f), y(kDim);
  for (std::size_t i = 1; i < taps.size(); i += kTaps) taps[i] = 1;
  Workspace workspace;
  LayerStepArgs args;
  args.key_heads = kHeads;
  args.conv.in.x = tensor(x.data(), {1, 1, kChannels});
  args.conv.in.weight = tensor(taps.data(), {kChannels, kTaps});
  args.conv.in.initial_state = args.conv.final_state = tensor(window.data(), {1, kChannels, kTaps - 1});
  args.rule.in.g = tensor(zero.data(), {1, 1, kHeads});
  args.rule.in.beta = tensor(one.data(), {1, 1, kHeads});
  args.rule.in.initial_state = args.rule.final_state = tensor(state.data(), {1, kHeads, kDim, kDim});
  args.norm.gate = tensor(z.data(), {1, 1, kHeads, kDim});
  args.norm.out = tensor(y.data(), {1, 1, kHeads, kDim});
  args.norm.activation = GD_NORM_SIGMOID;
  layer_step(args, workspace);
  EXPECT_GE(workspace.size(), workspace_size(args));
  for (const float value : y) ASSERT_NEAR(value, 0.5f, 1e-4f);
  for (const float value : state) ASSERT_NEAR(value, 0.25f, 1e-6f);
  for (const float value : window) ASSERT_EQ(value, 0.5f);
  args.key_heads = 0;
  EXPECT_THROW(layer_step(args), Error);
}

}  // namespace gatedelta::test
