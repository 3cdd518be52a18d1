// How sequences are cut (src/cuda/schedule): warm-up lengths, segments, and the cost of a cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <random>
#include <vector>

#include "cuda/sm90/schedule/cost_model.hpp"
#include "cuda/sm90/schedule/work_list.hpp"

namespace gatedelta::cuda::sm90 {
namespace {

TEST(FloorDiv, IsExact) {
  std::mt19937 random(1);
  for (int round = 0; round < 200000; ++round) {
    const int a = static_cast<int>(random() >> (random() % 31 + 1)),
              b = 1 + static_cast<int>(random() >> (random() % 31 + 1)) / 2;
    ASSERT_EQ(floor_div(a, b), a / b) << a << " / " << b;
  }
}

int warmup(const std::vector<ChunkDecay>& chunks, int boundary, int limit) {
  return warmup_length(boundary, limit, [&](int chunk) { return chunks.at(chunk); });
}

TEST(Warmup, LastsUntilTheOldStateHasDecayed) {
  const std::vector<ChunkDecay> chunks(100, {-4.6f, 30});
  EXPECT_EQ(warmup(chunks, 50, 12), 6);  // 6 x 4.6 > 24
  EXPECT_EQ(warmup(chunks, 50, 6), 6);
  EXPECT_EQ(warmup(chunks, 50, 5), kNoWarmup);
  EXPECT_EQ(warmup(chunks, 3, 12), 3);  // all chunks
  EXPECT_EQ(warmup(std::vector<ChunkDecay>(100, {-300, 30}), 50, 12), 1);
}

TEST(Warmup, DependsOnWhatWasWritten) {
  const std::vector<ChunkDecay> chunks(100, {-4.6f, 0x1p-20f});
  EXPECT_EQ(warmup(chunks, 50, 12), 10);  // 2^-20 counts
  EXPECT_EQ(warmup(std::vector<ChunkDecay>(100, {-4.6f, 0}), 50, 30),
            kNoWarmup);  // nothing written: the old state counts, however small
  EXPECT_EQ(warmup(std::vector<ChunkDecay>(100, {-300, 0}), 50, 30), kNoWarmup);
}

TEST(Warmup, IgnoresWritesBeforeAStateMayGrow) {
  std::vector<ChunkDecay> chunks(100, {-4.6f, 30});
  chunks[48].written = -1;  // writes up to here have no known weight; the 30 after it is enough
  EXPECT_EQ(warmup(chunks, 50, 12), 6);
  chunks[49].written = -1;
  EXPECT_EQ(warmup(chunks, 50, 12), kNoWarmup);
  for (ChunkDecay& chunk : chunks) chunk.log2_left = std::nanf("");
  EXPECT_EQ(warmup(chunks, 50, 12), kNoWarmup);
}

TEST(Warmup, MatchesItsDefinition) {
  std::mt19937 random(7);
  int warmups = 0, missed = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<ChunkDecay> chunks(70);
    const int pace = static_cast<int>(random() % 9);
    for (ChunkDecay& chunk : chunks) {
      chunk.log2_left = 1 - static_cast<float>(random() % (pace + 2));
      chunk.written = random() % 40 == 0 ? -1.0f : std::ldexp(1.0f, -static_cast<int>(random() % 12));
    }
    const int boundary = 1 + static_cast<int>(random() % 69), limit = 1 + static_cast<int>(random() % 30);
    double left = 1, written = 0;
    bool weighs = true;
    int expected = boundary <= limit ? boundary : kNoWarmup;
    for (int n = 1; n < boundary && n <= limit; ++n) {
      const ChunkDecay& chunk = chunks[boundary - n];
      weighs = weighs && chunk.written >= 0;
      if (weighs) written += chunk.written * left;
      left *= std::exp2(chunk.log2_left);
      if (left >= std::ldexp(std::min(written, 1.0), -24)) continue;
      expected = n;
      break;
    }
    warmups += expected > 0 && expected < boundary;
    const int found = warmup(chunks, boundary, limit);
    if (found == expected) continue;
    // The search stops early if the first chunks decay slowly. All chunks are a valid warm-up too.
    ASSERT_EQ(found, boundary <= limit ? boundary : kNoWarmup) << "trial " << trial;
    ++missed;
  }
  EXPECT_GT(warmups, 2000);
  EXPECT_LT(missed, warmups / 20);
}

// Writes to a state gradient have no known weight: only the decay counts, down to 2^-48.
TEST(Warmup, OfGradients) {
  const auto warmup = [](const std::vector<ChunkDecay>& chunks, int boundary, int limit) {
    return warmup_length<Pass::kBackward>(boundary, limit, [&](int chunk) { return chunks.at(chunk); });
  };
  for (const float written : {-1.0f, 0.0f, 30.0f}) {
    const std::vector<ChunkDecay> chunks(100, {-4.6f, written});
    EXPECT_EQ(warmup(chunks, 50, 24), 11);  // 11 x 4.6 > 48
    EXPECT_EQ(warmup(chunks, 50, 11), 11);
    EXPECT_EQ(warmup(chunks, 50, 10), kNoWarmup);
    EXPECT_EQ(warmup(chunks, 3, 24), 3);  // all chunks
    EXPECT_EQ(warmup(chunks, 10, 24), 10);
  }
  EXPECT_EQ(warmup(std::vector<ChunkDecay>(100, {0, 30}), 12, 24), 12);  // few
  EXPECT_EQ(warmup(std::vector<ChunkDecay>(100, {0, 30}), 13, 24), kNoWarmup);
  EXPECT_EQ(warmup(std::vector<ChunkDecay>(100, {-300, 0}), 50, 24), 1);
  EXPECT_EQ(warmup(std::vector<ChunkDecay>(100, {0, 30}), 50, 60), kNoWarmup);
  EXPECT_EQ(warmup(std::vector<ChunkDecay>(100, {3, 30}), 50, 60), kNoWarmup);
  EXPECT_EQ(warmup(std::vector<ChunkDecay>(100, {std::nanf(""), 30}), 50, 60), kNoWarmup);
  std::vector<ChunkDecay> grows(100, {-10, 30});
  grows[48].log2_left = 30;
  EXPECT_EQ(warmup(grows, 50, 24), 9);  // 8 x 10 - 30
}

// The limit leaves room for the gates of real models at every segment length, and a byte holds it.
TEST(Warmup, HasALimit) {
  for (int length = 1; length < 300; ++length) {
    EXPECT_GE(warmup_limit(length), 6);
    EXPECT_GE(warmup_limit<Pass::kBackward>(length), 11);
    EXPECT_LT(warmup_limit<Pass::kBackward>(length), 256);
  }
  EXPECT_FLOAT_EQ(usual_log2_left<Pass::kForward>(), -2);
  EXPECT_FLOAT_EQ(usual_log2_left<Pass::kBackward>(), -2);
}

TEST(Warmup, DoesNotExistWithoutDecay) {
  const std::vector<ChunkDecay> chunks(100, {0, 30});
  EXPECT_EQ(warmup(chunks, 50, 30), kNoWarmup);
  EXPECT_EQ(warmup(chunks, 30, 30), 30);  // up to the beginning
}

TEST(Segments, CoverASequence) {
  for (int chunks = 1; chunks < 300; ++chunks) {
    for (const int length : {0, 1, 2, 3, 7, 64, 1000}) {
      const int segments = segments_of(chunks, length);
      EXPECT_EQ(decaying_begin(chunks, segments, 0), 0);
      EXPECT_EQ(decaying_begin(chunks, segments, segments), chunks);
      EXPECT_EQ(persistent_begin(chunks, segments, 0), 0);
      EXPECT_EQ(persistent_begin(chunks, segments, segments), chunks);
      for (int i = 0; i < segments; ++i) {
        const int decaying = decaying_begin(chunks, segments, i + 1) - decaying_begin(chunks, segments, i);
        EXPECT_GE(decaying, 1);
        EXPECT_LE(decaying, length > 0 ? length : chunks);
        EXPECT_GE(persistent_begin(chunks, segments, i + 1) - persistent_begin(chunks, segments, i), 1)
            << chunks << " in " << segments;
      }
    }
  }
}

// In the backward a warm-up chunk costs as much as any other, so two segments are as slow as one.
TEST(Segments, OfABackwardAreNeverTwo) {
  for (int chunks = 1; chunks < 300; ++chunks) {
    for (const int length : {0, 1, 2, 3, 7, 64, 1000}) {
      const int segments = persistent_segments<Pass::kBackward>(chunks, length);
      EXPECT_EQ(segments, persistent_segments<Pass::kStates>(chunks, length));
      EXPECT_EQ(segments_of(chunks, length), persistent_segments(chunks, length));
      EXPECT_NE(segments, 2);
      EXPECT_LE(segments, chunks);
      EXPECT_TRUE(segments == segments_of(chunks, length) || segments_of(chunks, length) == 2);
      EXPECT_EQ(persistent_begin<Pass::kBackward>(chunks, segments, segments), chunks);
    }
  }
}

TEST(LengthClasses, GroupEqualLengths) {
  LengthClass classes[kMaxClasses];
  const int chunks[] = {100, 7, 100, 0, 7, 7};
  ASSERT_EQ(length_classes(chunks, 6, 8, 1, classes), 2);
  EXPECT_EQ(classes[0].chunks, 100);
  EXPECT_EQ(classes[0].decaying, 2 * 6);
  EXPECT_EQ(classes[0].persistent, 2 * 2);
  EXPECT_EQ(classes[1].chunks, 7);
  EXPECT_EQ(classes[1].decaying, 3 * 6);
  const int many[] = {100, 90, 60, 30, 20, 10};  // more lengths than classes
  ASSERT_EQ(length_classes(many, 6, 4, 0, classes), 4);
  EXPECT_EQ(classes[0].chunks, 95);
  EXPECT_EQ(classes[3].chunks, 15);
  int heads = 0;
  for (const LengthClass& c : {classes[0], classes[1], classes[2], classes[3]}) heads += c.decaying + c.persistent;
  EXPECT_EQ(heads, 6 * 4);
  EXPECT_EQ(length_classes(many, 0, 4, 0, classes), 0);
}

// The same, one piece at a time.
float run_one_by_one(const std::vector<Pieces>& list, int blocks) {
  std::priority_queue<float, std::vector<float>, std::greater<>> free;
  for (int i = 0; i < blocks; ++i) free.push(0);
  float end = 0;
  for (const Pieces& pieces : list) {
    for (int i = 0; i < pieces.number; ++i) {
      const float done = free.top() + pieces.size;
      free.pop();
      free.push(done);
      end = std::max(end, done);
    }
  }
  return end;
}

TEST(Timeline, IsCloseToTheTruth) {
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    std::vector<Pieces> list(1 + random() % 4);
    for (Pieces& pieces : list) pieces = {static_cast<int>(random() % 600), 1.0f + static_cast<float>(random() % 100)};
    Timeline timeline(132);
    for (const Pieces& pieces : list) timeline.run(pieces);
    const float truth = run_one_by_one(list, 132);
    EXPECT_NEAR(timeline.end, truth, 0.25f * truth + 1);
  }
  Timeline even(132);
  even.run({256, 10});
  EXPECT_FLOAT_EQ(even.end, 20);  // two rounds
  Timeline late(132);
  EXPECT_FLOAT_EQ(late.run({10, 5}, 100), 105);
}

