// The layer's step equals the three calls it stands for, bit for bit.
#include "testing/layer_step.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "testing/number.hpp"

namespace gatedelta::testing {
namespace {

void expect_three_calls(const LayerCase& c, gd_thread_pool* pool = nullptr) {
  SCOPED_TRACE(c.text());
  LayerProblem problem(c);
  const LayerProblem::Bytes before = problem.bytes();
  ASSERT_EQ(run_three_calls(problem.args), "");
  const LayerProblem::Bytes expected = problem.bytes();
  EXPECT_NE(expected, before);
  problem.reset();
  ASSERT_EQ(run_layer_step(problem.args, pool), "");
  EXPECT_TRUE(problem.bytes() == expected) << problem.difference(problem.bytes(), expected) << " (or less)";
  EXPECT_TRUE(problem.guards_intact());
  const gd_tensor& y = problem.args.norm.y;
  for (int64_t i = 0; i < element_count(y); ++i) ASSERT_TRUE(std::isfinite(load(y.data, y.dtype, i))) << i;
}

TEST(LayerStep, EqualsThreeCalls) {
  for (const LayerCase& c : layer_cases()) expect_three_calls(c);
}

TEST(LayerStep, OnThreads) {
  gd_thread_pool* pool = nullptr;
  ASSERT_EQ(gd_thread_pool_create(3, &pool), GD_OK) << gd_last_error();
  const std::unique_ptr<gd_thread_pool, decltype(&gd_thread_pool_destroy)> owner(pool, gd_thread_pool_destroy);
  expect_three_calls({.B = 7, .K = 128, .V = 128, .x = GD_BF16, .y = GD_BF16}, pool);
  expect_three_calls({.B = 2, .T = 4, .K = 64, .V = 128, .x = GD_BF16, .y = GD_BF16, .drafts = true}, pool);
}

// The norm of a padded row's zeros is zero, whatever its gate.
TEST(LayerStep, PaddedRowsAreZero) {
  for (const bool drafts : {false, true}) {
    LayerProblem problem({.B = 3, .T = 2, .x = GD_BF16, .drafts = drafts});
    for (const gd_tensor* gates : {&problem.args.rule.in.g, &problem.args.rule.in.beta})
      for (int64_t i = 0; i < gates->stride[0]; ++i)
        store(gates->data, gates->dtype, 2 * gates->stride[0] + i, std::nan(""));
    ASSERT_EQ(run_layer_step(problem.args), "");
    const gd_tensor& y = problem.args.norm.y;
    const auto* values = static_cast<const float*>(y.data);
    for (int64_t i = 0; i < y.stride[0]; ++i) ASSERT_EQ(values[2 * y.stride[0] + i], 0.0f) << drafts;
  }
}

TEST(LayerStep, Empty) {
  expect_three_calls({.B = 4, .lengths = {0, 3, 0, 0}});
  for (const bool pool : {false, true}) {
    LayerProblem nobody({.B = 0, .pool = pool}), no_token({.B = 2, .T = 0, .pool = pool});
    EXPECT_EQ(run_layer_step(nobody.args), "");
    EXPECT_EQ(run_layer_step(no_token.args), "");
  }
}

}  // namespace
}  // namespace gatedelta::testing
