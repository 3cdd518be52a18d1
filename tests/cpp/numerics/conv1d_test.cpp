#include <cstring>

#include "cases.hpp"
#include "support.hpp"
#include "testing/conv1d.hpp"
#include "testing/number.hpp"

namespace gatedelta::testing {
namespace {

void check_forward(const Specs& specs, gd_thread_pool* pool = nullptr) {
  for (const std::string& spec : selected(specs)) {
    ConvProblem problem(parse_conv_case(spec));
    for (const gd_isa isa : usable_isas())
      EXPECT_EQ(problem.judge_forward([&](const gd_conv1d_args& a) { return run_conv1d(a, isa, pool); }), "")
          << gd_isa_name(isa) << ": " << spec;
  }
}
void check_backward(const Specs& specs, gd_thread_pool* pool = nullptr) {
  for (const std::string& spec : selected(specs)) {
    ConvProblem problem(parse_conv_case(spec));
    for (const gd_isa isa : usable_isas())
      EXPECT_EQ(
          problem.judge_backward([&](const gd_conv1d_backward_args& a) { return run_conv1d_backward(a, isa, pool); }),
          "")
          << gd_isa_name(isa) << ": " << spec;
  }
}
void check(const Specs& specs) {
  check_forward(specs);
  check_backward(specs);
}

const Specs kTaps = {"W=2", "W=3 silu", "W=4 bias silu", "W=4 bias"};
const Specs kMajors = {"channel_major=0", "channel_major=1"};

TEST(Conv1d, Types) {
  check(cross(cross({"B=2 T=70 D=72 bias silu"}, kMajors),
              {"dtype=fp32", "dtype=bf16 wdtype=bf16 state=bf16", "dtype=fp16 wdtype=fp16 state=fp16",
               "dtype=bf16 odtype=fp32 state=fp16", "dtype=fp32 odtype=bf16 wdtype=fp16"}));
}

TEST(Conv1d, Lengths) {
  Specs lengths;
  for (const int T : {0, 1, 2, 3, 4, 5, 60, 61, 62, 63, 64, 65, 122, 123, 124, 130})
    lengths.push_back("T=" + num(T) + " D=20");
  check(cross(cross(lengths, kTaps), kMajors));
}

TEST(Conv1d, Channels) {
  Specs channels;
  for (const int D : {1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 127, 129}) channels.push_back("B=2 T=9 D=" + num(D));
  check(cross(cross(channels, kTaps), cross(kMajors, {"dtype=bf16", "strided"})));
}

TEST(Conv1d, PackedSequences) {
  check(cross(cross({"lengths=3+0+1+70+2+64+4 pad=5 D=24", "lengths=0+0 D=8", "lengths=1+1+1+1 D=8",
                     "lengths=0 pad=3 D=8", "lengths=200 D=70"},
                    kTaps),
              {"dtype=fp32", "dtype=bf16 channel_major i64", "strided", "channel_major strided", "h0=0", "ht=0",
               "state_tokens_first"}));
}

TEST(Conv1d, States) {
  check(cross(cross({"B=3 T=1 D=20", "B=3 T=2 D=20", "B=3 T=7 D=20", "lengths=5+0+1+2 D=20"},
                    {"W=4", "W=4 S=4", "W=4 S=9", "W=2 S=5 final_S=2", "W=3 S=2 final_S=7", "W=4 S=70"}),
              {"inplace=0", "inplace", "inplace state_tokens_first state=bf16", "strided", "h0=0 final_S=6"}));
}

TEST(Conv1d, Pools) {
  check_forward(
      cross(cross({"B=11 T=1 D=20 pool", "B=11 T=6 D=20 pool S=4", "lengths=3+0+1+9+2+0+4+5+6+7+1 pad=2 D=20 pool"},
                  {"inplace=0", "inplace", "inplace null_slot", "null_slot i64", "inplace strided state_tokens_first"}),
            {"dtype=fp32 silu", "dtype=bf16 state=bf16 bias", "channel_major silu"}));
  check_backward({"B=11 T=6 D=20 pool ht=0", "lengths=3+0+1+9+2+0+4+5+6+7+1 D=20 pool ht=0 null_slot silu"});
}

TEST(Conv1d, DraftWindows) {
  for (int T = 1; T <= 8; ++T)
    check_forward(cross(
        cross({"B=7 D=20 drafts T=" + num(T), "B=11 D=20 drafts pool T=" + num(T)}, {"W=2", "W=3", "W=4", "W=4 S=12"}),
        {"inplace", "inplace state_tokens_first state=bf16", "inplace=0", "inplace steps silu",
         "inplace strided null_slot"}));
  check_forward(cross({"lengths=3+0+1+8+2+5+4 pad=2 D=20 drafts", "lengths=1+1+4+0+2+5+4+1 D=20 drafts pool"},
                      {"inplace", "inplace i64 channel_major", "inplace=0", "inplace steps"}));
}

TEST(Conv1d, Steps) {
  check_forward(cross({"B=3 T=5 D=20 steps", "lengths=3+0+1+70+2 pad=4 D=20 steps", "B=11 T=2 D=20 steps pool"},
                      {"W=4", "W=2 strided", "W=3 dtype=bf16 state=bf16 channel_major"}));
}

TEST(Conv1d, StatesAlone) {
  for (const gd_isa isa : usable_isas()) {
    ConvProblem problem(parse_conv_case("lengths=3+0+1+70+2 pad=4 D=20 inplace"));
    problem.forward.y = {};
    EXPECT_EQ(problem.judge_forward([&](const gd_conv1d_args& a) { return run_conv1d(a, isa); }), "");
  }
}

TEST(Conv1d, SomeGradientsAlone) {
  for (const gd_isa isa : usable_isas()) {
    for (int kept = 0; kept < 4; ++kept) {
      ConvProblem problem(parse_conv_case("lengths=3+0+1+70+2 pad=4 D=20 silu"));
      gd_conv1d_backward_args& args = problem.backward;
      gd_tensor* const gradients[] = {&args.dx, &args.dweight, &args.dbias, &args.d_initial_state};
      for (int i = 0; i < 4; ++i) {
        if (i != kept) *gradients[i] = {};
      }
      EXPECT_EQ(problem.judge_backward([&](const gd_conv1d_backward_args& a) { return run_conv1d_backward(a, isa); }),
                "");
    }
  }
}

// The gradient with respect to a state that is not given: that of a state of zeros.
TEST(Conv1d, GradientOfAnAbsentState) {
  ConvProblem with(parse_conv_case("B=2 T=5 D=20 silu S=6"));
  std::memset(with.backward.in.initial_state.data, 0, size_t{2} * 20 * 6 * 4);
  gd_conv1d_backward_args args = with.backward;
  ASSERT_EQ(run_conv1d_backward(args, GD_ISA_AUTO), "");
  const auto expected = to_doubles(args.d_initial_state);
  std::memset(args.d_initial_state.data, 0xff, size_t{2} * 20 * 6 * 4);
  args.in.initial_state = {};
  ASSERT_EQ(run_conv1d_backward(args, GD_ISA_AUTO), "");
  EXPECT_EQ(to_doubles(args.d_initial_state), expected);
}

// Bits depend neither on the number of threads nor on where a sequence lies, nor on the cut of a prompt into calls.
TEST(Conv1d, Bits) {
  const Pool pool(5);
  const std::string spec = "lengths=300+0+1+170+64 pad=9 D=600 bias silu dtype=bf16";
  for (const gd_isa isa : usable_isas()) {
    ConvProblem one(parse_conv_case(spec)), many(parse_conv_case(spec));
    ASSERT_EQ(one.judge_forward([&](const gd_conv1d_args& a) { return run_conv1d(a, isa); }), "");
    ASSERT_EQ(many.judge_forward([&](const gd_conv1d_args& a) { return run_conv1d(a, isa, pool); }), "");
    EXPECT_EQ(to_doubles(one.forward.y), to_doubles(many.forward.y));
    one.backward.d_initial_state = many.backward.d_initial_state = {};
    ASSERT_EQ(one.judge_backward([&](const gd_conv1d_backward_args& a) { return run_conv1d_backward(a, isa); }), "");
    ASSERT_EQ(many.judge_backward([&](const gd_conv1d_backward_args& a) { return run_conv1d_backward(a, isa, pool); }),
              "");
    EXPECT_EQ(to_doubles(one.backward.dweight), to_doubles(many.backward.dweight));
    EXPECT_EQ(to_doubles(one.backward.dx), to_doubles(many.backward.dx));
  }
}

// A prompt in three calls, each in place, has the bits of one call.
TEST(Conv1d, PromptInParts) {
  for (const gd_isa isa : usable_isas()) {
    ConvProblem whole(parse_conv_case("T=150 D=40 bias silu inplace S=5"));
    ConvProblem parts(parse_conv_case("T=150 D=40 bias silu inplace S=5"));
    ASSERT_EQ(run_conv1d(whole.forward, isa), "");
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 2}, {2, 3}, {3, 80}, {80, 150}}) {
      gd_conv1d_args args = parts.forward;
      for (gd_tensor* t : {&args.in.x, &args.y}) {
        t->data = static_cast<float*>(t->data) + begin * t->stride[1];
        t->shape[1] = end - begin;
      }
      ASSERT_EQ(run_conv1d(args, isa), "");
    }
    EXPECT_EQ(to_doubles(whole.forward.y), to_doubles(parts.forward.y));
    EXPECT_EQ(to_doubles(whole.forward.final_state), to_doubles(parts.forward.final_state));
  }
}

