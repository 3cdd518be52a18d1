// Chunk indices, the size of the workspace, and how the work list is made.
#include "cuda/sm90/workspace/forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cuda/sm90/workspace/backward.hpp"

namespace gatedelta::cuda::sm90 {
namespace {

ForwardProblem dense(int64_t batch, int64_t tokens, int64_t heads, bool checkpoints = false) {
  ForwardProblem p;
  p.in.key_heads = p.in.value_heads = heads;
  p.in.group = 1;
  p.in.sequences.count = p.in.sequences.batch = batch;
  p.in.sequences.tokens = tokens;
  p.checkpoint_every = checkpoints ? kChunkTokens : 0;
  return p;
}
ForwardProblem packed(int64_t sequences, int64_t tokens, int64_t heads, bool checkpoints = false) {
  ForwardProblem p = dense(1, tokens, heads, checkpoints);
  p.in.sequences.count = sequences;
  p.in.sequences.offsets = {nullptr, false, true};  // as in a size query
  return p;
}

TEST(ChunkIndices, OfPackedSequencesNeverCollide) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int count = static_cast<int>(random() % 40);
    std::vector<int32_t> offsets(count + 1, 0);
    for (int n = 0; n < count; ++n) {
      // empty, short, around a whole number of chunks, long
      const int lengths[] = {0, static_cast<int>(random() % 64), 63 + static_cast<int>(random() % 3) + 64 * (n % 3),
                             static_cast<int>(random() % 1000)};
      offsets[n + 1] = offsets[n] + lengths[random() % 4];
    }
    const int64_t tokens = offsets[count] + random() % 200;
    const ChunkedSequences s = {count, 1, tokens, {offsets.data(), false, true}};
    int64_t free = 0;                   // first unused chunk index
    for (int n = 0; n <= count; ++n) {  // N: the tokens after the last sequence
      const int64_t length = n < count ? s[n].length : tokens - offsets[count];
      EXPECT_GE(s.first_chunk_index(n), free);
      free = std::max(free, s.first_chunk_index(n) + ChunkedSequences::chunks(length));
    }
    EXPECT_LE(free, s.workspace_chunks());
  }
}

TEST(ChunkIndices, OfADenseBatchHaveNoGaps) {
  for (const int64_t tokens : {0, 1, 63, 64, 65, 1000}) {
    const ChunkedSequences s = {7, 7, tokens, {}};
    for (int n = 0; n < 7; ++n) EXPECT_EQ(s.first_chunk_index(n), n * ChunkedSequences::chunks(tokens));
    EXPECT_EQ(s.workspace_chunks(), s.first_chunk_index(6) + ChunkedSequences::chunks(tokens));
  }
}

TEST(Workspace, PartsFollowEachOther) {
  const ForwardWorkspace w = forward_layout(packed(5, 1000, 3, true));
  EXPECT_EQ(w.prepared, 0u);
  EXPECT_EQ(w.first_checkpoint, (1000 / 64 + 5 + 1) * size_t{3} * kPreparedBytes);
  EXPECT_EQ(w.decays, w.first_checkpoint + 128);
  EXPECT_EQ(w.cuts, w.decays + 21 * 3 * 8 + 8);
  EXPECT_EQ(w.schedule, w.cuts + kShares * kCutBlocks * 8);
  EXPECT_EQ(w.work, w.schedule + 128);
  EXPECT_EQ(w.initial_read, w.work + (2 * 15 + 3 * 21 * 3) * 64 + 64);
  EXPECT_EQ(w.boundary_ready, w.initial_read + 128);
  EXPECT_EQ(w.boundaries, w.boundary_ready + 128);
  EXPECT_GT(w.boundary_count, 4);
  EXPECT_EQ(w.bytes, w.boundaries + static_cast<size_t>(w.boundary_count) * kBoundaryBytes + 64);
  for (const size_t at : {w.prepared, w.first_checkpoint, w.decays, w.cuts, w.schedule, w.work, w.initial_read,
                          w.boundary_ready, w.boundaries})
    EXPECT_EQ(at % ForwardWorkspace::kAlign, 0u);
}

