#include <cstring>

#include "device.hpp"
#include "testing/conv1d.hpp"

namespace gatedelta::testing {

template <>
struct CallOf<gd_conv1d_args> {
  static constexpr size_t kRowTensors = 0;
  static constexpr auto workspace = gd_conv1d_workspace;
  static constexpr auto run = gd_conv1d;
  static constexpr const char* kName = "gd_conv1d";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.in.x,
                       &a.in.weight,
                       &a.in.bias,
                       &a.in.cu_seqlens,
                       &a.in.initial_state,
                       &a.in.initial_indices,
                       &a.y,
                       &a.final_state,
                       &a.final_indices,
                       &a.previous_accept_lengths,
                       &a.step_states};
  }
};
template <>
struct CallOf<gd_conv1d_backward_args> {
  static constexpr size_t kRowTensors = 0;
  static constexpr auto workspace = gd_conv1d_backward_workspace;
  static constexpr auto run = gd_conv1d_backward;
  static constexpr const char* kName = "gd_conv1d_backward";
  template <class Args>
  static auto tensors(Args& a) {
    return std::vector{&a.in.x,
                       &a.in.weight,
                       &a.in.bias,
                       &a.in.cu_seqlens,
                       &a.in.initial_state,
                       &a.in.initial_indices,
                       &a.d_y,
                       &a.d_final_state,
                       &a.dx,
                       &a.dweight,
                       &a.dbias,
                       &a.d_initial_state};
  }
};

namespace {

// The convolution runs on every device from compute capability 8.0 on.
class Conv1d : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0, major = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    if (devices > 0) GD_CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major < 8) GTEST_SKIP() << "no CUDA device of compute capability 8.0 or later";
  }
};

void check_forward(const Specs& specs) {
  for (const std::string& spec : specs) {
    ConvProblem problem(parse_conv_case(spec));
    EXPECT_EQ(problem.judge_forward(on_device<gd_conv1d_args>), "") << spec;
  }
}
void check_backward(const Specs& specs) {
  for (const std::string& spec : specs) {
    ConvProblem problem(parse_conv_case(spec));
    EXPECT_EQ(problem.judge_backward(on_device<gd_conv1d_backward_args>), "") << spec;
  }
}
void check(const Specs& specs) {
  check_forward(specs);
  check_backward(specs);
}

const Specs kTaps = {"W=2", "W=3 silu", "W=4 bias silu", "W=4 bias"};
const Specs kMajors = {"channel_major=0", "channel_major=1"};
const Specs kAllTypes = {"dtype=fp32", "dtype=bf16 wdtype=bf16 state=bf16", "dtype=fp16 wdtype=fp16 state=fp16",
                         "dtype=bf16 odtype=fp32 state=fp16"};

TEST_F(Conv1d, Types) { check(cross(cross({"B=2 T=264 D=72 bias silu"}, kMajors), kAllTypes)); }

TEST_F(Conv1d, Lengths) {
  Specs lengths;
  for (const int T : {0, 1, 2, 3, 4, 5, 8, 16, 19, 63, 64, 65, 67, 128, 240, 248, 256, 264, 504, 1000})
    lengths.push_back("T=" + std::to_string(T) + " D=20");
  check(cross(cross(lengths, kTaps), cross(kMajors, {"dtype=fp32", "dtype=bf16 wdtype=bf16"})));
  check_backward(cross(cross(lengths, {"B=2 silu h0=0 ht=0", "B=2 bias h0=0 ht=0"}),
                       cross(kMajors, {"dtype=fp32", "dtype=bf16 wdtype=bf16"})));
}

TEST_F(Conv1d, Channels) {
  Specs channels;
  for (const int D : {1, 2, 3, 4, 5, 12, 33, 64, 256, 257, 260, 520, 1024})
    channels.push_back("B=2 T=24 D=" + std::to_string(D));
  check(cross(cross(channels, kTaps), cross(kMajors, {"dtype=bf16", "strided"})));
}

TEST_F(Conv1d, PackedSequences) {
  check(cross(cross({"lengths=3+0+1+70+2+64+4 pad=5 D=24", "lengths=0+0 D=8", "lengths=1+1+1+1+1+1+1+1+1+1 D=8",
                     "lengths=0 pad=3 D=8", "lengths=700+1+0+2+90 D=72", "lengths=61+19+67+24+16+35 pad=40 D=132"},
                    kTaps),
              {"dtype=fp32", "dtype=bf16 channel_major i64", "strided", "h0=0", "ht=0",
               "state_tokens_first dtype=bf16 state=bf16"}));
  std::string many = "lengths=1";  // more sequences than a warp probes at once
  for (int n = 1; n < 1500; ++n) many += "+" + std::to_string(n % 7 ? n % 4 : 0);
  check(cross({many}, {"D=8", "D=4 W=2 silu dtype=bf16", "D=3"}));
}