Cut best_cut(const std::vector<int>& chunks, int heads, int share, const Limits& limits = {132, 6000, 384}) {
  LengthClass classes[kMaxClasses];
  const int count = length_classes(chunks.data(), static_cast<int>(chunks.size()), heads, share, classes);
  int longest = 0;
  for (const int c : chunks) longest = std::max(longest, c);
  return cut_number(fastest_cut(classes, count, longest, limits, true).number, length_scale(longest));
}

TEST(Choice, CutsWhereThereAreFewHeads) {
  const Cut full = best_cut({128, 128, 128, 128}, 64, 1);  // 256 heads on 132 CTAs: two rounds
  EXPECT_EQ(full.decaying, 0);
  EXPECT_EQ(full.persistent, 0);
  EXPECT_FALSE(full.halves);
  const Cut few = best_cut({512}, 8, 1);
  EXPECT_GT(few.decaying, 4);
  EXPECT_LT(few.decaying, 100);
  EXPECT_GT(few.persistent, 4);
  EXPECT_LT(few.persistent, 64);
  EXPECT_LE(segments_of(512, best_cut({512}, 8, 1, {132, 6000, 0}).persistent), 2);  // no room for boundaries
  EXPECT_LE(segments_of(1, best_cut({1}, 8, 0).decaying), 1);
}

