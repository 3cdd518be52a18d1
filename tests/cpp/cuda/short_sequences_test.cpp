// Which sequences of a forward are short, by shapes, layouts and types.
#include "cuda/sm90/workspace/short_sequences.hpp"

#include <gtest/gtest.h>

namespace gatedelta::cuda::sm90 {
namespace {

// The common call of an engine: states [V, K] in fp32.
ForwardProblem dense(int64_t batch, int64_t tokens, int64_t heads = 4) {
  ForwardProblem p;
  Layer& in = p.in;
  in.key_heads = in.value_heads = heads;
  in.group = 1;
  in.key_dim = in.value_dim = 128;
  in.sequences.count = in.sequences.batch = batch;
  in.sequences.tokens = tokens;
  const TokenRows rows{nullptr, GD_BF16, tokens * heads * 128, heads * 128, 128};
  in.q = in.k = in.v = p.o = rows;
  in.g = in.beta = {nullptr, GD_F32, tokens * heads, heads, 1};
  in.layout = GD_STATE_VK;
  in.initial = p.final = {nullptr, GD_F32, batch, heads * 128 * 128, 128 * 128, {}, 0};
  return p;
}
ForwardProblem packed(int64_t sequences, int64_t tokens) {
  ForwardProblem p = dense(1, tokens);
  p.in.sequences.count = p.in.initial.slots = p.final.slots = sequences;
  p.in.sequences.offsets = {nullptr, false, true};
  return p;
}
ForwardProblem with_kv(ForwardProblem p) {
  p.in.layout = GD_STATE_KV;
  return p;
}
ShortSequences which(const ForwardProblem& p) { return short_plan(p).which; }

TEST(ShortSequences, DenseBatchesByTheirLength) {
  EXPECT_EQ(which(dense(7, 0)), ShortSequences::kAll);
  EXPECT_EQ(which(dense(7, kMaxWindowMmaTokens)), ShortSequences::kAll);
  EXPECT_EQ(which(dense(7, kMaxWindowMmaTokens + 1)), ShortSequences::kNone);
  EXPECT_EQ(which(with_kv(dense(7, kMaxGenericTokens))), ShortSequences::kAll);
  EXPECT_EQ(which(with_kv(dense(7, kMaxGenericTokens + 1))), ShortSequences::kNone);
}

TEST(ShortSequences, PacksByTheirAverageLength) {
  EXPECT_EQ(which(packed(2, kMaxWindowMmaTokens)), ShortSequences::kAll);  // no sequence can be longer
  EXPECT_EQ(which(packed(2, kMaxWindowMmaTokens + 1)), ShortSequences::kSome);
  EXPECT_EQ(which(with_kv(packed(2, kMaxWindowMmaTokens))), ShortSequences::kSome);
  EXPECT_EQ(which(packed(8, 8 * kUsuallyLong - 1)), ShortSequences::kSome);
  EXPECT_EQ(which(packed(8, 8 * kUsuallyLong)), ShortSequences::kNone);
  EXPECT_EQ(short_plan(packed(8, 200)).longest, kMaxWindowMmaTokens);
  EXPECT_EQ(short_plan(with_kv(packed(8, 200))).longest, kMaxGenericTokens);
}

TEST(ShortSequences, AllOfFewTokens) {
  EXPECT_EQ(which(packed(64, 64)), ShortSequences::kAll);
  EXPECT_EQ(which(packed(16, 64)), ShortSequences::kAll);
  EXPECT_EQ(short_plan(packed(16, 64)).longest, 64);  // one of them may have all tokens
  EXPECT_EQ(which(packed(15, 64)), ShortSequences::kSome);
  EXPECT_EQ(which(packed(65, 65)), ShortSequences::kSome);
  EXPECT_EQ(which(with_kv(packed(64, 64))), ShortSequences::kAll);
  EXPECT_EQ(which(with_kv(packed(63, 64))), ShortSequences::kSome);
  ForwardProblem p = packed(64, 64);  // a sequence of 64 tokens has a checkpoint, which only chunks store
  p.checkpoints = p.final;
  p.checkpoint_every = 64;
  EXPECT_EQ(which(p), ShortSequences::kSome);
}

TEST(ShortSequences, SeveralTokensAtATimeWhereDecodeDoes) {
  EXPECT_TRUE(short_plan(packed(7, 100)).uses_window_mma);
  EXPECT_FALSE(short_plan(with_kv(packed(7, 100))).uses_window_mma);
  ForwardProblem p = packed(7, 100);
  p.final.dtype = GD_BF16;  // another type than the initial states have
  EXPECT_FALSE(short_plan(p).uses_window_mma);
  EXPECT_EQ(short_plan(p).longest, kMaxGenericTokens);
}

TEST(ShortSequences, NothingThatABackwardNeeds) {
  for (ForwardProblem p : {dense(7, 1), packed(7, 100)}) {
    p.saved.present = true;
    EXPECT_EQ(which(p), ShortSequences::kNone);
  }
}

// Whether a sequence is short then depends on its own length alone.
TEST(ShortSequences, OfABatchInvariantCallAlwaysTheSame) {
  for (const int64_t tokens : {int64_t{64}, int64_t{100}, 80 * kUsuallyLong, int64_t{1} << 20}) {
    ForwardProblem p = packed(80, tokens);
    p.batch_invariant = true;
    EXPECT_EQ(which(p), ShortSequences::kSome);
    EXPECT_EQ(short_plan(p).longest, kMaxWindowMmaTokens);
  }
}

// A launch has fewer than 2^31 CTAs, however many sequences and heads there are.
TEST(ShortSequences, NothingOfTooManyHeads) {
  EXPECT_EQ(which(dense(kMaxDecodePairs / 64, 1, 64)), ShortSequences::kAll);
  EXPECT_EQ(which(dense(kMaxDecodePairs / 64 + 1, 1, 64)), ShortSequences::kNone);
}

}  // namespace
}  // namespace gatedelta::cuda::sm90