TEST(Workspace, QueryAndCallAgree) {
  const int32_t offsets[] = {0, 10, 700};
  ForwardProblem call = packed(2, 700, 4);
  const size_t queried = forward_layout(call).bytes;
  call.in.sequences.offsets.data = offsets;
  EXPECT_EQ(forward_layout(call).bytes, queried);
}

constexpr size_t kMiB = size_t{1} << 20;
size_t promised(const ForwardProblem& p) {  // 192 bytes per token and value head, and 1 MiB
  return static_cast<size_t>(192 * p.in.sequences.batch * p.in.sequences.tokens * p.in.value_heads) + kMiB;
}

BackwardProblem backward_of(const ForwardProblem& forward) {
  BackwardProblem p;
  p.in = forward.in;
  return p;
}

// The backward has two lists of the same length, two sets of counters and two of boundaries.
TEST(Workspace, OfABackward) {
  for (const ForwardProblem& forward :
       {dense(1, 32768, 4), packed(5, 1000, 3), packed(100, 5000, 4), dense(4, 8192, 64)}) {
    const BackwardProblem p = backward_of(forward);
    const BackwardWorkspace w = backward_layout(p);
    const int64_t chunks = sequences_of(p.in.sequences).workspace_chunks() * p.in.value_heads;
    EXPECT_EQ(w.forward.bytes, forward_layout(forward, kBackwardPreparedBytes).bytes);
    EXPECT_GT(w.forward.bytes, forward_layout(forward).bytes - forward_layout(forward).boundary_count * kBoundaryBytes);
    EXPECT_GE(w.states, w.forward.bytes);
    EXPECT_GE(w.gradients, w.states + static_cast<size_t>(chunks * kStateTileBytes));
    EXPECT_GE(w.dv, w.gradients + static_cast<size_t>(chunks * kStateTileBytes));
    EXPECT_GE(w.grad_work, w.grad_schedule + sizeof(Schedule));
    EXPECT_GE(w.grad_boundary_ready, w.grad_work + static_cast<size_t>(max_entries(forward)) * sizeof(WorkItem));
    EXPECT_GE(w.grad_boundaries, w.grad_boundary_ready + w.forward.boundary_count * sizeof(int));
    EXPECT_GE(w.bytes, w.grad_boundaries + static_cast<size_t>(w.forward.boundary_count) * kBoundaryBytes);
    for (const size_t at : {w.states, w.gradients, w.dv, w.grad_schedule, w.grad_work, w.grad_boundary_ready})
      EXPECT_EQ(at % ForwardWorkspace::kAlign, 0u);
  }
}

TEST(Workspace, OfABackwardThatCutsNothingHasNoBoundaries) {
  BackwardProblem p = backward_of(dense(1, 32768, 4));
  EXPECT_GT(backward_layout(p).forward.boundary_count, 0);
  EXPECT_TRUE(supports_cut(forward_of(p)));
  p.batch_invariant = true;
  EXPECT_EQ(backward_layout(p).forward.boundary_count, 0);
  p.batch_invariant = p.context_parallel = false;
  EXPECT_EQ(backward_layout(p).forward.boundary_count, 0);
  EXPECT_FALSE(supports_cut(forward_of(p)));
}

// A ragged chunk takes as much memory as a whole one. The bound covers it for 35 to 64 tokens, and from 70 tokens on.
TEST(Workspace, KeepsItsPromiseForBatches) {
  for (const int64_t tokens : {35, 63, 64, 70, 71, 128, 129, 192, 193, 257, 1000, 4096, 8191, 32769}) {
    for (const int64_t batch : {1, 2, 7, 64, 500}) {
      for (const int64_t heads : {1, 4, 48, 64}) {
        const ForwardProblem p = dense(batch, tokens, heads, true);
        EXPECT_LE(forward_layout(p).bytes, promised(p)) << batch << " x " << tokens << ", " << heads << " heads";
      }
    }
  }
}

