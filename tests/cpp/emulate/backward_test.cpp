// The portable backward's own text, executed on a CPU, against the fp64 truth.
#include "instances.hpp"

#include <gtest/gtest.h>
#include <iterator>

#include "testing/judge.hpp"

namespace gatedelta::testing {
namespace {

// Copies come at once in every other case, and as late as they may in the others.
void check(const Specs& specs, int multiprocessors = 1) {
  unsigned seed = 0;
  for (const std::string& spec : specs) {
    Judge judge(parse_case(spec));
    const emulated::Options options{multiprocessors, ++seed % 2 == 0, seed};
    const Judgement judgement = judge.backward(
        Compute::tensor_cores, [&](const gd_backward_args& args) { return emulated::run(args, options); });
    EXPECT_TRUE(judgement.ok()) << spec << "\n" << judgement.text();
  }
}

const Specs kTypes = {"dtype=bf16", "dtype=fp16"};

TEST(EmulatedBackward, Instances) {
  check(cross({"T=130 Hk=1 Hv=2 K=128 V=128", "T=70 Hk=1 Hv=3 K=64 V=64"}, kTypes));
  check({"T=40 K=128 V=128 dtype=bf16"}, 3);   // halves of heads
  check({"T=40 K=128 V=128 dtype=fp16"}, 64);  // quarters
  check({"T=70 K=256 V=64 dtype=bf16", "T=40 Hk=1 Hv=2 K=256 V=96 l2norm dtype=fp16"});
}

TEST(EmulatedBackward, HeadSizes) {
  check({"T=70 K=16 V=16 dtype=bf16", "T=70 K=48 V=80 dtype=fp16", "T=70 K=96 V=160 l2norm dtype=bf16",
         "T=40 K=144 V=48 l2norm dtype=bf16", "T=40 K=240 V=16 dtype=fp16", "T=40 K=32 V=256 dtype=bf16 layout=vk",
         "T=40 K=112 V=32 dtype=bf16 state=bf16"});
}

TEST(EmulatedBackward, Lengths) {
  check(cross({"B=2 T=0", "T=1", "T=31", "T=32", "T=33", "T=63", "B=2 T=64", "T=65", "T=96", "T=97", "T=129"},
              {"K=32 V=32 dtype=bf16"}));
}

TEST(EmulatedBackward, Packs) {
  check(cross({"lengths=0+70+0+1+63+64+65+0 pad=3", "lengths=0", "lengths=3x0 pad=5", "lengths=129 pad=70 i64",
               "lengths=40+0+90 pad=3 h0=0 dht=0 strided", "lengths=40x1+33 Hk=1 Hv=2"},
              {"K=32 V=32 dtype=bf16", "K=32 V=48 dtype=fp16 gate=raw l2norm"}));
}

TEST(EmulatedBackward, Heads) {
  check({"T=40 Hk=2 Hv=6 K=64 V=32 l2norm dtype=bf16", "T=40 Hk=1 Hv=19 K=16 V=16 dtype=fp16 gate=raw"});
}

TEST(EmulatedBackward, Gates) {
  check(cross({"T=100 Hk=2 Hv=4 K=32 V=48 dtype=bf16"},
              {"gate=zero", "gate=weak", "gate=strong", "gate=spiky", "gate=inf", "gate=huge", "gate=raw",
               "gate=raw dt_bias=0 gdtype=bf16 beta=logit", "gate=mixed gdtype=fp16"}));
}

TEST(EmulatedBackward, Betas) {
  check(cross({"T=80 Hk=1 Hv=2 K=48 V=32 dtype=bf16 seed=2"},
              {"beta=zeros", "beta=two", "beta=one", "beta=logit", "beta=logit2 gdtype=bf16",
               "beta=zeros keys=correlated gate=spiky"}));
}

TEST(EmulatedBackward, Keys) {
  check(cross({"T=100 Hk=1 Hv=2 K=128 V=32 seed=3"},
              {"keys=correlated gate=zero dtype=bf16", "keys=correlated beta=two gate=weak dtype=fp16",
               "keys=correlated l2norm gate=raw dtype=bf16", "keys=repeated beta=one dtype=bf16",
               "keys=repeated l2norm dtype=fp16", "keys=loose dtype=bf16", "keys=loose l2norm dtype=bf16"}),
        3);
}

// The product of two rows' norms is up to 1e6, more than fp16 can hold.
TEST(EmulatedBackward, KeysOfAllLengthsInFp16) {
  check({"T=170 Hk=2 Hv=4 K=128 V=128 dtype=fp16 keys=loose l2norm seed=3"});
  check(cross(cross({"T=100 Hk=1 Hv=2 V=32 dtype=fp16 keys=loose seed=3"}, {"K=64", "K=128", "K=256"}),
              {"", "l2norm", "l2norm gate=raw"}));
}

TEST(EmulatedBackward, States) {
  check(cross(
      cross({"lengths=70+0+1+33 pad=4 Hk=1 Hv=2 K=32 V=48 dtype=bf16"}, {"state=fp32", "state=bf16", "state=fp16"}),
      {"layout=kv", "layout=vk pool i64 strided", "pool first_slot=1", "layout=vk h0=0", "dht=0"}));
}

TEST(EmulatedBackward, StridesAndScale) {
  check({"B=2 T=75 Hk=2 Hv=4 K=32 V=32 dtype=bf16 strided", "T=40 K=32 V=32 dtype=bf16 scale=0",
         "T=40 K=32 V=32 dtype=fp16 scale=-2.5"});
}

// Under strong gates dg consists of what one token leaves to the next, which is far smaller than a token's own terms.
TEST(EmulatedBackward, StrongGatesKeepTheirGradient) {
  for (const std::string& spec : cross({"T=130 Hk=1 Hv=2 K=128 V=64 dtype=bf16 gate=strong"}, {"", "l2norm"})) {
    Judge judge(parse_case(spec));
    const Judgement judgement =
        judge.backward(Compute::tensor_cores, [&](const gd_backward_args& args) { return emulated::run(args, {}); });
    for (const Verdict& verdict : judgement.verdicts) {
      if (verdict.quantity != "dg") continue;
      EXPECT_LE(verdict.comparison.error, 2e-2) << spec;
    }
  }
}

std::vector<std::vector<char>> outputs_of(const gd_backward_args& args) {  // tensors without gaps
  std::vector<std::vector<char>> all;
  for (const gd_tensor* t : {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.d_initial_state}) {
    const char* data = static_cast<const char*>(t->data);
    all.emplace_back(data, data + element_count(*t) * element_bytes(t->dtype));
  }
  return all;
}

// The same bits whatever the order of threads, the device and the columns of a CTA, and from what a forward saved.
TEST(EmulatedBackward, BitsDependOnTheInputsAlone) {
  for (const char* spec : {"lengths=70+0+33 pad=4 Hk=1 Hv=2 K=128 V=128 dtype=bf16",
                           "lengths=33+0+70 pad=70 Hk=1 Hv=3 K=48 V=64 dtype=fp16 l2norm gate=raw"}) {
    Problem problem(parse_case(spec));
    std::vector<std::vector<char>> first;
    for (const int multiprocessors : {1, 9, 64}) {
      problem.reset();
      const emulated::Options options{multiprocessors, multiprocessors > 9, static_cast<unsigned>(multiprocessors)};
      gd_backward_args args = problem.backward;
      gd_forward_args forward = problem.forward;
      const Buffer saved(cuda::portable::saved_bytes(emulated::layer_of(args.in)));
      if (multiprocessors == 9) {
        forward.saved = saved.data(), forward.saved_bytes = saved.size();
        ASSERT_EQ(emulated::run(forward, options), "");
        args.saved = saved.data(), args.saved_bytes = saved.size();
      }
      ASSERT_EQ(emulated::run(args, options), "");
      EXPECT_TRUE(saved.guards_intact());
      if (first.empty()) first = outputs_of(args);
      EXPECT_EQ(first, outputs_of(args)) << spec << ", " << multiprocessors;
    }
  }
}

// Each gradient alone: nothing else is written, and those not wanted need no memory of the caller's.
TEST(EmulatedBackward, EachGradientIsOptional) {
  const std::string spec = "lengths=40+0+33 pad=3 Hk=1 Hv=2 K=32 V=32 dtype=bf16 gate=raw l2norm";
  Problem problem(parse_case(spec));
  ASSERT_EQ(emulated::run(problem.backward, {}), "");
  const auto all = outputs_of(problem.backward);
  using Field = gd_tensor gd_backward_args::*;
  constexpr Field kFields[] = {&gd_backward_args::dq, &gd_backward_args::dk,    &gd_backward_args::dv,
                               &gd_backward_args::dg, &gd_backward_args::dbeta, &gd_backward_args::d_initial_state};
  for (size_t wanted = 0; wanted < std::size(kFields); ++wanted) {
    problem.reset();
    gd_backward_args args = problem.backward;
    for (const Field field : kFields)
      if (field != kFields[wanted]) args.*field = {};
    args.dA_log = args.d_dt_bias = {};
    ASSERT_EQ(emulated::run(args, {}), "");
    EXPECT_EQ(all[wanted], outputs_of(problem.backward)[wanted]) << wanted;
  }
}

}  // namespace
}  // namespace gatedelta::testing
