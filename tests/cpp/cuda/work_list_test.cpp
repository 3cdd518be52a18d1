// The work list (src/cuda/schedule/work_list.hpp), as the scheduler writes it, for many random batches and cuts: every
// chunk's output is computed once, every item starts from the right state, and no item waits for a later one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "cuda/sm90/schedule/work_list.hpp"

#include "cuda/sm90/schedule/cost_model.hpp"

namespace gatedelta::cuda::sm90 {
namespace {

struct Batch {
  std::vector<int> rows;                        // of each sequence, longest first
  std::vector<std::vector<ChunkDecay>> decays;  // of each (sequence, head) pair
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

// The place of a chunk in the order of the pass, and the chunk at such a place.
template <Pass kPass>
int walked(int chunk, int chunks) {
  return kPass == Pass::kBackward ? chunks - 1 - chunk : chunk;
}

struct List {
  Cut cut;  // perhaps coarsened
  std::vector<WorkItem> items;
  int boundaries;
  bool in_place;  // final states may overwrite initial ones
};

// What Scheduler does, without threads.
template <Pass kPass>
List list_of(const Batch& batch, Cut cut, const Limits& limits, int lanes, bool in_place) {
  std::vector<bool> persists(batch.seq_heads(), false);
  std::vector<std::vector<uint8_t>> warmups(batch.seq_heads());
  for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
    const int chunks = batch.chunks(seq_head / batch.heads), segments = segments_of(chunks, cut.decaying);
    if (chunks > 0 && segments == 1)
      persists[seq_head] = batch.decays[seq_head][chunks / 2].log2_left > usual_log2_left<kPass>();
    for (int i = 1; i < segments; ++i) {
      const int warmup =
          warmup_length<kPass>(decaying_begin(chunks, segments, i), warmup_limit<kPass>(cut.decaying),
                               [&](int c) { return batch.decays[seq_head].at(walked<kPass>(c, chunks)); });
      warmups[seq_head].push_back(static_cast<uint8_t>(warmup == kNoWarmup ? 0 : warmup));
      if (warmup == kNoWarmup) persists[seq_head] = true;
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
                           before[seq_head], warmups[seq_head].data(), lane, lanes, [&](int i, const WorkItem& item) {
                             list.items.at(i) = item;
                             ++puts[i];
                           });
    }
  }
  for (const int n : puts) EXPECT_EQ(n, 1);
  return list;
}

// Takes the items of a list in order, as CTAs do.
template <Pass kPass>
struct Checker {
  static constexpr bool kReverse = kPass == Pass::kBackward;
  const Batch& batch;
  struct Boundary {
    int ready = 0, seq_head = -1, at = -1;  // the state before the at-th chunk of the pass
  };
  std::vector<Boundary> boundaries;
  std::map<std::vector<int>, int> stored;  // [sequence, head, half, chunk]: how often
  std::map<int, int> final_states;
  // By (sequence, head) pair, counted in warpgroups: how many read the initial state and signal it (of the items taken
  // so far), and how many of those a final state waits for.
  std::map<int, int> readers, awaited_readers;
  std::map<int, int> segment_begin;                   // of the transition of a boundary
  std::set<std::pair<int, int>> transitions, merges;  // (boundary, half) that are done

  Checker(const Batch& b, int count) : batch(b), boundaries(count) {}

