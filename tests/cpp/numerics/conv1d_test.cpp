// What the CPU alone offers, or is asked for, in the convolution.
#include <cstring>

#include "testing/number.hpp"
#include "tests/cpp/ops/conv1d.hpp"

namespace gatedelta::testing {
namespace {

using Conv1d = OnEngine;

TEST_F(Conv1d, StatesAlone) {
  for (const gd_isa isa : usable_isas()) {
    ConvProblem problem(parse_conv_case("lengths=3+0+1+70+2 pad=4 D=20 inplace"));
    problem.forward.out = {};
    EXPECT_EQ(problem.judge_forward([&](const gd_conv1d_args& a) { return run(a, isa); }), "");
  }
}

TEST_F(Conv1d, SomeGradientsAlone) {
  for (const gd_isa isa : usable_isas()) {
    for (int kept = 0; kept < 4; ++kept) {
      ConvProblem problem(parse_conv_case("lengths=3+0+1+70+2 pad=4 D=20 silu"));
      gd_conv1d_backward_args& args = problem.backward;
      gd_tensor* const gradients[] = {&args.dx, &args.dweight, &args.dbias, &args.d_initial_state};
      for (int i = 0; i < 4; ++i) {
        if (i != kept) *gradients[i] = {};
      }
      EXPECT_EQ(problem.judge_backward([&](const gd_conv1d_backward_args& a) { return run(a, isa); }), "");
    }
  }
}

// The gradient with respect to a state that is not given: that of a state of zeros.
TEST_F(Conv1d, GradientOfAnAbsentState) {
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
TEST_F(Conv1d, Bits) {
  const Pool pool(5);
  const std::string spec = "lengths=300+0+1+170+64 pad=9 D=600 bias silu dtype=bf16";
  for (const gd_isa isa : usable_isas()) {
    ConvProblem one(parse_conv_case(spec)), many(parse_conv_case(spec));
    ASSERT_EQ(one.judge_forward([&](const gd_conv1d_args& a) { return run(a, isa); }), "");
    ASSERT_EQ(many.judge_forward([&](const gd_conv1d_args& a) { return run_conv1d(a, isa, pool); }), "");
    EXPECT_EQ(to_doubles(one.forward.out), to_doubles(many.forward.out));
    one.backward.d_initial_state = many.backward.d_initial_state = {};
    ASSERT_EQ(one.judge_backward([&](const gd_conv1d_backward_args& a) { return run(a, isa); }), "");
    ASSERT_EQ(many.judge_backward([&](const gd_conv1d_backward_args& a) { return run_conv1d_backward(a, isa, pool); }),
              "");
    EXPECT_EQ(to_doubles(one.backward.dweight), to_doubles(many.backward.dweight));
    EXPECT_EQ(to_doubles(one.backward.dx), to_doubles(many.backward.dx));
  }
}

// A prompt in three calls, each in place, has the bits of one call.
TEST_F(Conv1d, PromptInParts) {
  for (const gd_isa isa : usable_isas()) {
    ConvProblem whole(parse_conv_case("T=150 D=40 bias silu inplace S=5"));
    ConvProblem parts(parse_conv_case("T=150 D=40 bias silu inplace S=5"));
    ASSERT_EQ(run_conv1d(whole.forward, isa), "");
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 2}, {2, 3}, {3, 80}, {80, 150}}) {
      gd_conv1d_args args = parts.forward;
      for (gd_tensor* t : {&args.in.x, &args.out}) {
        t->data = static_cast<float*>(t->data) + begin * t->stride[1];
        t->shape[1] = end - begin;
      }
      ASSERT_EQ(run_conv1d(args, isa), "");
    }
    EXPECT_EQ(to_doubles(whole.forward.out), to_doubles(parts.forward.out));
    EXPECT_EQ(to_doubles(whole.forward.final_state), to_doubles(parts.forward.final_state));
  }
}

// Drafts that are verified window by window give the outputs of the accepted tokens in one call.
TEST_F(Conv1d, DraftsAsOneSequence) {
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
  const auto* expected = static_cast<const float*>(truth.forward.out.data);
  for (int64_t t = 0, round = 0; t + kWindow <= 40; ++round) {
    const int64_t right = 1 + round % kWindow;  // drafts that turn out right; the others are rejected
    for (int64_t i = 0; i < kWindow * kD; ++i)
      x[static_cast<size_t>(i)] = i < right * kD ? all[t * kD + i] : 1e3f + static_cast<float>(i);
    gd_conv1d_args args = GD_CONV1D_ARGS_INIT;
    args.in = truth.forward.in;
    args.in.x = tensor(x.data(), GD_F32, {1, kWindow, kD});
    args.out = tensor(y.data(), GD_F32, {1, kWindow, kD});
    args.in.initial_state = args.final_state = tensor(state.data(), GD_F32, {1, kD, kW - 2 + kWindow});
    args.previous_accept_lengths = tensor(&accepted, GD_I32, {1});
    ASSERT_EQ(run_conv1d(args, GD_ISA_AUTO), "");
    for (int64_t i = 0; i < right * kD; ++i)
      ASSERT_EQ(y[static_cast<size_t>(i)], expected[t * kD + i]) << t << " " << i;
    accepted = static_cast<int32_t>(right);
    t += right;
  }
}

}  // namespace
}  // namespace gatedelta::testing