// Drafts that are verified window by window give the outputs of the accepted tokens in one call.
TEST(Conv1d, DraftsAsOneSequence) {
  constexpr int64_t kD = 24, kW = 4, kWindow = 4;
  ConvProblem truth(parse_conv_case("T=40 D=24 silu h0=0 ht=0"));
  ASSERT_EQ(run_conv1d(truth.forward, GD_ISA_AUTO), "");
  std::vector<float> state(static_cast<size_t>(kD * (kW - 2 + kWindow)), NAN), x(kWindow * kD), y(kWindow * kD);
  for (int64_t d = 0; d < kD; ++d)  // an empty sequence's state, as a prefill leaves it
    for (int64_t s = 0; s < kW - 1; ++s) state[static_cast<size_t>(d * (kW - 2 + kWindow) + s)] = 0;
  int32_t accepted = 1;
  const auto tensor = [](void* data, gd_dtype dtype, std::initializer_list<int64_t> shape) {
    gd_tensor t{};
    t.data = data, t.dtype = dtype, t.rank = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape);
    int64_t stride = 1;
    for (int i = t.rank; i-- > 0; stride *= t.shape[i]) t.stride[i] = stride;
    return t;
  };
  const auto* all = static_cast<const float*>(truth.forward.in.x.data);
  const auto* expected = static_cast<const float*>(truth.forward.y.data);
  for (int64_t t = 0, round = 0; t + kWindow <= 40; ++round) {
    const int64_t right = 1 + round % kWindow;  // drafts that turn out right; the others are rejected
    for (int64_t i = 0; i < kWindow * kD; ++i)
      x[static_cast<size_t>(i)] = i < right * kD ? all[t * kD + i] : 1e3f + static_cast<float>(i);
    gd_conv1d_args args = GD_CONV1D_ARGS_INIT;
    args.in = truth.forward.in;
    args.in.x = tensor(x.data(), GD_F32, {1, kWindow, kD});
    args.y = tensor(y.data(), GD_F32, {1, kWindow, kD});
    args.in.initial_state = args.final_state = tensor(state.data(), GD_F32, {1, kD, kW - 2 + kWindow});
    args.previous_accept_lengths = tensor(&accepted, GD_I32, {1});
    ASSERT_EQ(run_conv1d(args, GD_ISA_AUTO), "");
    for (int64_t i = 0; i < right * kD; ++i)
      ASSERT_EQ(y[static_cast<size_t>(i)], expected[t * kD + i]) << t << " " << i;
    accepted = static_cast<int32_t>(right);
    t += right;
  }
}

