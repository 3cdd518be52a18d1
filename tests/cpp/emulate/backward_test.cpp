// The portable backward's own text, executed on a CPU, against the fp64 truth.
#include "instances.hpp"

#include <gtest/gtest.h>
#include <iterator>

#include "testing/judge.hpp"
#include "testing/raw_gates.hpp"

namespace gatedelta::testing {
namespace {

// Copies come at once in every other case, and as late as they may in the others.
void check(const Specs& specs, int multiprocessors = 1, bool has_whole_grid = false) {
  unsigned seed = 0;
  for (const std::string& spec : specs) {
    Judge judge(parse_case(spec));
    const emulated::Options options{multiprocessors, ++seed % 2 == 0, seed, has_whole_grid};
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
  check({"T=40 Hk=1 Hv=3 K=144 V=16 l2norm dtype=bf16"});  // whose rows are projected by a kernel of their own
}

TEST(EmulatedBackward, Gates) {
  check(cross({"T=100 Hk=2 Hv=4 K=32 V=48 dtype=bf16"},
              {"gate=zero", "gate=weak", "gate=strong", "gate=spiky", "gate=inf", "gate=huge", "gate=raw",
               "gate=raw dt_bias=0 gdtype=bf16 beta=logit", "gate=mixed gdtype=fp16"}));
}

TEST(EmulatedBackward, RawGatesOneByOne) {
  for (const char* dtype : {"bf16", "fp16"})
    EXPECT_EQ(judge_raw_gates(dtype, [](const gd_backward_args& args) { return emulated::run(args, {}); }), "");
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

// Forced cuts: heads that fade, heads that do not, and both.
TEST(EmulatedBackward, Segments) {
  const Specs gates = {"gate=zero",  "gate=weak",       "gate=mixed",       "gate=strong",
                       "gate=spiky", "gate=raw l2norm", "gate=inf beta=two"};
  check(cross({"T=330 Hk=1 Hv=3 K=32 V=48 segment=1 dtype=bf16",
               "lengths=200+0+1+64+290 pad=7 K=48 V=32 segment=2 dtype=fp16 l2norm"},
              gates));
  check({"lengths=130+33x1+330+0 K=32 V=32 segment=1 gate=zero dtype=bf16"});
  check(cross({"T=1090 Hk=1 Hv=2 K=16 V=32 segment=4 dtype=bf16 layout=vk"}, gates));
  check({"T=330 K=128 V=64 segment=1 gate=zero dtype=bf16", "T=330 K=128 V=160 segment=2 gate=mixed dtype=fp16",
         "T=290 K=256 V=32 segment=1 gate=weak dtype=bf16", "T=290 K=80 V=112 segment=1 gate=zero dtype=bf16"});
  check({"T=330 K=128 V=128 segment=1 gate=zero dtype=bf16", "T=330 K=96 V=128 segment=2 gate=spiky dtype=bf16"}, 132);
}

// Warm-ups of gradients are longer than those of states: one chain may begin with a warm-up where the other one has an
// boundary state. The last chunk has one step, or two, or a few tokens.
TEST(EmulatedBackward, SegmentsOfHeadsThatFade) {
  check(cross(cross({"T=1100 Hk=1 Hv=3 K=32 V=16 segment=3 dtype=bf16", "T=1152 K=32 V=32 segment=2 dtype=bf16",
                     "lengths=700+0+1+64+400 pad=7 K=32 V=32 segment=2 dtype=fp16"},
                    {"seed=1", "seed=2 dht=0"}),
              {"gate=zero", "gate=mixed", "gate=strong", "gate=spiky", "gate=raw"}));
}

// Of gradients the decay has to reach 2^-48, by the chunks behind a segment; of states 2^-24, by those before it.
// Chunks decay by 2^-30 here, one of them by 2^-60.
TEST(EmulatedBackward, WarmupsOfBothChains) {
  using namespace cuda;
  using namespace cuda::portable;
  constexpr int kChunks = 12, kSegments = 6;
  std::vector<cuda::ChunkDecay> decays(kChunks * kStepsPerChunk, {-15, 1});
  decays[4 * kStepsPerChunk].log2_left = -45;
  std::vector<Segment> states(kSegments), gradients(kSegments);
  SegmentRange range{};
  Params p{};
  p.sequences = {1, 1, kChunks * 64 - 40, {}};  // the last chunk has one step
  p.value_heads = 1, p.segment_chunks = 2;
  p.decays = decays.data(), p.segments = states.data(), p.gradient_segments = gradients.data();
  p.segment_ranges = &range;
  emulated::run_segments(p, {}, {});
  EXPECT_EQ(range.first, 0);
  EXPECT_EQ(range.count, kSegments);
  constexpr int kGradientWarmups[kSegments] = {2, 1, 2, 2, Segment::kFromBoundary, 0};
  for (int i = 0; i < kSegments; ++i) {
    EXPECT_EQ(states[i].warmup, i == 0 ? 0 : 1) << i;
    EXPECT_EQ(gradients[i].warmup, kGradientWarmups[i]) << i;
    for (const Segment& segment : {states[i], gradients[i]}) {
      EXPECT_EQ(segment.sequence, 0);
      EXPECT_EQ(segment.chunk, 2 * i);
      EXPECT_EQ(segment.chunks, 2);
    }
  }
}

TEST(EmulatedBackward, CutsByItself) {
  BackwardProblem problem;
  problem.in.key_heads = problem.in.value_heads = problem.in.group = 1;
  problem.in.key_dim = problem.in.value_dim = 32;
  problem.in.sequences = {1, 1, 3300, {}};
  ASSERT_GT(emulated::cut_of(problem, {132}).chunks, 0);
  check(cross({"T=3300 K=32 V=32 dtype=bf16", "lengths=3400+3300 K=32 V=32 dtype=fp16"}, {"gate=zero", "gate=raw"}),
        132);
}

// What the segments kernel makes of the lengths of a pack. Heads do not fade.
struct PackSegments {
  cuda::portable::Cut cut;
  std::vector<cuda::portable::Segment> states, gradients;  // of the first head
  std::vector<cuda::portable::SegmentRange> segment_ranges;
};
PackSegments pack_segments(const std::vector<int64_t>& lengths, int64_t tokens, int heads, int size = 128,
                           int multiprocessors = 132, bool has_whole_grid = false) {
  using namespace cuda;
  using namespace cuda::portable;
  const int count = static_cast<int>(lengths.size());
  std::vector<int32_t> offsets = {0};
  for (const int64_t length : lengths) offsets.push_back(offsets.back() + static_cast<int32_t>(length));
  std::vector<int> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return lengths[a] > lengths[b]; });
  BackwardProblem problem;
  problem.in.key_heads = problem.in.value_heads = heads, problem.in.group = 1;
  problem.in.key_dim = problem.in.value_dim = size;
  problem.in.sequences = {count, 1, tokens, {offsets.data(), false, true}};
  PackSegments found{emulated::cut_of(problem, {multiprocessors, false, 1, has_whole_grid}), {}, {}, {}};
  Params p{};
  p.sequences = sequences_of(problem.in.sequences);
  p.value_heads = heads, p.segment_chunks = found.cut.chunks;
  p.longest_first = order.data();
  if (found.cut.chunks == 0) return found;
  const auto items = static_cast<size_t>(p.segment_length().most_segments(p.sequences) * heads);
  std::vector<cuda::ChunkDecay> decays(static_cast<size_t>(p.sequences.workspace_chunks() * heads) * kStepsPerChunk,
                                       {0, 1});
  std::vector<Segment> states(items), gradients(items);
  found.segment_ranges.resize(lengths.size());
  p.decays = decays.data(), p.segments = states.data(), p.gradient_segments = gradients.data();
  p.segment_ranges = found.segment_ranges.data();
  emulated::run_segments(p, found.cut.cost, {});
  for (size_t i = 0; i < items; i += static_cast<size_t>(heads)) {
    found.states.push_back(states[i]);
    found.gradients.push_back(gradients[i]);
  }
  return found;
}
// Every sequence's chunks, each once, by segments that follow each other; returns the longest segment.
int expect_all_chunks(const std::vector<cuda::portable::Segment>& segments, const std::vector<int64_t>& lengths) {
  std::vector<int> done(lengths.size(), 0), seen(lengths.size(), 0);
  int longest = 0;
  for (const cuda::portable::Segment& segment : segments) {
    if (segment.sequence < 0) continue;
    const auto n = static_cast<size_t>(segment.sequence);
    EXPECT_EQ(segment.chunk, done[n]);
    done[n] += segment.chunks;
    ++seen[n];
    longest = std::max(longest, segment.chunks);
  }
  for (size_t n = 0; n < lengths.size(); ++n) {
    EXPECT_GT(seen[n], 0) << n;  // one without tokens has a state to pass on
    EXPECT_EQ(done[n], cuda::ChunkedSequences::chunks(lengths[n])) << n;
  }
  return longest;
}

TEST(EmulatedBackward, PacksAreCutByTheirLengths) {
  using Lengths = std::vector<int64_t>;
  for (const Lengths& lengths : {Lengths{30000, 2768}, Lengths{100, 0, 8000, 0}, Lengths{5809, 1244, 406, 733},
                                 Lengths{3274, 1029, 2909, 5061, 2011, 3793, 9932, 4759}, Lengths{32768}}) {
    const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    for (const int heads : {4, 8}) {
      const PackSegments found = pack_segments(lengths, tokens + 7, heads);
      ASSERT_GT(found.cut.chunks, 0) << lengths[0];
      const auto longest = cuda::ChunkedSequences::chunks(*std::max_element(lengths.begin(), lengths.end()));
      for (const auto& segments : {found.states, found.gradients}) {
        const int length = expect_all_chunks(segments, lengths);
        EXPECT_LT(length, longest) << lengths[0];
        EXPECT_GE(length, found.cut.chunks) << lengths[0];
      }
      // Segments follow each other, sequence by sequence; empty ones come last.
      int first = 0;
      for (size_t n = 0; n < lengths.size(); ++n) {
        EXPECT_EQ(found.segment_ranges[n].first, first) << n;
        for (int i = 0; i < found.segment_ranges[n].count; ++i, ++first) {
          EXPECT_EQ(found.states[static_cast<size_t>(first)].sequence, static_cast<int>(n));
        }
      }
      for (auto i = static_cast<size_t>(first); i < found.states.size(); ++i) {
        EXPECT_LT(found.states[i].sequence, 0) << i;
      }
    }
  }
  // Lengths that are not worth it. The sequences are whole, the longest first, and all other segments are empty.
  for (const Lengths& lengths : {Lengths{1000, 0, 1200}, Lengths{0, 0, 0}, Lengths{64, 1, 63}}) {
    const PackSegments found = pack_segments(lengths, 32768, 4);
    ASSERT_GT(found.cut.chunks, 0);
    for (const cuda::portable::SegmentRange& range : found.segment_ranges)
      EXPECT_EQ(range.count, 0);  // nothing to merge
    for (const auto& segments : {found.states, found.gradients}) {
      expect_all_chunks(segments, lengths);
      for (size_t i = 0; i < segments.size(); ++i) {
        EXPECT_EQ(segments[i].sequence < 0, i >= lengths.size());
        EXPECT_EQ(segments[i].warmup, 0);
        EXPECT_LE(segments[i].chunks, segments[i == 0 ? 0 : i - 1].chunks);
      }
    }
  }
  // Longer segments than the host's, on a small device.
  const PackSegments longer = pack_segments({3840, 30}, 6000, 1, 32, 7);
  EXPECT_GT(expect_all_chunks(longer.states, {3840, 30}), longer.cut.chunks);
  check({"lengths=3840+30 pad=2130 K=32 V=32 dtype=bf16 gate=zero",
         "lengths=30+3840 pad=2130 K=32 V=32 dtype=bf16 gate=raw"},
        7);
  check(cross({"lengths=5300+0+700 pad=2000 K=32 V=16 dtype=bf16", "lengths=300+0+900 pad=6800 K=32 V=32 dtype=fp16"},
              {"gate=zero", "gate=raw"}),
        132);
}

// With a second grid, for whole sequences, one of the two has nothing to do.
TEST(EmulatedBackward, PacksHaveAGridForWholeSequences) {
  const std::vector<int64_t> cut_lengths = {30000, 2768}, whole_lengths = {1000, 0, 1200};
  const PackSegments cut = pack_segments(cut_lengths, 32775, 4, 128, 132, true);
  ASSERT_TRUE(cut.cut.cost.has_whole_grid);
  expect_all_chunks(cut.states, cut_lengths);
  for (const cuda::portable::SegmentRange& range : cut.segment_ranges) EXPECT_GT(range.count, 0);
  const PackSegments whole = pack_segments(whole_lengths, 32768, 4, 128, 132, true);
  ASSERT_TRUE(whole.cut.cost.has_whole_grid);
  for (const auto& segments : {whole.states, whole.gradients})
    for (const cuda::portable::Segment& segment : segments) EXPECT_LT(segment.sequence, 0);
  for (const cuda::portable::SegmentRange& range : whole.segment_ranges) EXPECT_EQ(range.count, 0);
  check(cross({"lengths=5300+0+700 pad=2000 K=32 V=16 dtype=bf16", "lengths=300+0+900 pad=6800 K=32 V=32 dtype=fp16",
               "lengths=70+900 pad=7100 K=32 V=32 dtype=bf16"},
              {"gate=zero", "gate=raw"}),
        132, true);
  check({"lengths=700+30 pad=20000 K=128 V=128 dtype=bf16"}, 132, true);
}

TEST(EmulatedBackward, StatesOfSegments) {
  check(cross(
      cross({"lengths=200+0+64+1+265 pad=3 Hk=1 Hv=2 K=32 V=48 segment=1 dtype=bf16"}, {"gate=zero", "gate=strong"}),
      {"pool first_slot=1", "pool i64 strided layout=vk", "h0=0 ht=0 dht=0", "state=bf16", "h0=0 keys=loose",
       "dht=0 state=fp16"}));
}

// Cut or not, the error is about the same. A few large sums enter dg of all tokens, so its rounding errors differ from
// cut to cut: theirs is about the same in the mean.
TEST(EmulatedBackward, SegmentsAreAsAccurateAsNone) {
  double ratios = 0;
  int count = 0;
  for (const std::string& spec :
       cross(cross({"T=1536 Hk=1 Hv=2 K=64 V=32"}, kTypes),
             {"gate=zero", "gate=weak", "gate=mixed", "gate=strong", "gate=zero keys=correlated"})) {
    Judge judge(parse_case(spec));
    const auto errors = [&](int segment) {
      const Judgement judgement = judge.backward(Compute::tensor_cores, [&](const gd_backward_args& args) {
        judge.problem().tuning.segment_chunks = segment;
        return emulated::run(args, {});
      });
      EXPECT_TRUE(judgement.problems.empty()) << spec << "\n" << judgement.text();
      return judgement.verdicts;
    };
    const std::vector<Verdict> whole = errors(0);
    for (const int segment : {3, 7}) {
      const std::vector<Verdict> cut = errors(segment);
      ASSERT_EQ(cut.size(), whole.size());
      for (size_t i = 0; i < cut.size(); ++i) {
        const double ratio = cut[i].comparison.error / whole[i].comparison.error;
        if (cut[i].quantity == "dg") {
          ratios += ratio;
          ++count;
        } else {
          EXPECT_LE(ratio, 1.1) << cut[i].quantity << " of " << spec << ", segments of " << segment;
        }
      }
    }
  }
  EXPECT_LE(ratios / count, 1.2);
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

// A pack that the segments kernel does not cut has the bits of a call that forbids cuts.
TEST(EmulatedBackward, UncutPacksHaveTheSameBits) {
  Problem problem(parse_case("lengths=600+0+900 pad=6500 Hk=2 Hv=2 K=32 V=16 dtype=bf16"));
  problem.backward.context_parallel = GD_CP_OFF;
  ASSERT_EQ(emulated::run(problem.backward, {132}), "");
  const auto outputs = outputs_of(problem.backward);
  for (const bool has_whole_grid : {false, true})
    for (const bool is_small : {false, true}) {
      problem.reset();
      problem.backward.context_parallel = GD_CP_AUTO;
      problem.backward.small_workspace = is_small;
      const emulated::Options options{132, true, 1, has_whole_grid};
      const cuda::portable::Cut cut = emulated::cut_of(emulated::problem_of(problem.backward), options);
      ASSERT_GT(cut.chunks, 0);
      ASSERT_EQ(cut.cost.has_whole_grid, has_whole_grid);
      ASSERT_EQ(emulated::run(problem.backward, options), "");
      EXPECT_EQ(outputs, outputs_of(problem.backward)) << has_whole_grid << is_small;
    }
}

// Two segments of a head that does not fade: either chain's second one begins with what the first one has, bit for bit.
// From what a forward saved, too, whether that was cut or not.
TEST(EmulatedBackward, TwoSegmentsAreAsGoodAsOne) {
  Problem problem(parse_case("T=330 Hk=1 Hv=2 K=64 V=48 gate=zero dtype=bf16"));
  ASSERT_EQ(emulated::run(problem.backward, {}), "");
  const auto whole = outputs_of(problem.backward);
  const Buffer saved(cuda::portable::saved_bytes(emulated::layer_of(problem.backward.in)));
  for (const int saves : {0, 1, 2}) {
    problem.reset();
    gd_backward_args args = problem.backward;
    if (saves) {
      gd_forward_args forward = problem.forward;
      forward.saved = saved.data(), forward.saved_bytes = saved.size();
      problem.tuning.segment_chunks = saves == 2 ? 2 : 0;
      ASSERT_EQ(emulated::run(forward, {}), "");
      args.saved = saved.data(), args.saved_bytes = saved.size();
    }
    problem.tuning.segment_chunks = 3;
    ASSERT_EQ(emulated::run(args, {}), "");
    EXPECT_EQ(whole, outputs_of(args)) << saves;
  }
}

// One half of the key heads after the other, in less memory: the bits are those of all heads together, cut or not.
TEST(EmulatedBackward, SmallWorkspaceHasTheSameBits) {
  for (const char* spec :
       {"lengths=200+0+33 pad=70 Hk=2 Hv=4 K=64 V=48 dtype=bf16", "T=100 Hk=3 Hv=3 K=32 V=32 dtype=fp16 l2norm",
        "lengths=40+0+33 pad=3 Hk=3 Hv=6 K=32 V=16 dtype=bf16 gate=raw l2norm beta=logit strided",
        "B=2 T=70 Hk=2 Hv=2 K=144 V=32 dtype=bf16 l2norm layout=vk pool",
        "T=330 Hk=2 Hv=6 K=32 V=48 dtype=bf16 gate=mixed segment=1"}) {
    Judge judge(parse_case(spec));
    Problem& problem = judge.problem();
    const Buffer saved(cuda::portable::saved_bytes(emulated::layer_of(problem.backward.in)));
    gd_forward_args forward = problem.forward;
    forward.saved = saved.data(), forward.saved_bytes = saved.size();
    ASSERT_EQ(emulated::run(forward, {}), "");
    const auto run = [&](const gd_backward_args& given, bool is_small) {
      gd_backward_args args = given;
      args.saved = saved.data(), args.saved_bytes = saved.size(), args.small_workspace = is_small;
      return emulated::run(args, {is_small ? 64 : 1, is_small, 1});
    };
    problem.reset();
    ASSERT_EQ(run(problem.backward, false), "");
    const auto whole = outputs_of(problem.backward);
    std::vector<std::vector<char>> halves;
    const Judgement judgement = judge.backward(Compute::tensor_cores, [&](const gd_backward_args& args) {
      const std::string error = run(args, true);
      halves = outputs_of(args);
      return error;
    });
    EXPECT_TRUE(judgement.ok()) << spec << "\n" << judgement.text();
    EXPECT_EQ(whole, halves) << spec;
    EXPECT_TRUE(saved.guards_intact());
  }
}
TEST(EmulatedBackward, SmallWorkspaceIsSmaller) {
  BackwardProblem problem;
  problem.in.key_heads = 4, problem.in.value_heads = 8, problem.in.group = 2;
  problem.in.key_dim = problem.in.value_dim = 128;
  problem.in.sequences = {1, 1, 8192, {}};
  problem.saved.present = true;
  const auto bytes = [&] { return static_cast<double>(cuda::portable::backward_layout(problem).bytes); };
  const double whole = bytes();
  problem.small_workspace = true;
  EXPECT_NEAR(bytes(), whole / 2, whole / 1000);
  problem.in.key_heads = 5, problem.in.value_heads = 10;
  problem.small_workspace = false;
  const double uneven = bytes();
  problem.small_workspace = true;
  EXPECT_NEAR(bytes(), 0.6 * uneven, uneven / 1000);
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
