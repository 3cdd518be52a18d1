// Warm-up: how many chunks before a boundary give the state there without what came before them.
#pragma once

#include "cuda/device/fast_math.hpp"

namespace gatedelta::cuda {

// What a chain computes: outputs, the states before every chunk, or the gradients of states. A backward pass goes from
// a sequence's last chunk to its first: chunk r is then the one with r chunks after it ("mirrored").
enum class Pass { kForward, kStates, kBackward };

// Decay of one chunk and value head, from prepare. After the chunk at most 2^log2_left of an older state is left: each
// token scales it by its gate and by at most |1 - beta |k|^2|. What the chunk itself writes weighs `written` at its
// end, the sum of beta_j times the decay since j. Negative: some token may amplify the state, and the weight is
// unknown.
struct alignas(8) ChunkDecay {
  float log2_left, written;
};
// Of tokens whose gates add up to 2^log2_gates, that may amplify a state by 2^growth, and that write so much.
GD_HOST_DEVICE inline ChunkDecay decay_of(float log2_gates, float growth, float written) {
  return {log2_gates + growth, growth > 0 || !(written >= 0) ? -1.0f : written};
}
// Of tokens and those that follow them.
GD_HOST_DEVICE inline ChunkDecay joined(const ChunkDecay& first, const ChunkDecay& second) {
  const bool weighs = first.written >= 0 && second.written >= 0;
  return {first.log2_left + second.log2_left,
          weighs ? first.written * fast_exp2(second.log2_left) + second.written : -1.0f};
}

// Warm-up length: chunks before a boundary from which the state there follows to fp32's accuracy without anything
// older. Returns all chunks if the warm-up reaches the beginning, and kNoWarmup if it takes more than `limit`. The
// truncation error is below 2^-24 of the old state *and* of everything written since, so a head that nearly stopped
// writing keeps its content.
constexpr float kNegligible = 5.9604645e-8f, kNegligibleLog2 = -24.0f;  // 2^-24
// State gradients have no such lower bound (dO may be zero for arbitrarily long), so only the decay is used, with
// 2^-48: below that the old gradient counts neither beside what it has caused before nor beside anything above 2^-24 of
// it.
constexpr float kNegligibleGradientLog2 = -48.0f;
constexpr int kNoWarmup = -1;
template <Pass kPass = Pass::kForward, class Decays>
GD_HOST_DEVICE int warmup_length(int boundary, int limit, const Decays& decays) {
  constexpr bool kGradients = kPass == Pass::kBackward;
  constexpr float kEnough = kGradients ? kNegligibleGradientLog2 : kNegligibleLog2;
  constexpr int kAtOnce = kGradients ? 16 : 8;  // loads in flight at a time; enough for most heads
  const int last = boundary <= limit ? boundary - 1 : limit;
  float log2_left = 0, left = 1, written = 0;
  bool weighs = true;
  int found = 0;
  int done = 0;
  bool is_slow = false;  // decays so slowly that no warm-up within the limit exists
  GD_NO_UNROLL for (; done < last && found == 0 && !is_slow; done += kAtOnce) {
    ChunkDecay chunks[kAtOnce];
    GD_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = boundary - 1 - done - i;
      chunks[i] = decays(chunk < 0 ? 0 : chunk);
    }
    // Branch-free: threads that leave the loop at different places would run the rest one after the other.
    GD_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const bool counts = done + i < last;
      log2_left += counts ? chunks[i].log2_left : 0.0f;
      bool enough = log2_left < kEnough;
      if constexpr (!kGradients) {
        weighs = weighs && chunks[i].written >= 0;
        written += weighs ? chunks[i].written * left : 0.0f;
        left = fast_exp2(log2_left);
        enough = left < kNegligible * (written < 1 ? written : 1.0f);
      }
      found = found == 0 && counts && enough ? done + i + 1 : found;
    }
    const int counted = done + kAtOnce < last ? done + kAtOnce : last;
    is_slow = log2_left * static_cast<float>(2 * limit) > kEnough * static_cast<float>(counted);
  }
  if (found > 0) return found;
  // Otherwise the warm-up is all chunks there are, if they are not too many. In the gradient chain a warm-up chunk
  // costs as much as any other: that pays only if they are few, or if the boundaries after this one will have warm-ups.
  const bool is_worth = !kGradients || 2 * boundary <= limit ||
                        (!is_slow && log2_left * static_cast<float>(limit) <= kEnough * static_cast<float>(last));
  return boundary <= limit && is_worth ? boundary : kNoWarmup;
}

// The longest warm-up that pays for segments of `length` chunks. Gradients have to decay four times as far; twice the
// limit still gives heads with the gates of real models a warm-up where segments are short.
template <Pass kPass = Pass::kForward>
GD_HOST_DEVICE int warmup_limit(int length) {
  const int limit = length < 8 ? 12 : length > 20 ? 30 : length * 3 / 2;
  return kPass == Pass::kBackward ? 2 * limit : limit;
}
// Per-chunk decay above which a head is taken for persistent.
template <Pass kPass>
GD_HOST_DEVICE float usual_log2_left() {
  return (kPass == Pass::kBackward ? kNegligibleGradientLog2 : kNegligibleLog2) /
         static_cast<float>(warmup_limit<kPass>(0));
}

}  // namespace gatedelta::cuda
