// What the CPU alone offers, or is asked for, in the backward.
#include "testing/number.hpp"
#include "testing/raw_gates.hpp"
#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

using Backward = OnEngine;

TEST_F(Backward, PromisedBounds) { check_backward(benchmark_cases()); }

TEST_F(Backward, RawGatesOneByOne) {
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const gd_isa isa : usable_isas())
      EXPECT_EQ(judge_raw_gates(dtype, [&](const gd_backward_args& args) { return run(args, isa); }), "")
          << dtype << " " << gd_isa_name(isa);
}

// More chunks than are kept at once, so that states are restored more than one way.
TEST_F(Backward, ManyChunks) {
  check_backward({"lengths=1500+64+700 pad=5 Hk=1 Hv=2 K=16 V=16", "T=2100 Hk=1 Hv=2 K=16 V=16 dtype=bf16",
                  "T=1111 Hk=1 Hv=1 K=16 V=16 gate=inf"});
}

// Every instruction set lays saved states out alike: a call may take what another one saved.
TEST_F(Backward, ReadsWhatAnotherInstructionSetSaved) {
  for (const char* spec : {"lengths=700+0+65 pad=2 Hk=1 Hv=2 K=48 V=80 dtype=bf16 gate=raw l2norm beta=logit h0=0",
                           "T=1100 Hk=1 Hv=2 K=16 V=32 layout=vk h0=0"}) {
    Judge judge(parse_case(spec));
    for (const gd_isa writer : usable_isas())
      for (const gd_isa reader : usable_isas()) {
        const auto bound = chunk_compute(judge.problem().spec.dtype, GD_ISA_AUTO);  // the looser of any two
        const auto result = judge.backward(bound, [&](const gd_backward_args& args) {
          Saved saved;
          const std::string error = run_forward(judge.problem().forward, alone(writer), &saved);
          judge.problem().reset();
          return error.empty() ? run_backward(args, alone(reader), &saved) : error;
        });
        SCOPED_TRACE(std::string("saved by ") + gd_isa_name(writer));
        expect_ok(result, judge.problem().spec, "bwd", reader);
      }
  }
}

// Each gradient alone is the gradient among all.
TEST_F(Backward, GradientsAreIndependentOfEachOther) {
  for (const char* spec : {"lengths=70+0+65 pad=2 Hk=1 Hv=2 K=32 V=16 dtype=bf16 gate=raw l2norm beta=logit",
                           "T=130 Hk=1 Hv=2 K=16 V=16"}) {
    Problem all(parse_case(spec)), one(parse_case(spec));
    for (const gd_isa isa : usable_isas()) {
      all.reset();
      ASSERT_EQ(run(all.backward, isa), "");
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
        ASSERT_EQ(run(args, isa), "");
        EXPECT_EQ(to_doubles(args.*wanted), to_doubles(all.backward.*wanted)) << gd_isa_name(isa) << " " << spec;
      }
    }
  }
}

// Gradients may be stored in any float type, whatever the inputs are.
TEST_F(Backward, GradientTypes) {
  Judge judge(parse_case("T=100 Hk=1 Hv=2 K=32 V=32 gate=raw"));
  gd_backward_args& args = judge.problem().backward;
  const auto narrow = [](gd_tensor& t, gd_dtype dtype) { t.dtype = dtype; };  // the buffer is large enough
  narrow(args.dq, GD_BF16), narrow(args.dk, GD_F16), narrow(args.dv, GD_BF16), narrow(args.dg, GD_BF16);
  narrow(args.dbeta, GD_F16), narrow(args.dA_log, GD_BF16), narrow(args.d_dt_bias, GD_F16);
  check_calls<gd_backward_args>(judge);
}

}  // namespace
}  // namespace gatedelta::testing