int busy_parts(const std::vector<int>& chunks, int heads) {
  LengthClass classes[kMaxClasses] = {};
  const int count = length_classes(chunks.data(), static_cast<int>(chunks.size()), heads, 0, classes);
  return busy_parts(classes, count, 132);
}

TEST(Choice, DoesNotCutWhatKeepsTheGpuBusy) {
  EXPECT_EQ(busy_parts({128, 128, 128, 128}, 64), 1);
  EXPECT_EQ(busy_parts(std::vector<int>(8, 16), 16), 1);
  EXPECT_EQ(busy_parts(std::vector<int>(40, 20), 24), 1);
  EXPECT_EQ(busy_parts({64}, 64), 2);
  EXPECT_EQ(busy_parts({512}, 64), 0);  // pieces of whole heads are faster
  EXPECT_EQ(busy_parts({32, 32}, 32), 2);
  EXPECT_EQ(busy_parts({128, 128, 128, 128}, 48), 0);
  EXPECT_EQ(busy_parts({512}, 48), 0);
  EXPECT_EQ(busy_parts({448, 64}, 64), 0);
  EXPECT_EQ(busy_parts({}, 64), 1);
}

bool is_balanced(const std::vector<int>& chunks, int heads) {
  return is_balanced(lengths_of(chunks.data(), static_cast<int>(chunks.size())), heads, 132);
}

