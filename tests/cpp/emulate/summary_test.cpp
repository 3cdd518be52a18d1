// The portable summaries' own text, executed on a CPU, against the fp64 truth.
#include "summary.hpp"

#include <gtest/gtest.h>

#include "instances.hpp"
#include "testing/summaries.hpp"

namespace gatedelta::testing {
namespace {

// Copies come at once in every other case, and as late as they may in the others.
void check(const Specs& specs, int multiprocessors = 1) {
  unsigned seed = 0;
  for (const std::string& spec : specs) {
    const Problem problem(parse_case(spec));
    const emulated::Options options{multiprocessors, ++seed % 2 == 0, seed};
    const auto run = [&](const auto& args) { return emulated::run(args, options); };
    check_summary(problem, truth_of_summary(problem), Compute::tensor_cores, "emulated", run);
    check_backward_summary(problem, reference_backward_summary(backward_summary_of(problem)), Compute::tensor_cores,
                           "emulated", run);
  }
}

const Specs kTypes = {"dtype=bf16", "dtype=fp16"};

TEST(EmulatedSummary, Instances) {
  check(cross({"T=200 Hk=1 Hv=2 K=128 V=128", "T=100 Hk=1 Hv=4 K=64 V=64", "T=70 K=256 V=128"}, kTypes));
  check(cross({"T=77 K=128 V=128"}, kTypes), 64);  // quarters
}

TEST(EmulatedSummary, HeadSizes) {
  check({"T=70 K=16 V=16 dtype=bf16", "T=70 K=48 V=80 dtype=fp16", "T=70 K=96 V=160 dtype=bf16",
         "T=40 K=240 V=48 dtype=bf16", "T=40 K=64 V=256 dtype=bf16 layout=vk", "T=40 K=112 V=32 dtype=fp16"});
}

TEST(EmulatedSummary, Packs) {
  check(cross({"lengths=0+70+0+1+63+64+65+0 pad=3", "lengths=3x0 pad=5", "lengths=129 pad=70 i64",
               "lengths=40+0+90 pad=3 strided", "B=2 T=97", "B=3 T=0"},
              {"K=32 V=32 dtype=bf16", "K=32 V=48 dtype=fp16 gate=raw l2norm layout=vk"}));
}

TEST(EmulatedSummary, GatesAndBetas) {
  check(cross({"T=100 Hk=2 Hv=4 K=32 V=48 dtype=bf16"},
              {"gate=zero", "gate=weak", "gate=strong", "gate=spiky", "gate=inf", "gate=huge", "gate=raw",
               "gate=mixed gdtype=fp16", "beta=zeros", "beta=two", "beta=logit2 gdtype=bf16",
               "keys=correlated gate=zero", "keys=loose l2norm"}));
}

// Heads that fade and heads that last, over more chunks than a window has. The last chunk has one step, or two.
TEST(EmulatedSummary, LongSequences) {
  check(cross({"T=1500 Hk=1 Hv=4 K=32 V=32", "lengths=920+0+700 Hk=1 Hv=2 K=32 V=16"},
              {"gate=mixed dtype=bf16", "gate=spiky dtype=fp16", "gate=raw l2norm beta=logit2 dtype=bf16"}));
}

// With skip_faded, tokens before the windows of heads that fade may be anything, and those behind them in a backward.
TEST(EmulatedSummary, FadedHeadsReadTheirWindowAlone) {
  Problem problem(parse_case("T=2048 Hk=1 Hv=4 K=32 V=32 gate=mixed seed=5 dtype=bf16"));
  const gd_inputs& in = problem.forward.in;
  const auto matrix = [](const Floats& of, int64_t head) {
    return std::vector<float>(of.data() + head * 1024, of.data() + (head + 1) * 1024);
  };
  Summary before(in, 0, 1), after(in, 0, 1);
  Floats gradients_before(state_shape(in, 1)), gradients_after(state_shape(in, 1));
  gd_backward_summary_args back = backward_summary_of(problem);
  for (const bool is_second : {false, true}) {
    Summary& summary = is_second ? after : before;
    if (is_second) {
      auto *v = static_cast<uint16_t*>(in.v.data), *d_o = static_cast<uint16_t*>(back.do_.data);
      std::fill_n(v, 1024 * 4 * 32, uint16_t{0x7fc0});
      std::fill_n(d_o + 1024 * 4 * 32, 1024 * 4 * 32, uint16_t{0x7fc0});
    }
    summary.args.skip_faded = back.skip_faded = 1;
    back.d_local = (is_second ? gradients_after : gradients_before).tensor;
    ASSERT_EQ(emulated::run(summary.args, {}), "");
    ASSERT_EQ(emulated::run(back, {}), "");
  }
  int faded = 0;
  for (int64_t h = 0; h < 4; ++h) {
    if (!std::isinf(before.fade.data()[h])) continue;
    ++faded;
    EXPECT_EQ(matrix(before.local, h), matrix(after.local, h));
    EXPECT_EQ(matrix(gradients_before, h), matrix(gradients_after, h));
  }
  EXPECT_EQ(faded, 3);  // every fourth head has gates of 0
}

// A part of the sequences, without M or the bound, in 16 bits; by what an earlier call has prepared.
TEST(EmulatedSummary, RangesAndWhatIsPrepared) {
  for (const char* spec : {"lengths=70+0+130+64 pad=3 Hk=2 Hv=4 K=32 V=16 dtype=bf16",
                           "B=4 T=130 Hk=1 Hv=2 K=128 V=32 dtype=fp16 l2norm gate=raw layout=vk"}) {
    Problem problem(parse_case(spec));
    const gd_inputs& in = problem.forward.in;
    Summary all(in, 0, 4);
    Floats all_gradients(state_shape(in, 4));
    gd_backward_summary_args back = backward_summary_of(problem);
    back.d_local = all_gradients.tensor;
    ASSERT_EQ(emulated::run(all.args, {}), "");
    ASSERT_EQ(emulated::run(back, {}), "");
    const Buffer saved(cuda::portable::saved_bytes(emulated::layer_of(in)));
    for (int64_t first = 0; first < 4; ++first) {
      Summary one(in, first, 1);
      one.args.in = without_state(in);
      one.args.saved = saved.data(), one.args.saved_bytes = saved.size();
      one.args.prepared = first > 0;
      const bool is_alone = first == 2;
      if (is_alone) one.args.transition = one.args.fade = {};
      ASSERT_EQ(emulated::run(one.args, {64, false, 3}), "");
      Floats gradients(state_shape(in, 1));
      back.d_local = gradients.tensor, back.first_sequence = first, back.sequence_count = 1;
      back.saved = first % 2 ? saved.data() : nullptr, back.saved_bytes = saved.size();
      ASSERT_EQ(emulated::run(back, {64, false, 5}), "");
      const auto expect_row = [&](const Floats& some, const Floats& whole) {
        const int64_t numbers = element_count(some.tensor);
        EXPECT_TRUE(std::equal(some.data(), some.data() + numbers, whole.data() + first * numbers)) << spec << first;
        EXPECT_TRUE(some.buffer.guards_intact());
      };
      expect_row(one.local, all.local);
      if (!is_alone) expect_row(one.transition, all.transition);
      if (!is_alone) expect_row(one.fade, all.fade);
      expect_row(gradients, all_gradients);
    }
    // The forward and its backward take what the summary has prepared.
    gd_forward_args forward = problem.forward;
    ASSERT_EQ(emulated::run(forward, {}), "");
    const auto bytes = [](const gd_tensor& t) {
      const char* const data = static_cast<const char*>(t.data);
      return std::vector<char>(data, data + element_count(t) * element_bytes(t.dtype));
    };
    const auto plain = bytes(forward.out);
    problem.reset();
    forward = problem.forward;
    forward.saved = saved.data(), forward.saved_bytes = saved.size(), forward.prepared = 1;
    ASSERT_EQ(emulated::run(forward, {}), "");
    EXPECT_EQ(plain, bytes(forward.out)) << spec;
    EXPECT_TRUE(saved.guards_intact());
  }
}

}  // namespace
}  // namespace gatedelta::testing