TEST_F(Conv1d, States) {
  check(cross(cross({"B=3 T=1 D=20", "B=3 T=2 D=20", "B=3 T=7 D=20", "lengths=5+0+1+2 D=20", "B=3 T=64 D=24"},
                    {"W=4", "W=4 S=4", "W=4 S=9", "W=2 S=5 final_S=2", "W=3 S=2 final_S=7", "W=4 S=70"}),
              {"inplace=0", "inplace", "inplace state_tokens_first state=bf16", "strided", "h0=0 final_S=6",
               "dtype=bf16 state=bf16 channel_major inplace"}));
}

TEST_F(Conv1d, Pools) {
  check_forward(
      cross(cross({"B=11 T=1 D=24 pool", "B=11 T=8 D=24 pool S=4", "lengths=3+0+1+9+2+0+4+5+6+7+1 pad=2 D=24 pool"},
                  {"inplace=0", "inplace", "inplace null_slot", "null_slot i64", "inplace strided state_tokens_first",
                   "inplace state_tokens_first"}),
            {"dtype=fp32 silu", "dtype=bf16 state=bf16 bias", "channel_major silu"}));
  check_backward({"B=11 T=6 D=20 pool ht=0", "lengths=3+0+1+9+2+0+4+5+6+7+1 D=20 pool ht=0 null_slot silu"});
}

// Decode steps in the usual orders of memory, which have a kernel of their own.
TEST_F(Conv1d, NearUpdates) {
  const Specs types = {"dtype=fp32", "dtype=bf16 state=bf16 wdtype=bf16", "dtype=fp16 state=fp16 wdtype=fp16",
                       "dtype=bf16 state=bf16"};
  const Specs states = {
      "state_tokens_first", "state_tokens_first S=4", "state_tokens_first S=11", "S=3", "S=4", "S=5", "S=16"};
  const Specs calls = {"inplace silu pool",   "inplace bias pool null_slot i64",
                       "silu bias pool",      "inplace=0 silu bias",
                       "h0=0 silu",           "ht=0 bias",
                       "inplace strided silu"};
  for (const int T : {1, 2, 4, 7})
    check_forward(cross(cross(cross({"B=11 D=1032 T=" + std::to_string(T)}, types), states), calls));
  check_forward(cross(cross({"B=1 D=8 T=1", "B=700 D=520 T=1", "B=3 D=8192 T=1 channel_major"}, types), states));
  check_forward(cross(cross({"B=11 D=520 T=1 drafts", "B=11 D=520 T=4 drafts", "B=11 D=520 T=5 drafts S=12"}, types),
                      {"state_tokens_first inplace pool silu", "state_tokens_first pool null_slot", "inplace",
                       "inplace pool silu", "pool null_slot bias", "inplace=0", "inplace i64 pool null_slot"}));
  check_forward(cross(cross({"B=5 D=264 T=2 drafts", "B=5 D=1032 T=8 drafts"}, types),
                      {"inplace pool silu", "pool null_slot bias", "inplace=0"}));
}

TEST_F(Conv1d, DraftWindows) {
  for (int T = 1; T <= 8; ++T) {
    const std::string window = " drafts T=" + std::to_string(T);
    check_forward(cross(cross({"B=7 D=24" + window, "B=11 D=24 pool" + window}, {"W=2", "W=3", "W=4", "W=4 S=12"}),
                        {"inplace", "inplace state_tokens_first dtype=bf16 state=bf16", "inplace=0",
                         "inplace steps silu", "inplace strided null_slot"}));
  }
  check_forward(cross(
      {"lengths=3+0+1+8+2+5+4 pad=2 D=24 drafts", "lengths=1+1+4+0+2+5+4+1 D=24 drafts pool"},
      {"inplace", "inplace i64 channel_major", "inplace=0", "inplace steps", "inplace state_tokens_first dtype=bf16"}));
}

TEST_F(Conv1d, Steps) {
  check_forward(cross({"B=3 T=5 D=20 steps", "lengths=3+0+1+70+2 pad=4 D=20 steps", "B=11 T=2 D=20 steps pool"},
                      {"W=4", "W=2 strided", "W=3 dtype=bf16 state=bf16 channel_major"}));
}

