// The stages of context parallelism against the fp64 truth, each alone and all together.
#include <cmath>

#include "testing/summaries.hpp"
#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

void check_summary(const Specs& specs) {
  for (const std::string& spec : selected(specs)) {
    const Problem problem(parse_case(spec));
    if (sequences_of(problem.forward.in) == 0) continue;
    const SummaryTruth truth = truth_of_summary(problem);
    for (const gd_isa isa : usable_isas()) {
      const Compute compute = chunk_compute(static_cast<gd_dtype>(problem.forward.in.k.dtype), isa);
      check_summary(problem, truth, compute, gd_isa_name(isa), [&](const gd_summary_args& args) {
        return run_summary(args, {.isa = isa, .pool = nullptr, .threads = 0});
      });
    }
  }
}

TEST(Summary, Gates) { check_summary(gate_cases()); }
TEST(Summary, Betas) { check_summary(beta_cases()); }
TEST(Summary, Keys) { check_summary(key_cases()); }
TEST(Summary, Heads) { check_summary(head_cases()); }
TEST(Summary, Packs) {
  check_summary({"lengths=0+0+300+0+1+63+64+65+0 pad=1 i64 Hk=2 Hv=2 K=32 V=32",
                 "lengths=129 pad=70 Hk=1 Hv=1 K=16 V=16 gate=raw l2norm dtype=bf16",
                 "lengths=70+0+64+1+129+30+20 pad=4 Hk=1 Hv=2 K=48 V=16 layout=vk strided dtype=bf16",
                 "T=100 Hk=1 Hv=2 K=16 V=256", "T=100 Hk=1 Hv=2 K=256 V=16 dtype=bf16", "B=3 T=0 Hk=1 Hv=2 K=16 V=16"});
}

// Heads that fade and heads that last, over more chunks than a window has.
TEST(Summary, LongSequences) {
  check_summary({"T=1500 Hk=1 Hv=4 K=32 V=32 gate=mixed dtype=bf16", "T=900 Hk=1 Hv=4 K=32 V=16 gate=spiky",
                 "T=700 Hk=1 Hv=8 K=16 V=16 gate=raw l2norm beta=logit2",
                 "T=800 Hk=1 Hv=2 K=16 V=16 gate=weak beta=two"});
}

// With skip_faded the benchmark's decaying heads read their last chunks alone: what lies before may be anything.
TEST(Summary, FadedHeadsReadTheirWindowAlone) {
  Problem problem(parse_case("T=2048 Hk=1 Hv=4 K=32 V=32 gate=mixed seed=5"));
  const gd_inputs& in = problem.forward.in;
  Summary summary(in, 0, 1);
  summary.args.skip_faded = 1;
  ASSERT_EQ(run_summary(summary.args, {}), "");
  const std::vector<double> before = to_doubles(summary.local.tensor);
  int faded = 0;
  for (int64_t h = 0; h < 4; ++h) faded += std::isinf(summary.fade.data()[h]);
  EXPECT_EQ(faded, 3);  // every fourth head has gates of 0
  auto* v = static_cast<float*>(in.v.data);
  for (int64_t t = 0; t < 1024; ++t)
    for (int64_t i = 0; i < 4 * 32; ++i) v[t * 4 * 32 + i] = std::nanf("");
  ASSERT_EQ(run_summary(summary.args, {}), "");
  const std::vector<double> after = to_doubles(summary.local.tensor);
  for (int64_t h = 0; h < 4; ++h) {
    if (!std::isinf(summary.fade.data()[h])) continue;
    for (int64_t i = 0; i < 32 * 32; ++i) EXPECT_EQ(before[h * 1024 + i], after[h * 1024 + i]);
  }
}

// Where a token may amplify the state, the weight of what is written is unknown, and the head does not count as faded.
// The heads share their keys; the last one is too long for the first head's beta alone.
TEST(Summary, HeadsThatMayAmplifyAreNotFaded) {
  Problem problem(parse_case("T=200 Hk=1 Hv=2 K=16 V=16 gate=strong"));
  const gd_inputs& in = problem.forward.in;
  auto *k = static_cast<float*>(in.k.data), *beta = static_cast<float*>(in.beta.data);
  for (int64_t i = 0; i < 16; ++i) k[199 * 16 + i] *= 2;
  beta[199 * 2] = 1;          // |1 - beta |k|^2| = 3
  beta[199 * 2 + 1] = 0.25f;  // 0
  for (const gd_isa isa : usable_isas()) {
    Summary summary(in, 0, 1);
    summary.args.skip_faded = 1;
    ASSERT_EQ(run_summary(summary.args, {.isa = isa, .pool = nullptr, .threads = 0}), "");
    EXPECT_TRUE(std::isfinite(summary.fade.data()[0])) << gd_isa_name(isa);
    EXPECT_TRUE(std::isinf(summary.fade.data()[1])) << gd_isa_name(isa);
  }
}

