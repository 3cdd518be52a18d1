// Which sequences of a forward are walked, by shapes, layouts and types.
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
Walked walked(const ForwardProblem& p) { return walk_plan(p).which; }

TEST(Walks, DenseBatchesByTheirLength) {
  EXPECT_EQ(walked(dense(7, 0)), Walked::kAll);
  EXPECT_EQ(walked(dense(7, kFoldedTokens)), Walked::kAll);
  EXPECT_EQ(walked(dense(7, kFoldedTokens + 1)), Walked::kNone);
  EXPECT_EQ(walked(with_kv(dense(7, kWalkedTokens))), Walked::kAll);
  EXPECT_EQ(walked(with_kv(dense(7, kWalkedTokens + 1))), Walked::kNone);
}

TEST(Walks, PacksByTheirAverageLength) {
  EXPECT_EQ(walked(packed(2, kFoldedTokens)), Walked::kAll);  // no sequence can be longer
  EXPECT_EQ(walked(packed(2, kFoldedTokens + 1)), Walked::kSome);
  EXPECT_EQ(walked(with_kv(packed(2, kFoldedTokens))), Walked::kSome);
  EXPECT_EQ(walked(packed(8, 8 * kUsuallyLong - 1)), Walked::kSome);
  EXPECT_EQ(walked(packed(8, 8 * kUsuallyLong)), Walked::kNone);
  EXPECT_EQ(walk_plan(packed(8, 200)).longest, kFoldedTokens);
  EXPECT_EQ(walk_plan(with_kv(packed(8, 200))).longest, kWalkedTokens);
}

TEST(Walks, AllOfFewTokens) {
  EXPECT_EQ(walked(packed(64, 64)), Walked::kAll);
  EXPECT_EQ(walked(packed(16, 64)), Walked::kAll);
  EXPECT_EQ(walk_plan(packed(16, 64)).longest, 64);  // one of them may have all tokens
  EXPECT_EQ(walked(packed(15, 64)), Walked::kSome);
  EXPECT_EQ(walked(packed(65, 65)), Walked::kSome);
  EXPECT_EQ(walked(with_kv(packed(64, 64))), Walked::kAll);
  EXPECT_EQ(walked(with_kv(packed(63, 64))), Walked::kSome);
  ForwardProblem p = packed(64, 64);  // a sequence of 64 tokens has a checkpoint, which only chunks store
  p.checkpoints = p.final;
  p.checkpoint_every = 64;
  EXPECT_EQ(walked(p), Walked::kSome);
}

TEST(Walks, SeveralTokensAtATimeWhereDecodeDoes) {
  EXPECT_TRUE(walk_plan(packed(7, 100)).folds);
  EXPECT_FALSE(walk_plan(with_kv(packed(7, 100))).folds);
  ForwardProblem p = packed(7, 100);
  p.final.dtype = GD_BF16;  // another type than the initial states have
  EXPECT_FALSE(walk_plan(p).folds);
  EXPECT_EQ(walk_plan(p).longest, kWalkedTokens);
}

TEST(Walks, NothingThatABackwardNeeds) {
  for (ForwardProblem p : {dense(7, 1), packed(7, 100)}) {
    p.saved.present = true;
    EXPECT_EQ(walked(p), Walked::kNone);
  }
}

// Whether a sequence is walked then depends on its own length alone.
TEST(Walks, OfABatchInvariantCallAlwaysTheSame) {
  for (const int64_t tokens : {int64_t{64}, int64_t{100}, 80 * kUsuallyLong, int64_t{1} << 20}) {
    ForwardProblem p = packed(80, tokens);
    p.batch_invariant = true;
    EXPECT_EQ(walked(p), Walked::kSome);
    EXPECT_EQ(walk_plan(p).longest, kFoldedTokens);
  }
}

// A launch has fewer than 2^31 CTAs, however many sequences and heads there are.
TEST(Walks, NothingOfTooManyHeads) {
  EXPECT_EQ(walked(dense(kMaxDecodePairs / 64, 1, 64)), Walked::kAll);
  EXPECT_EQ(walked(dense(kMaxDecodePairs / 64 + 1, 1, 64)), Walked::kNone);
}

}  // namespace
}  // namespace gatedelta::cuda::sm90
