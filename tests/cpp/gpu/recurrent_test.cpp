// Recurrent steps on a CUDA device: each kernel, bits, graphs, streams, refusals, a pool beyond 2^32 elements.
#include <cstdlib>

#include "device.hpp"
#include "testing/reference.hpp"

namespace gatedelta::testing {
namespace {

using Recurrent = Gpu;

const std::string kStep = "K=128 V=128 layout=vk ";

void check(const Specs& specs) { check_calls<gd_recurrent_args>(specs); }

// K = V = 128 and [V, K]: all tokens of a window at once on the tensor cores, for every type of states and inputs.
TEST_F(Recurrent, WindowMma) {
  const Specs types = cross({"dtype=bf16", "dtype=fp16"}, kStates);
  const Specs gates = {"",
                       "gate=raw beta=logit l2norm gdtype=bf16",
                       "gate=inf",
                       "gate=huge l2norm",
                       "gate=mixed keys=loose",
                       "gate=spiky beta=two"};
  for (int T = 2; T <= 8; ++T) {
    const std::string tokens = "B=6 T=" + std::to_string(T) + " Hk=2 Hv=4 " + kStep + gates[T % gates.size()] + " ";
    check(cross(cross({tokens}, types), {"", "accept pool inplace", "pool ht=0", "steps=dense",
                                         "accept pool steps=pool", "h0=0 accept", "odtype=fp32 i64 pool accept"}));
  }
  check(cross(cross({"B=5 T=1 Hk=2 Hv=4 " + kStep, "B=3 T=9 Hk=1 Hv=2 l2norm " + kStep, "B=3 T=16 Hk=1 Hv=3 " + kStep,
                     "B=2 T=70 Hk=1 Hv=2 gate=spiky " + kStep,
                     "lengths=3+0+1+8+2+5+4+17+9 pad=2 Hk=1 Hv=2 gate=raw beta=logit l2norm " + kStep,
                     "lengths=4x0 pad=5 Hk=1 Hv=2 " + kStep},
                    types),
              {"", "accept pool inplace", "pool ht=0", "accept steps=dense", "accept pool steps=pool", "h0=0"}));
}

// K = V = 128, token by token: every state, [K, V], and packs with no more tokens than sequences.
TEST_F(Recurrent, Sequential128) {
  const Specs types = cross({"dtype=bf16", "dtype=fp16"}, kStates);
  const Specs gates = {"", "gate=raw beta=logit l2norm gdtype=bf16", "gate=inf", "gate=mixed keys=loose l2norm"};
  for (int T = 1; T <= 9; ++T) {
    const std::string tokens = "B=6 T=" + std::to_string(T) + " Hk=2 Hv=4 K=128 V=128 " + gates[T % gates.size()];
    check(cross(cross({tokens + " layout=kv"}, types), {"", "accept pool inplace", "pool ht=0", "h0=0 accept i64"}));
    check(cross(cross(cross({tokens}, kLayouts), types), {"steps=dense", "accept pool steps=pool strided"}));
  }
  check(cross(cross(cross({"lengths=3+0+1+8+2+5+4+17+9 pad=2 Hk=1 Hv=2 l2norm", "lengths=7x1 Hk=1 Hv=3 gate=raw",
                           "lengths=1+0+3+1+0+1 pad=1 Hk=1 Hv=2", "lengths=4x0 pad=3 Hk=1 Hv=2"},
                          cross({"K=128 V=128"}, kLayouts)),
                    types),
              {"", "accept pool inplace", "pool ht=0", "accept steps=dense i64", "accept pool steps=pool", "h0=0"}));
}

// A token that is not finite reaches no earlier output and no state before it: drafts may be anything.
TEST_F(Recurrent, LaterTokensDoNotReachEarlierOnes) {
  for (const std::string& spec :
       cross(cross({"B=3 T=4", "B=3 T=8", "B=3 T=12"}, {"steps=dense", "steps=none"}),
             cross({"Hk=1 Hv=2 dtype=bf16 accept l2norm " + kStep}, {"state=fp32", "state=bf16"}))) {
    Problem clean(parse_case(spec)), spoilt(parse_case(spec));
    constexpr int64_t kFirst = 3;  // of the tokens that are not finite; accepted are 0, 1 and 2 tokens
    const gd_recurrent_args& args = spoilt.recurrent;
    const int64_t T = args.out.shape[1];
    for (const gd_tensor* x : {&args.in.q, &args.in.k, &args.in.v}) {
      auto* rows = static_cast<uint16_t*>(x->data);
      for (int64_t n = 0; n < 3; ++n)
        for (int64_t i = kFirst * x->stride[1]; i < T * x->stride[1]; ++i) rows[n * x->stride[0] + i] = 0x7fc0;
    }
    ASSERT_EQ(on_device(clean.recurrent), "");
    ASSERT_EQ(on_device(args), "");
    EXPECT_EQ(bytes_of(clean.recurrent.final_state), bytes_of(args.final_state)) << spec;
    for (const auto& [want, got] :
         {std::pair(&clean.recurrent.out, &args.out), std::pair(&clean.recurrent.step_states, &args.step_states)}) {
      if (got->dtype == GD_DTYPE_NONE) continue;
      const std::vector<char> a = bytes_of(*want), b = bytes_of(*got);
      const size_t token = a.size() / (3 * T);
      for (size_t n = 0; n < 3; ++n)
        EXPECT_TRUE(
            std::equal(a.begin() + n * T * token, a.begin() + (n * T + kFirst) * token, b.begin() + n * T * token))
            << spec << ", sequence " << n;
    }
  }
}

// The state a call starts from, the one it ends with and those in between may have three types.
TEST_F(Recurrent, MixedStateTypes) {
  for (const std::string& spec :
       cross({"B=7 T=4 Hk=1 Hv=2 steps=dense", "B=7 T=1 Hk=1 Hv=2"}, cross({"K=128 V=128", "K=32 V=48"}, kLayouts))) {
    for (const std::string& from : kStates) {
      for (const std::string& to : kStates) {
        // Both cases have the same values up to the rounding of the initial state, which here is the first one's.
        Problem first(parse_case(spec + " " + from)), second(parse_case(spec + " " + to));
        gd_recurrent_args args = second.recurrent;
        args.in.initial_state = first.recurrent.in.initial_state;
        const RecurrentTruth truth = reference_recurrent(args);
        ASSERT_EQ(on_device(args), "") << spec << " " << from << " " << to;
        const auto expect_close = [&](const gd_tensor& got, const std::vector<double>& want, Quantity quantity,
                                      int head_axis) {
          if (got.dtype == GD_DTYPE_NONE) return;
          const Tolerance bound = tolerance(quantity, Compute::fp32, static_cast<gd_dtype>(got.dtype), second.spec);
          const Comparison result = compare(to_doubles(got), want, head_shape(got, head_axis), bound);
          EXPECT_TRUE(result.ok) << spec << " " << from << " " << to << ": " << result.text();
        };
        expect_close(args.out, truth.o, Quantity::o, 2);
        expect_close(args.final_state, truth.final_state, Quantity::final_state, 1);
        expect_close(args.step_states, truth.step_states, Quantity::step_states, 2);
        EXPECT_TRUE(second.damage().empty()) << spec << " " << from << " " << to;
      }
    }
  }
}

// Tokens [first, first + count) of a call's tensors. Its states are updated in place.
gd_recurrent_args tokens_of(const gd_recurrent_args& whole, int64_t first, int64_t count) {
  gd_recurrent_args some = whole;
  for (gd_tensor* t : {&some.in.q, &some.in.k, &some.in.v, &some.in.g, &some.in.beta, &some.out}) {
    t->data = static_cast<char*>(t->data) + first * t->stride[1] * element_bytes(t->dtype);
    t->shape[1] = count;
  }
  return some;
}

// With fp32 states and batch_invariant, how tokens are spread over calls changes no bit: speculative and plain decode
// agree.
TEST_F(Recurrent, OneCallHasTheBitsOfMany) {
  const Specs cases = cross(cross({"B=4 T=9 Hk=2 Hv=4 inplace"}, {"K=128 V=128", "K=64 V=32", "K=208 V=48"}),
                            cross(kLayouts, {"dtype=fp32", "dtype=bf16 gate=raw beta=logit l2norm", "dtype=fp16",
                                             "dtype=bf16 l2norm strided"}));
  for (const std::string& spec : cases) {
    Problem problem(parse_case(spec));
    problem.recurrent.batch_invariant = 1;
    std::vector<char> o, states;
    for (const int64_t step : {9, 1, 2, 4}) {
      problem.reset();
      DeviceRecurrent device(problem.recurrent);
      const gd_recurrent_args whole = device.args();
      for (int64_t t = 0; t < 9; t += step) {
        device.args() = tokens_of(whole, t, std::min<int64_t>(step, 9 - t));
        ASSERT_EQ(device.run(), "");
      }
      ASSERT_EQ(device.download(problem.recurrent), "");
      const std::vector<double> o_now = to_doubles(problem.recurrent.out);
      const std::vector<double> states_now = to_doubles(problem.recurrent.final_state);
      const auto bytes = [](const std::vector<double>& x) {
        const char* data = reinterpret_cast<const char*>(x.data());
        return std::vector<char>(data, data + x.size() * sizeof(double));
      };
      if (step == 9) o = bytes(o_now), states = bytes(states_now);
      EXPECT_EQ(o, bytes(o_now)) << spec << ", " << step << " tokens a call";
      EXPECT_EQ(states, bytes(states_now)) << spec << ", " << step << " tokens a call";
    }
  }
}

// Tokens of a pack with no more of them than sequences have the bits of single tokens: engines may send either.
TEST_F(Recurrent, PackOfSingleTokensHasTheBitsOfABatch) {
  for (const std::string& spec :
       cross(cross({"B=7 T=1 Hk=2 Hv=4 K=128 V=128 pool inplace l2norm gate=raw beta=logit"}, kLayouts),
             cross({"dtype=bf16", "dtype=fp16"}, kStates))) {
    Problem problem(parse_case(spec));
    const gd_recurrent_args& host = problem.recurrent;
    ASSERT_EQ(on_device(host), "");
    const auto o = bytes_of(host.out), states = bytes_of(host.final_state);
    problem.reset();
    DeviceRecurrent device(host);
    gd_recurrent_args& args = device.args();
    for (gd_tensor* t : {&args.in.q, &args.in.k, &args.in.v, &args.in.g, &args.in.beta, &args.out})
      t->shape[0] = 1, t->shape[1] = 7, t->stride[1] = t->stride[0];
    const std::vector<int32_t> offsets = {0, 1, 2, 3, 4, 5, 6, 7};
    DeviceMemory memory(32, 0);
    memory.upload(offsets.data());
    gd_tensor& seqlens = args.in.cu_seqlens;
    seqlens.data = memory.data(), seqlens.dtype = GD_I32, seqlens.rank = 1, seqlens.shape[0] = 8, seqlens.stride[0] = 1;
    ASSERT_EQ(device.run(), "") << spec;
    ASSERT_EQ(device.download(host), "");
    EXPECT_EQ(o, bytes_of(host.out)) << spec;
    EXPECT_EQ(states, bytes_of(host.final_state)) << spec;
  }
}

// Every state of a call has the bits of single steps, with or without batch_invariant, as long as states are fp32.
TEST_F(Recurrent, EveryStateHasTheBitsOfSingleSteps) {
  for (const std::string& layout : kLayouts) {
    Problem steps(parse_case("B=5 T=6 Hk=1 Hv=2 K=128 V=128 dtype=bf16 l2norm steps=dense " + layout));
    Problem single(parse_case("B=5 T=6 Hk=1 Hv=2 K=128 V=128 dtype=bf16 l2norm inplace " + layout));
    ASSERT_EQ(on_device(steps.recurrent), "");
    const std::vector<char> every = bytes_of(steps.recurrent.step_states), o = bytes_of(steps.recurrent.out);
    const size_t state = every.size() / (5 * 6);
    DeviceRecurrent device(single.recurrent);
    const gd_recurrent_args whole = device.args();
    for (int64_t t = 0; t < 6; ++t) {
      device.args() = tokens_of(whole, t, 1);
      ASSERT_EQ(device.run(), "");
      ASSERT_EQ(device.download(single.recurrent), "");
      const std::vector<char> now = bytes_of(single.recurrent.final_state);
      for (int64_t n = 0; n < 5; ++n)
        EXPECT_TRUE(
            std::equal(now.begin() + n * state, now.begin() + (n + 1) * state, every.begin() + (n * 6 + t) * state))
            << layout << ", sequence " << n << ", token " << t;
    }
    EXPECT_EQ(o, bytes_of(single.recurrent.out)) << layout;
  }
}

// With batch_invariant the state after m accepted tokens is, bit by bit, that of a call with m tokens.
TEST_F(Recurrent, AcceptedStateIsThatOfFewerTokens) {
  for (const std::string& layout : kLayouts) {
    Problem problem(parse_case("B=5 T=6 Hk=1 Hv=2 K=128 V=128 dtype=bf16 l2norm " + layout));
    Problem with_lengths(parse_case("B=5 T=6 Hk=1 Hv=2 K=128 V=128 dtype=bf16 l2norm accept " + layout));
    problem.recurrent.batch_invariant = with_lengths.recurrent.batch_invariant = 1;
    ASSERT_EQ(on_device(with_lengths.recurrent), "");
    const std::vector<char> accepted = bytes_of(with_lengths.recurrent.final_state);
    const size_t state = accepted.size() / 5;
    for (int64_t n = 0; n < 5; ++n) {
      problem.reset();
      DeviceRecurrent device(problem.recurrent);
      device.args() = tokens_of(device.args(), 0, n);  // the generator has sequence n accept n tokens
      ASSERT_EQ(device.run(), "");
      ASSERT_EQ(device.download(problem.recurrent), "");
      const std::vector<char> whole = bytes_of(problem.recurrent.final_state);
      EXPECT_TRUE(std::equal(whole.begin() + n * state, whole.begin() + (n + 1) * state, accepted.begin() + n * state))
          << layout << ", " << n << " tokens";
    }
  }
}

// The device clamps lengths the host would refuse.
TEST_F(Recurrent, ClampsAcceptLengths) {
  std::vector<std::vector<char>> results;
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{-5, 0, 3, 4, 1000}, {0, 0, 3, 4, 4}}) {
    Problem problem(parse_case("B=5 T=4 Hk=1 Hv=2 K=64 V=32 dtype=bf16 accept i64 pool=0"));
    DeviceRecurrent device(problem.recurrent);
    GD_CUDA_OK(cudaMemcpy(device.args().accept_lengths.data, lengths.data(), 40, cudaMemcpyHostToDevice));
    ASSERT_EQ(device.run(), "");
    ASSERT_EQ(device.download(problem.recurrent), "");
    results.push_back(bytes_of(problem.recurrent.final_state));
  }
  EXPECT_EQ(results[0], results[1]);
}

