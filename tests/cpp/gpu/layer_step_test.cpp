#include "device.hpp"
#include "testing/layer_step_device.hpp"

namespace gatedelta::testing {
namespace {

// The layer's step runs on every device from compute capability 8.0 on.
class LayerStep : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0, major = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    if (devices > 0) GD_CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major < 8) GTEST_SKIP() << "no CUDA device of compute capability 8.0 or later";
  }
};

// What the CPU computes, which is compared with the truth operation by operation.
LayerProblem::Bytes on_cpu(LayerProblem& problem) {
  problem.reset();
  EXPECT_EQ(run_layer_step(problem.args), "");
  LayerProblem::Bytes bytes = problem.bytes();
  problem.reset();
  return bytes;
}

TEST_F(LayerStep, AgreesWithTheCpu) {
  for (const LayerCase& c : layer_cases()) {
    SCOPED_TRACE(c.text());
    LayerProblem problem(c);
    const LayerProblem::Bytes expected = on_cpu(problem);
    ASSERT_EQ(on_device(problem.args), "");
    EXPECT_EQ(problem.difference(problem.bytes(), expected), "");
  }
}

// Engines' shapes: 16 key heads, 32 and 64 value heads, from one sequence to many.
TEST_F(LayerStep, EnginesShapes) {
  for (const int64_t batch : {1, 2, 5, 8, 33}) {
    for (const gd_dtype state : {GD_F32, GD_BF16}) {
      for (const int64_t tokens : {1, 4}) {
        LayerProblem problem({.B = batch,
                              .T = tokens,
                              .Hk = 16,
                              .Hv = batch == 5 ? 64 : 32,
                              .K = 128,
                              .V = 128,
                              .x = GD_BF16,
                              .y = GD_BF16,
                              .conv_state = GD_BF16,
                              .state = state,
                              .value_first = true,
                              .tokens_first = batch % 2 == 0,
                              .drafts = tokens > 1,
                              .null_slot = batch > 2,
                              .seed = static_cast<uint64_t>(batch)});
        SCOPED_TRACE(problem.spec.text());
        const LayerProblem::Bytes expected = on_cpu(problem);
        ASSERT_EQ(on_device(problem.args), "");
        EXPECT_EQ(problem.difference(problem.bytes(), expected), "");
      }
    }
  }
}

// What lies between the operations is rounded as the separate calls store it: the bits are theirs.
TEST_F(LayerStep, EqualsThreeCalls) {
  for (const LayerCase& c : layer_cases()) {
    SCOPED_TRACE(c.text());
    LayerProblem problem(c);
    DeviceLayerStep step(problem.args);
    ASSERT_EQ(run_three_calls(step), "");
    ASSERT_EQ(step.download(problem.args), "");
    const LayerProblem::Bytes expected = problem.bytes();
    problem.reset();
    step.upload(problem.args);
    ASSERT_EQ(step.run(), "");
    ASSERT_EQ(step.download(problem.args), "");
    EXPECT_TRUE(problem.bytes() == expected) << problem.difference(problem.bytes(), expected) << " (or less)";
  }
}

// A captured step reads everything anew at each replay, and a hundred of them have the same bits: no CTA writes a conv
// state that another one has yet to read.
TEST_F(LayerStep, Graph) {
  for (const int64_t tokens : {1, 3}) {
    LayerProblem problem({.B = 17,
                          .T = tokens,
                          .Hk = 4,
                          .Hv = 8,
                          .K = 128,
                          .V = 128,
                          .x = GD_BF16,
                          .y = GD_BF16,
                          .conv_state = GD_BF16,
                          .value_first = true,
                          .drafts = tokens > 1});
    SCOPED_TRACE(problem.spec.text());
    DeviceLayerStep step(problem.args);
    ASSERT_EQ(step.run(), "");
    ASSERT_EQ(step.download(problem.args), "");
    const LayerProblem::Bytes expected = problem.bytes();
    problem.reset();
    const CudaStream stream;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    GD_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    EXPECT_EQ(step.run(stream), "");
    GD_CUDA_OK(cudaStreamEndCapture(stream, &graph));
    GD_CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = 0; i < 100; ++i) {
      problem.reset();
      step.upload(problem.args);
      GD_CUDA_OK(cudaGraphLaunch(replay, stream));
      ASSERT_EQ(step.download(problem.args), "");
      ASSERT_TRUE(problem.bytes() == expected)
          << "replay " << i << ": " << problem.difference(problem.bytes(), expected);
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }
}

// Two steps in a stream, the second one on what the first one wrote, without a word from the host between them.
TEST_F(LayerStep, StepAfterStep) {
  LayerProblem problem({.B = 9,
                        .Hk = 4,
                        .Hv = 8,
                        .K = 128,
                        .V = 128,
                        .x = GD_BF16,
                        .y = GD_BF16,
                        .conv_state = GD_BF16,
                        .value_first = true});
  for (int i = 0; i < 5; ++i) ASSERT_EQ(run_layer_step(problem.args), "");
  const LayerProblem::Bytes expected = problem.bytes();
  problem.reset();
  DeviceLayerStep step(problem.args);
  for (int i = 0; i < 5; ++i) ASSERT_EQ(step.run(), "");
  ASSERT_EQ(step.download(problem.args), "");
  EXPECT_EQ(problem.difference(problem.bytes(), expected), "");
}

}  // namespace
}  // namespace gatedelta::testing