// More work than the grid has slots, so that a CTA of the backward has several chunks.
TEST_F(Conv1d, ManyChunks) {
  check_backward({"T=20000 D=2048 dtype=bf16 wdtype=bf16 silu h0=0 ht=0",
                  "T=4960 D=2500 channel_major dtype=bf16 silu h0=0 ht=0", "T=9000 D=1026 silu h0=0 ht=0",
                  "B=400 T=3 D=6400 silu", "B=3 T=700 D=520 dtype=bf16 silu h0=0 ht=0",
                  "B=2 T=1001 D=132 dtype=fp16 h0=0 ht=0", "T=37 D=128 silu bias h0=0 ht=0"});
  check_forward({"T=20000 D=1024 dtype=bf16 silu"});
}

// One call gives the bits of another, whichever kernel takes it, and run after run.
TEST_F(Conv1d, Bits) {
  const auto outputs = [](const std::string& spec) {
    ConvProblem problem(parse_conv_case(spec));
    EXPECT_EQ(problem.judge_forward(on_device<gd_conv1d_args>), "") << spec;
    return to_doubles(problem.forward.y);
  };
  for (const std::string spec : {"B=2 T=512 D=48 silu bias", "B=2 T=512 D=48 silu dtype=bf16"}) {
    const auto rows = outputs(spec), columns = outputs(spec + " channel_major"), any = outputs(spec + " strided");
    EXPECT_EQ(rows, columns) << spec;
    EXPECT_EQ(rows, any) << spec;
  }
  for (const std::string spec : {"B=5 T=1 D=520 silu bias", "B=5 T=7 D=520 silu dtype=bf16 state=bf16"}) {
    const auto near = outputs(spec), any = outputs(spec + " strided");
    EXPECT_EQ(near, any) << spec;
    EXPECT_EQ(near, outputs(spec + " state_tokens_first")) << spec;
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

// A graph holds the call; a replay reads slots and states anew.
TEST_F(Conv1d, GraphReplay) {
  ConvProblem problem(parse_conv_case("B=16 T=1 D=512 silu dtype=bf16 state=bf16 pool inplace"));
  ConvProblem again(parse_conv_case("B=16 T=1 D=512 silu dtype=bf16 state=bf16 pool inplace seed=2"));
  CudaStream stream;
  DeviceCall<gd_conv1d_args> device(problem.forward);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  GD_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_EQ(device.run(stream), "");
  GD_CUDA_OK(cudaStreamEndCapture(stream, &graph));
  GD_CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
  for (ConvProblem* each : {&problem, &again}) {
    EXPECT_EQ(each->judge_forward([&](const gd_conv1d_args& args) {
      device.upload(args);
      GD_CUDA_OK(cudaGraphLaunch(replay, stream));
      GD_CUDA_OK(cudaStreamSynchronize(stream));
      return device.download(args);
    }),
              "");
  }
  GD_CUDA_OK(cudaGraphExecDestroy(replay));
  GD_CUDA_OK(cudaGraphDestroy(graph));
}

TEST_F(Conv1d, RandomCases) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    auto pick = [&, i = uint64_t{0}](int64_t below) mutable {
      return static_cast<int64_t>(uniform(seed, 99, i++) * static_cast<double>(below));
    };
    const auto num = [](int64_t x) { return std::to_string(x); };
    const char* const types[] = {"fp32", "bf16", "fp16"};
    std::string spec = "W=" + num(2 + pick(3)) + " seed=" + std::to_string(seed) + " dtype=" + types[pick(3)];
    spec += std::string(" wdtype=") + types[pick(3)];
    spec += std::string(" state=") + types[pick(3)];
    spec += " D=" + num(pick(3) ? 8 * (1 + pick(60)) : 1 + pick(350));
    if (pick(2)) {
      spec += " lengths=" + num(pick(90));
      for (int64_t n = pick(pick(3) ? 8 : 200); n > 0; --n) spec += "+" + num(pick(3) ? pick(5) : pick(150));
      spec += " pad=" + num(pick(2) * pick(70));
    } else {
      const int64_t T = pick(2) ? pick(9) : pick(900);
      spec += " B=" + num(1 + pick(4)) + " T=" + num(pick(2) ? T / 8 * 8 : T);
    }
    for (const char* flag : {" channel_major", " bias", " silu", " state_tokens_first", " i64"})
      if (pick(2)) spec += flag;
    if (pick(4) == 0) spec += " strided";
    if (pick(2)) spec += " S=" + num(3 + pick(8));
    check_backward({spec});
    for (const char* flag : {" inplace", " pool", " null_slot", " steps"})
      if (pick(3) == 0) spec += flag;
    check_forward({spec});
  }
}

}  // namespace
}  // namespace gatedelta::testing
