// The list of work (src/cuda/forward/schedule.hpp), as the scheduler makes it, of many random batches and cuts: every
// chunk is put out once, every piece begins with a state that is right, and nothing waits for what comes later.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "cuda/schedule/work_list.hpp"

#include "cuda/schedule/cost_model.hpp"

namespace gatedelta::cuda {
namespace {

struct Batch {
  std::vector<int> rows;                        // of each sequence, longest first
  std::vector<std::vector<ChunkDecay>> decays;  // of each pair of sequence and head
  int heads;
  int chunks(int n) const { return (rows[n] + kChunkTokens - 1) / kChunkTokens; }
  int seq_heads() const { return static_cast<int>(rows.size()) * heads; }
  int first_token(int n) const {
    int at = 0;
    for (int m = 0; m < n; ++m) at += rows[m];
    return at;
  }
  int first_chunk_index(int n) const {
    int at = 0;
    for (int m = 0; m < n; ++m) at += chunks(m) + 1;
    return at;
  }
  WorkItem whole(int seq_head) const {
    WorkItem item{};
    item.kind = kOutputs;
    item.sequence = seq_head / heads;
    item.head = item.key_head = seq_head % heads;
    item.half = kWhole;
    item.token = item.origin = first_token(item.sequence);
    item.tokens = rows[item.sequence];
    item.prepared = first_chunk_index(item.sequence) * heads + item.head;
    item.from = kFromInitial;
    item.to = kToFinal;
    return item;
  }
};

// The number of a chunk among those walked through, and the chunk at such a number.
template <Pass kPass>
int walked(int chunk, int chunks) {
  return kPass == Pass::kBackward ? chunks - 1 - chunk : chunk;
}

struct List {
  Cut cut;  // what is left of it
  std::vector<WorkItem> items;
  int boundaries;
  bool in_place;  // final states may overwrite initial ones
};

// What Scheduler does, one thread after the other.
template <Pass kPass>
List list_of(const Batch& batch, Cut cut, const Limits& limits, int lanes, bool in_place) {
  std::vector<bool> persists(batch.seq_heads(), false);
  std::vector<std::vector<uint8_t>> windows(batch.seq_heads());
  for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
    const int chunks = batch.chunks(seq_head / batch.heads), segments = segments_of(chunks, cut.decaying);
    if (chunks > 0 && segments == 1)
      persists[seq_head] = batch.decays[seq_head][chunks / 2].log2_left > usual_log2_left<kPass>();
    for (int i = 1; i < segments; ++i) {
      const int window =
          warmup_length<kPass>(decaying_begin(chunks, segments, i), warmup_limit<kPass>(cut.decaying),
                               [&](int c) { return batch.decays[seq_head].at(walked<kPass>(c, chunks)); });
      windows[seq_head].push_back(static_cast<uint8_t>(window == kNoWarmup ? 0 : window));
      if (window == kNoWarmup) persists[seq_head] = true;
    }
  }
  std::vector<EntryCounts> before(batch.seq_heads());
  EntryCounts total{0};
  do {
    total.all = 0;
    for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
      const int chunks = batch.chunks(seq_head / batch.heads);
      before[seq_head] = total;
      total.all += entries_of(segments_of<kPass>(cut, chunks, persists[seq_head]), chunks, persists[seq_head],
                              cut.halves ? 2 : 1)
                       .all;
    }
  } while (!fits(cut, total, limits));
  List list{cut, std::vector<WorkItem>(total.entries(cut.halves ? 2 : 1)), total[EntryCounts::kBoundaries], in_place};
  std::vector<int> puts(list.items.size(), 0);
  const ListPlan plan{cut, total, limits.blocks, is_longer_than_chain(cut, batch.chunks(0)), batch.heads, in_place};
  for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
    const int chunks = batch.chunks(seq_head / batch.heads),
              segments = segments_of<kPass>(cut, chunks, persists[seq_head]);
    for (int lane = 0; lane < lanes; ++lane) {
      list_seq_head<kPass>(plan, batch.whole(seq_head), seq_head, chunks, segments, persists[seq_head],
                           before[seq_head], windows[seq_head].data(), lane, lanes, [&](int i, const WorkItem& item) {
                             list.items.at(i) = item;
                             ++puts[i];
                           });
    }
  }
  for (const int n : puts) EXPECT_EQ(n, 1);
  return list;
}

