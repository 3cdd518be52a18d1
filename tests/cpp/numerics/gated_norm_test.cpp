// What the CPU alone offers, or is asked for, in the gated norm; and its truth.
#include <cmath>

#include "testing/gated_norm_cases.hpp"
#include "testing/number.hpp"
#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

using GatedNorm = OnEngine;

TEST_F(GatedNorm, BroadcastInputs) {
  NormProblem problem({.T = 40, .x = GD_BF16});
  problem.backward.dy.stride[0] = problem.backward.dy.stride[1] = problem.backward.gate.stride[2] = 0;
  const Judgement judgement = judge_gated_norm_backward(
      problem, [](const gd_gated_norm_backward_args& args) { return run_gated_norm_backward(args, {}); });
  EXPECT_TRUE(judgement.ok()) << judgement.text();
}

// The bits of y are those of the truth, rounded, but for numbers next to a tie: roundings before the gate happen where
// they must and nowhere else.
TEST_F(GatedNorm, Roundings) {
  for (const gd_dtype x : {GD_BF16, GD_F16}) {
    for (const gd_dtype weight : {x, GD_F32}) {
      std::vector<double> unrounded;
      for (const bool round : {false, true}) {
        NormProblem problem({.T = 64, .H = 8, .x = x, .weight = weight, .round = round});
        const std::vector<double> truth = reference_gated_norm(problem.forward);
        for (const gd_isa isa : engine_isas()) {
          problem.reset();
          ASSERT_EQ(run(problem.forward, isa), "");
          const std::vector<double> y = to_doubles(problem.forward.out);
          size_t wrong = 0, changed = 0;
          for (size_t i = 0; i < y.size(); ++i) {
            wrong += y[i] != (x == GD_BF16 ? decode_bf16(encode_bf16(truth[i])) : decode_f16(encode_f16(truth[i])));
            changed += round && y[i] != unrounded[i];
          }
          EXPECT_LT(wrong, y.size() / 200) << gd_isa_name(isa) << " " << problem.spec.text();
          if (round) {
            EXPECT_GT(changed, y.size() / 5) << gd_isa_name(isa) << " " << problem.spec.text();
          } else {
            unrounded = y;
          }
        }
      }
    }
  }
}

// dx is made of the rows before they are rounded. Here they are a little below 1 and are rounded up to it, so that
// dx = r (1 - n^2) is half as large where rounded rows take part in its sum.
TEST_F(GatedNorm, GradientOfRoundedRows) {
  for (const gd_dtype x : {GD_BF16, GD_F16}) {
    const double n = 1 - 0.4 * (x == GD_BF16 ? 0x1p-8 : 0x1p-11);
    const auto eps = static_cast<float>(1 / (n * n) - 1);
    for (const int64_t D : {16, 80, 128}) {
      NormProblem problem(
          {.T = 2, .H = 2, .D = D, .x = x, .gate = NormGateKind::none, .has_weight = false, .round = true, .eps = eps});
      for (const gd_tensor& t : {problem.backward.x, problem.backward.dy})
        for (int64_t i = 0; i < element_count(t); ++i) store(t.data, x, i, 1);
      for (const gd_isa isa : engine_isas()) {
        problem.reset();
        ASSERT_EQ(run(problem.backward, isa), "");
        for (const double dx : to_doubles(problem.backward.dx))
          EXPECT_NEAR(dx, n * (1 - n * n), 0.02 * (1 - n * n)) << gd_isa_name(isa) << " " << problem.spec.text();
      }
    }
  }
}

TEST_F(GatedNorm, BitsDoNotDependOnThreads) {
  const Pool pool(4);
  for (const gd_dtype x : kNormTypes) {
    NormProblem problem({.B = 2, .T = 501, .H = 7, .D = 64, .x = x});
    std::vector<std::vector<char>> first;
    for (const int threads : {1, 2, 3, 4}) {
      const Exec exec = {.isa = GD_ISA_AUTO, .pool = pool, .threads = threads};
      problem.reset();
      ASSERT_EQ(run_gated_norm(problem.forward, exec), "");
      ASSERT_EQ(run_gated_norm_backward(problem.backward, exec), "");
      const std::vector<std::vector<char>> bits = {bytes_of(problem.forward.out), bytes_of(problem.backward.dx),
                                                   bytes_of(problem.backward.dgate),
                                                   bytes_of(problem.backward.dweight)};
      if (first.empty()) first = bits;
      EXPECT_EQ(bits, first) << threads << " threads, " << problem.spec.text();
    }
  }
}

// A NaN or an infinity stays in its row.
TEST_F(GatedNorm, NonFinite) {
  NormProblem problem({.T = 4, .H = 1, .D = 32});
  auto* x = static_cast<float*>(problem.forward.x.data);
  auto* z = static_cast<float*>(problem.forward.gate.data);
  x[3] = NAN;
  z[32 + 5] = NAN;
  z[64 + 6] = INFINITY;
  for (const gd_isa isa : engine_isas()) {
    problem.reset();
    ASSERT_EQ(run(problem.forward, isa), "");
    const auto* y = static_cast<const float*>(problem.forward.out.data);
    for (int i = 0; i < 4 * 32; ++i) {
      if (i == 64 + 6) {
        EXPECT_TRUE(std::isinf(y[i])) << gd_isa_name(isa);
      } else {
        EXPECT_EQ(std::isnan(y[i]), i < 32 || i == 32 + 5) << gd_isa_name(isa) << " " << i;
      }
    }
  }
}

// The truth's gradients by finite differences.
TEST_F(GatedNorm, TruthHasTheDerivatives) {
  for (const NormGateKind gate : {NormGateKind::none, NormGateKind::silu, NormGateKind::sigmoid}) {
    NormProblem problem({.T = 2, .H = 2, .D = 16, .gate = gate, .eps = 0.1f});
    const NormGradients gradients = reference_gated_norm_backward(problem.backward);
    const std::vector<double> d_y = to_doubles(problem.backward.dy);
    const auto loss = [&] {
      double sum = 0;
      const std::vector<double> y = reference_gated_norm(problem.forward);
      for (size_t i = 0; i < y.size(); ++i) sum += y[i] * d_y[i];
      return sum;
    };
    const auto check_input = [&](const gd_tensor& t, const std::vector<double>& expected) {
      ASSERT_EQ(static_cast<int64_t>(expected.size()), element_count(t));
      auto* values = static_cast<float*>(t.data);
      for (size_t i = 0; i < expected.size(); ++i) {
        const float before = values[i], up = before + 0x1p-8f, down = before - 0x1p-8f;
        values[i] = up;
        const double above = loss();
        values[i] = down;
        const double below = loss();
        values[i] = before;
        EXPECT_NEAR((above - below) / (double{up} - double{down}), expected[i], 1e-3) << i;
      }
    };
    check_input(problem.forward.x, gradients.dx);
    if (gate != NormGateKind::none) check_input(problem.forward.gate, gradients.dz);
    check_input(problem.forward.weight, gradients.dweight);
  }
}

}  // namespace
}  // namespace gatedelta::testing
