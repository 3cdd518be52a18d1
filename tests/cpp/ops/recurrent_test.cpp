#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

using Recurrent = OnEngine;

const std::string kStep = "K=128 V=128 layout=vk ";  // with T=1 what the GPU's kernel for one token takes

void check(const Specs& specs) { check_calls<gd_recurrent_args>(specs); }

TEST_F(Recurrent, Gates) {
  check(cross(cross({"T=70 Hk=4 Hv=8 K=32 V=48", "B=3 T=1 Hk=4 Hv=8 " + kStep}, kDtypeSpecs), kGates));
}

TEST_F(Recurrent, Betas) {
  check(cross(cross({"T=9 Hk=2 Hv=4 K=48 V=32 seed=2", "B=9 T=1 Hk=2 Hv=4 seed=2 " + kStep}, kDtypeSpecs),
              joined(kBetas, {"beta=zeros keys=correlated gate=spiky"})));
}

TEST_F(Recurrent, Keys) {
  check(cross(cross({"T=90 Hk=2 Hv=4 K=32 V=32 seed=3", "B=14 T=1 Hk=2 Hv=4 seed=3 " + kStep}, kDtypeSpecs), kKeys));
  check(cross(cross({"T=8 Hk=2 Hv=4 K=32 V=32 seed=3"}, kDtypeSpecs), {"keys=repeated beta=two gate=zero"}));
}

TEST_F(Recurrent, Heads) {
  for (const int group : {1, 2, 3, 4, 8}) {
    const std::string heads = "Hk=2 Hv=" + num(2 * group) + " l2norm ";
    check(cross({"B=3 T=2 K=32 V=16 " + heads, "B=3 T=1 " + heads + kStep}, kDtypeSpecs));
  }
  check(cross(cross({"tiled Hk=2 Hv=6", "tiled Hk=5 Hv=10 l2norm"}, kDtypeSpecs),
              {"B=3 T=2 K=32 V=16", "B=3 T=1 " + kStep, "B=3 T=1 K=128 V=128 layout=kv", "B=3 T=4 " + kStep,
               "lengths=3+0+1+9 pad=1 " + kStep, "lengths=2+1 K=48 V=64"}));
  check(cross({"Hk=2 Hv=4 dtype=bf16", "Hk=4 Hv=12", "Hk=3 Hv=24 dtype=fp16", "Hk=1 Hv=4", "Hk=3 Hv=3"},
              {"tiled B=3 T=1 K=32 V=16 l2norm gate=raw beta=logit", "tiled B=3 T=1 K=16 V=48 layout=vk strided"}));
  check({"T=3 Hk=1 Hv=33 K=16 V=32 dtype=bf16", "T=3 Hk=5 Hv=15 K=16 V=16", "T=1 Hk=7 Hv=21 dtype=bf16 " + kStep,
         "B=3 T=1 Hk=1 Hv=8 K=16 V=32 dtype=bf16"});
}

TEST_F(Recurrent, Sizes) {
  for (int size = 16; size <= 256; size += 16) {
    const std::string dim = num(size), dtype = kDtypeSpecs[size / 16 % 3], state = kStates[size / 16 % 2];
    check(cross({"T=3 Hk=1 Hv=2 K=" + dim + " V=32 " + dtype, "T=3 Hk=1 Hv=2 K=32 V=" + dim + " " + dtype},
                cross(kLayouts, {"state=fp32", state})));
  }
  check(
      cross(cross({"T=3 Hk=1 Hv=2"}, cross(kDtypeSpecs, kStates)),
            cross({"K=16 V=256", "K=256 V=16", "K=256 V=256", "K=128 V=128", "K=64 V=128", "K=144 V=208"}, kLayouts)));
}

TEST_F(Recurrent, States) {
  check(cross(cross(cross({"lengths=7+0+4+1+19+3+2 pad=4 Hk=1 Hv=2"}, {"K=48 V=16", "K=128 V=128", "K=176 V=64"}),
                    cross(kStates, kLayouts)),
              {"pool=0", "pool=1 dtype=bf16", "pool=1 i64 strided", "pool=1 first_slot=2", "h0=0 dtype=fp16", "ht=0"}));
}

TEST_F(Recurrent, Strides) {
  check(
      cross(cross({"B=2 T=5 Hk=2 Hv=4 K=32 V=48 strided", "lengths=7+3+0+6 pad=6 Hk=1 Hv=2 K=16 V=80 strided",
                   "B=3 T=1 Hk=2 Hv=4 K=128 V=128 strided"},
                  kLayouts),
            cross(kDtypeSpecs, {"gate=mixed", "gate=raw l2norm beta=logit", "gate=raw l2norm beta=logit state=bf16"})));
}

TEST_F(Recurrent, ScaleAndOutputType) {
  check(cross({"T=7 Hk=1 Hv=2 K=32 V=32", "B=7 T=1 Hk=1 Hv=2 " + kStep},
              {"scale=0", "scale=-2.5", "scale=1 dtype=bf16", "dtype=bf16 odtype=fp32", "dtype=fp32 odtype=bf16",
               "dtype=fp16 odtype=fp32"}));
}