// A packed sequence takes one chunk more. The bound covers it from 77 tokens per sequence on, counting one sequence
// more than there are.
TEST(Workspace, KeepsItsPromiseForPackedSequences) {
  std::mt19937 random(2);
  for (int round = 0; round < 5000; ++round) {
    const int64_t count = random() % 3000, tokens = 77 * (count + 1) + random() % 100000, heads = 1 + random() % 64;
    const ForwardProblem p = packed(count, tokens, heads, round % 2);
    EXPECT_LE(forward_layout(p).bytes, promised(p)) << count << " in " << tokens << ", " << heads << " heads";
  }
}

// Boundaries take what is left below the bound, to the last byte that holds one.
TEST(Workspace, KeepsItsPromiseWithBoundaries) {
  size_t least_left = kMiB;
  for (int64_t tokens = 70; tokens < 100000; ++tokens) {
    for (const ForwardProblem& p : {dense(1, tokens, 1), dense(1, tokens, 3, true), packed(1, tokens + 77, 2)}) {
      const ForwardWorkspace w = forward_layout(p);
      ASSERT_LE(w.bytes, promised(p)) << tokens;
      if (w.boundary_count < kMaxBoundaries) least_left = std::min(least_left, promised(p) - w.bytes);
    }
  }
  EXPECT_LT(least_left, 2 * ForwardWorkspace::kAlign);
}

// The bound does not cover many short sequences. They take at most one more chunk each.
TEST(Workspace, OfShortSequencesIsAChunkEach) {
  EXPECT_GT(forward_layout(dense(500, 34, 32)).bytes, promised(dense(500, 34, 32)));
  EXPECT_GT(forward_layout(dense(1000, 69, 32)).bytes, promised(dense(1000, 69, 32)));
  EXPECT_GT(forward_layout(packed(1000, 75 * 1001, 64)).bytes, promised(packed(1000, 75 * 1001, 64)));
  std::mt19937 random(3);
  for (int round = 0; round < 5000; ++round) {
    const int64_t count = random() % 3000, tokens = random() % 200000, heads = 1 + random() % 64;
    const ForwardProblem p = round % 2 ? packed(count, tokens, heads, true) : dense(count, tokens % 300, heads, true);
    const int64_t total = p.in.sequences.batch * p.in.sequences.tokens;
    const int64_t chunk = kPreparedBytes + int64_t{sizeof(ChunkDecay)};
    const int64_t bound = (total / kChunkTokens + count + 1) * heads * chunk + count * heads * 64 + count * 12;
    EXPECT_LE(forward_layout(p).bytes, std::max(promised(p), static_cast<size_t>(bound) + kMiB));
  }
}

TEST(Blocks, OfPrepare) {
  constexpr int kHelpers = 1 + kShares * kCutBlocks;  // one sorts sequences, the others search cuts
  EXPECT_EQ(prepare_blocks(dense(3, 65, 4).in), 3 * 2 * 4 + kHelpers);
  EXPECT_EQ(prepare_blocks(packed(3, 640, 4).in), (10 + 3 + 1) * 4 + kHelpers);
  EXPECT_EQ(prepare_blocks(packed(0, 0, 1).in), 1 + kHelpers);
}

