// Which decode kernel takes a call, and how its CTAs find their work.
#include "cuda/decode/config.hpp"

#include <gtest/gtest.h>

namespace gatedelta::cuda {
namespace {

TEST(DecodeDivider, DividesExactly) {
  constexpr uint32_t kLargest = (uint32_t{1} << 31) - 1;
  for (const uint32_t divisor : {1u, 2u, 3u, 5u, 7u, 16u, 24u, 31u, 32u, 33u, 48u, 641u, 65535u, 65536u, kLargest}) {
    const Divider by(divisor);
    for (const uint32_t around : {0u, divisor, 2 * divisor, kLargest / divisor * divisor, kLargest, 123456789u})
      for (const int64_t n : {int64_t{around} - 1, int64_t{around}, int64_t{around} + 1}) {
        if (n < 0 || n > kLargest) continue;
        const auto number = static_cast<uint32_t>(n);
        EXPECT_EQ(by.quotient(number), number / divisor) << number << " / " << divisor;
        EXPECT_EQ(by.remainder(number, by.quotient(number)), number % divisor) << number << " % " << divisor;
      }
  }
}

TEST(DecodeKeyHeads, GroupedAndTiled) {
  for (const int64_t key_heads : {1, 2, 3, 16, 48, 641})
    for (const int64_t group : {1, 2, 3, 8}) {
      Layer in;
      in.key_heads = key_heads, in.group = group, in.value_heads = key_heads * group;
      for (const bool tiled : {false, true}) {
        in.tiled = tiled;
        const KeyHeads key_heads_of(in);
        for (int64_t head = 0; head < in.value_heads; ++head)
          EXPECT_EQ(key_heads_of.of(static_cast<uint32_t>(head)), in.key_head(head)) << key_heads << " " << group;
      }
    }
}

class DecodePlan : public ::testing::Test {
 protected:
  RecurrentProblem p;