// Few and many sequences take other instances of a kernel, with the same bits.
TEST_F(Recurrent, DoesNotDependOnTheBatch) {
  Specs cases = cross(cross({"B=40 T=1 Hk=2 Hv=4", "B=40 T=4 Hk=2 Hv=4"}, kLayouts),
                      cross({"K=128 V=128 dtype=bf16", "K=32 V=48 dtype=fp32"}, kStates));
  for (const std::string& many : cross(cross({"B=40 T=1 Hk=8 Hv=16", "B=40 T=3 Hk=8 Hv=16"}, kLayouts), kStates))
    cases.push_back(many + " K=128 V=128 dtype=bf16");
  cases.push_back("B=40 T=1 Hk=52 Hv=104 K=128 V=128 dtype=bf16 layout=vk state=bf16");
  for (const std::string& spec : cases) {
    Problem problem(parse_case(spec + " l2norm"));
    problem.recurrent.batch_invariant = problem.spec.T == 3;
    const gd_recurrent_args& host = problem.recurrent;
    ASSERT_EQ(on_device(host), "");
    const auto o = bytes_of(host.out), states = bytes_of(host.final_state);
    problem.reset();
    DeviceRecurrent device(host);
    const gd_recurrent_args whole = device.args();
    for (int64_t n = 0; n < 40; ++n) {
      gd_recurrent_args& alone = device.args() = whole;
      for (gd_tensor* t : {&alone.in.q, &alone.in.k, &alone.in.v, &alone.in.g, &alone.in.beta, &alone.in.initial_state,
                           &alone.out, &alone.final_state}) {
        t->data = static_cast<char*>(t->data) + n * t->stride[0] * element_bytes(t->dtype);
        t->shape[0] = 1;
      }
      ASSERT_EQ(device.run(), "");
    }
    ASSERT_EQ(device.download(host), "");
    EXPECT_EQ(o, bytes_of(host.out)) << spec;
    EXPECT_EQ(states, bytes_of(host.final_state)) << spec;
  }
}