// Goes through a list as blocks would that take one item after the other.
template <Pass kPass>
struct Checker {
  static constexpr bool kReverse = kPass == Pass::kBackward;
  const Batch& batch;
  struct Boundary {
    int ready = 0, seq_head = -1, at = -1;  // the state before the at'th chunk that is walked through
  };
  std::vector<Boundary> boundaries;
  std::map<std::vector<int>, int> stored;  // [sequence, head, half, chunk]: how often
  std::map<int, int> final_states;
  // By (sequence, head) pair, counted in warpgroups: how many read the initial state and signal it (of the items taken
  // so far), and how many of those a final state waits for.
  std::map<int, int> readers, awaited_readers;
  std::map<int, int> segment_begin;  // of the transition of a boundary

  Checker(const Batch& b, int count) : batch(b), boundaries(count) {}

  // The chunks of an item, as kernels walk through them: their numbers in that order.
  struct Walk {
    int first, end, warmup_tokens;  // walked chunks
  };
  Walk walk(const WorkItem& it) {
    using Chunk = ChunkAt<kReverse>;
    const int chunks = batch.chunks(it.sequence), token = batch.first_token(it.sequence);
    Walk walk{-1, 0, 0};
    int prepared = it.prepared, rows = it.tokens;
    for (Chunk at = Chunk::first_of(it); at.tokens_left > 0; at = at.next(), rows -= kChunkTokens) {
      const int chunk = (at.token - token) / kChunkTokens, number = walked<kPass>(chunk, chunks);
      EXPECT_EQ((at.token - token) % kChunkTokens, 0);
      EXPECT_TRUE(chunk >= 0 && chunk < chunks);
      EXPECT_EQ(prepared, (batch.first_chunk_index(it.sequence) + chunk) * batch.heads + it.head);
      EXPECT_EQ(at.tokens(), std::min(kChunkTokens, batch.rows[it.sequence] - chunk * kChunkTokens));
      EXPECT_EQ(at.is_whole(), at.tokens() == kChunkTokens);
      const Chunk again = Chunk::of(it, rows);  // by the warp that loads values
      EXPECT_EQ(again.token, at.token);
      EXPECT_EQ(again.tokens(), at.tokens());
      if (walk.first < 0) walk.first = walk.end = number;
      EXPECT_EQ(number, walk.end++);
      if (at.is_warmup()) {
        EXPECT_EQ(number, walk.first + walk.warmup_tokens++);  // all of them first
      } else if (it.kind == kOutputs) {
        for (int half = 0; half < 2; ++half)
          if (it.half == kWhole || it.half == half) ++stored[{it.sequence, it.head, half, chunk}];
      }
      prepared += kReverse ? -batch.heads : batch.heads;
    }
    EXPECT_TRUE(rows > -kChunkTokens && rows <= 0);
    return walk;
  }
  int halves(const WorkItem& it) const { return it.half == kWhole ? 2 : 1; }

