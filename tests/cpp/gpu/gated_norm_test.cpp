// The gated norm on a CUDA device: bits, graphs, long inputs.
#include "device.hpp"
#include "testing/gated_norm_cases.hpp"

namespace gatedelta::testing {
namespace {

using GatedNorm = Gpu;

// The same row has the same bits in every place, and a call repeats bit for bit.
TEST_F(GatedNorm, Bits) {
  for (const gd_dtype x : kNormTypes) {
    NormProblem problem({.B = 2, .T = 1001, .H = 5, .D = 128, .x = x});
    std::vector<std::vector<char>> first;
    for (int i = 0; i < 20; ++i) {
      problem.reset();
      ASSERT_EQ(on_device(problem.forward), "");
      ASSERT_EQ(on_device(problem.backward), "");
      const std::vector<std::vector<char>> bits = {bytes_of(problem.forward.out), bytes_of(problem.backward.dx),
                                                   bytes_of(problem.backward.dgate),
                                                   bytes_of(problem.backward.dweight)};
      if (first.empty()) first = bits;
      ASSERT_EQ(bits, first) << problem.spec.text();
    }
  }
}

TEST_F(GatedNorm, Graph) {
  NormProblem first({.T = 700, .H = 3, .x = GD_BF16}), second({.T = 700, .H = 3, .x = GD_BF16, .seed = 2});
  DeviceCall<gd_gated_norm_args> forward(first.forward);
  DeviceCall<gd_gated_norm_backward_args> backward(first.backward);
  Replay replay([&](cudaStream_t stream) {
    const std::string error = forward.run(stream);
    return error.empty() ? backward.run(stream) : error;
  });
  ASSERT_EQ(replay.error(), "");
  for (NormProblem* problem : {&first, &second, &first}) {
    problem->reset();
    forward.upload(problem->forward);
    backward.upload(problem->backward);
    replay.launch();
    const Judgement y = judge_gated_norm(*problem, [&](const auto& args) { return forward.download(args); });
    EXPECT_TRUE(y.ok()) << y.text();
    const Judgement gradients =
        judge_gated_norm_backward(*problem, [&](const auto& args) { return backward.download(args); });
    EXPECT_TRUE(gradients.ok()) << gradients.text();
  }
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
  args.out = rows(y);
  ASSERT_EQ(gd_gated_norm(&args), GD_OK) << gd_last_error();
  std::vector<uint16_t> last(100 * kD);
  GD_CUDA_OK(cudaMemcpy(last.data(), y.data() + y.size() - last.size() * 2, last.size() * 2, cudaMemcpyDeviceToHost));
  for (const uint16_t bits : last) ASSERT_EQ(bits, 0x3f80);
}

}  // namespace
}  // namespace gatedelta::testing