TEST(Conv1d, RandomCases) {
  const Pool pool(3);
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    auto pick = [&, i = uint64_t{0}](int64_t below) mutable {
      return static_cast<int64_t>(uniform(seed, 99, i++) * static_cast<double>(below));
    };
    const char* const types[] = {"fp32", "bf16", "fp16"};
    std::string spec = "D=" + num(1 + pick(150)) + " W=" + num(2 + pick(3)) + " dtype=" + types[pick(3)] +
                       " wdtype=" + types[pick(3)] + " state=" + types[pick(3)] +
                       " seed=" + num(static_cast<int64_t>(seed));
    if (pick(2)) {
      spec += " lengths=" + num(pick(90));
      for (int64_t n = pick(8); n > 0; --n) spec += "+" + num(pick(3) ? pick(5) : pick(150));
      spec += " pad=" + num(pick(2) * pick(70));
    } else {
      spec += " B=" + num(1 + pick(5)) + " T=" + num(pick(2) ? pick(9) : pick(200));
    }
    for (const char* flag : {" channel_major", " bias", " silu", " strided", " state_tokens_first", " i64"})
      if (pick(2)) spec += flag;
    if (pick(2)) spec += " S=" + num(3 + pick(8));
    check_backward({spec}, pool);
    for (const char* flag : {" inplace", " pool", " null_slot", " steps"})
      if (pick(3) == 0) spec += flag;
    check_forward({spec}, pool);
  }
}

}  // namespace
}  // namespace gatedelta::testing