  static void* address(int64_t n) { return reinterpret_cast<void*>(n << 32); }
  static TokenRows rows(int64_t n, int64_t heads) { return {address(n), GD_BF16, heads * 128, heads * 128, 128}; }
  static StateRows states(int64_t n, gd_dtype dtype) {
    return {address(n), dtype, 64, 4 * 128 * 128, 128 * 128, {nullptr, false, true}};
  }
  void SetUp() override {
    p.in.sequences = {9, 9, 1, {}};
    p.in.key_heads = 2, p.in.value_heads = 4, p.in.group = 2, p.in.key_dim = p.in.value_dim = 128;
    p.in.layout = GD_STATE_VK;
    p.in.q = rows(1, 2), p.in.k = rows(2, 2), p.in.v = rows(3, 4), p.o = rows(4, 4);
    p.in.initial = p.final = states(5, GD_F32);
  }
};

TEST_F(DecodePlan, OneTokenTakesDecodeInPlace) {
  EXPECT_TRUE(supports_one_token(p));
  p.final = {};
  EXPECT_TRUE(supports_one_token(p));
  p.final = p.in.initial;
  p.in.initial = {};
  EXPECT_TRUE(supports_one_token(p));
  p.o = {};
  EXPECT_TRUE(supports_one_token(p));
  p.in.sequences.count = p.in.sequences.batch = 1;  // the batch has no say
  EXPECT_TRUE(supports_one_token(p));
}

TEST_F(DecodePlan, Sequential128TakesTheRestOfTheSameKind) {
  const RecurrentProblem single = p;
  const auto expect_sequential = [&](const char* why) {
    EXPECT_FALSE(supports_one_token(p) || supports_window_mma(p)) << why;
    EXPECT_TRUE(supports_sequential_128(p)) << why;
    p = single;
  };
  p.step_states = states(6, GD_F32), expect_sequential("per-step states");
  p.accept_lengths.present = true, expect_sequential("accept lengths");
  p.previous_accept_lengths.present = true, expect_sequential("picked slots");
  p.in.sequences = {9, 1, 9, {nullptr, false, true}}, expect_sequential("packed, perhaps one token each");
  p.in.sequences.tokens = 4, p.in.layout = GD_STATE_KV, expect_sequential("layout");
  p.in.sequences.tokens = 4, p.batch_invariant = true, expect_sequential("bits of single tokens");
  p.in.sequences.tokens = 4, p.step_states = states(6, GD_F32), expect_sequential("every state");
}

TEST_F(DecodePlan, GenericTakesTheRest) {
  const RecurrentProblem single = p;
  const auto expect_generic = [&](const char* why) {
    EXPECT_FALSE(supports_one_token(p) || supports_window_mma(p) || supports_sequential_128(p)) << why;
    p = single;
  };
  p.in.key_dim = 64, expect_generic("K");
  p.in.value_dim = 64, expect_generic("V");
  p.in.q.dtype = GD_F32, expect_generic("fp32 inputs");
  p.final.dtype = GD_BF16, expect_generic("two types of states");
  p.step_states = states(6, GD_BF16), expect_generic("two types of states, one of them per step");
  p.in.sequences.tokens = int64_t{1} << 31, expect_generic("tokens");
  p.in.k.data = static_cast<char*>(p.in.k.data) + 2, expect_generic("address of k");
  p.o.head_stride += 1, expect_generic("stride of o");
  p.in.initial.slot_stride += 2, expect_generic("stride of slots");
  p.final.data = static_cast<char*>(p.final.data) + 8, expect_generic("address of states");
  p.in.initial = p.final = {}, expect_generic("no states");
  p.in.v.batch_stride = int64_t{1} << 31, expect_generic("a stride of more than 31 bits");
  p.in.initial.slot_stride = int64_t{1} << 29, expect_generic("a stride of slots of more than 31 bits");
  p.final.indices.stride = int64_t{1} << 28, expect_generic("a stride of indices of more than 31 bits");
}

TEST_F(DecodePlan, WindowMmaTakesSeveralTokens) {
  EXPECT_FALSE(supports_window_mma(p));  // `one_token` does
  p.in.sequences.tokens = 2;
  EXPECT_TRUE(supports_window_mma(p));
  p.in.sequences.tokens = 100;
  EXPECT_TRUE(supports_window_mma(p));
  p.accept_lengths.present = true;
  EXPECT_TRUE(supports_window_mma(p));
  const RecurrentProblem several = p;
  const auto expect_other = [&](const char* why) {
    EXPECT_FALSE(supports_window_mma(p)) << why;
    p = several;
  };
  p.batch_invariant = true, expect_other("bits of single tokens");
  p.in.layout = GD_STATE_KV, expect_other("layout");
  p.in.q.dtype = GD_F32, expect_other("fp32 inputs");
  p.step_states = states(6, GD_F32), expect_other("every state");
  p.in.sequences.tokens = int64_t{1} << 31, expect_other("tokens");
  p.in.key_dim = 64, expect_other("K");
  p.in.sequences = {3, 1, 4, {nullptr, false, true}};  // packed: lengths are not known
  EXPECT_TRUE(supports_window_mma(p));
  p.in.sequences.tokens = 3;  // no more tokens than sequences
  EXPECT_FALSE(supports_window_mma(p));
}

// The order of sums: by the types of the states a call reads and stores, and by nothing else.
TEST_F(DecodePlan, OrderOfSums) {
  EXPECT_EQ(state_vector(p), 4);
  p.final.dtype = GD_BF16;
  EXPECT_EQ(state_vector(p), 4);
  p.in.initial.dtype = GD_F16;
  EXPECT_EQ(state_vector(p), 8);
  p.step_states = states(6, GD_F32);
  EXPECT_EQ(state_vector(p), 8);
  p.in.initial = {};
  EXPECT_EQ(state_vector(p), 8);
  p.final = {};
  EXPECT_EQ(state_vector(p), 4);
}

TEST_F(DecodePlan, PartsCoverAllColumns) {
  EXPECT_EQ((Vk128<4, 1, 2>::kParts), 16);
  EXPECT_EQ((Vk128<8, 4, 1>::kParts), 8);
  EXPECT_EQ(OneTokenKv<4>::kParts, 2);
  for (const int columns : {GenericVk<4, 16>::kCtaColumns, GenericVk<4, 32>::kCtaColumns, GenericKv<16>::kCtaColumns,
                            GenericKv<32>::kCtaColumns})
    for (p.in.value_dim = 16; p.in.value_dim <= 256; p.in.value_dim += 16) {
      const auto parts = static_cast<int>(decode_params(p, columns).parts.divisor);
      EXPECT_TRUE(parts * columns >= p.in.value_dim && (parts - 1) * columns < p.in.value_dim && parts <= kMaxParts);
    }
  EXPECT_EQ(decode_pairs(p.in), 36);
  p.in.sequences.offsets.present = true;  // and the tokens past the last offset
  EXPECT_EQ(decode_pairs(p.in), 40);
}

TEST_F(DecodePlan, GridCoversAllSequences) {
  for (const int64_t count : {0, 1, 65534, 65535, 65536, 131070, 131071, 1000003}) {
    p.in.sequences.count = count;
    const DecodeGrid grid = grid_of(p, 8);
    EXPECT_EQ(grid.x, 32u);
    EXPECT_TRUE(grid.y <= 65535 && grid.z <= 65535);
    EXPECT_GE(int64_t{grid.y} * grid.z, count);
    EXPECT_LT(int64_t{grid.y} * grid.z, count + 65536);
    EXPECT_EQ(grid.y == 0, count == 0);
  }
  p.in.sequences = {65535, 1, 70000, {nullptr, false, true}};  // and the tokens past the last offset
  EXPECT_EQ(grid_of(p, 8).y * grid_of(p, 8).z, 65536u);
}

}  // namespace
}  // namespace gatedelta::cuda
