// Which sequences of a forward are short. They have a kernel of their own (sm90/forward/short_sequences.cu), because
// their states, not their products, take the time. Pure host arithmetic.
#pragma once

#include "core/problem.hpp"
#include "cuda/decode/config.hpp"
#include "cuda/device/sequences.hpp"

namespace gatedelta::cuda::sm90 {

// The longest short sequences, from times of 128 equal ones on an H200: beyond, a chunk is faster.
constexpr int64_t kMaxWindowMmaTokens = 16;  // several tokens at a time, as decode's `window_mma`
constexpr int64_t kMaxGenericTokens = 2;     // one after the other, as decode's `generic`
// NOTE: the kernel stores no checkpoints, and prepare finds a short sequence by the rows of its first chunk.
static_assert(kMaxWindowMmaTokens < kChunkTokens && kMaxGenericTokens < kChunkTokens);

// With so few tokens in a call, and so few per sequence, one kernel for all sequences beats three, though a few of them
// may be longer than the limits above.
constexpr int64_t kFewTokens = 64, kFewPerWindowMma = 4, kFewPerGeneric = 1;

// From this mean length of a pack on, short sequences are not split off: the chunks of the others hide them, and their
// own kernel would add its time.
constexpr int64_t kUsuallyLong = kChunkTokens;

enum class ShortSequences { kNone, kSome, kAll };
struct ShortPlan {
  ShortSequences which = ShortSequences::kNone;
  int64_t longest = -1;          // tokens of a short sequence
  bool uses_window_mma = false;  // several tokens at a time
};

// A forward as decode sees it.
inline RecurrentProblem recurrent_of(const ForwardProblem& p) {
  RecurrentProblem r;
  static_cast<OutputProblem&>(r) = p;
  return r;
}

inline ShortPlan short_plan(const ForwardProblem& p) {
  const Sequences& s = p.in.sequences;
  // A backward needs what only chunks save.
  if (p.saved || decode_pairs(p.in) > kMaxDecodePairs) return {};
  // In a batch-invariant call the choice depends on a sequence's own length alone.
  const bool is_pack = static_cast<bool>(s.offsets);
  if (s.tokens > kMaxWindowMmaTokens && !(is_pack && (p.batch_invariant || s.tokens < kUsuallyLong * s.count)))
    return {};
  const bool uses_window_mma = p.in.layout == GD_STATE_VK && supports_128(recurrent_of(p));
  const int64_t limit = uses_window_mma ? kMaxWindowMmaTokens : kMaxGenericTokens;
  if (s.tokens <= limit) return {ShortSequences::kAll, limit, uses_window_mma};
  if (!is_pack) return {};
  const bool has_few =
      s.tokens <= kFewTokens && s.tokens <= (uses_window_mma ? kFewPerWindowMma : kFewPerGeneric) * s.count;
  if (has_few && !p.batch_invariant && !p.checkpoints) return {ShortSequences::kAll, kFewTokens, uses_window_mma};
  return {ShortSequences::kSome, limit, uses_window_mma};
}

}  // namespace gatedelta::cuda::sm90
