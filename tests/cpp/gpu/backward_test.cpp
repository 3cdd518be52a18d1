// Backward on a CUDA device: cuts, memory saved by a forward, small workspaces, bits, graphs.
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include "device.hpp"

namespace gatedelta::testing {
namespace {

using Backward = Gpu;

void check(const Specs& specs) { check_backward(cross(specs, kTypes)); }

TEST_F(Backward, ManyHeads) { check_backward(many_heads_cases()); }

TEST_F(Backward, Dense) { check({"T=1", "T=63", "T=64", "T=65", "T=128", "B=3 T=200", "B=2 T=513", "B=2 T=0"}); }

// Under strong gates dg consists of what one token leaves to the next, which is far smaller than a token's own terms.
// (In fp16 it is below the smallest number.)
TEST_F(Backward, StrongGatesKeepTheirGradient) {
  const std::string strong = "T=300 Hk=2 Hv=4 K=128 V=128 dtype=bf16 gate=strong";
  for (const std::string& spec : {strong, strong + " l2norm"}) {
    Judge judge(parse_case(spec));
    const Judgement judgement = judge.backward(Compute::tensor_cores, on_device<gd_backward_args>);
    for (const Verdict& verdict : judgement.verdicts) {
      if (verdict.quantity != "dg") continue;
      EXPECT_LE(verdict.comparison.error, 2e-2) << spec;
    }
  }
}

// Forced cuts; the sequences end at the beginning, in the middle and at the end of a chunk.
TEST_F(Backward, Segments) {
  check(cross(
      cross({"T=600 Hk=2 Hv=4", "lengths=300+0+1+64+900+130 pad=7 Hk=1 Hv=3"}, {"segment=1", "segment=2", "segment=3"}),
      {"gate=zero", "gate=mixed", "gate=strong", "gate=spiky", "gate=raw l2norm", "gate=inf beta=two"}));
  check(cross({"lengths=400+0+64+1+329 Hk=1 Hv=2 segment=2"},
              {"strided layout=vk", "h0=0 ht=0 dht=0", "state=bf16 gate=zero", "state=fp16 gate=strong layout=vk",
               "h0=0 gate=weak keys=loose", "dht=0 gate=zero"}));
}

// Automatic cuts: few heads, long sequences.
TEST_F(Backward, CutsLongSequences) {
  check(cross({"T=3000 Hk=1 Hv=2", "lengths=3000+70+0+900 pad=9 Hk=1 Hv=2"},
              {"gate=zero", "gate=weak", "gate=mixed", "gate=strong", "gate=spiky", "gate=raw l2norm"}));
  check({"T=9000 Hk=1 Hv=2 gate=mixed", "T=4001 Hk=1 Hv=1 gate=zero", "lengths=5000+3x500 Hk=1 Hv=4 gate=mixed",
         "lengths=8x1024 Hk=2 Hv=4 gate=mixed", "lengths=5300+7x413 Hk=2 Hv=4 gate=mixed"});
}

// Each of the two may cut or not.
TEST_F(Backward, FromSavedMemory) {
  for (const std::string& spec :
       cross({"T=1", "B=2 T=1024", "T=1025 Hk=1 Hv=2", "T=3000 Hk=1 Hv=1 gate=zero", "B=70 T=1030 Hk=1 Hv=1",
              "lengths=1024+1+0+2049 pad=3 Hk=1 Hv=2", "lengths=70x30 Hk=1 Hv=2 gate=raw l2norm",
              "T=2500 Hk=1 Hv=3 layout=vk state=bf16 gate=raw l2norm", "lengths=4x0 pad=5 Hk=1 Hv=2",
              "T=4097 Hk=1 Hv=2 gate=spiky beta=zeros"},
             kTypes)) {
    Judge judge(parse_case(spec));
    for (const auto& [forward_cuts, backward_cuts] :
         {std::pair{GD_CP_AUTO, GD_CP_AUTO}, {GD_CP_AUTO, GD_CP_OFF}, {GD_CP_OFF, GD_CP_AUTO}}) {
      const Judgement judgement = judge.backward(Compute::tensor_cores, [&](const gd_backward_args& host) {
        return from_saved(judge.problem().forward, host, forward_cuts, backward_cuts);
      });
      expect_ok(judgement, judge.problem().spec, "bwd");
    }
  }
}

// Hopper's kernels in slices of chunks, which hold whole sequences, parts of them, or none.
const Specs kSlicedChunks = {"T=2500 Hk=1 Hv=2",
                             "B=3 T=1030 Hk=1 Hv=2",
                             "B=40 T=63 Hk=1 Hv=2",
                             "T=1984 Hk=1 Hv=1",
                             "lengths=1024+1+0+2049+30 pad=3 Hk=1 Hv=2 gate=raw l2norm",
                             "lengths=3x900 pad=200 Hk=1 Hv=2 layout=vk",
                             "lengths=33x60 Hk=1 Hv=1"};
// The portable ones in halves of the key heads.
const Specs kSlicedHeads = {"T=2500 Hk=2 Hv=4", "B=3 T=230 Hk=3 Hv=3 gate=raw l2norm",
                            "lengths=1024+1+0+2049+30 pad=3 Hk=3 Hv=6 gate=raw l2norm beta=logit",
                            "lengths=3x900 pad=200 Hk=2 Hv=2 layout=vk gate=zero",
                            "T=900 Hk=2 Hv=4 segment=2 gate=mixed"};
TEST_F(Backward, SmallWorkspace) {
  for (const std::string& spec : cross(kIsPortable ? kSlicedHeads : kSlicedChunks, kTypes)) {
    Judge judge(parse_case(spec));
    for (const gd_context_parallel cut : {GD_CP_AUTO, GD_CP_OFF}) {
      const gd_backward_args& args = judge.problem().backward;
      const gd_tensor* const outputs[] = {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.d_initial_state};
      std::vector<std::vector<char>> found[2];
      for (const bool is_small : {false, true}) {
        const Judgement judgement = judge.backward(Compute::tensor_cores, [&](gd_backward_args host) {
          host.small_workspace = is_small;
          gd_forward_args forward = judge.problem().forward;
          if (cut == GD_CP_OFF) forward.exec.tuning = host.exec.tuning = nullptr;
          const std::string error = from_saved(forward, host, cut, cut);
          for (const gd_tensor* t : outputs) found[is_small].push_back(bytes_of(*t));
          return error;
        });
        expect_ok(judgement, judge.problem().spec, "bwd");
      }
      EXPECT_EQ(found[0], found[1]) << spec;
    }
  }
}

// Cut or not, the error is about the same. Also where it exceeds the bounds of the table, which do not cover thousands
// of tokens with beta up to 2. A few large sums enter dg of all tokens, so its rounding errors differ from cut to cut,
// by less those of dbeta: with two orders of the merge's sums and eight seeds, 48 cuts of the last case with T=3000
// have between 0.89 and 1.08 of the automatic cut's error in dbeta, 0.994 in the mean. So the mean has the narrower
// bound.
TEST_F(Backward, SegmentsAreAsAccurateAsNone) {
  std::map<std::string, std::vector<double>> growth;  // logarithms, by quantity
  for (const std::string& spec :
       cross(cross({"T=3000 Hk=1 Hv=2 seed=5", "T=3000 Hk=1 Hv=2 seed=6 l2norm beta=logit2",
                    "T=600 Hk=1 Hv=2 seed=7 keys=loose beta=logit2"},
                   kTypes),
             {"gate=zero", "gate=weak", "gate=strong", "gate=spiky", "gate=mixed", "gate=zero keys=correlated"})) {
    Judge judge(parse_case(spec));
    const auto errors = [&](int segment) {
      const Judgement judgement = judge.backward(Compute::tensor_cores, [&](const gd_backward_args& host) {
        gd_backward_args args = host;
        judge.problem().tuning.segment_chunks = segment;
        args.context_parallel = segment ? GD_CP_AUTO : GD_CP_OFF;
        return on_device(args);
      });
      EXPECT_TRUE(judgement.problems.empty()) << spec << "\n" << judgement.text();
      return judgement.verdicts;
    };
    const std::vector<Verdict> whole = errors(0);
    const bool may_grow = judge.problem().spec.keys == KeyKind::loose;  // states may grow, and errors with them
    for (const int segment : {2, 9}) {
      const std::vector<Verdict> cut = errors(segment);
      ASSERT_EQ(cut.size(), whole.size());
      for (size_t i = 0; i < cut.size(); ++i) {
        const double of_dg = kIsPortable ? 2.5 : 1.5;
        const double of_dbeta = kIsPortable ? 1.25 : 1.1;
        const double margin = cut[i].quantity == "dg"      ? of_dg
                              : may_grow                   ? 1.5
                              : cut[i].quantity == "dbeta" ? of_dbeta
                                                           : 1.1;
        if (!may_grow && whole[i].comparison.error > 0)
          growth[cut[i].quantity].push_back(std::log(cut[i].comparison.error / whole[i].comparison.error));
        EXPECT_LE(cut[i].comparison.error, margin * whole[i].comparison.error)
            << cut[i].quantity << " of " << spec << ", segments of " << segment;
      }
    }
  }
  for (const auto& [quantity, logs] : growth) {
    const double mean = std::accumulate(logs.begin(), logs.end(), 0.0) / static_cast<double>(logs.size());
    EXPECT_LE(std::exp(mean), 1.05) << quantity;
  }
}

TEST_F(Backward, RepeatsBitForBit) {
  for (const std::string& spec :
       cross({"T=3000 Hk=1 Hv=2 gate=mixed", "lengths=2000+0+70+129+1 pad=5 Hk=2 Hv=4 gate=zero",
              "T=900 Hk=1 Hv=2 segment=2 gate=zero", "B=40 T=200 Hk=2 Hv=4"},
             kTypes)) {
    Problem problem(parse_case(spec));
    const gd_backward_args& args = problem.backward;
    const gd_tensor* const outputs[] = {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.d_initial_state};
    std::vector<std::vector<char>> first;
    for (int round = 0; round < 10; ++round) {
      problem.reset();
      ASSERT_EQ(on_device(args), "");
      for (size_t i = 0; i < std::size(outputs); ++i) {
        if (round == 0) first.push_back(bytes_of(*outputs[i]));
        EXPECT_EQ(first[i], bytes_of(*outputs[i])) << spec << ", round " << round << ", output " << i;
      }
    }
  }
}

// Every replay cuts by the lengths and gates it finds.
TEST_F(Backward, GraphReplaysWithNewContents) {
  for (const std::string& type : kTypes) {
    const std::string rest = " pad=6 Hk=1 Hv=2 " + type + " seed=";
    check_replay<gd_backward_args>("lengths=70+0+2300+64+30 gate=zero" + rest + "1",
                                   "lengths=1+799+0+1633+31 gate=mixed" + rest + "2");
  }
}

// With batch_invariant nothing is cut, and a sequence alone gives the same bits as in a batch.
TEST_F(Backward, DoesNotDependOnTheBatch) {
  Problem problem(parse_case("B=70 T=700 Hk=2 Hv=4 gate=zero K=128 V=128 dtype=bf16"));
  problem.backward.batch_invariant = 1;
  DeviceBackward device(with_kernels(problem.backward));
  ASSERT_EQ(device.run(), "");
  ASSERT_EQ(device.download(problem.backward), "");
  const auto dq = bytes_of(problem.backward.dq), dv = bytes_of(problem.backward.dv);
  problem.reset();
  device.upload(problem.backward);
  gd_backward_args& alone = device.args();
  for (gd_tensor* t :
       {&alone.in.q, &alone.in.k, &alone.in.v, &alone.in.g, &alone.in.beta, &alone.in.initial_state, &alone.do_,
        &alone.dht, &alone.dq, &alone.dk, &alone.dv, &alone.dg, &alone.dbeta, &alone.d_initial_state})
    t->shape[0] = 1;
  ASSERT_EQ(device.run(), "");
  ASSERT_EQ(device.download(problem.backward), "");
  EXPECT_EQ(std::memcmp(dq.data(), bytes_of(problem.backward.dq).data(), dq.size() / 70), 0);
  EXPECT_EQ(std::memcmp(dv.data(), bytes_of(problem.backward.dv).data(), dv.size() / 70), 0);
}

}  // namespace
}  // namespace gatedelta::testing