  // The chunks of an item in the order of the pass.
  struct Walk {
    int first, end, warmup_chunks;  // places in the order of the pass
  };
  Walk walk(const WorkItem& item) {
    using Chunk = ChunkAt<kReverse>;
    const int chunks = batch.chunks(item.sequence), token = batch.first_token(item.sequence);
    Walk walk{-1, 0, 0};
    int prepared = item.prepared, rows = item.tokens;
    for (Chunk at = Chunk::first_of(item); at.tokens_left > 0; at = at.next(), rows -= kChunkTokens) {
      const int chunk = (at.token - token) / kChunkTokens, number = walked<kPass>(chunk, chunks);
      EXPECT_EQ((at.token - token) % kChunkTokens, 0);
      EXPECT_TRUE(chunk >= 0 && chunk < chunks);
      EXPECT_EQ(prepared, (batch.first_chunk_index(item.sequence) + chunk) * batch.heads + item.head);
      EXPECT_EQ(at.tokens(), std::min(kChunkTokens, batch.rows[item.sequence] - chunk * kChunkTokens));
      EXPECT_EQ(at.is_whole(), at.tokens() == kChunkTokens);
      const Chunk again = Chunk::of(item, rows);  // as the warp that loads V finds it
      EXPECT_EQ(again.token, at.token);
      EXPECT_EQ(again.tokens(), at.tokens());
      if (walk.first < 0) walk.first = walk.end = number;
      EXPECT_EQ(number, walk.end++);
      if (at.is_warmup()) {
        EXPECT_EQ(number, walk.first + walk.warmup_chunks++);  // warm-up chunks are the first
      } else if (item.kind == kOutputs) {
        for (int half = 0; half < 2; ++half)
          if (item.half == kWhole || item.half == half) ++stored[{item.sequence, item.head, half, chunk}];
      }
      prepared += kReverse ? -batch.heads : batch.heads;
    }
    EXPECT_TRUE(rows > -kChunkTokens && rows <= 0);
    return walk;
  }
  int halves(const WorkItem& item) const { return item.half == kWhole ? 2 : 1; }

  void take(const WorkItem& item) {
    const int seq_head = item.sequence * batch.heads + item.head, chunks = batch.chunks(item.sequence);
    if (item.kind == kMerge) return merge(item, seq_head);
    ASSERT_TRUE(item.half == kWhole || item.half == 0 || item.half == 1);
    const Walk w = walk(item);
    if (item.kind == kTransition) {
      EXPECT_EQ(item.from, kFromZero);
      EXPECT_EQ(w.warmup_chunks, w.end - w.first);
      ASSERT_TRUE(item.half >= 0 && item.to > 0);
      EXPECT_TRUE(boundaries[item.to].at == -1 || boundaries[item.to].at == w.end);
      boundaries[item.to].seq_head = seq_head;
      boundaries[item.to].at = w.end;
      EXPECT_TRUE(transitions.insert({item.to, item.half}).second) << "the same half twice";
      boundaries[item.to].ready += 2;  // one from each math warpgroup
      EXPECT_EQ(segment_begin.insert({item.to, w.first}).first->second, w.first);
      return;
    }
    if (item.from == kFromInitial) {
      EXPECT_EQ(w.first, 0);
    } else if (item.from == kFromZero) {
      EXPECT_TRUE(has_decayed(seq_head, w.first, w.first + w.warmup_chunks));
    } else {
      EXPECT_GE(boundaries[item.from].ready, kStateReady) << "waits for something later in the list";
      EXPECT_EQ(boundaries[item.from].seq_head, seq_head);
      EXPECT_EQ(boundaries[item.from].at, w.first);
    }
    if (item.to >= 0) {
      EXPECT_EQ(item.from, kFromInitial);
      boundaries[item.to].seq_head = seq_head;
      boundaries[item.to].at = w.end;
      boundaries[item.to].ready += kStateReady / 2 * halves(item);
    } else if (item.to == kToFinal) {
      EXPECT_EQ(w.end, chunks);
      EXPECT_LE(item.readers, readers[seq_head]) << "waits for something later in the list";
      EXPECT_TRUE(item.readers == 0 || item.seq_head == seq_head);
      EXPECT_TRUE(final_states[seq_head] == 0 || awaited_readers[seq_head] == item.readers);  // both halves alike
      awaited_readers[seq_head] = item.readers;
      final_states[seq_head] += halves(item);
    } else {
      EXPECT_NE(w.end, chunks);
      if (item.from != kFromInitial) return;
      EXPECT_EQ(item.seq_head, seq_head);
      readers[seq_head] += halves(item);
    }
  }

