// The layer's step equals the three calls it stands for, bit for bit: what lies between the operations is rounded as
// the separate calls store it.
#include <cmath>

#include "testing/number.hpp"
#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

using LayerStep = OnEngine;

std::string three_calls(LayerProblem& problem) {
#if defined GD_TEST_CUDA
  DeviceLayerStep step(with_kernels(problem.args));
  const std::string error = run_three_calls(step);
  return error.empty() ? step.download(problem.args) : error;
#else
  return run_three_calls(problem.args);
#endif
}
std::string one_call(LayerProblem& problem, gd_thread_pool* pool = nullptr) {
#if defined GD_TEST_CUDA
  return run(problem.args, GD_ISA_AUTO, pool);
#else
  return run_layer_step(problem.args, pool);
#endif
}

void expect_three_calls(const LayerCase& c, gd_thread_pool* pool = nullptr) {
  SCOPED_TRACE(c.text());
  LayerProblem problem(c);
  const LayerProblem::Bytes before = problem.bytes();
  ASSERT_EQ(three_calls(problem), "");
  const LayerProblem::Bytes expected = problem.bytes();
  EXPECT_NE(expected, before);
  problem.reset();
  ASSERT_EQ(one_call(problem, pool), "");
  EXPECT_TRUE(problem.bytes() == expected) << problem.difference(problem.bytes(), expected) << " (or less)";
  EXPECT_TRUE(problem.guards_intact());
  const gd_tensor& y = problem.args.norm.out;
  for (int64_t i = 0; i < element_count(y); ++i) ASSERT_TRUE(std::isfinite(load(y.data, y.dtype, i))) << i;
}

TEST_F(LayerStep, EqualsThreeCalls) {
  for (const LayerCase& c : layer_cases()) expect_three_calls(c);
}

#if !defined GD_TEST_CUDA
TEST_F(LayerStep, OnThreads) {
  const Pool pool(3);
  expect_three_calls({.B = 7, .K = 128, .V = 128, .x = GD_BF16, .y = GD_BF16}, pool);
  expect_three_calls({.B = 2, .T = 4, .K = 64, .V = 128, .x = GD_BF16, .y = GD_BF16, .drafts = true}, pool);
}
#endif

// The norm of a padded row's zeros is zero, whatever its gate.
TEST_F(LayerStep, PaddedRowsAreZero) {
  for (const bool drafts : {false, true}) {
    LayerProblem problem({.B = 3, .T = 2, .x = GD_BF16, .drafts = drafts});
    for (const gd_tensor* gates : {&problem.args.rule.in.g, &problem.args.rule.in.beta})
      for (int64_t i = 0; i < gates->stride[0]; ++i)
        store(gates->data, gates->dtype, 2 * gates->stride[0] + i, std::nan(""));
    ASSERT_EQ(one_call(problem), "");
    const gd_tensor& y = problem.args.norm.out;
    const auto* values = static_cast<const float*>(y.data);
    for (int64_t i = 0; i < y.stride[0]; ++i) ASSERT_EQ(values[2 * y.stride[0] + i], 0.0f) << drafts;
  }
}

TEST_F(LayerStep, Empty) {
  expect_three_calls({.B = 4, .lengths = {0, 3, 0, 0}});
  if (!kOnCpu) return;
  for (const bool pool : {false, true}) {
    LayerProblem no_sequence({.B = 0, .pool = pool}), no_token({.B = 2, .T = 0, .pool = pool});
    EXPECT_EQ(one_call(no_sequence), "");
    EXPECT_EQ(one_call(no_token), "");
  }
}

}  // namespace
}  // namespace gatedelta::testing
