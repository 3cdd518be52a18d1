// Forward on a CUDA device: cuts, short sequences, bits, graphs, streams, refusals.
#include <cstring>

#include "device.hpp"

namespace gatedelta::testing {
namespace {

using Forward = Gpu;

void check(const Specs& specs) { check_calls<gd_forward_args>(cross(specs, kTypes)); }

TEST_F(Forward, ManyHeads) { check_calls<gd_forward_args>(many_heads_cases()); }

TEST_F(Forward, Dense) {
  check({"T=1", "T=63", "T=64", "T=65", "T=128", "B=3 T=200", "B=2 T=513", "B=2 T=0", "T=300 h0=0", "T=300 ht=0",
         "B=70 T=70 Hk=1 Hv=2"});  // more heads than multiprocessors
}

// Short sequences, which have a kernel of their own, alone and beside others.
TEST_F(Forward, ShortSequences) {
  check(cross({"B=3 T=1", "T=16 Hk=2 Hv=4", "B=2 T=17", "lengths=3+0+5 pad=4", "lengths=64x1 Hk=2 Hv=4",
               "lengths=40+6x1+0+17x1 Hk=1 Hv=2", "lengths=3x1+200+5x2+0+17+16+65 pad=20 Hk=1 Hv=3",
               "lengths=70x1+2x150+0+9 pad=2 i64 strided"},
              {"", "layout=vk gate=mixed", "layout=vk gate=raw l2norm beta=logit gdtype=bf16 state=bf16"}));
  check(cross({"lengths=40x1+300+20x9+100+30x16+31 Hk=1 Hv=2", "lengths=7x2+0+9x70 pad=3 Hk=1 Hv=2 segment=1",
               "lengths=1100x1+70+3x0+5 Hk=1 Hv=1", "lengths=64+3+0+200+1+130+16+65 every=64"},
              {"layout=vk gate=mixed"}));
}

TEST_F(Forward, StatesOfShortSequences) {
  check(cross(cross({"lengths=4x1+0+64+16+17+3x3+65+2x8 pad=4 Hk=1 Hv=2"}, {"state=fp32", "state=bf16"}),
              cross({"layout=kv", "layout=vk"}, {"pool=1 i64 strided", "inplace pool=1", "inplace", "h0=0", "ht=0"})));
  check(cross({"B=9 T=3 Hk=1 Hv=2"}, {"pool=1 inplace", "pool=1 layout=vk strided", "state=fp16 layout=vk"}));
}

// Ragged packs with states in a pool, as engines send them: more items than CTAs, so that states are read and written
// between the chunks of other items.
TEST_F(Forward, RaggedPacks) {
  std::string lengths;
  for (int i = 0; i < 40; ++i) lengths += (i ? "+" : "") + std::to_string(1 + i * 7919 % 300);
  check(cross({"lengths=" + lengths + " Hk=1 Hv=4"},
              {"pool=1 inplace layout=vk", "pool=1", "pool=1 state=bf16 layout=vk", "h0=0 strided"}));
}

// A sequence gives the same bits alone and in a pack of long ones.
TEST_F(Forward, ShortSequencesDoNotDependOnTheBatch) {
  Problem problem(parse_case("lengths=5+3x1000 Hk=2 Hv=4 K=128 V=128 dtype=bf16 layout=vk"));
  problem.forward.batch_invariant = 1;
  DeviceForward device(with_kernels(problem.forward));
  ASSERT_EQ(device.run(), "");
  ASSERT_EQ(device.download(problem.forward), "");
  const auto o = bytes_of(problem.forward.out), states = bytes_of(problem.forward.final_state);

  problem.reset();
  device.upload(problem.forward);
  gd_forward_args& alone = device.args();
  for (gd_tensor* t : {&alone.in.q, &alone.in.k, &alone.in.v, &alone.in.g, &alone.in.beta, &alone.out}) t->shape[1] = 5;
  for (gd_tensor* t : {&alone.in.initial_state, &alone.final_state}) t->shape[0] = 1;
  alone.in.cu_seqlens.shape[0] = 2;
  ASSERT_EQ(device.run(), "");
  ASSERT_EQ(device.download(problem.forward), "");
  const auto o_alone = bytes_of(problem.forward.out), states_alone = bytes_of(problem.forward.final_state);
  EXPECT_EQ(std::memcmp(o.data(), o_alone.data(), o.size() / 3005 * 5), 0);
  EXPECT_EQ(std::memcmp(states.data(), states_alone.data(), states.size() / 4), 0);
}

TEST_F(Forward, RepeatsBitForBit) {
  for (const std::string& spec : cross({"lengths=300+0+70+129+1 pad=5 Hk=2 Hv=4", "B=40 T=200 Hk=2 Hv=4"}, kTypes)) {
    Problem problem(parse_case(spec));
    const gd_forward_args& args = problem.forward;
    std::vector<char> o, states;
    for (int round = 0; round < 10; ++round) {
      problem.reset();
      ASSERT_EQ(on_device(args), "");
      if (round == 0) {
        o = bytes_of(args.out);
        states = bytes_of(args.final_state);
      }
      EXPECT_EQ(o, bytes_of(args.out)) << spec << ", round " << round;
      EXPECT_EQ(states, bytes_of(args.final_state)) << spec << ", round " << round;
    }
  }
}

// Forced cuts; the sequences end at the beginning, in the middle and at the end of a chunk.
TEST_F(Forward, Segments) {
  check(cross(
      cross({"T=600 Hk=2 Hv=4", "lengths=300+0+1+64+900+130 pad=7 Hk=1 Hv=3"}, {"segment=1", "segment=2", "segment=3"}),
      {"gate=zero", "gate=mixed", "gate=strong", "gate=spiky", "gate=raw l2norm", "gate=inf beta=two"}));
  check(cross({"lengths=400+0+64+1+329 Hk=1 Hv=2 segment=2"},
              {"inplace", "inplace pool", "pool i64 strided layout=vk", "h0=0 ht=0", "state=bf16 every=64",
               "every=128 gate=zero pool", "inplace gate=strong every=64 layout=vk", "h0=0 gate=weak keys=loose"}));
  check({"T=3000 Hk=1 Hv=5 segment=8 gate=mixed", "B=3 T=1500 Hk=2 Hv=2 segment=5 gate=weak keys=correlated",
         "T=12000 Hk=1 Hv=4", "T=9000 Hk=1 Hv=2 gate=zero", "T=9000 Hk=1 Hv=2 gate=strong",
         "lengths=9000+500+2000 Hk=2 Hv=4 gate=weak"});  // the last four are cut automatically
  check({"lengths=500+0+900 pad=11000 Hk=1 Hv=4", "lengths=100+0+11900+1 Hk=1 Hv=4 gate=mixed",
         "lengths=4x2048 Hk=2 Hv=8 gate=mixed",
         "lengths=5000+1000+1500+692 Hk=2 Hv=8 gate=mixed"});  // as lengths ask for
}

// Cut or not, the error is about the same. Also where it exceeds the bounds of the table, which do not cover thousands
// of tokens with beta up to 2.
TEST_F(Forward, SegmentsAreAsAccurateAsNone) {
  for (const std::string& spec :
       cross(cross({"T=4096 Hk=2 Hv=4 seed=5", "T=4096 Hk=2 Hv=4 seed=6 l2norm beta=logit2"}, kTypes),
             {"gate=zero", "gate=weak", "gate=strong", "gate=spiky", "gate=mixed", "gate=zero keys=correlated"})) {
    Judge judge(parse_case(spec));
    const auto errors = [&](int segment) {
      const Judgement judgement = judge.forward(Compute::tensor_cores, [&](const gd_forward_args& host) {
        gd_forward_args args = host;
        judge.problem().tuning.segment_chunks = segment;
        args.context_parallel = segment ? GD_CP_AUTO : GD_CP_OFF;
        return on_device(args);
      });
      EXPECT_TRUE(judgement.problems.empty()) << spec << "\n" << judgement.text();
      std::vector<double> values;
      for (const Verdict& verdict : judgement.verdicts) values.push_back(verdict.comparison.error);
      return values;
    };
    const std::vector<double> whole = errors(0);
    for (const int segment : {4, 9}) {
      const std::vector<double> cut = errors(segment);
      ASSERT_EQ(cut.size(), whole.size());
      for (size_t i = 0; i < cut.size(); ++i) EXPECT_LE(cut[i], 1.02 * whole[i]) << spec << ", segments of " << segment;
    }
  }
}

// A segment that warms up over everything before it changes no bit.
TEST_F(Forward, TwoSegmentsAreAsGoodAsOne) {
  Problem problem(parse_case("T=700 Hk=1 Hv=3 gate=zero K=128 V=128 dtype=bf16"));
  ASSERT_EQ(on_device(problem.forward), "");
  const auto o = bytes_of(problem.forward.out), states = bytes_of(problem.forward.final_state);
  problem.reset();
  problem.tuning.segment_chunks = 6;
  ASSERT_EQ(on_device(problem.forward), "");
  EXPECT_EQ(o, bytes_of(problem.forward.out));
  EXPECT_EQ(states, bytes_of(problem.forward.final_state));
}

// 192 heads on 132 SMs: some are in two parts, the second of which goes on with the first one's state. Also in place.
TEST_F(Forward, BalancedHeadsHaveTheBitsOfWholeOnes) {
  for (const char* states : {"", " inplace"}) {
    Problem problem(parse_case(std::string("B=3 T=1290 Hk=16 Hv=64 K=128 V=128 dtype=bf16") + states));
    ASSERT_EQ(on_device(problem.forward), "");
    const auto o = bytes_of(problem.forward.out), final_states = bytes_of(problem.forward.final_state);
    problem.reset();
    problem.forward.context_parallel = GD_CP_OFF;
    ASSERT_EQ(on_device(problem.forward), "");
    EXPECT_EQ(o, bytes_of(problem.forward.out));
    EXPECT_EQ(final_states, bytes_of(problem.forward.final_state));
  }
}

// For one sequence two CTAs share each head; for 70 sequences a CTA has whole heads.
TEST_F(Forward, DoesNotDependOnTheBatch) {
  Problem problem(parse_case("B=70 T=1500 Hk=2 Hv=4 K=128 V=128 dtype=bf16"));
  problem.forward.batch_invariant = 1;
  DeviceForward device(with_kernels(problem.forward));
  ASSERT_EQ(device.run(), "");
  ASSERT_EQ(device.download(problem.forward), "");
  const auto o = bytes_of(problem.forward.out), states = bytes_of(problem.forward.final_state);

  problem.reset();
  device.upload(problem.forward);
  gd_forward_args& alone = device.args();
  for (gd_tensor* t : {&alone.in.q, &alone.in.k, &alone.in.v, &alone.in.g, &alone.in.beta, &alone.in.initial_state,
                       &alone.out, &alone.final_state})
    t->shape[0] = 1;
  ASSERT_EQ(device.run(), "");
  ASSERT_EQ(device.download(problem.forward), "");
  const auto o_alone = bytes_of(problem.forward.out), states_alone = bytes_of(problem.forward.final_state);
  EXPECT_EQ(std::memcmp(o.data(), o_alone.data(), o.size() / 70), 0);
  EXPECT_EQ(std::memcmp(states.data(), states_alone.data(), states.size() / 70), 0);
}

TEST_F(Forward, GraphReplaysWithNewContents) {
  for (const std::string& type : kTypes) {
    const std::string rest = " pad=6 Hk=2 Hv=4 pool " + type + " seed=";
    check_replay<gd_forward_args>("lengths=70+0+1300+64+30" + rest + "1", "lengths=1+799+0+633+31" + rest + "2");
  }
}

TEST_F(Forward, RunsOnAStream) { check_on_a_stream<gd_forward_args>("B=2 T=200 Hk=1 Hv=2 K=128 V=128 dtype=bf16"); }

TEST_F(Forward, LeavesTheCurrentDeviceAlone) {
  int before = -1, after = -1, devices = 0;
  GD_CUDA_OK(cudaGetDeviceCount(&devices));
  GD_CUDA_OK(cudaGetDevice(&before));
  Problem problem(parse_case("T=100 K=128 V=128 dtype=bf16"));
  ASSERT_EQ(on_device(problem.forward), "");
  GD_CUDA_OK(cudaGetDevice(&after));
  EXPECT_EQ(after, before);
  if (devices < 2) GTEST_SKIP() << "one CUDA device only: no call on another one";
  GD_CUDA_OK(cudaSetDevice(1));
  DeviceForward device(with_kernels(problem.forward));
  GD_CUDA_OK(cudaSetDevice(0));
  device.args().exec.device_index = 1;
  EXPECT_EQ(device.run(), "");
  GD_CUDA_OK(cudaGetDevice(&after));
  EXPECT_EQ(after, 0);
  GD_CUDA_OK(cudaSetDevice(1));
  GD_CUDA_OK(cudaDeviceSynchronize());
  GD_CUDA_OK(cudaSetDevice(before));
}

// A refused call writes nothing and does not affect the next one.
TEST_F(Forward, RefusesAndGoesOn) {
  Judge judge(parse_case("T=200 Hk=1 Hv=2 K=128 V=128 dtype=bf16"));
  const auto run = [](const gd_forward_args& host) -> std::string {
    DeviceForward device(with_kernels(host));
    const gd_exec right = device.args().exec;
    device.args().exec.device_index = 1000;
    if (gd_forward(&device.args()) != GD_INVALID_ARGUMENT) return "a missing device was accepted";
    if (std::string(gd_last_error()) != "device_index is 1000, and there is no such CUDA device")
      return gd_last_error();
    device.args().exec = right;
    device.args().exec.workspace_bytes -= 1;
    if (gd_forward(&device.args()) != GD_WORKSPACE_TOO_SMALL) return "a small workspace was accepted";
    device.args().exec = right;
    device.args().in.q.stride[1] += 1;
    if (gd_forward(&device.args()) != GD_UNSUPPORTED) return "rows without alignment were accepted";
    device.args().in.q.stride[1] -= 1;
    if (std::string error = device.run(); !error.empty()) return error;
    return device.download(host);
  };
  expect_ok(judge.forward(Compute::tensor_cores, run), judge.problem().spec, "fwd");
}

// All heads share one q and k: strides of 0, as expand() makes them.
TEST_F(Forward, BroadcastHeads) {
  Judge judge(parse_case("T=200 Hk=1 Hv=4 K=128 V=128 dtype=bf16"));
  bool accepted = true;
  const auto run = [&](const gd_forward_args& host) -> std::string {
    DeviceForward device(with_kernels(host));
    for (gd_tensor* t : {&device.args().in.q, &device.args().in.k}) {
      t->shape[2] = 4;
      t->stride[2] = 0;
    }
    const std::string error = device.run();
    accepted = error.find("tensor maps") == std::string::npos;
    return error.empty() ? device.download(host) : error;
  };
  const Judgement judgement = judge.forward(Compute::tensor_cores, run);
  if (!accepted) GTEST_SKIP() << "the driver's tensor maps do not accept strides of 0, and the call was refused";
  expect_ok(judgement, judge.problem().spec, "fwd");
}

}  // namespace
}  // namespace gatedelta::testing
