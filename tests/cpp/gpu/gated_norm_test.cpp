#include "device.hpp"
#include "testing/gated_norm_cases.hpp"
#include "testing/gated_norm_device.hpp"
#include "testing/gated_norm_judge.hpp"

namespace gatedelta::testing {
namespace {

// The gated norm runs on every device from compute capability 8.0 on.
class GatedNorm : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0, major = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    if (devices > 0) GD_CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major < 8) GTEST_SKIP() << "no CUDA device of compute capability 8.0 or later";
  }
};

void check(const NormCases& cases) {
  for (const NormCase& c : cases) {
    NormProblem problem(c);
    const Judgement forward = judge_gated_norm(problem, on_device<gd_gated_norm_args>);
    const Judgement backward = judge_gated_norm_backward(problem, on_device<gd_gated_norm_backward_args>);
    for (const Judgement* judgement : {&forward, &backward})
      if (!judgement->ok()) ADD_FAILURE() << c.text() << "\n" << judgement->text();
  }
}

TEST_F(GatedNorm, Sizes) { check(norm_sizes()); }
TEST_F(GatedNorm, Types) { check(norm_types()); }
TEST_F(GatedNorm, Options) { check(norm_options()); }
TEST_F(GatedNorm, Layouts) { check(norm_layouts()); }
TEST_F(GatedNorm, Numbers) { check(norm_numbers()); }
TEST_F(GatedNorm, Lengths) { check(norm_lengths()); }
TEST_F(GatedNorm, Empty) { check(norm_empty()); }

TEST_F(GatedNorm, SomeGradients) {
  NormProblem all({.T = 40, .x = GD_BF16});
  const gd_gated_norm_backward_args wanted = all.backward;
  for (int bits = 1; bits < 8; ++bits) {
    if (!(bits & 1)) all.backward.dx = {};
    if (!(bits & 2)) all.backward.dz = {};
    if (!(bits & 4)) all.backward.dweight = {};
    const Judgement judgement = judge_gated_norm_backward(all, on_device<gd_gated_norm_backward_args>);
    EXPECT_TRUE(judgement.ok()) << bits << "\n" << judgement.text();
    all.backward = wanted;
  }
}

// The same row has the same bits in every place, and a call repeats bit for bit.
TEST_F(GatedNorm, Bits) {
  for (const gd_dtype x : kNormTypes) {
    NormProblem problem({.B = 2, .T = 1001, .H = 5, .D = 128, .x = x});
    std::vector<std::vector<char>> first;
    for (int i = 0; i < 20; ++i) {
      problem.reset();
      ASSERT_EQ(on_device(problem.forward), "");
      ASSERT_EQ(on_device(problem.backward), "");
      const std::vector<std::vector<char>> bits = {bytes_of(problem.forward.y), bytes_of(problem.backward.dx),
                                                   bytes_of(problem.backward.dz), bytes_of(problem.backward.dweight)};
      if (first.empty()) first = bits;
      ASSERT_EQ(bits, first) << problem.spec.text();
    }
  }
}

// A captured call reads its inputs anew at every replay.
TEST_F(GatedNorm, Graph) {
  const NormCase c = {.T = 700, .H = 3, .x = GD_BF16};
  NormProblem first(c), second({.T = 700, .H = 3, .x = GD_BF16, .seed = 2});
  DeviceCall<gd_gated_norm_args> forward(first.forward);
  DeviceCall<gd_gated_norm_backward_args> backward(first.backward);
  const CudaStream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  GD_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  EXPECT_EQ(forward.run(stream), "");
  EXPECT_EQ(backward.run(stream), "");
  GD_CUDA_OK(cudaStreamEndCapture(stream, &graph));
  GD_CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
  for (NormProblem* problem : {&first, &second, &first}) {
    problem->reset();
    forward.upload(problem->forward);
    backward.upload(problem->backward);
    GD_CUDA_OK(cudaGraphLaunch(replay, stream));
    const Judgement y = judge_gated_norm(*problem, [&](const auto& args) { return forward.download(args); });
    EXPECT_TRUE(y.ok()) << y.text();
    const Judgement gradients =
        judge_gated_norm_backward(*problem, [&](const auto& args) { return backward.download(args); });
    EXPECT_TRUE(gradients.ok()) << gradients.text();
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

// Rows beyond 2^31 elements: every offset is 64 bits wide. Only the last rows are looked at.
TEST_F(GatedNorm, LargeOffsets) {
  constexpr int64_t kD = 128, kT = (int64_t{1} << 31) / kD + 100;
  size_t unused = 0, total = 0;
  GD_CUDA_OK(cudaMemGetInfo(&unused, &total));
  if (unused < size_t{14} << 30) GTEST_SKIP() << "less than 14 GiB of device memory are free";
  const DeviceMemory x(kT * kD * 2, 0), y(kT * kD * 2, 0);
  GD_CUDA_OK(cudaMemset(x.data(), 0x40, x.size()));  // 3.004 in every place: the norm is 1
  gd_gated_norm_args args = GD_GATED_NORM_ARGS_INIT;
  args.exec.device = GD_CUDA;
  const auto rows = [](const DeviceMemory& memory) {
    return gd_tensor{memory.data(), GD_BF16, 4, {1, kT, 1, kD}, {kT * kD, kD, kD, 1}};
  };
  args.x = rows(x);
  args.y = rows(y);
  ASSERT_EQ(gd_gated_norm(&args), GD_OK) << gd_last_error();
  std::vector<uint16_t> last(100 * kD);
  GD_CUDA_OK(cudaMemcpy(last.data(), y.data() + y.size() - last.size() * 2, last.size() * 2, cudaMemcpyDeviceToHost));
  for (const uint16_t bits : last) ASSERT_EQ(bits, 0x3f80);
}

}  // namespace
}  // namespace gatedelta::testing