  void take(const WorkItem& it) {
    const int seq_head = it.sequence * batch.heads + it.head, chunks = batch.chunks(it.sequence);
    if (it.kind == kMerge) return merge(it, seq_head);
    ASSERT_TRUE(it.half == kWhole || it.half == 0 || it.half == 1);
    const Walk w = walk(it);
    if (it.kind == kTransition) {
      EXPECT_EQ(it.from, kFromZero);
      EXPECT_EQ(w.warmup_tokens, w.end - w.first);
      ASSERT_TRUE(it.half >= 0 && it.to > 0);
      EXPECT_TRUE(boundaries[it.to].at == -1 || boundaries[it.to].at == w.end);
      boundaries[it.to].seq_head = seq_head;
      boundaries[it.to].at = w.end;
      boundaries[it.to].ready += 2;  // by both warpgroups
      EXPECT_EQ(segment_begin.insert({it.to, w.first}).first->second, w.first);
      return;
    }
    if (it.from == kFromInitial) {
      EXPECT_EQ(w.first, 0);
    } else if (it.from == kFromZero) {
      EXPECT_TRUE(is_forgotten(seq_head, w.first, w.first + w.warmup_tokens));
    } else {
      EXPECT_GE(boundaries[it.from].ready, kStateReady) << "waits for something later in the list";
      EXPECT_EQ(boundaries[it.from].seq_head, seq_head);
      EXPECT_EQ(boundaries[it.from].at, w.first);
    }
    if (it.to >= 0) {
      EXPECT_EQ(it.from, kFromInitial);
      boundaries[it.to].seq_head = seq_head;
      boundaries[it.to].at = w.end;
      boundaries[it.to].ready += kStateReady / 2 * halves(it);
    } else if (it.to == kToFinal) {
      EXPECT_EQ(w.end, chunks);
      EXPECT_LE(it.readers, readers[seq_head]) << "waits for something later in the list";
      EXPECT_TRUE(it.readers == 0 || it.seq_head == seq_head);
      EXPECT_TRUE(final_states[seq_head] == 0 || awaited_readers[seq_head] == it.readers);  // both halves alike
      awaited_readers[seq_head] = it.readers;
      final_states[seq_head] += halves(it);
    } else {
      EXPECT_NE(w.end, chunks);
      if (it.from != kFromInitial) return;
      EXPECT_EQ(it.seq_head, seq_head);
      readers[seq_head] += halves(it);
    }
  }

  void merge(const WorkItem& it, int seq_head) {
    ASSERT_EQ(it.tokens % (kMergeTiles * kChunkTokens), 0);
    EXPECT_EQ(it.warmup_tokens, it.tokens);
    EXPECT_EQ(it.to, it.from + 1);
    EXPECT_EQ(it.prepared, it.to * kBoundaryTiles);
    EXPECT_GE(boundaries[it.from].ready, kStateReady) << "waits for something later in the list";
    for (int i = 0; i < it.tokens / (kMergeTiles * kChunkTokens); ++i) {
      const Boundary& last = boundaries[it.from + i];
      Boundary& next = boundaries[it.to + i];
      EXPECT_EQ(last.seq_head, seq_head);
      EXPECT_EQ(next.seq_head, seq_head);
      EXPECT_EQ(segment_begin[it.to + i], last.at);
      EXPECT_GE(next.ready, kTransitionReady) << "waits for something later in the list";
      next.ready += 2;
    }
  }

  bool is_forgotten(int seq_head, int begin, int end) const {
    const int chunks = batch.chunks(seq_head / batch.heads);
    double log2_left = 0, written = 0;
    for (int c = end - 1; c >= begin; --c) {
      const ChunkDecay& decay = batch.decays[seq_head][walked<kPass>(c, chunks)];
      written += decay.written * std::exp2(log2_left);
      log2_left += decay.log2_left;
    }
    return kReverse ? log2_left < kNegligibleGradientLog2
                    : std::exp2(log2_left) < 1.001 * kNegligible * std::min(1.0, written);
  }

  void check(const List& list) {
    for (const WorkItem& it : list.items) take(it);
    for (const Boundary& boundary : boundaries) EXPECT_EQ(boundary.ready, kStateReady);
    for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
      const int n = seq_head / batch.heads;
      for (int c = 0; c < batch.chunks(n); ++c)
        for (int half = 0; half < 2; ++half) EXPECT_EQ((stored[{n, seq_head % batch.heads, half, c}]), 1);
      EXPECT_EQ(final_states[seq_head], batch.chunks(n) ? 2 : 0);
      // A final state that may overwrite the initial one waits for everyone who reads that: no more, no fewer.
      EXPECT_EQ(awaited_readers[seq_head], list.in_place ? readers[seq_head] : 0);
    }
  }
};