TEST_F(Recurrent, RepeatsBitForBit) {
  for (const std::string& spec : {"B=70 T=1 Hk=2 Hv=8 dtype=bf16 pool inplace " + kStep,
                                  std::string("lengths=3+0+9+1 pad=2 Hk=2 Hv=4 K=96 V=80 pool steps=dense")}) {
    Problem problem(parse_case(spec));
    const gd_recurrent_args& host = problem.recurrent;
    std::vector<char> o, states;
    for (int round = 0; round < 5; ++round) {
      problem.reset();
      ASSERT_EQ(on_device(host), "");
      if (round == 0) o = bytes_of(host.out), states = bytes_of(host.final_state);
      EXPECT_EQ(o, bytes_of(host.out)) << spec << ", round " << round;
      EXPECT_EQ(states, bytes_of(host.final_state)) << spec << ", round " << round;
    }
  }
}

TEST_F(Recurrent, GraphReplaysWithNewContents) {
  const std::string rest = " pad=2 Hk=1 Hv=2 K=64 V=48 dtype=bf16 pool inplace accept steps=pool seed=";
  check_replay<gd_recurrent_args>("lengths=3+0+1+8+2" + rest + "1", "lengths=1+5+0+4+4" + rest + "2");
  for (const std::string& state : kStates) {
    const std::string decode = "B=9 T=1 Hk=1 Hv=2 dtype=bf16 gate=raw beta=logit l2norm pool inplace " + kStep + state;
    check_replay<gd_recurrent_args>(decode + " seed=1", decode + " seed=2");
  }
}

