// Padded rows of a batch: sequences that are skipped because their slots are negative.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cases.hpp"

namespace gatedelta::test {

TEST(Forward, PaddedRowCannotBeSaved) {
  ForwardCase c;
  c.in.initial_state = c.final_state = c.state(6);
  c.in.initial_state_indices = c.indices(1, -1);
  c.final_state_indices = c.indices(1, -1);
  EXPECT_TRUE(c.accepts());
  ASSERT_EQ(gd_forward_saved_size(&c, &c.saved_bytes), GD_OK);
  c.saved = c.memory.take(c.saved_bytes, 0xa5);
  EXPECT_TRUE(c.invalid("saved is given, but sequence 1 is a padded row"));
}

TEST(Recurrent, PaddedRowIsSkipped) {
  RecurrentCase c;
  c.in.initial_state = c.final_state = c.state(6);
  c.in.initial_state_indices = c.indices(1, -1);
  c.final_state_indices = c.indices(1, -1);
  c.accept_lengths = c.indices(70, 1000);  // a padded row's count is ignored
  EXPECT_TRUE(c.accepts());
}

// Sequence n is a padded row: nothing of it is read, its output is exactly 0. The other sequence is computed.
template <class Call>
void expect_padding(Call& c, int64_t n) {
  for (const gd_tensor* t : {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta})
    std::ranges::fill(sequence_of(*t, n), std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(c.accepts());
  for (const float x : sequence_of(c.out, n)) ASSERT_EQ(std::bit_cast<uint32_t>(x), 0u) << "sequence " << n;
  for (const float x : sequence_of(c.out, 1 - n)) ASSERT_GT(std::fabs(x), 0.0f) << "sequence " << 1 - n;
}
// Sequence n starts from zero: the output is that of a call without an initial state.
template <class Call>
void expect_start_from_zero(Call& c, int64_t n) {
  EXPECT_TRUE(c.accepts());
  Call zero;
  EXPECT_TRUE(zero.accepts());
  EXPECT_TRUE(std::ranges::equal(sequence_of(c.out, n), sequence_of(zero.out, n))) << "sequence " << n;
  EXPECT_FALSE(std::ranges::equal(sequence_of(c.out, 1 - n), sequence_of(zero.out, 1 - n))) << "sequence " << 1 - n;
}

// The first sequence and the last, in both plans of the CPU: whole heads per lane, and heads shared between lanes.
TEST(Forward, PaddedRowIsZero) {
  ThreadPool pool(8);
  for (const bool shared_heads : {false, true}) {
    for (const int64_t n : {0, 1}) {
      ForwardCase c;
      if (shared_heads) pool.apply(c.exec);
      c.in.initial_state = c.final_state = c.state(6);
      c.in.initial_state_indices = n ? c.indices(1, -1) : c.indices(-1, 1);
      c.final_state_indices = n ? c.indices(1, -1) : c.indices(-1, 1);
      expect_padding(c, n);
    }
  }
}

TEST(Recurrent, PaddedRowIsZero) {
  for (const int64_t n : {0, 1}) {
    RecurrentCase c;
    c.in.initial_state = c.final_state = c.state(6);
    c.in.initial_state_indices = n ? c.indices(1, -1) : c.indices(-1, 1);
    c.final_state_indices = n ? c.indices(1, -1) : c.indices(-1, 1);
    expect_padding(c, n);
  }
}

// Draft verification that stores no state has no write slots.
TEST(Recurrent, ReadSlotAloneMakesAPaddedRowWhereNoStateIsStored) {
  for (const int64_t n : {0, 1}) {
    RecurrentCase c;
    c.in.initial_state = c.state(6);
    c.in.initial_state_indices = n ? c.indices(1, -1) : c.indices(-1, 1);
    expect_padding(c, n);
  }
}

TEST(Recurrent, NegativeReadSlotStartsFromZeroWhereStatesAreStored) {
  for (const bool steps : {false, true}) {
    for (const int64_t n : {0, 1}) {
      RecurrentCase c;
      c.in.initial_state = c.state(6);
      c.in.initial_state_indices = n ? c.indices(1, -1) : c.indices(-1, 1);
      (steps ? c.step_states : c.final_state) = steps ? c.output({kB, kT, kHv, kK, kV}) : c.state_output(2);
      expect_start_from_zero(c, n);
    }
  }
}

// Prefill: a sequence without a past starts from zero, whether its final state is stored or not.
TEST(Forward, NegativeReadSlotStartsFromZero) {
  for (const bool stores : {false, true}) {
    for (const int64_t n : {0, 1}) {
      ForwardCase c;
      c.in.initial_state = c.state(6);
      c.in.initial_state_indices = n ? c.indices(1, -1) : c.indices(-1, 1);
      if (stores) c.final_state = c.state_output(2);
      expect_start_from_zero(c, n);
    }
  }
}

}  // namespace gatedelta::test
