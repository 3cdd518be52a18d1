#include <cmath>

#include "support.hpp"
#include "testing/gated_norm_cases.hpp"
#include "testing/gated_norm_judge.hpp"
#include "testing/number.hpp"

namespace gatedelta::testing {
namespace {

void check(const NormCases& cases) {
  for (const NormCase& c : cases) {
    NormProblem problem(c);
    for (const gd_isa isa : usable_isas()) {
      const Exec exec = {.isa = isa, .pool = nullptr, .threads = 0};
      const Judgement forward =
          judge_gated_norm(problem, [&](const gd_gated_norm_args& args) { return run_gated_norm(args, exec); });
      const Judgement backward = judge_gated_norm_backward(
          problem, [&](const gd_gated_norm_backward_args& args) { return run_gated_norm_backward(args, exec); });
      for (const Judgement* judgement : {&forward, &backward})
        if (!judgement->ok()) ADD_FAILURE() << gd_isa_name(isa) << " " << c.text() << "\n" << judgement->text();
    }
  }
}

TEST(GatedNorm, Sizes) { check(norm_sizes()); }
TEST(GatedNorm, Types) { check(norm_types()); }
TEST(GatedNorm, Options) { check(norm_options()); }
TEST(GatedNorm, Layouts) { check(norm_layouts()); }
TEST(GatedNorm, Numbers) { check(norm_numbers()); }
TEST(GatedNorm, Lengths) { check(norm_lengths()); }
TEST(GatedNorm, Empty) { check(norm_empty()); }

// Gradients in any combination, and broadcast inputs.
TEST(GatedNorm, SomeGradients) {
  NormProblem all({.T = 40, .x = GD_BF16});
  const gd_gated_norm_backward_args wanted = all.backward;
  for (int bits = 1; bits < 8; ++bits) {
    if (!(bits & 1)) all.backward.dx = {};
    if (!(bits & 2)) all.backward.dz = {};
    if (!(bits & 4)) all.backward.dweight = {};
    const Judgement judgement = judge_gated_norm_backward(
        all, [](const gd_gated_norm_backward_args& args) { return run_gated_norm_backward(args, {}); });
    EXPECT_TRUE(judgement.ok()) << bits << "\n" << judgement.text();
    EXPECT_EQ(judgement.verdicts.size(), static_cast<size_t>(__builtin_popcount(static_cast<unsigned>(bits))));
    all.backward = wanted;
  }
  all.backward.d_y.stride[0] = all.backward.d_y.stride[1] = all.backward.z.stride[2] = 0;
  const Judgement judgement = judge_gated_norm_backward(
      all, [](const gd_gated_norm_backward_args& args) { return run_gated_norm_backward(args, {}); });
  EXPECT_TRUE(judgement.ok()) << judgement.text();
}

// The bits of y are those of the truth, rounded, but for numbers next to a tie: roundings before the gate happen where
// they must and nowhere else.
TEST(GatedNorm, Roundings) {
  for (const gd_dtype x : {GD_BF16, GD_F16}) {
    for (const gd_dtype weight : {x, GD_F32}) {
      std::vector<double> unrounded;
      for (const bool round : {false, true}) {
        NormProblem problem({.T = 64, .H = 8, .x = x, .weight = weight, .round = round});
        const std::vector<double> truth = reference_gated_norm(problem.forward);
        for (const gd_isa isa : usable_isas()) {
          problem.reset();
          ASSERT_EQ(run_gated_norm(problem.forward, {.isa = isa, .pool = nullptr, .threads = 0}), "");
          const std::vector<double> y = to_doubles(problem.forward.y);
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

std::vector<char> bytes_of(const gd_tensor& t) {  // of a dense tensor
  const char* data = static_cast<const char*>(t.data);
  return {data, data + element_count(t) * element_bytes(t.dtype)};
}

TEST(GatedNorm, BitsDoNotDependOnThreads) {
  const Pool pool(4);
  for (const gd_dtype x : kNormTypes) {
    NormProblem problem({.B = 2, .T = 501, .H = 7, .D = 64, .x = x});
    std::vector<std::vector<char>> first;
    for (const int threads : {1, 2, 3, 4}) {
      const Exec exec = {.isa = GD_ISA_AUTO, .pool = pool, .threads = threads};
      problem.reset();
      ASSERT_EQ(run_gated_norm(problem.forward, exec), "");
      ASSERT_EQ(run_gated_norm_backward(problem.backward, exec), "");
      const std::vector<std::vector<char>> bits = {bytes_of(problem.forward.y), bytes_of(problem.backward.dx),
                                                   bytes_of(problem.backward.dz), bytes_of(problem.backward.dweight)};
      if (first.empty()) first = bits;
      EXPECT_EQ(bits, first) << threads << " threads, " << problem.spec.text();
    }
  }
}

// A NaN or an infinity stays in its row.
TEST(GatedNorm, NonFinite) {
  NormProblem problem({.T = 4, .H = 1, .D = 32});
  auto* x = static_cast<float*>(problem.forward.x.data);
  auto* z = static_cast<float*>(problem.forward.z.data);
  x[3] = NAN;
  z[32 + 5] = NAN;
  z[64 + 6] = INFINITY;
  for (const gd_isa isa : usable_isas()) {
    problem.reset();
    ASSERT_EQ(run_gated_norm(problem.forward, {.isa = isa, .pool = nullptr, .threads = 0}), "");
    const auto* y = static_cast<const float*>(problem.forward.y.data);
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
TEST(GatedNorm, TruthHasTheDerivatives) {
  for (const NormGateKind gate : {NormGateKind::none, NormGateKind::silu, NormGateKind::sigmoid}) {
    NormProblem problem({.T = 2, .H = 2, .D = 16, .gate = gate, .eps = 0.1f});
    const NormGradients gradients = reference_gated_norm_backward(problem.backward);
    const std::vector<double> d_y = to_doubles(problem.backward.d_y);
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
    if (gate != NormGateKind::none) check_input(problem.forward.z, gradients.dz);
    check_input(problem.forward.weight, gradients.dweight);
  }
}

}  // namespace
}  // namespace gatedelta::testing
