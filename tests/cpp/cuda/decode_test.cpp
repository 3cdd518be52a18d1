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

TEST_F(DecodePlan, StepTakesDecodeInPlace) {
  EXPECT_TRUE(takes_step(p));
  p.final = {};
  EXPECT_TRUE(takes_step(p));
  p.final = p.in.initial;
  p.in.initial = {};
  EXPECT_TRUE(takes_step(p));
  p.o = {};
  EXPECT_TRUE(takes_step(p));
  p.in.sequences.count = p.in.sequences.batch = 1;  // the batch has no say
  EXPECT_TRUE(takes_step(p));
}

TEST_F(DecodePlan, WalkTakesTheRest) {
  const RecurrentProblem step = p;
  const auto expect_walk = [&](const char* why) {
    EXPECT_FALSE(takes_step(p)) << why;
    p = step;
  };
  p.in.sequences.tokens = 2, expect_walk("two tokens");
  p.in.sequences.offsets.present = true, expect_walk("packed");
  p.in.key_dim = 64, expect_walk("K");
  p.in.value_dim = 64, expect_walk("V");
  p.in.layout = GD_STATE_KV, expect_walk("layout");
  p.in.q.dtype = GD_F32, expect_walk("fp32 inputs");
  p.final.dtype = GD_BF16, expect_walk("two types of states");
  p.step_states = states(6, GD_F32), expect_walk("per-step states");
  p.accept_lengths.present = true, expect_walk("accept lengths");
  p.in.k.data = static_cast<char*>(p.in.k.data) + 2, expect_walk("address of k");
  p.o.head_stride += 1, expect_walk("stride of o");
  p.in.initial.slot_stride += 2, expect_walk("stride of slots");
  p.final.data = static_cast<char*>(p.final.data) + 8, expect_walk("address of states");
  p.in.initial = p.final = {}, expect_walk("no states");
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
  EXPECT_EQ(decode_params(p, StepVk<4>::kCtaColumns).parts.divisor, 16u);
  EXPECT_EQ(decode_params(p, StepVk<8>::kCtaColumns).parts.divisor, 8u);
  for (const int columns :
       {WalkVk<4, 16>::kCtaColumns, WalkVk<8, 32>::kCtaColumns, WalkKv<16>::kCtaColumns, WalkKv<32>::kCtaColumns})
    for (p.in.value_dim = 16; p.in.value_dim <= 256; p.in.value_dim += 16) {
      const auto parts = static_cast<int>(decode_params(p, columns).parts.divisor);
      EXPECT_TRUE(parts * columns >= p.in.value_dim && (parts - 1) * columns < p.in.value_dim && parts <= kMaxParts);
    }
  EXPECT_EQ(decode_pairs(p.in), 36);
  p.in.sequences.offsets.present = true;  // and the tokens past the last offset
  EXPECT_EQ(decode_pairs(p.in), 40);
}

}  // namespace
}  // namespace gatedelta::cuda
