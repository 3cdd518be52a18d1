// The portable forward's own text, executed on a CPU, against the fp64 truth.
#include "instances.hpp"

#include <gtest/gtest.h>

#include "testing/judge.hpp"

namespace gatedelta::testing {
namespace {

using emulated::run;

// Copies come at once in every other case, and as late as they may in the others.
void check(const Specs& specs, int multiprocessors = 1, bool has_whole_grid = false) {
  unsigned seed = 0;
  for (const std::string& spec : specs) {
    Judge judge(parse_case(spec));
    const emulated::Options options{multiprocessors, ++seed % 2 == 0, seed, has_whole_grid};
    const Judgement judgement =
        judge.forward(Compute::tensor_cores, [&](const gd_forward_args& args) { return run(args, options); });
    EXPECT_TRUE(judgement.ok()) << spec << "\n" << judgement.text();
  }
}

const Specs kTypes = {"dtype=bf16", "dtype=fp16"};

TEST(EmulatedForward, Instances) {
  check(cross({"T=200 Hk=1 Hv=2 K=128 V=128", "T=100 Hk=1 Hv=4 K=64 V=64", "T=70 K=256 V=128"}, kTypes));
  check(cross({"T=77 K=128 V=128"}, kTypes), 3);   // halves of heads
  check(cross({"T=77 K=128 V=128"}, kTypes), 64);  // quarters
}

TEST(EmulatedForward, HeadSizes) {
  check({"T=70 K=16 V=16 dtype=bf16", "T=70 K=48 V=80 dtype=fp16", "T=70 K=96 V=160 dtype=bf16",
         "T=40 K=144 V=144 dtype=fp16", "T=40 K=240 V=48 dtype=bf16", "T=40 K=64 V=256 dtype=bf16 layout=vk",
         "T=40 K=112 V=32 dtype=bf16 state=bf16", "T=40 K=80 V=192 dtype=fp16"});
}

TEST(EmulatedForward, Lengths) {
  check(cross({"B=2 T=0", "T=1", "T=31", "T=32", "T=33", "T=63", "B=2 T=64", "T=65", "T=96", "T=97"},
              {"K=64 V=64 dtype=bf16"}));
}

TEST(EmulatedForward, Packs) {
  check(cross({"lengths=0+70+0+1+63+64+65+0 pad=3", "lengths=0", "lengths=3x0 pad=5", "lengths=129 pad=70 i64",
               "lengths=40+0+90 pad=3 h0=0 strided", "lengths=40x1+33 Hk=1 Hv=2"},
              {"K=64 V=64 dtype=bf16", "K=32 V=96 dtype=fp16 gate=raw l2norm"}));
  check(cross({"lengths=20+0 pad=3", "lengths=2x0 pad=66 Hk=1 Hv=2"},
              {"K=16 V=144 dtype=bf16", "K=16 V=256 dtype=fp16"}));
}

TEST(EmulatedForward, Heads) {
  check({"T=40 Hk=2 Hv=6 K=64 V=64 dtype=bf16", "T=40 Hk=1 Hv=35 K=16 V=16 dtype=fp16 gate=raw"});
}

TEST(EmulatedForward, Gates) {
  check(cross({"T=100 Hk=2 Hv=4 K=64 V=64 dtype=bf16"},
              {"gate=zero", "gate=weak", "gate=strong", "gate=spiky", "gate=inf", "gate=huge", "gate=raw",
               "gate=raw dt_bias=0 gdtype=bf16", "gate=mixed gdtype=fp16"}));
}

TEST(EmulatedForward, Betas) {
  check(cross({"T=100 K=64 V=64 dtype=bf16 seed=2"},
              {"beta=zeros", "beta=two", "beta=one", "beta=logit", "beta=logit2 gdtype=bf16"}));
}

TEST(EmulatedForward, Keys) {
  check(cross({"T=100 Hk=1 Hv=2 K=128 V=64 seed=3"},
              {"keys=correlated gate=zero dtype=bf16", "keys=correlated beta=two gate=weak dtype=fp16",
               "keys=correlated l2norm gate=raw dtype=bf16", "keys=repeated beta=one dtype=bf16",
               "keys=repeated l2norm dtype=fp16", "keys=loose dtype=bf16", "keys=loose l2norm dtype=fp16"}),
        3);
}

// 32 writes in a row of which each undoes the one before. Over many steps the errors of N and W add up, too.
TEST(EmulatedForward, RepeatedKeys) {
  check({"T=192 Hk=1 Hv=2 K=128 V=128 dtype=bf16 keys=repeated beta=one seed=5",
         "T=170 Hk=2 Hv=4 K=128 V=128 dtype=bf16 keys=repeated beta=one seed=3",
         "T=700 Hk=1 Hv=2 K=128 V=128 dtype=bf16 keys=repeated beta=one gate=weak seed=15",
         "T=300 Hk=1 Hv=2 K=64 V=64 dtype=bf16 keys=repeated beta=one gate=zero h0=0 seed=3",
         "T=288 Hk=1 Hv=2 K=64 V=64 dtype=bf16 keys=repeated beta=one gate=zero h0=0 seed=27"});
}

TEST(EmulatedForward, States) {
  check(cross(
      cross({"lengths=70+0+1+33+20 pad=4 Hk=1 Hv=2 K=32 V=48 dtype=bf16"}, {"state=fp32", "state=bf16", "state=fp16"}),
      {"layout=kv", "layout=vk pool i64 strided", "pool first_slot=1 inplace", "layout=vk h0=0", "ht=0"}));
}

TEST(EmulatedForward, Checkpoints) {
  check(cross({"B=2 T=200 Hk=1 Hv=2 every=64", "lengths=64+63+0+200+130+128 pad=3 every=64",
               "lengths=64+0+200 every=128", "T=60 every=64", "B=3 T=130 offsets", "lengths=64+63+0+200+130 offsets"},
              {"K=32 V=32 dtype=bf16", "K=48 V=16 dtype=fp16 state=bf16 layout=vk pool"}));
}

TEST(EmulatedForward, StridesAndScale) {
  check({"B=2 T=75 Hk=2 Hv=4 K=64 V=64 dtype=bf16 strided", "T=40 K=64 V=64 dtype=bf16 scale=0",
         "T=40 K=64 V=64 dtype=fp16 scale=-2.5"});
}

// Forced cuts: heads that fade, heads that do not, and both.
TEST(EmulatedForward, Segments) {
  const Specs gates = {"gate=zero",  "gate=weak",       "gate=mixed",       "gate=strong",
                       "gate=spiky", "gate=raw l2norm", "gate=inf beta=two"};
  check(cross(
      {"T=330 Hk=1 Hv=3 K=32 V=48 segment=1 dtype=bf16", "lengths=200+0+1+64+290 pad=7 K=64 V=32 segment=2 dtype=fp16"},
      gates));
  check({"lengths=130+33x1+330+0 K=32 V=32 segment=1 gate=zero dtype=bf16"});
  check(cross({"T=1100 Hk=1 Hv=2 K=16 V=32 segment=4 dtype=bf16 layout=vk"}, gates));
  check({"T=330 K=128 V=64 segment=1 gate=zero dtype=bf16", "T=330 K=128 V=160 segment=2 gate=mixed dtype=fp16",
         "T=290 K=256 V=32 segment=1 gate=weak dtype=bf16", "T=290 K=80 V=112 segment=1 gate=zero dtype=bf16"});
  check({"T=330 K=128 V=128 segment=1 gate=zero dtype=bf16", "T=330 K=96 V=128 segment=2 gate=spiky dtype=bf16"}, 132);
}

TEST(EmulatedForward, CutsByItself) {
  ForwardProblem problem;
  problem.in.key_heads = problem.in.value_heads = problem.in.group = 1;
  problem.in.key_dim = problem.in.value_dim = 32;
  problem.in.sequences = {1, 1, 4000, {}};
  ASSERT_GT(emulated::cut_of(problem, {132}).chunks, 0);
  check(cross({"T=4000 K=32 V=32 dtype=bf16", "lengths=4100+4000 K=32 V=32 dtype=fp16 inplace"},
              {"gate=zero", "gate=raw"}),
        132);
}

// Of a pack the segments kernel knows the lengths: where the host may cut, it does so or not, and takes longer segments
// where they are better. What it finds is in records.
TEST(EmulatedForward, PacksAreCutByTheirLengths) {
  check(cross({"lengths=6900+0+1100 K=32 V=32 dtype=bf16", "lengths=64+7300+636 pad=9 K=32 V=16 dtype=fp16 inplace",
               "lengths=900+0+700 pad=6400 K=32 V=32 dtype=bf16 inplace"},
              {"gate=zero", "gate=raw"}),
        132);
}

// With a second grid, for whole sequences, one of the two has nothing to do.
TEST(EmulatedForward, PacksHaveAGridForWholeSequences) {
  check(
      cross({"lengths=6900+0+1100 K=32 V=32 dtype=bf16", "lengths=64+7300+636 pad=9 K=32 V=16 dtype=fp16 inplace",
             "lengths=900+0+700 pad=6400 K=32 V=32 dtype=bf16 inplace", "lengths=70+900 pad=7100 K=32 V=48 dtype=fp16"},
            {"gate=zero", "gate=raw"}),
      132, true);
  check({"lengths=1500+30 pad=20000 K=128 V=128 dtype=bf16", "lengths=30+2100 pad=3 K=128 V=64 dtype=fp16 pool"}, 132,
        true);
}

std::vector<char> bytes_of(const gd_tensor& t) {  // of a tensor without gaps
  const char* data = static_cast<const char*>(t.data);
  return {data, data + element_count(t) * element_bytes(t.dtype)};
}

// A pack that the segments kernel does not cut has the bits of a call that forbids cuts.
TEST(EmulatedForward, UncutPacksHaveTheSameBits) {
  for (const char* gates : {"gate=zero", "gate=raw"})
    for (const bool has_whole_grid : {false, true}) {
      Problem problem(parse_case(std::string("lengths=600+0+900 pad=6500 K=32 V=32 dtype=bf16 inplace ") + gates));
      const emulated::Options options{132, true, 1, has_whole_grid};
      const cuda::portable::Cut cut = emulated::cut_of(emulated::problem_of(problem.forward), options);
      ASSERT_GT(cut.chunks, 0);
      ASSERT_EQ(cut.cost.has_whole_grid, has_whole_grid);
      ASSERT_EQ(run(problem.forward, options), "");
      const auto o = bytes_of(problem.forward.out), states = bytes_of(problem.forward.final_state);
      problem.reset();
      problem.forward.context_parallel = GD_CP_OFF;
      ASSERT_EQ(run(problem.forward, options), "");
      EXPECT_EQ(o, bytes_of(problem.forward.out)) << gates;
      EXPECT_EQ(states, bytes_of(problem.forward.final_state)) << gates;
    }
}

TEST(EmulatedForward, SegmentsOfHeadsThatFade) {
  check(cross({"T=1100 Hk=1 Hv=3 K=32 V=16 segment=3 dtype=bf16",
               "lengths=700+0+1+64+400 pad=7 K=32 V=32 segment=2 dtype=fp16"},
              {"gate=zero", "gate=mixed", "gate=strong inplace every=64", "gate=spiky"}));
}

TEST(EmulatedForward, StatesOfSegments) {
  check(cross(
      cross({"lengths=200+0+64+1+265 pad=3 Hk=1 Hv=2 K=32 V=48 segment=1 dtype=bf16"}, {"gate=zero", "gate=strong"}),
      {"inplace", "inplace pool first_slot=1", "pool i64 strided layout=vk", "h0=0 ht=0", "state=bf16 every=64",
       "every=128 pool", "inplace every=64 layout=vk", "h0=0 keys=loose", "offsets state=fp16 inplace"}));
}

// Cut or not, the error is about the same.
TEST(EmulatedForward, SegmentsAreAsAccurateAsNone) {
  for (const std::string& spec : cross(cross({"T=1536 Hk=1 Hv=2 K=64 V=32"}, kTypes),
                                       {"gate=zero", "gate=weak", "gate=mixed", "gate=zero keys=correlated"})) {
    Judge judge(parse_case(spec));
    const auto errors = [&](int segment) {
      const Judgement judgement = judge.forward(Compute::tensor_cores, [&](const gd_forward_args& args) {
        judge.problem().tuning.segment_chunks = segment;
        return run(args, {});
      });
      EXPECT_TRUE(judgement.problems.empty()) << spec << "\n" << judgement.text();
      std::vector<double> values;
      for (const Verdict& verdict : judgement.verdicts) values.push_back(verdict.comparison.error);
      return values;
    };
    const std::vector<double> whole = errors(0);
    for (const int segment : {3, 7}) {
      const std::vector<double> cut = errors(segment);
      ASSERT_EQ(cut.size(), whole.size());
      for (size_t i = 0; i < cut.size(); ++i) EXPECT_LE(cut[i], 1.02 * whole[i]) << spec << ", segments of " << segment;
    }
  }
}

// Two segments of a head that does not fade: the second begins with the state that the first one has, bit for bit.
TEST(EmulatedForward, TwoSegmentsAreAsGoodAsOne) {
  Problem problem(parse_case("T=330 Hk=1 Hv=2 K=64 V=48 gate=zero dtype=bf16 inplace"));
  ASSERT_EQ(run(problem.forward, {}), "");
  const auto o = bytes_of(problem.forward.out), states = bytes_of(problem.forward.final_state);
  problem.reset();
  problem.tuning.segment_chunks = 3;
  ASSERT_EQ(run(problem.forward, {}), "");
  EXPECT_EQ(o, bytes_of(problem.forward.out));
  EXPECT_EQ(states, bytes_of(problem.forward.final_state));
}

// The same bits whatever the order of threads, the device and the columns of a CTA.
TEST(EmulatedForward, BitsDependOnTheInputsAlone) {
  for (const std::string& type : kTypes) {
    Problem problem(parse_case("lengths=70+0+33 Hk=1 Hv=2 K=128 V=128 " + type));
    std::vector<char> o, states;
    for (const int multiprocessors : {1, 9, 64}) {
      problem.reset();
      const auto seed = static_cast<unsigned>(multiprocessors);
      ASSERT_EQ(run(problem.forward, {multiprocessors, multiprocessors > 9, seed}), "");
      if (o.empty()) {
        o = bytes_of(problem.forward.out);
        states = bytes_of(problem.forward.final_state);
      }
      EXPECT_EQ(o, bytes_of(problem.forward.out)) << multiprocessors;
      EXPECT_EQ(states, bytes_of(problem.forward.final_state)) << multiprocessors;
    }
  }
}

}  // namespace
}  // namespace gatedelta::testing