TEST_F(Recurrent, LongSequences) {
  check(cross({"T=300 Hk=1 Hv=2 K=32 V=32", "T=300 Hk=1 Hv=2 K=128 V=128"}, cross(kLayouts, kDtypeSpecs)));
  check({"T=0 B=3 Hk=1 Hv=2 K=32 V=32", "lengths=4x0 pad=5 Hk=1 Hv=2 K=16 V=16", "lengths=0 Hk=1 Hv=2 K=16 V=16"});
}

// T = 1 over a pool, in place, as a serving engine calls it.
TEST_F(Recurrent, Decode) {
  check(cross(cross(cross({"B=19 T=1 Hk=2 Hv=4 l2norm gate=raw beta=logit"},
                          either({"K=64 V=32"}, {"K=128 V=128", "K=64 V=32"})),
                    kDtypeSpecs),
              cross(cross(kStates, kLayouts), {"pool", "pool inplace", "pool inplace i64", "pool inplace strided",
                                               "pool inplace i64 strided", "pool ht=0", "h0=0", "inplace"})));
}

// T = 2..8 drafts: which state is kept, and all of them.
TEST_F(Recurrent, DraftVerification) {
  for (int T = 1; T <= 8; ++T) {
    const std::string drafts = "B=10 T=" + num(T) + " Hk=1 Hv=2 " + kDtypeSpecs[T % 3];
    check(cross(cross({drafts + " K=16 V=32"}, cross(either({""}, {"", kStep}),
                                                     {"accept", "accept pool inplace", "accept pool i64", "inplace"})),
                {"steps=none", "steps=dense", "steps=pool", "steps=pool state=bf16 strided",
                 "steps=pool layout=vk state=bf16 strided", "steps=dense state=fp16"}));
  }
}

TEST_F(Recurrent, PackedDrafts) {
  check(cross(cross({"lengths=3+0+1+8+2+5+4 pad=2 Hk=1 Hv=2"}, {"K=32 V=16", "K=128 V=128 layout=vk"}),
              {"accept", "accept pool", "accept pool inplace steps=pool", "steps=dense", "pool steps=dense strided i64",
               "h0=0", "ht=0", "dtype=bf16 state=bf16 accept", "dtype=bf16 state=fp16 pool inplace"}));
}

// Verification that stores no state: of every five sequences two have no read slot and are padded rows.
TEST_F(Recurrent, PaddedRowsWithoutStoredStates) {
  check(cross({"B=10 T=4 Hk=1 Hv=2 K=32 V=16 pool ht=0", "lengths=3+0+1+8+2+5+4 pad=2 Hk=1 Hv=2 K=16 V=32 pool ht=0",
               "B=10 T=1 Hk=1 Hv=2 pool ht=0 " + kStep},
              {"dtype=fp32", "dtype=bf16 i64 state=bf16", "dtype=bf16 i64 layout=vk state=bf16", "steps=dense",
               "steps=pool strided"}));
}

// Block tables of engines: slots below the first one hold no state, columns and rows have strides, and the slot a draft
// starts from is the one of the last token accepted of the draft before.
TEST_F(Recurrent, SlotsOfEngines) {
  check(cross(cross({"B=11 T=1 Hk=1 Hv=2 K=32 V=16 pool", "B=11 T=4 Hk=1 Hv=2 K=16 V=32 pool",
                     "lengths=3+0+1+8+2+5+4+1+7+2 pad=2 Hk=1 Hv=2 K=16 V=32 pool"},
                    {"first_slot=1", "first_slot=3 inplace accept strided", "picked=1", "picked=3 strided i64",
                     "picked=4 first_slot=1 inplace", "picked=2 ht=0"}),
              {"dtype=fp32", "dtype=bf16 state=bf16 layout=vk", "steps=pool strided"}));
  check(cross(
      {"lengths=3+0+1+8+2+5+4 pad=2 Hk=1 Hv=2 K=32 V=16 steps=rows", "lengths=6 pad=3 Hk=1 Hv=2 K=16 V=16 steps=rows"},
      {"pool=0", "pool ht=0", "pool first_slot=2 strided", "pool picked=4 first_slot=1 i64 ht=0",
       "pool inplace accept layout=vk state=fp16"}));
}

// A commit moves the states and nothing else.
TEST_F(Recurrent, CommitWithoutOutput) {
  for (const std::string& spec : cross({"B=7 T=4 Hk=1 Hv=2 K=32 V=32 dtype=bf16 accept pool inplace",
                                        "B=7 T=1 Hk=1 Hv=2 dtype=bf16 pool inplace " + kStep},
                                       kStates)) {
    Judge judge(parse_case(spec));
    judge.problem().recurrent.out = {};
    check_calls<gd_recurrent_args>(judge);
  }
}

}  // namespace
}  // namespace gatedelta::testing