Batch random_batch(std::mt19937& random) {
  Batch batch;
  batch.heads = 1 + static_cast<int>(random() % 4);
  for (int n = 1 + static_cast<int>(random() % 4); n > 0; --n)
    batch.rows.push_back(static_cast<int>(random() % (random() % 2 ? 300 : 9000)));
  std::sort(batch.rows.rbegin(), batch.rows.rend());
  for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
    const float paces[] = {0, -0.4f, -3, -4.6f, -12, -150};
    const float pace = paces[random() % 6];
    std::vector<ChunkDecay>& decays = batch.decays.emplace_back();
    for (int c = 0; c < batch.chunks(seq_head / batch.heads); ++c)
      decays.push_back({pace - (random() % 40 ? 0.0f : 200.0f), static_cast<float>(random() % 40) * 0.1f});
  }
  return batch;
}

template <Pass kPass>
void check_lists(int seed) {
  std::mt19937 random(seed);
  int cuts = 0, merges = 0, warmups = 0, one_reader = 0, more_readers = 0;
  for (int round = 0; round < 400; ++round) {
    const Batch batch = random_batch(random);
    const int decaying = length_number(static_cast<int>(random() % kDecayingLengths));
    const int persistent = length_number(static_cast<int>(random() % kPersistentLengths));
    const Limits limits{132, round % 4 ? 6144 : 2 * batch.seq_heads() + static_cast<int>(random() % 20),
                        round % 3 ? 384 : static_cast<int>(random() % 5)};
    const bool in_place = kPass != Pass::kBackward && random() % 4;
    const List list =
        list_of<kPass>(batch, {decaying, persistent, random() % 2 == 0}, limits, 1 << random() % 6, in_place);
    EXPECT_LE(static_cast<int>(list.items.size()), limits.entries);
    EXPECT_LE(list.boundaries, limits.boundaries);
    Checker<kPass>(batch, list.boundaries).check(list);
    cuts += list.cut.decaying || list.cut.persistent;
    for (const WorkItem& it : list.items) {
      merges += it.kind == kMerge;
      warmups += it.kind == kOutputs && it.warmup_tokens > 0;
      one_reader += it.readers == 2;  // two warpgroups read for every segment
      more_readers += it.readers > 2;
    }
    if (::testing::Test::HasFailure()) FAIL() << "in round " << round;
  }
  EXPECT_GT(cuts, 100);
  EXPECT_GT(merges, 100);
  EXPECT_GT(warmups, 100);
  EXPECT_TRUE(kPass == Pass::kBackward || (one_reader > 100 && more_readers > 50)) << one_reader << " " << more_readers;
}

TEST(List, OfOutputs) { check_lists<Pass::kForward>(1); }
TEST(List, OfStates) { check_lists<Pass::kStates>(2); }
TEST(List, OfGradients) { check_lists<Pass::kBackward>(3); }

// A saved list is used only under the limits it was made for: with fewer boundaries, its items would write behind them.
TEST(Limits, AreEqualOnlyIfAllAre) {
  const Limits limits{132, 600, 40};
  EXPECT_TRUE(limits == (Limits{132, 600, 40}));
  EXPECT_FALSE(limits == (Limits{131, 600, 40}));
  EXPECT_FALSE(limits == (Limits{132, 599, 40}));
  EXPECT_FALSE(limits == (Limits{132, 600, 39}));
}

// Where nothing is cut the second list is the first one, mirrored.
TEST(List, OfWholeSequencesIsMirrored) {
  Batch batch{{1000, 640, 64, 63, 1, 0}, {}, 3};
  for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
    const WorkItem item = mirrored(batch.whole(seq_head), batch.heads);
    const int chunks = batch.chunks(item.sequence);
    Checker<Pass::kBackward> checker(batch, 0);
    if (chunks == 0) {
      EXPECT_EQ(item.tokens, 0);
      continue;
    }
    checker.take(item);
    EXPECT_EQ(checker.stored.size(), 2u * static_cast<size_t>(chunks));
    EXPECT_EQ(checker.final_states[seq_head], 2);
  }
}

}  // namespace
}  // namespace gatedelta::cuda
