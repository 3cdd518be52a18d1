// The kernels for fp32 q, k and v. tests/cpp/emulate runs their text on a CPU.
#include "device.hpp"

namespace gatedelta::testing {
namespace {

using Fp32 = Gpu;

void check_forward(const Specs& specs) { check_calls<gd_forward_args>(specs); }
void check(const Specs& specs) {
  check_forward(specs);
  check_backward(specs);
}

TEST_F(Fp32, Instances) {
  check({"T=300 Hk=2 Hv=4 K=128 V=128", "T=300 Hk=1 Hv=3 K=64 V=64 gate=raw l2norm beta=logit",
         "T=300 Hk=1 Hv=2 K=256 V=256", "B=9 T=200 Hk=4 Hv=8 K=128 V=128"});
}

TEST_F(Fp32, PromisedBounds) {
  check({"T=1024 Hk=2 Hv=4 K=128 V=128", "T=4096 Hk=1 Hv=4 K=128 V=128 l2norm gate=raw"});
}

TEST_F(Fp32, HeadSizes) {
  Specs specs;
  for (int size = 16; size <= 256; size += 16) {
    const std::string text = std::to_string(size), other = std::to_string(16 + (size * 7 + 80) % 256);
    specs.push_back("T=97 Hk=2 Hv=4 K=" + text + " V=" + other + " layout=vk l2norm gate=raw");
    specs.push_back("lengths=70+0+1+33 pad=9 Hk=1 Hv=3 K=" + other + " V=" + text);
  }
  check(specs);
}

TEST_F(Fp32, Lengths) {
  check(
      {"lengths=" + every_length() + " pad=9 Hk=1 Hv=2 K=32 V=64", "B=2 T=0", "T=1", "T=8", "T=9", "B=3 T=64", "T=65"});
}

TEST_F(Fp32, Packs) {
  check({"lengths=0+0+300+0+1+63+64+65+0 pad=1 i64 Hk=2 Hv=2", "lengths=5x1+128+2x0 Hk=1 Hv=3 gate=strong",
         "lengths=129 pad=70 gate=raw l2norm", "lengths=4x0 pad=5 Hk=1 Hv=2", "lengths=0"});
}

TEST_F(Fp32, Gates) { check(cross({"T=200 Hk=4 Hv=8 K=32 V=48", "T=200 Hk=4 Hv=8 K=128 V=128"}, kGates)); }

TEST_F(Fp32, BetasAndKeys) {
  check(
      cross({"T=170 Hk=2 Hv=4 K=64 V=32 seed=3"}, joined(joined(kBetas, kKeys), {"keys=repeated beta=two gate=zero"})));
}

TEST_F(Fp32, States) {
  check(
      cross(cross({"lengths=70+0+64+1+129 pad=4 Hk=1 Hv=2"}, {"state=fp32", "state=bf16", "state=fp16"}),
            {"layout=kv", "layout=vk pool i64 strided", "pool first_slot=1 inplace", "layout=vk h0=0", "ht=0 dht=0"}));
}

TEST_F(Fp32, Checkpoints) {
  check_forward(cross({"B=2 T=200 Hk=1 Hv=2 every=64", "lengths=64+63+0+200+130+128 pad=3 every=64",
                       "B=3 T=130 offsets", "lengths=64+63+0+200+130 offsets"},
                      {"K=128 V=128", "K=16 V=16 state=bf16 layout=vk pool"}));
}

TEST_F(Fp32, StridesAndScale) {
  check({"B=2 T=75 Hk=2 Hv=4 K=128 V=128 strided", "T=70 scale=0", "T=70 scale=-2.5 l2norm"});
}

// Saved results change no bit; neither does another run.
TEST_F(Fp32, BitsRepeat) {
  for (const char* spec : {"lengths=300+0+70+1 Hk=2 Hv=4 K=128 V=128 gate=raw l2norm beta=logit", "T=200 K=48 V=80"}) {
    Problem problem(parse_case(spec));
    std::vector<std::vector<char>> first;
    for (const bool saves : {false, true, false}) {
      problem.reset();
      const gd_backward_args& args = problem.backward;
      ASSERT_EQ(saves ? from_saved(problem.forward, args) : on_device(args), "") << spec;
      std::vector<std::vector<char>> all;
      for (const gd_tensor* t : {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.d_initial_state})
        all.push_back(bytes_of(*t));
      if (first.empty()) first = all;
      EXPECT_EQ(first, all) << spec;
    }
  }
}

}  // namespace
}  // namespace gatedelta::testing