// A list is planned unless sequences of one length fill the GPU or there are too many.
TEST(List, IsPlannedWhereCutsMayHelp) {
  EXPECT_EQ(list_mode(dense(4, 8192, 64), 132), kEvenList);  // 256 of 264
  EXPECT_EQ(list_mode(dense(8, 1024, 16), 132), kEvenList);  // 128 of 132
  EXPECT_EQ(list_mode(dense(4, 8192, 48), 132), kPlannedList);
  EXPECT_EQ(list_mode(dense(1, 2048, 8), 132), kPlannedList);
  EXPECT_EQ(list_mode(dense(1, 2048, 64), 132), kEvenList);
  EXPECT_EQ(even_parts(dense(1, 2048, 64), 132), 2);
  EXPECT_EQ(even_parts(dense(4, 2048, 64), 132), 1);
  EXPECT_EQ(list_mode(dense(10000, 64, 64), 132), kEvenList);
  EXPECT_EQ(list_mode(packed(2, 32768, 66), 132), kPlannedList);  // the host does not know the lengths
  EXPECT_EQ(list_entries(dense(1, 777, 20), 132), 40);            // no more CTAs than halves of heads
  EXPECT_EQ(list_entries(packed(3, 777, 4), 132), 24);
  EXPECT_EQ(list_entries(dense(8, 1024, 16), 132), 128);
  EXPECT_EQ(list_entries(dense(1, 2048, 8), 132), max_entries(dense(1, 2048, 8)));
  EXPECT_EQ(list_mode(packed(65, 32768, 1), 132), kSortedList);
  EXPECT_EQ(list_mode(packed(17, 32768, 64), 132), kSortedList);
  ForwardProblem forced = dense(4, 8192, 64);
  forced.segment_chunks = 8;
  EXPECT_EQ(list_mode(forced, 132), kPlannedList);
  EXPECT_EQ(list_mode(dense(0, 64, 64), 132), kEvenList);
}

// Short sequences need no plan: halves of heads if there are CTAs and entries for all of them, else whole heads.
TEST(List, OfShortSequencesNeedsNoPlan) {
  EXPECT_EQ(list_mode(packed(1, 64, 8), 132), kEvenList);
  EXPECT_EQ(even_parts(packed(1, 64, 8), 132), 2);
  EXPECT_EQ(even_parts(packed(3, kShortTokens, 32), 132), 1);
  EXPECT_EQ(even_parts(packed(66, kShortTokens, 1), 132), 1);
  EXPECT_LT(max_entries(packed(66, kShortTokens, 1)), 2 * 66);
  EXPECT_EQ(list_mode(packed(1, kShortTokens + 1, 8), 132), kPlannedList);
  EXPECT_EQ(even_parts(dense(2, kShortTokens, 8), 132), 2);
  ForwardProblem saves = packed(1, 64, 8);
  saves.saved.present = true;
  EXPECT_EQ(list_mode(saves, 132), kPlannedList);
  saves = dense(8, 1024, 16);  // an even list; a backward may still cut it at save intervals
  saves.saved.present = true;
  EXPECT_EQ(list_mode(saves, 132), kEvenList);
  EXPECT_EQ(list_entries(saves, 132), max_entries(saves));
  for (int64_t count = 0; count < 70; ++count)
    for (int64_t heads = 1; heads < 70; ++heads) {
      const ForwardProblem p = packed(count, kShortTokens, heads);
      EXPECT_LE(even_parts(p, 132) * count * heads, max_entries(p)) << count << " of " << heads;
    }
}

// Prepare writes an even list without looking at the room for it, also where there are too many sequences to plan.
TEST(List, HasRoomForEvenParts) {
  for (const int blocks : {78, 114, 132, 144})
    for (int64_t count = 0; count <= 200; ++count)
      for (int64_t heads = 1; heads <= 20; ++heads)
        for (const int64_t tokens : {int64_t{64}, kShortTokens + 1, int64_t{4096}, int64_t{32768}})
          for (const ForwardProblem& p : {dense(count, tokens, heads), packed(count, tokens, heads)}) {
            ASSERT_LE(even_parts(p, blocks) * count * heads, max_entries(p))
                << count << " of " << tokens << " tokens, " << heads << " heads, " << blocks << " CTAs";
            ASSERT_LE(list_entries(p, blocks), max_entries(p));
          }
}