TEST(Summary, RangesAndThreads) {
  for (const char* spec :
       {"lengths=70+0+130+64 pad=3 Hk=2 Hv=4 K=32 V=16 dtype=bf16", "B=4 T=130 Hk=1 Hv=2 K=16 V=32"}) {
    Problem problem(parse_case(spec));
    const gd_inputs& in = problem.forward.in;
    Summary all(in, 0, 4);
    ASSERT_EQ(run_summary(all.args, {}), "");
    const auto whole = to_doubles(all.local.tensor), transitions = to_doubles(all.transition.tensor);
    for (int64_t first = 0; first < 4; ++first) {
      for (const int threads : {1, 3, 7}) {
        const Pool pool(threads);
        Summary one(in, first, 1);
        ASSERT_EQ(run_summary(one.args, {.isa = GD_ISA_AUTO, .pool = pool, .threads = 0}), "");
        const auto local = to_doubles(one.local.tensor), map = to_doubles(one.transition.tensor);
        EXPECT_TRUE(std::equal(local.begin(), local.end(), whole.begin() + first * static_cast<int64_t>(local.size())));
        EXPECT_TRUE(std::equal(map.begin(), map.end(), transitions.begin() + first * static_cast<int64_t>(map.size())));
      }
    }
  }
}

void check_backward_summary(const Specs& specs) {
  for (const std::string& spec : selected(specs)) {
    const Problem problem(parse_case(spec));
    if (sequences_of(problem.backward.in) == 0) continue;
    const auto truth = reference_backward_summary(backward_summary_of(problem));
    for (const gd_isa isa : usable_isas()) {
      const Compute compute = chunk_compute(static_cast<gd_dtype>(problem.backward.in.q.dtype), isa);
      check_backward_summary(problem, truth, compute, gd_isa_name(isa), [&](const gd_backward_summary_args& args) {
        return run_backward_summary(args, {.isa = isa, .pool = nullptr, .threads = 0});
      });
    }
  }
}

TEST(BackwardSummary, Gates) { check_backward_summary(gate_cases()); }
TEST(BackwardSummary, Keys) { check_backward_summary(key_cases()); }
TEST(BackwardSummary, Heads) { check_backward_summary(head_cases()); }
TEST(BackwardSummary, Packs) {
  check_backward_summary({"lengths=0+0+300+0+1+63+64+65+0 pad=1 i64 Hk=2 Hv=2 K=32 V=32 dtype=bf16",
                          "lengths=70+0+64+1+129+30+20 pad=4 Hk=1 Hv=2 K=48 V=16 layout=vk strided",
                          "T=1500 Hk=1 Hv=4 K=32 V=32 gate=mixed dtype=bf16", "T=900 Hk=1 Hv=4 K=32 V=16 gate=spiky"});
}

TEST(Merge, IsTheSumOfProducts) {
  for (const bool kv : {true, false}) {
    for (const bool transposed : {false, true}) {
      const int64_t P = 5, H = 3, K = 48, V = 80, R = 4;
      Floats values({P, H, kv ? K : V, kv ? V : K}), transitions({P, H, K, K}), state({R, H, kv ? K : V, kv ? V : K});
      for (int64_t i = 0; i < P * H * K * V; ++i) values.data()[i] = static_cast<float>(normal(1, 1, i));
      for (int64_t i = 0; i < P * H * K * K; ++i) transitions.data()[i] = static_cast<float>(normal(1, 2, i) / 8);
      std::vector<int32_t> first = {0, 2, 4, 3}, count = {5, 2, 1, 0};
      gd_merge_args args{};
      args.struct_size = sizeof args;
      args.values = values.tensor;
      args.transitions = transitions.tensor;
      args.state = state.tensor;
      args.first = {first.data(), GD_I32, 1, {R}, {1}};
      args.count = {count.data(), GD_I32, 1, {R}, {1}};
      args.transposed = transposed;
      args.state_layout = kv ? GD_STATE_KV : GD_STATE_VK;
      const auto truth = reference_merge(args);
      for (const gd_isa isa : usable_isas()) {
        ASSERT_EQ(run_merge(args, {.isa = isa, .pool = nullptr, .threads = 0}), "");
        const Comparison result = compare(to_doubles(state.tensor), truth, {R, H, K * V}, Tolerance{1e-6, 0});
        EXPECT_TRUE(result.ok) << gd_isa_name(isa) << " " << result.text();
      }
    }
  }
}

