// The convolution on a CUDA device: its kernels for decode steps, long inputs, bits, graphs.
#include "tests/cpp/ops/conv1d.hpp"
#include "device.hpp"

namespace gatedelta::testing {
namespace {

using Conv1d = Gpu;

// Decode steps in the usual orders of memory, which have a kernel of their own.
TEST_F(Conv1d, VectorUpdates) {
  const Specs types = {"dtype=fp32", "dtype=bf16 state=bf16 wdtype=bf16", "dtype=fp16 state=fp16 wdtype=fp16",
                       "dtype=bf16 state=bf16"};
  const Specs states = {
      "state_tokens_first", "state_tokens_first S=4", "state_tokens_first S=11", "S=3", "S=4", "S=5", "S=16"};
  const Specs calls = {"inplace silu pool",   "inplace bias pool null_slot i64",
                       "silu bias pool",      "inplace=0 silu bias",
                       "h0=0 silu",           "ht=0 bias",
                       "inplace strided silu"};
  for (const int T : {1, 2, 4, 7})
    check_conv1d_forward(cross(cross(cross({"B=11 D=1032 T=" + std::to_string(T)}, types), states), calls));
  check_conv1d_forward(cross(cross({"B=1 D=8 T=1", "B=700 D=520 T=1", "B=3 D=8192 T=1 channel_major"}, types), states));
  check_conv1d_forward(
      cross(cross({"B=11 D=520 T=1 drafts", "B=11 D=520 T=4 drafts", "B=11 D=520 T=5 drafts S=12"}, types),
            {"state_tokens_first inplace pool silu", "state_tokens_first pool null_slot", "inplace",
             "inplace pool silu", "pool null_slot bias", "inplace=0", "inplace i64 pool null_slot"}));
  check_conv1d_forward(cross(cross({"B=5 D=264 T=2 drafts", "B=5 D=1032 T=8 drafts"}, types),
                             {"inplace pool silu", "pool null_slot bias", "inplace=0"}));
}

// More chunks than the grid has groups, so that a CTA of the backward has several chunks.
TEST_F(Conv1d, ManyChunks) {
  check_conv1d_backward({"T=20000 D=2048 dtype=bf16 wdtype=bf16 silu h0=0 ht=0",
                         "T=4960 D=2500 channel_major dtype=bf16 silu h0=0 ht=0", "T=9000 D=1026 silu h0=0 ht=0",
                         "B=400 T=3 D=6400 silu", "B=3 T=700 D=520 dtype=bf16 silu h0=0 ht=0",
                         "B=2 T=1001 D=132 dtype=fp16 h0=0 ht=0", "T=37 D=128 silu bias h0=0 ht=0"});
  check_conv1d_forward({"T=20000 D=1024 dtype=bf16 silu"});
}

// One call gives the bits of another, whichever kernel takes it, and run after run.
TEST_F(Conv1d, Bits) {
  const auto outputs = [](const std::string& spec) {
    ConvProblem problem(parse_conv_case(spec));
    EXPECT_EQ(problem.judge_forward(on_device<gd_conv1d_args>), "") << spec;
    return to_doubles(problem.forward.out);
  };
  for (const std::string spec : {"B=2 T=512 D=48 silu bias", "B=2 T=512 D=48 silu dtype=bf16"}) {
    const auto rows = outputs(spec), columns = outputs(spec + " channel_major"), any = outputs(spec + " strided");
    EXPECT_EQ(rows, columns) << spec;
    EXPECT_EQ(rows, any) << spec;
  }
  for (const std::string spec : {"B=5 T=1 D=520 silu bias", "B=5 T=7 D=520 silu dtype=bf16 state=bf16"}) {
    const auto vectors = outputs(spec), any = outputs(spec + " strided");
    EXPECT_EQ(vectors, any) << spec;
    EXPECT_EQ(vectors, outputs(spec + " state_tokens_first")) << spec;
  }
  ConvProblem problem(parse_conv_case("B=3 T=2000 D=1000 silu bias dtype=bf16 wdtype=fp32"));
  std::vector<double> first;
  for (int run = 0; run < 20; ++run) {
    ASSERT_EQ(on_device<gd_conv1d_backward_args>(problem.backward), "");
    const auto dw = to_doubles(problem.backward.dweight);
    if (run == 0) first = dw;
    ASSERT_EQ(dw, first);
  }
}

// A replay reads slots and states anew.
TEST_F(Conv1d, GraphReplay) {
  ConvProblem problem(parse_conv_case("B=16 T=1 D=512 silu dtype=bf16 state=bf16 pool inplace"));
  ConvProblem again(parse_conv_case("B=16 T=1 D=512 silu dtype=bf16 state=bf16 pool inplace seed=2"));
  DeviceCall<gd_conv1d_args> device(problem.forward);
  Replay replay([&](cudaStream_t stream) { return device.run(stream); });
  ASSERT_EQ(replay.error(), "");
  for (ConvProblem* each : {&problem, &again}) {
    EXPECT_EQ(each->judge_forward([&](const gd_conv1d_args& args) {
      device.upload(args);
      replay.launch();
      return device.download(args);
    }),
              "");
  }
}

}  // namespace
}  // namespace gatedelta::testing