// A plan would find the same, or gain less than it costs: about 5 us on an H200.
TEST(List, OfShortSequencesIsAsGoodAsAPlan) {
  constexpr float kPlan = 5 * Costs::kPerMicrosecond;
  for (const int count : {1, 2, 5, 8, 64})
    for (int heads = 1; heads <= 128 && is_planned(count, heads); heads += 3)
      for (int chunks = 1; chunks <= kShortTokens / kChunkTokens; ++chunks) {
        const ForwardProblem p = dense(count, chunks * kChunkTokens, heads);
        const Limits limits = {132, static_cast<int>(max_entries(p)), forward_layout(p).boundary_count};
        const std::vector<int> lengths(count, chunks);
        for (int share = 0; share < kShares; ++share) {
          LengthClass classes[kMaxClasses] = {};
          const int class_count = length_classes(lengths.data(), count, heads, share, classes);
          const CutCost uncut = fastest_cut(classes, class_count, chunks, limits, false);
          const CutCost best = fastest_cut(classes, class_count, chunks, limits, true);
          EXPECT_EQ(even_parts(p, 132), cut_number(uncut.number, 1).halves ? 2 : 1)
              << count << " of " << chunks << " chunks, " << heads << " heads";
          EXPECT_LT(uncut.cost - best.cost, kPlan) << count << " of " << chunks << " chunks, " << heads << " heads";
        }
      }
}

// The device writes a balanced list without looking at the room for it.
TEST(List, MayBeBalancedWhereThereIsRoom) {
  const auto may = [](const ForwardProblem& p, int blocks = 132) {
    return may_balance(p, {blocks, static_cast<int>(list_entries(p, blocks)), forward_layout(p).boundary_count});
  };
  EXPECT_TRUE(may(packed(4, 8192, 48)));
  EXPECT_TRUE(may(dense(4, 2048, 48)));
  EXPECT_FALSE(may(packed(2, 8192, 48)));       // fewer heads than CTAs
  EXPECT_FALSE(may(packed(65, 65 * 1024, 4)));  // not planned
  EXPECT_FALSE(may(packed(8, 8192, 48), 300));  // more CTAs than it is made for
  EXPECT_FALSE(may(packed(4, 256, 48)));        // no room for the boundaries
  ForwardProblem p = packed(4, 8192, 48);
  EXPECT_FALSE(may_balance(p, {132, 322, 384}));  // 192 heads and 131 second parts
  EXPECT_TRUE(may_balance(p, {132, 323, 131}));
  p.segment_chunks = 8;
  EXPECT_FALSE(may(p));
  p.segment_chunks = 0;
  p.saved.present = true;
  EXPECT_FALSE(may(p));
  p.saved.present = false;
  p.context_parallel = false;
  EXPECT_FALSE(may(p));
  p.context_parallel = p.batch_invariant = true;
  EXPECT_FALSE(may(p));
}

TEST(List, HasRoomForEveryPiece) {
  ForwardProblem p = dense(2, 6400, 8);
  EXPECT_EQ(max_entries(p), 2 * 16 + 4096);
  EXPECT_EQ(max_entries(dense(1, 64, 8)), 2 * 8 + 3 * 8);
  p.segment_chunks = 10;
  EXPECT_EQ(max_entries(p), 3 * 8 * (200 / 10 + 2));
  p.segment_chunks = 0;
  p.context_parallel = false;
  EXPECT_EQ(max_entries(p), 2 * 16);
  p.context_parallel = p.batch_invariant = true;
  EXPECT_EQ(max_entries(p), 2 * 16);
  EXPECT_EQ(forward_layout(p).boundary_count, 0);
  EXPECT_EQ(max_entries(packed(65, 6400, 8)), 65 * 8);
}

}  // namespace
}  // namespace gatedelta::cuda::sm90
