// How much of a state is left after chunks: records of decay joined, and the windows of summaries.
#include "cuda/device/fade.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace gatedelta::cuda {
namespace {

using Decays = std::vector<ChunkDecay>;

// Reads of other chunks than those of the sequence fail: they are another sequence's, or nobody's.
auto reader(const Decays& decays) {
  return [&decays](int chunk) {
    EXPECT_GE(chunk, 0);
    EXPECT_LT(chunk, static_cast<int>(decays.size()));
    return decays.at(static_cast<size_t>(chunk));
  };
}

TEST(Decay, WhatWasWrittenDecaysByWhatFollows) {
  const ChunkDecay both = joined({-3, 0.5f}, {-2, 0.125f});
  EXPECT_EQ(both.log2_left, -5);
  EXPECT_EQ(both.written, 0.5f / 4 + 0.125f);
  const ChunkDecay first = {-1, 1}, second = {-4, 2}, third = {-2, 0.25f};
  const ChunkDecay left = joined(joined(first, second), third), right = joined(first, joined(second, third));
  EXPECT_EQ(left.log2_left, right.log2_left);
  EXPECT_EQ(left.written, right.written);
}
TEST(Decay, WeightsAreUnknownWhereAnyIs) {
  EXPECT_LT(joined({-3, -1}, {-2, 1}).written, 0);
  EXPECT_LT(joined({-3, 1}, {-2, -1}).written, 0);
  EXPECT_EQ(joined({-3, -1}, {-2, 1}).log2_left, -5);
  EXPECT_LT(decay_of(-3, 1, 1).written, 0);  // some token amplifies
  EXPECT_LT(decay_of(-3, 0, NAN).written, 0);
  EXPECT_EQ(decay_of(-3, 1, 1).log2_left, -2);
  EXPECT_EQ(decay_of(-3, 0, 0.5f).written, 0.5f);
}

// The rules once more, one chunk after the other.
Fade plain_fade(const Decays& decays) {
  Fade fade = {0, 0};
  float written = 0;
  bool weighs = true, is_gone = false;
  const int chunks = static_cast<int>(decays.size());
  for (int i = 0; i < chunks; ++i) {
    const ChunkDecay& chunk = decays[static_cast<size_t>(chunks - 1 - i)];
    weighs = weighs && chunk.written >= 0;
    if (weighs) written += chunk.written * std::exp2(fade.log2_left);
    fade.log2_left += chunk.log2_left;
    if (fade.window == 0 && std::exp2(fade.log2_left) < kNegligible * std::fmin(written, 1.0f)) fade.window = i + 1;
    is_gone = is_gone || fade.log2_left < kNegligibleGradientLog2;
  }
  if (!is_gone) fade.window = 0;
  return fade;
}
int plain_gradient_window(const Decays& decays) {
  float log2_left = 0;
  for (size_t i = 0; i < decays.size(); ++i)
    if ((log2_left += decays[i].log2_left) < kNegligibleGradientLog2) return static_cast<int>(i) + 1;
  return static_cast<int>(decays.size());
}

TEST(Fade, IsThatOfThePlainRules) {
  std::mt19937 bits{1};
  int faded = 0, kept = 0, shorter = 0;
  for (int round = 0; round < 2000; ++round) {
    Decays decays(bits() % 70 + 1);
    const auto rate = static_cast<float>(bits() % 8);
    for (ChunkDecay& chunk : decays) {  // multiples of 1/8: sums are exact
      chunk.log2_left = -rate * static_cast<float>(bits() % 17) / 8;
      chunk.written = bits() % 32 == 0 ? -1.0f : static_cast<float>(bits() % 5) / 4;
    }
    const Fade expected = plain_fade(decays), found = find_fade(static_cast<int>(decays.size()), false, reader(decays));
    EXPECT_EQ(found.window, expected.window) << round;
    EXPECT_EQ(found.log2_left, expected.log2_left) << round;
    EXPECT_EQ(find_fade(static_cast<int>(decays.size()), true, reader(decays)).window, expected.window) << round;
    const int window = gradient_window(static_cast<int>(decays.size()), reader(decays));
    EXPECT_EQ(window, plain_gradient_window(decays)) << round;
    ++(expected.window > 0 ? faded : kept);
    shorter += window < static_cast<int>(decays.size());
    if (HasFailure()) FAIL();
  }
  EXPECT_GT(faded, 500);
  EXPECT_GT(kept, 500);
  EXPECT_GT(shorter, 500);
}

// Chunks are looked at several at a time: a window is no longer than the sequence, also where the next chunks, which
// are not there, would decay enough.
TEST(Fade, WindowsEndWithTheSequence) {
  for (int chunks = 1; chunks <= 40; ++chunks) {
    const Decays slow(static_cast<size_t>(chunks), {-47.0f / static_cast<float>(chunks), 1});
    EXPECT_EQ(gradient_window(chunks, reader(slow)), chunks);
    EXPECT_EQ(find_fade(chunks, false, reader(slow)).window, 0) << chunks;
    const Decays fast(static_cast<size_t>(chunks), {-49.0f / static_cast<float>(chunks), 1});
    EXPECT_EQ(gradient_window(chunks, reader(fast)), chunks);
  }
}

}  // namespace
}  // namespace gatedelta::cuda