TEST(Choice, BalancesHeadsThatFillTheLastRoundBadly) {
  EXPECT_TRUE(is_balanced({32, 32, 32, 32}, 48));  // 192 on 132 CTAs
  EXPECT_TRUE(is_balanced(std::vector<int>(8, 64), 24));
  EXPECT_TRUE(is_balanced({33, 32, 32, 31}, 48));
  EXPECT_FALSE(is_balanced({32, 32, 32, 32}, 64));          // 256 of 264
  EXPECT_FALSE(is_balanced({32, 32, 32, 32}, 24));          // a stretch would be shorter than a head
  EXPECT_FALSE(is_balanced({128, 8, 8, 8}, 48));            // likewise
  EXPECT_FALSE(is_balanced(std::vector<int>(8, 16), 24));   // short: an item more costs more than it balances
  EXPECT_FALSE(is_balanced(std::vector<int>(60, 20), 18));  // nine rounds fill themselves
  EXPECT_FALSE(is_balanced({}, 48));
}

TEST(Choice, CutsLongSequencesIntoLongSegments) {
  EXPECT_EQ(length_scale(512), 1);
  EXPECT_EQ(length_scale(513), 2);
  const Cut cut = best_cut({8192}, 60, 1);
  EXPECT_GT(segments_of(8192, cut.decaying), 1);
  EXPECT_LT(segments_of(8192, cut.decaying), 20);
}

