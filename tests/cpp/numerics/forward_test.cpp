#include "cases.hpp"
#include "support.hpp"

namespace gatedelta::testing {
namespace {

void check(const Specs& specs) {
  for (const std::string& spec : selected(specs)) {
    Judge judge(parse_case(spec));
    for (const gd_isa isa : usable_isas()) {
      expect_ok(judge.forward({.isa = isa, .pool = nullptr, .threads = 0}), judge.problem().spec, "fwd", isa);
    }
  }
}

TEST(Forward, Gates) { check(gate_cases()); }
TEST(Forward, Betas) { check(beta_cases()); }
TEST(Forward, Keys) { check(key_cases()); }
TEST(Forward, Heads) { check(head_cases()); }
TEST(Forward, Sizes) { check(size_cases()); }
TEST(Forward, Packs) { check(pack_cases()); }
TEST(Forward, States) { check(state_cases()); }
TEST(Forward, Strides) { check(stride_cases()); }
TEST(Forward, ScaleAndOutputType) { check(scale_cases()); }
TEST(Forward, PromisedBounds) { check(benchmark_cases()); }

TEST(Forward, EveryLength) {
  Specs specs;
  for (int T = 0; T <= 130; ++T) {
    specs.push_back("T=" + num(T) + " Hk=1 Hv=1 K=16 V=16 seed=" + num(T + 1) + " " + kDtypeSpecs[T % 3]);
  }
  check(specs);
}

TEST(Forward, InPlace) {
  check(
      cross(cross({"lengths=70+0+64+1+129+30+20 Hk=1 Hv=2 K=16 V=48 inplace"}, {"layout=kv", "layout=vk"}),
            cross({"pool=0", "pool=1", "pool=1 strided i64"}, {"state=fp32", "state=bf16 dtype=bf16", "state=fp16"})));
}

TEST(Forward, Checkpoints) {
  check(
      cross(cross({"B=2 T=400 Hk=1 Hv=2 K=16 V=48 every=64", "B=1 T=390 Hk=1 Hv=2 K=48 V=16 every=128",
                   "lengths=64+63+0+200+130+128+65 pad=3 Hk=1 Hv=2 K=32 V=32 every=64",
                   "lengths=64+63+0+400+130+192+65 Hk=1 Hv=1 K=32 V=32 every=192", "T=60 Hk=1 Hv=1 K=16 V=16 every=64"},
                  {"pool=0", "pool=1", "pool=1 i64 strided"}),
            {"dtype=bf16", "dtype=fp32 state=bf16 layout=vk", "dtype=fp16 state=fp16"}));
}

// One state per sequence, at an offset of its own.
TEST(Forward, CheckpointOffsets) {
  check(cross(cross({"B=6 T=400 Hk=1 Hv=2 K=16 V=48 offsets", "T=2100 Hk=1 Hv=1 K=16 V=16 offsets",
                     "lengths=64+63+0+200+130+128+65+300+320 pad=3 Hk=1 Hv=2 K=32 V=32 offsets"},
                    {"pool=0", "pool=1", "pool=1 i64 strided first_slot=2 inplace", "pool=1 ht=0"}),
              {"dtype=bf16", "dtype=fp32 state=bf16 layout=vk", "dtype=fp16 state=fp16"}));
}

}  // namespace
}  // namespace gatedelta::testing
