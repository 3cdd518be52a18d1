// The text of the fp32 kernels, executed on a CPU, against the fp64 truth.
#include "fp32.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "testing/judge.hpp"
#include "testing/raw_gates.hpp"

namespace gatedelta::testing {
namespace {

// Copies come at once in every other case, and as late as they may in the others.
void check_forward(const Specs& specs) {
  unsigned seed = 0;
  for (const std::string& spec : specs) {
    Judge judge(parse_case(spec));
    const emulated::Options options{1, ++seed % 2 == 0, seed};
    const Judgement judgement =
        judge.forward(Compute::fp32, [&](const gd_forward_args& args) { return emulated::fp32::run(args, options); });
    EXPECT_TRUE(judgement.ok()) << spec << "\n" << judgement.text();
  }
}
// The backward recomputes in every other case, and has what a forward saved in the others.
void check_backward(const Specs& specs) {
  unsigned seed = 0;
  for (const std::string& spec : specs) {
    Judge judge(parse_case(spec));
    const emulated::Options options{1, ++seed % 2 == 0, seed};
    const Judgement judgement = judge.backward(
        Compute::fp32, [&](const gd_backward_args& args) { return emulated::fp32::run(args, options, seed % 4 < 2); });
    EXPECT_TRUE(judgement.ok()) << spec << "\n" << judgement.text();
  }
}
void check(const Specs& specs) {
  check_forward(specs);
  check_backward(specs);
}

TEST(EmulatedFp32, Instances) {
  check({"T=75 Hk=1 Hv=2 K=128 V=128", "T=70 Hk=1 Hv=3 K=64 V=64 gate=raw l2norm beta=logit", "T=40 K=256 V=64"});
}

TEST(EmulatedFp32, HeadSizes) {
  check({"T=20 K=16 V=16", "T=20 K=48 V=144 layout=vk", "T=20 K=80 V=80 state=bf16", "T=12 K=144 V=48 layout=vk",
         "T=12 K=240 V=16", "T=12 K=32 V=256"});
}

TEST(EmulatedFp32, Lengths) {
  check(
      cross({"B=2 T=0", "T=1", "T=4", "T=5", "T=7", "B=2 T=8", "T=9", "T=63", "T=64", "T=65", "T=129"}, {"K=16 V=32"}));
}

TEST(EmulatedFp32, Packs) {
  check(cross({"lengths=0+70+0+1+63+64+8+0 pad=3", "lengths=0", "lengths=3x0 pad=5", "lengths=130 pad=70 i64",
               "lengths=40+0+66 pad=3 h0=0 strided"},
              {"K=16 V=32", "K=32 V=16 gate=raw l2norm"}));
}

TEST(EmulatedFp32, Heads) {
  check({"T=20 Hk=2 Hv=6 K=32 V=32", "T=9 Hk=1 Hv=35 K=16 V=16 gate=raw l2norm", "B=2 T=20 Hk=3 Hv=3 K=16 V=16"});
}

TEST(EmulatedFp32, Gates) {
  check(cross({"T=100 Hk=2 Hv=4 K=32 V=48"},
              {"gate=zero", "gate=weak", "gate=strong", "gate=spiky", "gate=inf", "gate=huge", "gate=raw",
               "gate=raw dt_bias=0 gdtype=bf16", "gate=mixed gdtype=fp16"}));
}

TEST(EmulatedFp32, RawGatesOneByOne) {
  EXPECT_EQ(judge_raw_gates("fp32", [](const gd_backward_args& args) { return emulated::fp32::run(args, {}, false); }),
            "");
}

TEST(EmulatedFp32, Betas) {
  check(cross({"T=100 K=32 V=32 seed=2"}, {"beta=zeros", "beta=two", "beta=one", "beta=logit",
                                           "beta=logit2 gdtype=bf16", "beta=zeros keys=correlated gate=spiky"}));
}

TEST(EmulatedFp32, Keys) {
  check(cross({"T=100 Hk=1 Hv=2 K=32 V=32 seed=3"},
              {"keys=correlated gate=zero", "keys=correlated beta=two gate=weak", "keys=correlated l2norm gate=raw",
               "keys=repeated beta=one", "keys=repeated beta=two gate=zero", "keys=repeated l2norm", "keys=loose",
               "keys=loose l2norm"}));
}

TEST(EmulatedFp32, States) {
  check(
      cross(cross({"lengths=30+0+1+10 pad=4 Hk=1 Hv=2 K=32 V=16"}, {"state=fp32", "state=bf16", "state=fp16"}),
            {"layout=kv", "layout=vk pool i64 strided", "pool first_slot=1 inplace", "layout=vk h0=0", "ht=0 dht=0"}));
}

TEST(EmulatedFp32, Checkpoints) {
  check_forward(
      cross({"B=2 T=200 Hk=1 Hv=2 every=64", "lengths=64+63+0+200+130+128 pad=3 every=64", "lengths=64+0+200 every=128",
             "T=60 every=64", "B=3 T=130 offsets", "lengths=64+63+0+200+130 offsets"},
            {"K=16 V=16", "K=16 V=16 state=bf16 layout=vk pool"}));
}

TEST(EmulatedFp32, StridesAndScale) {
  check({"B=2 T=35 Hk=2 Hv=4 K=32 V=32 strided", "T=40 K=16 V=16 scale=0", "T=40 K=16 V=16 scale=-2.5"});
}

// Sums of gates go from chunk to chunk.
TEST(EmulatedFp32, LongSequences) {
  check_backward({"T=700 Hk=1 Hv=4 K=16 V=16", "T=700 K=16 V=16 gate=zero", "T=500 K=16 V=16 gate=strong"});
}

// Of sums in which most of dg cancels, each head by itself, half of the bound at most: a GPU rounds exp differently.
TEST(EmulatedFp32, SumsOfGatesHaveRoom) {
  for (const char* spec : {"T=170 Hk=2 Hv=4 K=64 V=32 gate=raw keys=correlated l2norm seed=3",
                           "lengths=0+17+0+100+64 pad=5 Hk=1 Hv=3 K=48 V=80 gate=raw beta=logit l2norm layout=vk"}) {
    Judge judge(parse_case(spec));
    const Judgement judgement = judge.backward(Compute::fp32, [&](const gd_backward_args& args) {
      return emulated::fp32::run(args, {1, true, 1}, false);
    });
    EXPECT_TRUE(judgement.ok()) << spec << "\n" << judgement.text();
    const Case& c = judge.problem().spec;
    const auto check_heads = [&](Quantity quantity, const gd_tensor& got, const std::vector<double>& truth) {
      const Tolerance bound = tolerance(quantity, Compute::fp32, GD_F32, c);
      EXPECT_LE(compare(to_doubles(got), truth, {1, c.Hv, 1}, bound).margin, 0.5) << spec << " " << name_of(quantity);
    };
    const gd_backward_args& args = judge.problem().backward;
    check_heads(Quantity::dA_log, args.dA_log, judge.backward_truth().dA_log);
    check_heads(Quantity::d_dt_bias, args.d_dt_bias, judge.backward_truth().d_dt_bias);
  }
}

// The same bits whatever the order of threads and copies, and with what a forward saved.
TEST(EmulatedFp32, BitsDependOnTheInputsAlone) {
  Problem problem(parse_case("lengths=70+0+13 Hk=1 Hv=2 K=128 V=128 gate=raw l2norm beta=logit"));
  const gd_backward_args& args = problem.backward;
  std::vector<std::vector<double>> first;
  for (const unsigned seed : {1u, 7u}) {
    problem.reset();
    ASSERT_EQ(emulated::fp32::run(args, {1, seed == 1, seed}, seed == 1), "");
    std::vector<std::vector<double>> all;
    for (const gd_tensor* t :
         {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.dA_log, &args.d_dt_bias, &args.d_initial_state})
      all.push_back(to_doubles(*t));
    if (first.empty()) first = all;
    EXPECT_EQ(first, all);
  }
}

// Each gradient alone is the gradient among all.
TEST(EmulatedFp32, GradientsAreIndependentOfEachOther) {
  const Case spec = parse_case("lengths=20+0+9 pad=2 Hk=1 Hv=2 K=16 V=16 gate=raw l2norm beta=logit");
  Problem all(spec), one(spec);
  ASSERT_EQ(emulated::fp32::run(all.backward, {1, true, 1}, false), "");
  constexpr gd_tensor gd_backward_args::*kOutputs[] = {
      &gd_backward_args::dq,        &gd_backward_args::dk,
      &gd_backward_args::dv,        &gd_backward_args::dg,
      &gd_backward_args::dbeta,     &gd_backward_args::dA_log,
      &gd_backward_args::d_dt_bias, &gd_backward_args::d_initial_state};
  for (const auto wanted : kOutputs) {
    one.reset();
    gd_backward_args args = one.backward;
    for (const auto other : kOutputs)
      if (other != wanted) args.*other = {};
    ASSERT_EQ(emulated::fp32::run(args, {1, true, 1}, false), "");
    EXPECT_EQ(to_doubles(args.*wanted), to_doubles(all.backward.*wanted));
  }
}

// Rows of the gradients of states, found by indices: sequence 0 reads row 1 and leaves row 1, sequence 1 reads nothing
// and leaves row 0.
TEST(EmulatedFp32, RowsOfGradientsOfStates) {
  Problem problem(parse_case("lengths=20+9 Hk=1 Hv=2 K=16 V=16"));
  constexpr int64_t kRow = 2 * 16 * 16;
  gd_backward_args args = problem.backward;
  int32_t from[] = {1, -1}, to[] = {1, 0};
  const auto indices = [](int32_t* data) {
    gd_tensor t{data, GD_I32, 1, {2}, {1}};
    return t;
  };
  args.dht_indices = indices(from), args.d_initial_state_indices = indices(to);
  ASSERT_EQ(emulated::fp32::run(args, {1, true, 1}, false), "");
  const std::vector<double> by_indices = to_doubles(args.d_initial_state);
  problem.reset();
  auto* const rows = static_cast<float*>(problem.backward.dht.data);
  std::copy(rows + kRow, rows + 2 * kRow, rows);
  std::fill(rows + kRow, rows + 2 * kRow, 0.0f);
  ASSERT_EQ(emulated::fp32::run(problem.backward, {1, true, 1}, false), "");
  std::vector<double> plain = to_doubles(problem.backward.d_initial_state);
  std::rotate(plain.begin(), plain.begin() + kRow, plain.end());
  EXPECT_EQ(by_indices, plain);
}

}  // namespace
}  // namespace gatedelta::testing
