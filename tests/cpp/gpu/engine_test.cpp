// What engines ask of states beyond one slot per sequence: null slots, strided indices, rows of slots, one
// checkpoint per sequence.
#include <cmath>
#include <cstring>

#include "device.hpp"
#include "testing/reference.hpp"

namespace gatedelta::testing {
namespace {

using EngineRecurrent = Gpu;
using EngineForward = Gpu;

const Specs kSizes = {"K=128 V=128 layout=vk", "K=128 V=128 layout=kv", "K=48 V=32", "K=176 V=64 layout=vk"};

void check(const Specs& specs) { check_calls<gd_recurrent_args>(specs); }

TEST_F(EngineRecurrent, NullSlots) {
  check(cross(cross({"B=11 T=1 Hk=1 Hv=2 pool dtype=bf16 l2norm", "B=11 T=4 Hk=1 Hv=2 pool dtype=bf16",
                     "lengths=3+0+1+8+2+5+4+1+7+2 pad=2 Hk=1 Hv=2 pool"},
                    kSizes),
              {"first_slot=1", "first_slot=3 inplace strided", "first_slot=2 inplace i64 state=bf16",
               "first_slot=1 ht=0", "first_slot=1 steps=pool", "first_slot=2 accept inplace"}));
}

TEST_F(EngineRecurrent, PicksTheSlotOfTheLastTokenKept) {
  check(cross(cross({"B=11 T=1 Hk=1 Hv=2 pool dtype=bf16 l2norm", "B=11 T=4 Hk=1 Hv=2 pool dtype=bf16",
                     "lengths=3+0+1+8+2+5+4+1+7+2 pad=2 Hk=1 Hv=2 pool"},
                    kSizes),
              {"picked=1", "picked=3 strided i64", "picked=4 first_slot=1 inplace", "picked=2 ht=0",
               "picked=5 first_slot=1 steps=pool state=bf16"}));
}

TEST_F(EngineRecurrent, StepsByRows) {
  check(
      cross(cross({"lengths=3+0+1+8+2+5+4 pad=2 Hk=1 Hv=2 steps=rows", "lengths=6 pad=3 Hk=1 Hv=2 steps=rows"}, kSizes),
            {"pool=0", "pool ht=0 dtype=bf16", "pool first_slot=2 strided", "pool picked=4 first_slot=1 i64 ht=0",
             "pool inplace accept state=fp16 dtype=fp16"}));
}

// An engine's drafts: one pool, one row of slots per sequence, both for the state it starts from and for those after
// its tokens. Slot 0 is a null slot. Two rounds, the second on the states of the first, against the truth on the host.
TEST_F(EngineRecurrent, DraftsOverOnePool) {
  for (const std::string& spec : cross({"lengths=3+0+4+1+2 pad=3 Hk=2 Hv=4 dtype=bf16 l2norm"}, kSizes)) {
    constexpr int64_t kSequences = 5, kColumns = 4, kSlots = 1 + kSequences * kColumns;
    const Case c = parse_case(spec);
    Problem problem(c);
    gd_recurrent_args args = problem.recurrent;
    args.final_state = args.final_state_indices = {};
    const int64_t slot = c.Hv * c.K * c.V;
    std::vector<float> pool(kSlots * slot, NAN), before;
    std::vector<int32_t> table(kSequences * kColumns), kept = {1, 3, 2, 4, 1};
    for (size_t i = 0; i < table.size(); ++i) table[i] = 1 + static_cast<int32_t>((i * 7) % table.size());
    for (int64_t n = 0; n < kSequences; ++n)
      for (int64_t i = 0; i < slot; ++i)
        pool[table[n * kColumns + kept[n] - 1] * slot + i] = static_cast<float>(normal(3, 0, n * slot + i));
    table[4 * kColumns] = 0;  // the last sequence starts from zero, and its first state is not stored
    const auto tensor = [](void* data, gd_dtype dtype, std::vector<int64_t> shape) {
      gd_tensor t{data, dtype, static_cast<int32_t>(shape.size()), {}, {}};
      int64_t stride = 1;
      for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) t.shape[d] = shape[d], t.stride[d] = stride;
      return t;
    };
    const bool vk = c.layout == GD_STATE_VK;
    args.in.initial_state = args.step_states =
        tensor(pool.data(), GD_F32, {kSlots, c.Hv, vk ? c.V : c.K, vk ? c.K : c.V});
    args.in.initial_state_indices = args.step_indices = tensor(table.data(), GD_I32, {kSequences, kColumns});
    args.previous_accept_lengths = tensor(kept.data(), GD_I32, {kSequences});
    args.in.first_slot = 1;
    for (int round = 0; round < 2; ++round) {
      before = pool;
      const RecurrentTruth truth = reference_recurrent(args);
      ASSERT_EQ(on_device(args), "") << spec;
      const auto spans = sequence_spans(args.in);
      std::vector<bool> written(kSlots, false);
      for (int64_t n = 0; n < kSequences; ++n) {
        for (int64_t t = 0; t < spans[n].length; ++t) {
          const int64_t to = step_slot(args, n, spans[n], t);
          if (to < 0) continue;
          written[to] = true;
          const std::vector<double> got(pool.begin() + to * slot, pool.begin() + (to + 1) * slot);
          const auto want = truth.step_states.begin() + (spans[n].begin + t) * slot;
          const Comparison result = compare(got, {want, want + slot}, {1, c.Hv, c.K * c.V},
                                            tolerance(Quantity::step_states, Compute::fp32, GD_F32, c));
          EXPECT_TRUE(result.ok) << spec << " round " << round << " sequence " << n << " token " << t << result.text();
        }
      }
      for (int64_t i = 0; i < kSlots; ++i) {
        const bool same = std::memcmp(&pool[i * slot], &before[i * slot], slot * sizeof(float)) == 0;
        EXPECT_TRUE(written[i] || same) << spec << " round " << round << " slot " << i;
      }
      kept = {3, 3, 2, 1, 2};  // the next drafts start from states that this round has stored, or left as they were
    }
  }
}

// A column that is no token's is not stored: the device does not refuse rows that are too short.
TEST_F(EngineRecurrent, RowsTooShortStoreWhatTheyHave) {
  Problem longer(parse_case("lengths=3+5+2 Hk=1 Hv=2 K=128 V=128 layout=vk dtype=bf16 steps=rows"));
  gd_recurrent_args args = longer.recurrent;
  ASSERT_EQ(on_device(args), "");
  const auto all = to_doubles(args.step_states);
  longer.reset();
  args.step_indices.shape[1] = 2;
  ASSERT_EQ(on_device(args), "");
  const auto some = to_doubles(args.step_states);
  const int64_t slot = static_cast<int64_t>(all.size()) / args.step_states.shape[0];
  const auto spans = sequence_spans(args.in);
  for (int64_t n = 0; n < 3; ++n) {
    for (int64_t t = 0; t < spans[n].length; ++t) {
      const int64_t to = slot_at(args.in, longer.recurrent.step_indices, n, t);
      if (to < 0) continue;
      for (int64_t i = 0; i < slot; ++i) {
        const double x = some[to * slot + i];
        ASSERT_TRUE(t < 2 ? x == all[to * slot + i] : std::isnan(x)) << n << " " << t;
      }
    }
  }
}

void check_forward(const Specs& specs) { check_calls<gd_forward_args>(cross(specs, kTypes)); }

TEST_F(EngineForward, NullSlots) {
  check_forward(cross({"lengths=70+0+64+1+129+30+20 pad=4 Hk=1 Hv=2 pool", "B=11 T=70 Hk=1 Hv=2 pool"},
                      {"first_slot=1", "first_slot=3 inplace strided layout=vk", "first_slot=2 every=64 state=bf16",
                       "first_slot=2 i64 strided every=64"}));
}

TEST_F(EngineForward, CheckpointOffsets) {
  check_forward(cross({"B=6 T=400 Hk=1 Hv=2 offsets", "T=2100 Hk=1 Hv=2 offsets", "B=70 T=130 Hk=1 Hv=2 offsets",
                       "lengths=64+63+0+200+130+128+65+300+320 pad=3 Hk=1 Hv=2 offsets"},
                      {"pool=0", "pool=1", "pool=1 i64 strided first_slot=2 inplace layout=vk",
                       "pool=1 ht=0 state=bf16", "h0=0 ht=0 state=fp16"}));
}

// Offsets before, at and after boundaries of segments, forced and automatic, of heads that decay and that persist.
TEST_F(EngineForward, CheckpointOffsetsOfSegments) {
  check_forward(
      cross(cross({"lengths=400+0+64+1+329+640+640+700 Hk=1 Hv=2 offsets"}, {"segment=1", "segment=2", "segment=3"}),
            {"gate=zero pool inplace", "gate=mixed", "gate=strong pool layout=vk", "gate=spiky state=bf16"}));
  check_forward(cross({"T=12000 Hk=1 Hv=4 offsets", "lengths=9000+500+2000 Hk=2 Hv=4 offsets"},
                      {"gate=zero seed=2", "gate=weak seed=3", "gate=strong seed=4", "gate=mixed seed=5"}));
}

// The device stores nothing where the host would refuse: no multiple of a chunk, and past the end.
TEST_F(EngineForward, OffsetsThatAreNoneStoreNothing) {
  Problem problem(parse_case("B=6 T=200 Hk=1 Hv=2 K=128 V=128 dtype=bf16 offsets i64"));
  const gd_forward_args& host = problem.forward;
  DeviceForward device(host);
  const std::vector<int64_t> offsets = {65, 256, INT64_MAX, INT64_MIN, 200, 192};
  GD_CUDA_OK(cudaMemcpy(device.args().checkpoint_offsets.data, offsets.data(), 48, cudaMemcpyHostToDevice));
  ASSERT_EQ(device.run(), "");
  ASSERT_EQ(device.download(host), "");
  const std::vector<double> states = to_doubles(host.checkpoints);
  const size_t state = states.size() / 6;
  for (size_t i = 0; i < states.size(); ++i) ASSERT_EQ(std::isnan(states[i]), i / state != 5) << i / state;
}

TEST_F(EngineRecurrent, GraphReplaysWithNewSlots) {
  const std::string rest =
      " pad=4 Hk=2 Hv=4 K=128 V=128 layout=vk dtype=bf16 pool first_slot=1 picked=4 ht=0 steps=pool seed=";
  check_replay<gd_recurrent_args>("lengths=3+0+1+4+2+5" + rest + "1", "lengths=1+2+6+0+5+1" + rest + "2");
}

}  // namespace
}  // namespace gatedelta::testing
