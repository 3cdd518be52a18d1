// Which sequences of a forward are walked: short ones, by a kernel of their own (sm90/forward/short_walk.cu), because
// their states, not their products, take the time. Pure host arithmetic.
#pragma once

#include "core/problem.hpp"
#include "cuda/decode/config.hpp"
#include "cuda/device/sequences.hpp"

namespace gatedelta::cuda::sm90 {

// The longest sequences that are walked, from times of 128 equal ones on an H200: beyond, a chunk is faster.
constexpr int64_t kFoldedTokens = 16;  // several tokens at a time, as decode's `fold`
constexpr int64_t kWalkedTokens = 2;   // one after the other, as decode's `walk`
// NOTE: a walk stores no checkpoints, and prepare knows a walked sequence by the rows of its first chunk.
static_assert(kFoldedTokens < kChunkTokens && kWalkedTokens < kChunkTokens);

// With so few tokens in a call, and so few per sequence, one kernel for all sequences beats three, though a few of them
// may be longer than the limits above.
constexpr int64_t kFewTokens = 64, kFewPerFold = 4, kFewPerWalk = 1;

// Tokens per sequence of a pack, on average, from which on nobody looks for short ones: the chunks of the others hide
// them, and the kernel that looks would take its time after all of these.
constexpr int64_t kUsuallyLong = kChunkTokens;

enum class Walked { kNone, kSome, kAll };
struct WalkPlan {
  Walked which = Walked::kNone;
  int64_t longest = -1;  // tokens of a sequence that is walked
  bool folds = false;    // several tokens at a time
};

// A forward as decode sees it.
inline RecurrentProblem recurrent_of(const ForwardProblem& p) {
  RecurrentProblem r;
  static_cast<OutputProblem&>(r) = p;
  return r;
}

inline WalkPlan walk_plan(const ForwardProblem& p) {
  const Sequences& s = p.in.sequences;
  // A backward needs what only chunks save.
  if (p.saved || decode_pairs(p.in) > kMaxDecodePairs) return {};
  // A batch-invariant call looks at a sequence's own length alone.
  const bool is_pack = static_cast<bool>(s.offsets);
  if (s.tokens > kFoldedTokens && !(is_pack && (p.batch_invariant || s.tokens < kUsuallyLong * s.count))) return {};
  const bool folds = p.in.layout == GD_STATE_VK && is_common(recurrent_of(p));
  const int64_t limit = folds ? kFoldedTokens : kWalkedTokens;
  if (s.tokens <= limit) return {Walked::kAll, limit, folds};
  if (!is_pack) return {};
  const bool has_few = s.tokens <= kFewTokens && s.tokens <= (folds ? kFewPerFold : kFewPerWalk) * s.count;
  if (has_few && !p.batch_invariant && !p.checkpoints) return {Walked::kAll, kFewTokens, folds};
  return {Walked::kSome, limit, folds};
}

}  // namespace gatedelta::cuda::sm90
