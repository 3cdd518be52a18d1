#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

using Forward = OnEngine;

void check(const Specs& specs) { check_calls<gd_forward_args>(specs); }

TEST_F(Forward, Gates) { check(gate_cases()); }
TEST_F(Forward, Betas) { check(beta_cases()); }
TEST_F(Forward, Keys) { check(key_cases()); }
TEST_F(Forward, SimilarKeys) {
  if (!kOnCpu) GTEST_SKIP() << "bounds of similar keys are not established for the kernels on a GPU";
  check(similar_key_cases());
}
TEST_F(Forward, Heads) { check(head_cases()); }
TEST_F(Forward, Sizes) { check(size_cases()); }
TEST_F(Forward, Packs) { check(pack_cases()); }
TEST_F(Forward, EveryLength) { check(every_length_cases()); }
TEST_F(Forward, States) { check(state_cases()); }
TEST_F(Forward, Strides) { check(stride_cases()); }
TEST_F(Forward, ScaleAndOutputType) { check(scale_cases()); }
TEST_F(Forward, PromisedBounds) { check(benchmark_cases()); }

TEST_F(Forward, InPlace) {
  check(cross(cross({"lengths=70+0+64+1+129+30+20 Hk=1 Hv=2 K=16 V=48 inplace"}, kLayouts),
              cross({"pool=0", "pool=1", "pool=1 strided i64"},
                    either({"state=fp32", "state=bf16 dtype=bf16", "state=fp16"}, cross(kStates, kTypes)))));
}

TEST_F(Forward, Checkpoints) {
  check(cross(cross({"B=2 T=400 Hk=1 Hv=2 K=16 V=48 every=64", "T=390 Hk=1 Hv=2 K=48 V=16 every=128",
                     "lengths=64+63+0+200+130+128+65 pad=3 Hk=1 Hv=2 K=32 V=32 every=64",
                     "lengths=64+63+0+400+130+192+65 K=32 V=32 every=192", "T=60 K=16 V=16 every=64"},
                    {"pool=0", "pool=1", "pool=1 i64 strided"}),
              kStorage));
}

// One state per sequence, at an offset of its own.
TEST_F(Forward, CheckpointOffsets) {
  check(cross(cross({"B=6 T=400 Hk=1 Hv=2 K=16 V=48 offsets", "T=2100 K=16 V=16 offsets",
                     "lengths=64+63+0+200+130+128+65+300+320 pad=3 Hk=1 Hv=2 K=32 V=32 offsets"},
                    {"pool=0", "pool=1", "pool=1 i64 strided first_slot=2 inplace", "pool=1 ht=0"}),
              kStorage));
}

}  // namespace
}  // namespace gatedelta::testing
