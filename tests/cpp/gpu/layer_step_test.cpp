// The layer's step on a CUDA device against the CPU, and steps in graphs and one after the other.
#include "device.hpp"

namespace gatedelta::testing {
namespace {

using LayerStep = Gpu;

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
    Replay replay([&](cudaStream_t stream) { return step.run(stream); });
    ASSERT_EQ(replay.error(), "");
    for (int i = 0; i < 100; ++i) {
      problem.reset();
      step.upload(problem.args);
      replay.launch();
      ASSERT_EQ(step.download(problem.args), "");
      ASSERT_TRUE(problem.bytes() == expected)
          << "replay " << i << ": " << problem.difference(problem.bytes(), expected);
    }
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
