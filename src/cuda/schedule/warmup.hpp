// Warm-up: how many chunks before a boundary give the state there without what came before them.
#pragma once

#include "cuda/schedule/work_item.hpp"

namespace gatedelta::cuda {

// What prepare notes of a chunk and value head. A state from before is at most 2^fade of itself after it (every token
// scales it by its gate and by |1 - beta |k|^2| at most), and what the chunk writes weighs `written` at its end: the
// sum of beta_j times the decay since j. Negative: some token may make a state grow, nothing is known of weights.
struct alignas(8) ChunkDecay {
  float log2_left, written;
};

// Chunks before a boundary from which the state there can be computed to fp32's accuracy without what was before them;
// all there are if they reach the beginning; none if that takes more than `limit`. What is left out is below 2^-24 of
// the older state *and* of what was written since, for if little was written the little counts.
constexpr float kNegligible = 5.9604645e-8f, kNegligibleLog2 = -24.0f;  // 2^-24
// A gradient of a state has no such weight: what is added to it depends on d_o, which may be 0 for as long as it likes.
// All that is known is what is left of the older one. Below 2^-48 of it nothing counts beside what it has led to
// before, nor beside what came since unless that is 2^-24 of it or less.
constexpr float kNegligibleGradientLog2 = -48.0f;
constexpr int kNoWarmup = -1;
template <Pass kPass = Pass::kForward, class Decays>
GD_HOST_DEVICE int warmup_length(int boundary, int limit, const Decays& decays) {
  constexpr bool kGradients = kPass == Pass::kBackward;
  constexpr float kEnough = kGradients ? kNegligibleGradientLog2 : kNegligibleLog2;
  constexpr int kAtOnce = kGradients ? 16 : 8;  // asked for before the first is looked at; for most heads these will do
  const int last = boundary <= limit ? boundary - 1 : limit;
  float log2_left = 0, left = 1, written = 0;
  bool weighs = true;
  int found = 0;
  int done = 0;
  bool is_slow = false;  // at this pace it would take much too long; nothing is lost by not looking further
  GD_NO_UNROLL for (; done < last && found == 0 && !is_slow; done += kAtOnce) {
    ChunkDecay chunks[kAtOnce];
    GD_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = boundary - 1 - done - i;
      chunks[i] = decays(chunk < 0 ? 0 : chunk);
    }
    // Without a jump: threads that jump from different places take one after the other what is left to do.
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
  // Then it is all there are, if they are not too many. For gradients silent chunks take as long as others: that is
  // only worth it if they are few, or if the boundaries after this one will have windows.
  const bool is_worth = !kGradients || 2 * boundary <= limit ||
                        (!is_slow && log2_left * static_cast<float>(limit) <= kEnough * static_cast<float>(last));
  return boundary <= limit && is_worth ? boundary : kNoWarmup;
}

// A window that would take longer than what it saves is none. Gradients need four times as much to be forgotten; twice
// the limit lets gates as models have them have windows also where segments are short.
template <Pass kPass = Pass::kForward>
GD_HOST_DEVICE int warmup_limit(int length) {
  const int limit = length < 8 ? 12 : length > 20 ? 30 : length * 3 / 2;
  return kPass == Pass::kBackward ? 2 * limit : limit;
}
// What a chunk leaves of an older state, if the head fades; about.
template <Pass kPass>
GD_HOST_DEVICE float usual_log2_left() {
  return (kPass == Pass::kBackward ? kNegligibleGradientLog2 : kNegligibleLog2) /
         static_cast<float>(warmup_limit<kPass>(0));
}

}  // namespace gatedelta::cuda