TEST(Choice, StaysWithinItsLimits) {
  std::mt19937 random(3);
  for (int round = 0; round < 30; ++round) {
    std::vector<int> chunks(1 + random() % 6);
    for (int& c : chunks) c = 1 + static_cast<int>(random() % 1000);
    const int heads = 1 + static_cast<int>(random() % 64), share = static_cast<int>(random() % kShares);
    const Limits limits = {132, 2 * heads * static_cast<int>(chunks.size()) + 500, static_cast<int>(random() % 100)};
    const Cut cut = best_cut(chunks, heads, share, limits);
    if (!cut.decaying && !cut.persistent) continue;
    LengthClass classes[kMaxClasses];
    const int count = length_classes(chunks.data(), static_cast<int>(chunks.size()), heads, share, classes);
    int entries = 0, boundaries = 0;
    for (int i = 0; i < count; ++i) {
      entries += pieces_of(cut, classes[i]).most;
      boundaries += pieces_of(cut, classes[i]).boundaries;
    }
    EXPECT_LE(entries, limits.entries);
    EXPECT_LE(boundaries, limits.boundaries);
  }
}

// The cost model counts the entries and boundaries that the work list will have, and `most` covers both kinds of heads.
TEST(Choice, CountsAsTheWorkListDoes) {
  std::mt19937 random(4);
  int merged = 0;
  for (int round = 0; round < 20000; ++round) {
    const LengthClass c{1 + static_cast<int>(random() % 600), static_cast<int>(random() % 50),
                        static_cast<int>(random() % 50)};
    const Cut cut = cut_number(static_cast<int>(random() % kCuts), length_scale(c.chunks));
    const ClassPieces p = pieces_of(cut, c);
    const int per_head = cut.halves ? 2 : 1, heads = c.decaying + c.persistent;
    const EntryCounts decaying = entries_of(segments_of(c.chunks, cut.decaying), c.chunks, false, per_head);
    EXPECT_EQ(p.decaying.number, c.decaying * decaying[EntryCounts::kFree]);
    EXPECT_GE(p.most, heads * decaying.entries(per_head));
    if (p.merges.number == 0) continue;
    ++merged;
    const EntryCounts persistent = entries_of(segments_of(c.chunks, cut.persistent), c.chunks, true, per_head);
    EXPECT_EQ(p.first.number, c.persistent * persistent[EntryCounts::kFirst]);
    EXPECT_EQ(p.merges.number, c.persistent * persistent[EntryCounts::kMerges]);
    EXPECT_EQ(p.boundaries, c.persistent * persistent[EntryCounts::kBoundaries]);
    EXPECT_EQ(p.waiting.number, per_head * p.boundaries);
    EXPECT_GE(p.most, heads * persistent.entries(per_head));
  }
  EXPECT_GT(merged, 1000);
}

// The scheduler keeps a warm-up length per boundary of every head, in shared memory, before it knows whether the list
// fits. Lengths within a class may differ.
TEST(Choice, LeavesRoomForAllWarmups) {
  std::mt19937 random(5);
  int most = 0;
  for (int round = 0; round < 150; ++round) {
    std::vector<int> chunks(1 + random() % kMaxPlannedSequences);
    const int longest = 1 << random() % 13;
    for (int& c : chunks) c = static_cast<int>(random() % (longest + 1));
    const int count = static_cast<int>(chunks.size()), heads = std::max(1, kMaxPlannedSeqHeads / count >> random() % 6);
    const Cut cut = best_cut(chunks, heads, static_cast<int>(random() % kShares), {132, kMaxPlannedEntries, 384});
    int warmups = 0;
    for (const int c : chunks) warmups += heads * (segments_of(c, cut.decaying) - 1);
    EXPECT_LE(warmups, kMaxPlannedEntries);
    most = std::max(most, warmups);
  }
  EXPECT_GT(most, 500);
}

}  // namespace
}  // namespace gatedelta::cuda::sm90
