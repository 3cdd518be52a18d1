#include "testing/gated_norm_cases.hpp"
#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

using GatedNorm = OnEngine;

Judgement judge_backward(NormProblem& problem, gd_isa isa) {
  return judge_gated_norm_backward(problem, [&](const gd_gated_norm_backward_args& args) { return run(args, isa); });
}
void check(const NormCases& cases) {
  for (const NormCase& c : cases) {
    NormProblem problem(c);
    for (const gd_isa isa : engine_isas()) {
      const Judgement forward =
          judge_gated_norm(problem, [&](const gd_gated_norm_args& args) { return run(args, isa); });
      const Judgement backward = judge_backward(problem, isa);
      for (const Judgement* judgement : {&forward, &backward})
        if (!judgement->ok()) ADD_FAILURE() << gd_isa_name(isa) << " " << c.text() << "\n" << judgement->text();
    }
  }
}

TEST_F(GatedNorm, Sizes) { check(norm_sizes()); }
TEST_F(GatedNorm, Types) { check(norm_types()); }
TEST_F(GatedNorm, Options) { check(norm_options()); }
TEST_F(GatedNorm, Layouts) { check(norm_layouts()); }
TEST_F(GatedNorm, Numbers) { check(norm_numbers()); }
TEST_F(GatedNorm, Lengths) { check(norm_lengths()); }
TEST_F(GatedNorm, Empty) { check(norm_empty()); }

// Gradients in any combination.
TEST_F(GatedNorm, SomeGradients) {
  NormProblem all({.T = 40, .x = GD_BF16});
  const gd_gated_norm_backward_args wanted = all.backward;
  for (int bits = 1; bits < 8; ++bits) {
    if (!(bits & 1)) all.backward.dx = {};
    if (!(bits & 2)) all.backward.dgate = {};
    if (!(bits & 4)) all.backward.dweight = {};
    const Judgement judgement = judge_backward(all, engine_isas().back());
    EXPECT_TRUE(judgement.ok()) << bits << "\n" << judgement.text();
    EXPECT_EQ(judgement.verdicts.size(), static_cast<size_t>(__builtin_popcount(static_cast<unsigned>(bits))));
    all.backward = wanted;
  }
}

}  // namespace
}  // namespace gatedelta::testing