TEST_F(Recurrent, RunsOnAStream) { check_on_a_stream<gd_recurrent_args>("B=3 T=4 Hk=1 Hv=2 K=128 V=128 dtype=bf16"); }

// A refusal writes nothing and does not spoil the next call.
TEST_F(Recurrent, RefusesAndGoesOn) {
  Judge judge(parse_case("B=3 T=1 Hk=1 Hv=2 dtype=bf16 " + kStep));
  const auto run = [](const gd_recurrent_args& host) -> std::string {
    DeviceRecurrent device(host);
    device.args().exec.device_index = 1000;
    if (gd_recurrent(&device.args()) != GD_INVALID_ARGUMENT) return "a device that is not there was taken";
    if (std::string(gd_last_error()) != "device_index is 1000, and there is no such CUDA device")
      return gd_last_error();
    device.args().exec.device_index = 0;
    device.args().out.rank = 3;
    if (gd_recurrent(&device.args()) != GD_INVALID_ARGUMENT) return "an o of rank 3 was taken";
    device.args().out.rank = 4;
    if (std::string error = device.run(); !error.empty()) return error;
    return device.download(host);
  };
  expect_ok(judge.recurrent(run), judge.problem().spec, "rec");
}

// Slots beyond 2^31 and 2^32 elements: every product of slot and stride must be 64 bits wide.
TEST_F(Recurrent, HugePool) {
  constexpr int64_t kSlot = 2 * 128 * 128, kSlots = (int64_t{5} << 30) / kSlot;
  const std::vector<int32_t> slots = {int32_t(kSlots - 1), int32_t((int64_t{1} << 31) / kSlot + 3),
                                      int32_t((int64_t{1} << 32) / kSlot)};
  void* pool = nullptr;
  if (cudaMalloc(&pool, kSlots * kSlot * 4) != cudaSuccess) {
    cudaGetLastError();
    GTEST_SKIP() << "the device has no memory for a pool of " << kSlots * kSlot * 4 << " bytes";
  }
  const std::unique_ptr<void, cudaError_t (*)(void*)> owner(pool, cudaFree);
  DeviceMemory indices(12, 0);
  indices.upload(slots.data());
  for (const std::string& spec :
       cross({"B=3 T=1 Hk=1 Hv=2 K=128 V=128 inplace", "B=3 T=5 Hk=1 Hv=2 K=128 V=128 inplace"}, kLayouts)) {
    Problem problem(parse_case(spec));
    const gd_recurrent_args& host = problem.recurrent;
    const RecurrentTruth truth = reference_recurrent(host);
    DeviceRecurrent device(host);
    gd_recurrent_args& args = device.args();
    const auto slot = [&](size_t n) { return static_cast<float*>(pool) + slots[n] * kSlot; };
    for (size_t n = 0; n < 3; ++n)
      GD_CUDA_OK(cudaMemcpy(slot(n), static_cast<float*>(host.final_state.data) + n * kSlot, kSlot * 4,
                            cudaMemcpyHostToDevice));
    args.in.initial_state.data = pool;
    args.in.initial_state.shape[0] = kSlots;
    args.final_state = args.in.initial_state;
    gd_tensor& index = args.in.initial_state_indices;
    index.data = indices.data();
    index.dtype = GD_I32, index.rank = 1, index.shape[0] = 3, index.stride[0] = 1;
    args.final_state_indices = index;
    ASSERT_EQ(device.run(), "");
    GD_CUDA_OK(cudaDeviceSynchronize());
    std::vector<float> got(3 * kSlot);
    for (size_t n = 0; n < 3; ++n)
      GD_CUDA_OK(cudaMemcpy(got.data() + n * kSlot, slot(n), kSlot * 4, cudaMemcpyDeviceToHost));
    const Comparison result =
        compare(std::vector<double>(got.begin(), got.end()), truth.final_state, {3, 2, 128 * 128}, {1e-5, 0});
    EXPECT_TRUE(result.ok) << spec << ": " << result.text();
  }
}

}  // namespace
}  // namespace gatedelta::testing
