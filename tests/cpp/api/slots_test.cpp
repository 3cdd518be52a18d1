// Index tensors: which slots are null, strides, and rows of slots from which one is picked.
#include <bit>
#include <cstring>
#include <limits>

#include "cases.hpp"

namespace gatedelta::test {

template <class Operation>
class Slots : public testing::Test {};
TYPED_TEST_SUITE(Slots, Operations);

template <class Args>
gd_tensor rows(Case<Args>& c, std::initializer_list<int64_t> slots, int64_t columns) {
  gd_tensor t = c.indices(slots);
  t.rank = 2;
  t.shape[0] /= columns;
  t.shape[1] = columns;
  t.stride[0] = columns;
  t.stride[1] = 1;
  return t;
}
// Every second one.
template <class Args>
gd_tensor strided(Case<Args>& c, std::initializer_list<int64_t> slots) {
  gd_tensor t = c.indices(slots);
  t.shape[0] /= 2;
  t.stride[0] = 2;
  return t;
}
bool same(const gd_tensor& a, const gd_tensor& b) {  // of contiguous fp32 tensors
  int64_t count = 1;
  for (int d = 0; d < a.rank; ++d) count *= a.shape[d];
  return std::memcmp(a.data, b.data, static_cast<size_t>(count) * sizeof(float)) == 0;
}
// Slots that differ from each other.
void number_slots(const gd_tensor& pool) {
  for (int64_t slot = 0; slot < pool.shape[0]; ++slot)
    for (float& x : sequence_of(pool, slot)) x = 0.125f * static_cast<float>(slot + 1);
}

TYPED_TEST(Slots, Rules) {
  check_rules<TypeParam>({
      {"FirstSlotIsNotNegative",
       [](auto& c) {
         c.in.initial_state = c.state(3);
         c.in.initial_state_indices = c.indices(1, 2);
         c.in.first_slot = -1;
       },
       "first_slot is -1, must not be negative"},
      {"FirstSlotWithoutIndices", [](auto& c) { c.in.initial_state = c.state(2), c.in.first_slot = 1; },
       "first_slot is 1, but the call has no indices"},
      {"RangeOfSlotsWithNullSlots",
       [](auto& c) {
         c.in.initial_state = c.state(3);
         c.in.first_slot = 2;
         c.in.initial_state_indices = c.indices(0, std::numeric_limits<int64_t>::min());
       }},
      {"", [](auto& c) { c.in.initial_state_indices = c.indices(0, 3); },
       "initial_state_indices[1] is 3, but initial_state has 3 slots"},
      {"", [](auto& c) { c.in.first_slot = std::numeric_limits<int64_t>::max(); }},
      {"RowsNeedWhatPicks",
       [](auto& c) {
         c.in.initial_state = c.state(5), c.in.initial_state_indices = rows(c, {0, 1, 2, 3}, 2);
       },
       "initial_state_indices: rank is 2, must be 1: [N]"},
  });
}

TYPED_TEST(Slots, StridesOfReadSlots) {
  TypeParam c;
  c.in.initial_state = c.state(5);
  c.in.initial_state_indices = strided(c, {4, 9, 2, 9});
  EXPECT_TRUE(c.accepts());
  c.in.initial_state_indices.stride[0] = 0;  // all start from one slot
  EXPECT_TRUE(c.accepts());
  c.in.initial_state_indices.stride[0] = -1;
  EXPECT_TRUE(c.invalid("initial_state_indices: stride[0] is -1, must not be negative"));
}

// With first_slot 1 a pool's slot 0 is what -1 is without: results are those of the same slots.
template <class Call>
void expect_null_slots(bool finals) {
  Call with, without;
  for (Call* c : {&with, &without}) {
    c->in.initial_state = c->state(4);
    number_slots(c->in.initial_state);
    if (finals) c->final_state = c->in.initial_state;
  }
  with.in.first_slot = 1;
  with.in.initial_state_indices = with.indices(0, 3);
  without.in.initial_state_indices = without.indices(-1, 3);
  if (finals) {
    with.final_state_indices = with.indices(2, 0);
    without.final_state_indices = without.indices(2, -1);
  }
  EXPECT_TRUE(with.accepts());
  EXPECT_TRUE(without.accepts());
  EXPECT_TRUE(same(with.out, without.out));
  EXPECT_TRUE(same(with.in.initial_state, without.in.initial_state));
}
TEST(SlotsOfForward, NullBelowTheFirst) {
  expect_null_slots<ForwardCase>(false);
  expect_null_slots<ForwardCase>(true);
}
TEST(SlotsOfRecurrent, NullBelowTheFirst) {
  expect_null_slots<RecurrentCase>(false);
  expect_null_slots<RecurrentCase>(true);
}

TEST(SlotsOfForward, NullInAllIndices) {
  ForwardCase c;
  c.in.initial_state = c.final_state = c.checkpoints = c.state(4);
  c.checkpoint_every = 64;
  c.in.first_slot = 2;
  c.in.initial_state_indices = c.indices(0, 1);
  c.final_state_indices = c.indices(1, 3);
  c.checkpoint_indices = c.indices(1, 0);  // slot 1 is written by none of three
  EXPECT_TRUE(c.accepts());
  for (const int64_t slot : {0, 1, 2})
    for (const float x : sequence_of(c.final_state, slot)) ASSERT_EQ(x, 0.1f);
  c.checkpoint_indices = c.indices(1, 3);
  EXPECT_TRUE(c.invalid("checkpoint_indices[1]: slot 3 is written more than once"));
}

TEST(SlotsOfForward, StridesOfWrittenSlots) {
  ForwardCase c;
  c.final_state = c.state_output(5);
  c.final_state_indices = strided(c, {4, 9, 2, 9});
  EXPECT_TRUE(c.accepts());
  c.final_state_indices.stride[0] = 0;
  EXPECT_TRUE(
      c.invalid("final_state_indices: stride[0] is 0, must be positive: no slot may be written more than once"));
  c.final_state_indices = strided(c, {4, 9, 5, 9});
  EXPECT_TRUE(c.invalid("final_state_indices[1] is 5, but final_state has 5 slots"));
}

TEST(SlotsOfForward, Rules) {
  check_rules<ForwardCase>({
      {"CheckpointOffsetsWithoutCheckpoints", [](auto& c) { c.checkpoint_offsets = c.indices(64, 0); },
       "checkpoint_offsets is given without checkpoints"},
      {"CheckpointOffsetsOrEvery",
       [](auto& c) {
         c.checkpoints = c.state_output(2);
         c.checkpoint_offsets = c.indices(64, 0);
         c.checkpoint_every = 64;
       },
       "checkpoint_every is 64, but checkpoint_offsets says where checkpoints are"},
      {"CheckpointOffsetsShapes",
       [](auto& c) { c.checkpoints = c.state_output(3), c.checkpoint_offsets = c.indices(64, 0); },
       "checkpoints: shape is [3, 4, 16, 32], must be [N, Hv, K, V] = [2, 4, 16, 32]"},
      {"", [](auto& c) { c.checkpoint_indices = c.indices(0, 1, 2); },
       "checkpoint_indices: shape is [3], must be [N] = [2]"},
      {"", [](auto& c) { c.checkpoint_indices = c.indices(2, 1), c.checkpoint_offsets = c.indices(64); },
       "checkpoint_offsets: shape is [1], must be [N] = [2]"},
      {"", [](auto& c) { c.checkpoint_offsets = c.input({2}); },
       "checkpoint_offsets: dtype is float32, must be int32 or int64"},
  });
}

TEST(SlotsOfForward, CheckpointOffsetRange) {
  ForwardCase c;
  c.checkpoints = c.state_output(2);
  c.checkpoint_offsets = c.indices(0, 65);
  EXPECT_TRUE(
      c.invalid("checkpoint_offsets[1] is 65, must be a multiple of 64 and at most the sequence's 70 tokens, or 0"));
  c.checkpoint_offsets = c.indices32(128, 0);
  EXPECT_TRUE(c.invalid("checkpoint_offsets[0] is 128, must be a multiple of 64"));
  c.checkpoint_offsets = c.indices(-3, 64);
  EXPECT_TRUE(c.accepts());
  for (const float x : sequence_of(c.checkpoints, 0)) ASSERT_EQ(std::bit_cast<uint32_t>(x), 0xa5a5a5a5u);  // untouched
}

TEST(SlotsOfForward, CheckpointSlotTwice) {
  ForwardCase c;
  c.checkpoints = c.final_state = c.state_output(6);
  c.final_state_indices = c.indices(0, 1);
  c.checkpoint_offsets = c.indices(64, 64);
  c.checkpoint_indices = c.indices(2, 1);
  EXPECT_TRUE(c.invalid("checkpoint_indices[1]: slot 1 is written more than once"));
  c.checkpoint_offsets = c.indices(64, 0);  // none, so its slot does not count
  EXPECT_TRUE(c.accepts());
  c.checkpoint_offsets = c.indices(0, 64);
  c.checkpoint_indices = c.indices(2, 6);
  EXPECT_TRUE(c.invalid("checkpoint_indices[1] is 6, but checkpoints has 6 slots"));
}

// A checkpoint is the final state of the tokens before it.
TEST(SlotsOfForward, CheckpointIsTheFinalStateOfFewerTokens) {
  ForwardCase whole, part;
  for (ForwardCase* c : {&whole, &part}) c->pack(0, 70, 140);
  whole.checkpoints = whole.state_output(2);
  whole.checkpoint_offsets = whole.indices(64, 64);
  part.final_state = part.state_output(2);
  part.in.cu_seqlens = part.indices(0, 64, 128);
  EXPECT_TRUE(whole.accepts());
  EXPECT_TRUE(part.accepts());
  EXPECT_TRUE(same(whole.checkpoints, part.final_state));
}

TEST(SlotsOfRecurrent, StridesOfLengths) {
  RecurrentCase c;
  c.final_state = c.state_output(2);
  c.accept_lengths = strided(c, {70, 999, 0, 999});
  EXPECT_TRUE(c.accepts());
  c.accept_lengths.stride[0] = 0;
  EXPECT_TRUE(c.accepts());
  c.accept_lengths = strided(c, {0, 1, 71, 1});
  EXPECT_TRUE(c.invalid("accept_lengths[1] is 71"));
}

struct Picked : RecurrentCase {
  Picked() {
    in.initial_state = state(8);
    number_slots(in.initial_state);
    in.initial_state_indices = rows(*this, {1, 2, 3, 4, 5, 6}, 3);
    previous_accept_lengths = indices(2, 3);
  }
};

TEST(SlotsOfRecurrent, PicksTheSlotOfTheLastTokenKept) {
  Picked picked;
  RecurrentCase plain;
  plain.in.initial_state = plain.state(8);
  number_slots(plain.in.initial_state);
  const auto expect_same = [&](std::initializer_list<int64_t> lengths, std::initializer_list<int64_t> slots) {
    picked.previous_accept_lengths = picked.indices(lengths);
    plain.in.initial_state_indices = plain.indices(slots);
    ASSERT_TRUE(picked.accepts());
    ASSERT_TRUE(plain.accepts());
    EXPECT_TRUE(same(picked.out, plain.out)) << *slots.begin();
  };
  expect_same({2, 3}, {2, 6});    // columns 1 and 2
  expect_same({1, 0}, {1, 4});    // none kept: column 0
  expect_same({-9, 99}, {1, 6});  // the nearest there is
  expect_same({std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}, {3, 4});
}

TEST(SlotsOfRecurrent, RowsAndLengthsGoTogether) {
  Picked c;
  c.previous_accept_lengths = {};
  EXPECT_TRUE(
      c.invalid("initial_state_indices: rank is 2, must be 1: [N]; rows of slots [N, S] need previous_accept_lengths"));
  c.previous_accept_lengths = c.indices(1, 1);
  c.in.initial_state_indices = c.indices(1, 2);
  EXPECT_TRUE(
      c.invalid("previous_accept_lengths is given, but initial_state_indices has rank 1, must have 2: rows of slots"));
  c.in.initial_state_indices = {};
  EXPECT_TRUE(c.invalid("previous_accept_lengths is given without initial_state_indices"));
}

TEST(SlotsOfRecurrent, ShapesOfRowsAndLengths) {
  Picked c;
  c.previous_accept_lengths = c.indices(1);
  EXPECT_TRUE(c.invalid("previous_accept_lengths: shape is [1], must be [N] = [2]"));
  c.previous_accept_lengths = c.input({2});
  EXPECT_TRUE(c.invalid("previous_accept_lengths: dtype is float32, must be int32 or int64"));
  c.previous_accept_lengths = c.indices32(1, 1);
  c.in.initial_state_indices.shape[0] = 1;
  EXPECT_TRUE(c.invalid("initial_state_indices: shape is [1, 3], must be [N, S] = [2, any]"));
  c.in.initial_state_indices.shape[0] = 2;
  c.in.initial_state_indices.shape[1] = 0;
  EXPECT_TRUE(c.invalid("initial_state_indices is [N, S] with S = 0, must have a slot for each sequence"));
}

// Only what is picked counts.
TEST(SlotsOfRecurrent, RangeOfThePickedSlot) {
  Picked c;
  c.in.initial_state_indices = rows(c, {99, 2, 99, 99, 99, 8}, 3);
  EXPECT_TRUE(c.invalid("initial_state_indices[1, 2] is 8, but initial_state has 8 slots"));
  c.in.initial_state_indices = rows(c, {99, 2, 99, 99, 99, 7}, 3);
  EXPECT_TRUE(c.accepts());
}

TEST(SlotsOfRecurrent, PickedSlotMakesAPaddedRow) {
  Picked c;
  c.in.first_slot = 1;
  c.in.initial_state_indices = rows(c, {1, 0, 3, 4, 5, 6}, 3);
  EXPECT_TRUE(c.accepts());
  for (const float x : sequence_of(c.out, 0)) ASSERT_EQ(x, 0.0f);
}

// Two drafts over one pool, each with a row of slots, as an engine's block table has them: the states after its tokens
// replace those of the draft before, the one that is read among them.
struct DraftRows : RecurrentCase {
  DraftRows() {
    pack(0, 3, 5);
    for (gd_tensor* t : {&in.q, &in.k, &in.v, &in.g, &in.beta, &out}) t->shape[1] = 8;
    in.initial_state = step_states = state(12);
    number_slots(in.initial_state);
    in.initial_state_indices = step_indices = rows(*this, {1, 2, 3, 7, 8, 0}, 3);
    previous_accept_lengths = indices(2, 1);
    in.first_slot = 1;
  }
};

TEST(SlotsOfRecurrent, StepsByRows) {
  DraftRows c, by_token;
  by_token.step_indices = rows(by_token, {1, 2, 3, 7, 8, 99, 99, 99}, 8);
  by_token.in.initial_state_indices = by_token.indices(2, 7);
  by_token.previous_accept_lengths = {};
  ASSERT_TRUE(c.accepts());
  ASSERT_TRUE(by_token.accepts());
  EXPECT_TRUE(same(c.step_states, by_token.step_states));
  for (int64_t t = 0; t < 5; ++t)
    EXPECT_EQ(std::memcmp(static_cast<float*>(c.out.data) + t * kHv * kV,
                          static_cast<float*>(by_token.out.data) + t * kHv * kV, kHv * kV * sizeof(float)),
              0);
}

TEST(SlotsOfRecurrent, StepRowsAreLongEnough) {
  DraftRows c;
  c.in.cu_seqlens = c.indices(0, 4, 6);
  EXPECT_TRUE(c.invalid("step_indices has rows of 3 slots, but sequence 0 has 4 tokens"));
}

TEST(SlotsOfRecurrent, StepRowsAreInRange) {
  DraftRows c;
  c.step_indices = rows(c, {1, 2, 12, 7, 8, 99}, 3);  // the last one belongs to no token
  EXPECT_TRUE(c.invalid("step_indices[0, 2] is 12, but step_states has 12 slots"));
  c.step_indices = rows(c, {1, 2, 7, 7, 8, 99}, 3);
  EXPECT_TRUE(c.invalid("step_indices[1, 0]: slot 7 is written more than once"));
  c.step_indices = rows(c, {1, 3, 7, 4, 8, 99}, 3);
  EXPECT_TRUE(c.invalid("sequence 1 starts from slot 7, which another sequence writes in place"));
  c.step_indices.stride[0] = 0;
  EXPECT_TRUE(c.invalid("step_indices: stride[0] is 0, must be positive"));
}

TEST(SlotsOfRecurrent, StepsOfABatchHaveARowForEachOfItsTokens) {
  RecurrentCase c;
  c.step_states = c.state_output(kB * kT);
  c.step_indices = dense(c.memory.take(kB * (kT + 1) * 8, 0), GD_I64, {kB, kT + 1});
  EXPECT_TRUE(c.invalid("step_indices: shape is [2, 71], must be [B, T] = [2, 70]"));
}

}  // namespace gatedelta::test