  void merge(const WorkItem& item, int seq_head) {
    ASSERT_EQ(item.tokens % (kMergeTiles * kChunkTokens), 0);
    EXPECT_EQ(item.warmup_tokens, item.tokens);
    EXPECT_TRUE(item.key_head == 0 || item.key_head == 1);
    EXPECT_EQ(item.to, item.from + 1);
    EXPECT_EQ(item.prepared, item.to * kBoundaryTiles);
    EXPECT_GE(boundaries[item.from].ready, kStateReady) << "waits for something later in the list";
    for (int i = 0; i < item.tokens / (kMergeTiles * kChunkTokens); ++i) {
      const Boundary& last = boundaries[item.from + i];
      Boundary& next = boundaries[item.to + i];
      EXPECT_EQ(last.seq_head, seq_head);
      EXPECT_EQ(next.seq_head, seq_head);
      EXPECT_EQ(segment_begin[item.to + i], last.at);
      EXPECT_GE(next.ready, kTransitionReady) << "waits for something later in the list";
      EXPECT_TRUE(merges.insert({item.to + i, item.key_head}).second) << "the same half twice";
      next.ready += 2;
    }
  }

  bool has_decayed(int seq_head, int begin, int end) const {
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
    for (const WorkItem& item : list.items) take(item);
    for (const Boundary& boundary : boundaries) EXPECT_EQ(boundary.ready, kStateReady);
    for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
      const int n = seq_head / batch.heads;
      for (int c = 0; c < batch.chunks(n); ++c)
        for (int half = 0; half < 2; ++half) EXPECT_EQ((stored[{n, seq_head % batch.heads, half, c}]), 1);
      EXPECT_EQ(final_states[seq_head], batch.chunks(n) ? 2 : 0);
      // A final state that may overwrite the initial one waits for all warpgroups that read it: no more, no fewer.
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
    for (const WorkItem& item : list.items) {
      merges += item.kind == kMerge;
      warmups += item.kind == kOutputs && item.warmup_tokens > 0;
      one_reader += item.readers == 2;  // two warpgroups read for every segment
      more_readers += item.readers > 2;
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

// What list_balanced does, without threads.
List balanced_list_of(const Batch& batch, int blocks) {
  std::vector<int> begin;
  int line_chunks = 0, seq_heads = 0;
  for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
    begin.push_back(line_chunks);
    line_chunks += batch.chunks(seq_head / batch.heads);
    seq_heads += batch.chunks(seq_head / batch.heads) > 0;
  }
  const BalancedLine line(line_chunks, batch.chunks(0), blocks);
  std::vector<int> tails(line.borders(), 0), before(line.borders());
  for (int i = 0; i < line.borders(); ++i) {
    for (int seq_head = 0; seq_head < seq_heads; ++seq_head) {
      const int chunks = batch.chunks(seq_head / batch.heads);
      if (begin[seq_head] <= line.border(i) && line.border(i) < begin[seq_head] + chunks)
        tails[i] = line.tail(i, begin[seq_head], chunks);
    }
  }
  int cut = 0;
  for (int i = 0; i < line.borders(); ++i) {
    before[i] = cut;
    cut += tails[i] > 0;
  }
  List list{{}, std::vector<WorkItem>(seq_heads + cut), line.borders(), false};
  std::vector<int> puts(list.items.size(), 0);
  for (int seq_head = 0; seq_head < seq_heads; ++seq_head)
    list_balanced_head(line, {tails.data(), before.data(), cut}, batch.whole(seq_head), seq_head, seq_heads,
                       begin[seq_head], batch.chunks(seq_head / batch.heads), batch.heads,
                       [&](int i, const WorkItem& item) {
                         list.items.at(i) = item;
                         ++puts[i];
                       });
  for (const int n : puts) EXPECT_EQ(n, 1);
  return list;
}

// When a list of whole chunks ends on so many CTAs; an item takes no time besides its chunks.
int end_of(const List& list, int blocks) {
  std::vector<int> free(blocks, 0), ready(list.boundaries, 0);
  for (const WorkItem& item : list.items) {
    int& block = *std::min_element(free.begin(), free.end());
    if (item.from >= 0) block = std::max(block, ready[item.from]);
    block += (item.tokens + kChunkTokens - 1) / kChunkTokens;
    if (item.to >= 0) ready[item.to] = block;
  }
  return *std::max_element(free.begin(), free.end());
}

void check_balanced_lists(int seed) {
  std::mt19937 random(seed);
  int cut = 0;
  for (int round = 0; round < 300; ++round) {
    const int blocks = 2 + static_cast<int>(random() % 60);
    Batch batch;
    batch.heads = 1 + static_cast<int>(random() % 12);
    const int longest = 1 + static_cast<int>(random() % 2000), spread = round % 2 ? 1 : longest;
    int chunks = 0;
    while (chunks < 2 * blocks * (longest / kChunkTokens + 1)) {
      batch.rows.push_back(longest - static_cast<int>(random() % spread));
      chunks += batch.heads * batch.chunks(static_cast<int>(batch.rows.size()) - 1);
    }
    if (round % 4 == 0) batch.rows.push_back(0);
    std::sort(batch.rows.rbegin(), batch.rows.rend());
    const List list = balanced_list_of(batch, blocks);
    Checker<Pass::kForward> checker(batch, list.boundaries);
    for (const WorkItem& item : list.items) {
      if (item.to >= 0) ++cut;
      checker.take(item);
    }
    for (int seq_head = 0; seq_head < batch.seq_heads(); ++seq_head) {
      const int n = seq_head / batch.heads;
      for (int c = 0; c < batch.chunks(n); ++c)
        for (int half = 0; half < 2; ++half) EXPECT_EQ((checker.stored[{n, seq_head % batch.heads, half, c}]), 1);
      EXPECT_EQ(checker.final_states[seq_head], batch.chunks(n) ? 2 : 0);
    }
    // Equal heads: every CTA has a stretch of the line, up to the parts that were too short.
    if (spread == 1) {
      EXPECT_LE(end_of(list, blocks), chunks / blocks + 2 + 2 * BalancedLine::kShortestPart) << "round " << round;
    }
    if (::testing::Test::HasFailure()) FAIL() << "in round " << round;
  }
  EXPECT_GT(cut, 1000);
}

TEST(Balanced, OutputsOnce) { check_balanced_lists(4); }

TEST(Balanced, FindsTheBorderBehindAPosition) {
  std::mt19937 random(6);
  for (int round = 0; round < 2000; ++round) {
    const int longest = 1 + static_cast<int>(random() % 200), chunks = longest * (1 + static_cast<int>(random() % 500));
    const BalancedLine line(chunks, longest, 132);
    EXPECT_LE(line.borders(), 131);
    EXPECT_GE(line.border(0), line.borders() > 0 ? longest : 0);
    if (line.borders() > 0) {
      EXPECT_LT(line.border(line.borders() - 1), chunks);
    }
    const int position = static_cast<int>(random() % chunks), found = line.border_after(position);
    if (found < line.borders()) {
      EXPECT_GT(line.border(found), position);
    }
    if (found > 0) {
      EXPECT_LE(line.border(found - 1), position);
    }
  }
}

// A saved list is used only under the limits it was made for: with fewer boundaries, its items would write behind them.
TEST(Limits, AreEqualOnlyIfAllAre) {
  const Limits limits{132, 600, 40};
  EXPECT_TRUE(limits == (Limits{132, 600, 40}));
  EXPECT_FALSE(limits == (Limits{131, 600, 40}));
  EXPECT_FALSE(limits == (Limits{132, 599, 40}));
  EXPECT_FALSE(limits == (Limits{132, 600, 39}));
}

// Where nothing is cut, the gradient chain's list is the forward's, mirrored.
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
}  // namespace gatedelta::cuda::sm90