// Segments one after the other are the whole sequence: outputs and every gradient.
TEST(Stages, SegmentsAreTheSequence) {
  const Specs specs =
      cross(cross({"lengths=700 Hk=1 Hv=4 K=32 V=48 h0=0 dht=0"}, {"dtype=fp32", "dtype=bf16"}),
            {"gate=mixed", "gate=zero l2norm", "gate=raw l2norm beta=logit layout=vk", "gate=weak keys=correlated"});
  for (const std::string& spec : selected(specs)) {
    Judge judge(parse_case(spec));
    Problem& whole = judge.problem();
    std::vector<int32_t> cuts = {0, 100, 292, 292, 420, 700}, zero_to_n, counts, back_first, back_count;
    const int64_t P = static_cast<int64_t>(cuts.size()) - 1;
    for (int64_t i = 0; i < P; ++i) {
      zero_to_n.push_back(0);
      counts.push_back(static_cast<int32_t>(i));
      back_first.push_back(static_cast<int32_t>(i + 1));
      back_count.push_back(static_cast<int32_t>(P - 1 - i));
    }
    const auto indices = [&](std::vector<int32_t>& x) -> gd_tensor {
      return {x.data(), GD_I32, 1, {static_cast<int64_t>(x.size())}, {1}};
    };
    for (const bool skip : {false, true}) {
      gd_forward_args forward = whole.forward;
      gd_backward_args backward = whole.backward;
      forward.final_state = {};
      forward.in.cu_seqlens = backward.in.cu_seqlens = indices(cuts);
      Summary summary(forward.in, 0, P);
      summary.args.skip_faded = skip;
      Floats entering(state_shape(forward.in, P)), leaving(state_shape(forward.in, P)),
          d_local(state_shape(forward.in, P));
      gd_merge_args merge{};
      merge.struct_size = sizeof merge;
      merge.values = summary.local.tensor;
      merge.transitions = summary.transition.tensor;
      merge.first = indices(zero_to_n);
      merge.count = indices(counts);
      merge.state = entering.tensor;
      merge.state_layout = forward.in.state_layout;
      const auto run = [&](const gd_forward_args&) -> std::string {
        if (auto error = run_summary(summary.args, {}); !error.empty()) return error;
        if (auto error = run_merge(merge, {}); !error.empty()) return error;
        forward.in.initial_state = entering.tensor;
        return run_forward(forward, {});
      };
      const Compute compute = chunk_compute(static_cast<gd_dtype>(forward.in.q.dtype), GD_ISA_AUTO);
      const Judgement outputs = judge.forward(compute, run);
      for (const Verdict& v : outputs.verdicts)
        EXPECT_TRUE(v.quantity != "o" || v.comparison.ok) << spec << " " << v.comparison.text();
      ASSERT_FALSE(outputs.verdicts.empty()) << outputs.text();
      const auto run_back = [&](const gd_backward_args&) -> std::string {
        gd_backward_summary_args back{};
        back.struct_size = sizeof back;
        back.in = without_state(backward.in);
        back.do_ = backward.do_;
        back.d_local = d_local.tensor;
        back.skip_faded = skip;
        if (auto error = run_backward_summary(back, {}); !error.empty()) return error;
        merge.values = d_local.tensor;
        merge.first = indices(back_first);
        merge.count = indices(back_count);
        merge.state = leaving.tensor;
        merge.transposed = 1;
        if (auto error = run_merge(merge, {}); !error.empty()) return error;
        backward.in.initial_state = entering.tensor;
        backward.dht = leaving.tensor;
        backward.d_initial_state = {};
        return run_backward(backward, {});
      };
      const Judgement gradients = judge.backward(compute, run_back);
      EXPECT_FALSE(gradients.verdicts.empty()) << gradients.text();
      for (const Verdict& v : gradients.verdicts)
        EXPECT_TRUE(v.quantity == "d_initial_state" || v.comparison.ok)
            << spec << " " << v.quantity << " " << v.comparison.text();
    }
  }
}

// Rows for some sequences alone: the gradients are those of dense ones.
TEST(Stages, GradientRowsByIndex) {
  Problem problem(parse_case("lengths=70+0+130+64 pad=3 Hk=1 Hv=2 K=32 V=16 dtype=bf16"));
  gd_backward_args args = problem.backward;
  Floats dense_in(state_shape(args.in, 4)), dense_out(state_shape(args.in, 4)), few_out(state_shape(args.in, 2));
  const int64_t size = 2 * 32 * 16;
  std::fill(dense_in.data(), dense_in.data() + 4 * size, 0.0f);
  for (int64_t i = 0; i < size; ++i) dense_in.data()[2 * size + i] = static_cast<float>(normal(3, 3, i));
  args.dht = dense_in.tensor;
  args.d_initial_state = dense_out.tensor;
  ASSERT_EQ(run_backward(args, {}), "");
  const auto dk = to_doubles(args.dk);
  std::vector<int32_t> in_rows = {-1, -1, 0, -5}, out_rows = {1, -1, -1, 0};
  args.dht.data = dense_in.data() + 2 * size;
  args.dht.shape[0] = 1;
  args.dht_indices = {in_rows.data(), GD_I32, 1, {4}, {1}};
  args.d_initial_state = few_out.tensor;
  args.d_initial_state_indices = {out_rows.data(), GD_I32, 1, {4}, {1}};
  problem.reset();
  ASSERT_EQ(run_backward(args, {}), "");
  EXPECT_EQ(dk, to_doubles(args.dk));
  for (int64_t i = 0; i < size; ++i) {
    EXPECT_EQ(few_out.data()[size + i], dense_out.data()[i]);
    EXPECT_EQ(few_out.data()[i], dense_out.data()[3 * size + i]);
  }
}

}  // namespace
}  // namespace gatedelta::testing
