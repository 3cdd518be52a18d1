#include <cmath>

#include "cases.hpp"
#include "support.hpp"
#include "testing/number.hpp"

namespace gatedelta::testing {
namespace {

void check(const Specs& specs) {
  for (const std::string& spec : selected(specs)) {
    Judge judge(parse_case(spec));
    for (const gd_isa isa : usable_isas()) {
      for (const bool from_saved : {false, true}) {
        SCOPED_TRACE(from_saved ? "from what the forward saved" : "recomputing");
        const Exec exec{.isa = isa, .pool = nullptr, .threads = 0};
        expect_ok(judge.backward(exec, from_saved), judge.problem().spec, "bwd", isa);
      }
    }
  }
}

TEST(Backward, Gates) { check(gate_cases()); }
TEST(Backward, Betas) { check(beta_cases()); }
TEST(Backward, Keys) { check(key_cases()); }
TEST(Backward, Heads) { check(head_cases()); }
TEST(Backward, Sizes) { check(size_cases()); }
TEST(Backward, Packs) { check(pack_cases()); }
TEST(Backward, States) { check(state_cases()); }
TEST(Backward, Strides) { check(stride_cases()); }
TEST(Backward, ScaleAndOutputType) { check(scale_cases()); }
TEST(Backward, PromisedBounds) { check(benchmark_cases()); }

TEST(Backward, EveryLength) {
  Specs specs;
  for (int T = 0; T <= 130; ++T) {
    specs.push_back("T=" + num(T) + " Hk=1 Hv=1 K=16 V=16 seed=" + num(T + 1) + " " + kDtypeSpecs[T % 3]);
  }
  check(specs);
}

// More chunks than are kept at once, so that states are restored more than one way.
TEST(Backward, ManyChunks) {
  check({"lengths=1500+64+700 pad=5 Hk=1 Hv=2 K=16 V=16", "T=2100 Hk=1 Hv=2 K=16 V=16 dtype=bf16",
         "T=1111 Hk=1 Hv=1 K=16 V=16 gate=inf"});
}

// Each gradient alone is the gradient among all.
TEST(Backward, GradientsAreIndependentOfEachOther) {
  for (const char* spec : {"lengths=70+0+65 pad=2 Hk=1 Hv=2 K=32 V=16 dtype=bf16 gate=raw l2norm beta=logit",
                           "T=130 Hk=1 Hv=2 K=16 V=16"}) {
    Problem all(parse_case(spec)), one(parse_case(spec));
    for (const gd_isa isa : usable_isas()) {
      const Exec exec{.isa = isa, .pool = nullptr, .threads = 0};
      all.reset();
      ASSERT_EQ(run_backward(all.backward, exec), "");
      constexpr gd_tensor gd_backward_args::*kOutputs[] = {
          &gd_backward_args::dq,        &gd_backward_args::dk,
          &gd_backward_args::dv,        &gd_backward_args::dg,
          &gd_backward_args::dbeta,     &gd_backward_args::dA_log,
          &gd_backward_args::d_dt_bias, &gd_backward_args::d_initial_state};
      for (const auto wanted : kOutputs) {
        if ((one.backward.*wanted).dtype == GD_DTYPE_NONE) continue;
        one.reset();
        gd_backward_args args = one.backward;
        for (const auto other : kOutputs) {
          if (other != wanted) args.*other = {};
        }
        ASSERT_EQ(run_backward(args, exec), "");
        EXPECT_EQ(to_doubles(args.*wanted), to_doubles(all.backward.*wanted)) << gd_isa_name(isa) << " " << spec;
      }
    }
  }
}

// Gradients may be stored in any float type, whatever the inputs are.
TEST(Backward, GradientTypes) {
  Judge judge(parse_case("T=100 Hk=1 Hv=2 K=32 V=32 gate=raw"));
  gd_backward_args& args = judge.problem().backward;
  const auto narrow = [](gd_tensor& t, gd_dtype dtype) { t.dtype = dtype; };  // the buffer is large enough
  narrow(args.dq, GD_BF16), narrow(args.dk, GD_F16), narrow(args.dv, GD_BF16), narrow(args.dg, GD_BF16);
  narrow(args.dbeta, GD_F16), narrow(args.dA_log, GD_BF16), narrow(args.d_dt_bias, GD_F16);
  for (const gd_isa isa : usable_isas()) {
    expect_ok(judge.backward({.isa = isa, .pool = nullptr, .threads = 0}, false), judge.problem().spec, "bwd", isa);
  }
}

}  // namespace
}  // namespace gatedelta::testing
