#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

using Backward = OnEngine;

TEST_F(Backward, Gates) { check_backward(gate_cases()); }
TEST_F(Backward, Betas) { check_backward(beta_cases()); }
TEST_F(Backward, Keys) {
  if (kEngine == EngineKind::cuda) GTEST_SKIP() << "bounds of similar keys are not established for Hopper's kernels";
  check_backward(key_cases());
}
TEST_F(Backward, SimilarKeys) {
  if (!kOnCpu) GTEST_SKIP() << "bounds of similar keys are not established for the kernels on a GPU";
  check_backward(similar_key_cases());
}
TEST_F(Backward, Heads) { check_backward(head_cases()); }
TEST_F(Backward, Sizes) { check_backward(size_cases()); }
TEST_F(Backward, Packs) { check_backward(pack_cases()); }
TEST_F(Backward, EveryLength) { check_backward(every_length_cases()); }
TEST_F(Backward, States) { check_backward(state_cases()); }
TEST_F(Backward, Strides) { check_backward(stride_cases()); }
TEST_F(Backward, ScaleAndOutputType) { check_backward(scale_cases()); }

}  // namespace
}  // namespace gatedelta::testing
