// Recomputation of the states from save intervals (src/cuda/schedule/recompute.hpp), for many random packs.
#include "cuda/sm90/schedule/recompute.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/sm90/workspace/backward.hpp"

namespace gatedelta::cuda::sm90 {
namespace {

struct Pack {
  std::vector<int> chunks, sequence_of, first_chunk_index;  // by rank
  int heads, chunk_count;

  int count() const { return static_cast<int>(chunks.size()); }
  int piece() const { return static_cast<int>(recompute_chunks(chunk_count, count(), heads)); }
  RecomputePieces pieces(int split) const {
    RecomputePieces pieces;
    pieces.find(
        count(), heads, piece(), split, [&](int rank) { return chunks[rank]; },
        [&](int rank) { return sequence_of[rank]; }, [&](int rank) { return first_chunk_index[rank]; });
    return pieces;
  }
};

Pack random_pack(std::mt19937& random) {
  const auto up_to = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most + 1)); };
  const int count = 1 + up_to(kMaxPlannedSequences - 1);
  Pack pack;
  pack.heads = 1 + up_to(kMaxPlannedSeqHeads / count - 1);
  std::vector<int> lengths(count), first_chunks(count);
  const int longest = 1 << up_to(9);
  pack.chunk_count = 0;
  for (int n = 0; n < count; ++n) {
    lengths[n] = up_to(longest);
    first_chunks[n] = pack.chunk_count;
    pack.chunk_count += lengths[n] + up_to(1);  // at most one unused index per sequence
  }
  pack.sequence_of.resize(count);
  std::iota(pack.sequence_of.begin(), pack.sequence_of.end(), 0);
  std::ranges::stable_sort(pack.sequence_of, [&](int a, int b) { return lengths[a] > lengths[b]; });
  for (const int n : pack.sequence_of) {
    pack.chunks.push_back(lengths[n]);
    pack.first_chunk_index.push_back(first_chunks[n]);
  }
  return pack;
}
// After the last chunk (no second slice), or anywhere.
int random_split(const Pack& pack, std::mt19937& random) {
  return random() % 4 == 0 ? pack.chunk_count
                           : static_cast<int>(random() % static_cast<unsigned>(pack.chunk_count + 1));
}

TEST(Recompute, EveryChunkIsInOnePieceThatStartsAtASaveIntervalOfItsSlice) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const Pack pack = random_pack(random);
    const int split = random_split(pack, random);
    const auto chunks = [&](int rank) { return pack.chunks[rank]; };
    const RecomputePieces pieces = pack.pieces(split);
    EXPECT_EQ(pieces.length % kSaveInterval, 0);
    std::vector<std::vector<int>> times(pack.count() * pack.heads);
    for (int seq_head = 0; seq_head < pack.count() * pack.heads; ++seq_head)
      times[seq_head].resize(chunks(seq_head / pack.heads));
    std::vector<int> listed[kMaxSlices];
    for (int slice = 0; slice < kMaxSlices; ++slice) listed[slice].resize(pieces.count[slice]);
    for (int i = 0; i < pieces.numbers(); ++i) {
      const auto [rank, head, begin, slice, place] = pieces.piece(i, chunks);
      if (place < 0) continue;
      ASSERT_LT(rank, pack.count());
      ASSERT_LT(head, pack.heads);
      EXPECT_EQ(begin % pieces.length, 0);
      ASSERT_LT(begin, chunks(rank));
      EXPECT_EQ(slice, pack.first_chunk_index[rank] + begin >= split);
      ASSERT_LT(place, pieces.count[slice]);
      ++listed[slice][place];
      const int end = std::min(begin + pieces.length, chunks(rank));
      EXPECT_EQ(end - begin == pieces.length, i < pieces.whole);
      for (int c = begin; c < end; ++c) ++times[rank * pack.heads + head][c];
    }
    for (const auto& seq_head : times)
      for (const int n : seq_head) EXPECT_EQ(n, 1);
    for (const auto& slice : listed)
      for (const int n : slice) EXPECT_EQ(n, 1);
  }
}

TEST(Recompute, WholePiecesRunFromTheLastChunkToTheFirst) {
  std::mt19937 random(2);
  for (int round = 0; round < 100; ++round) {
    const Pack pack = random_pack(random);
    const RecomputePieces pieces = pack.pieces(random_split(pack, random));
    std::vector<std::pair<int, int>> listed[kMaxSlices];
    for (int slice = 0; slice < kMaxSlices; ++slice) listed[slice].resize(pieces.count[slice], {-1, 0});
    for (int i = 0; i < pieces.whole; ++i) {
      const auto [rank, head, begin, slice, place] = pieces.piece(i, [&](int r) { return pack.chunks[r]; });
      listed[slice][place] = {pack.sequence_of[rank], begin};
    }
    for (const auto& list : listed) EXPECT_TRUE(std::ranges::is_sorted(list, std::greater<>()));
  }
}

BackwardProblem problem_of(int64_t count, int64_t batch, int64_t tokens, int64_t heads, bool packed) {
  BackwardProblem p;
  p.saved.present = true;
  p.small_workspace = true;
  p.in.key_heads = p.in.value_heads = heads;
  p.in.sequences.count = count;
  p.in.sequences.batch = batch;
  p.in.sequences.tokens = tokens;
  if (packed) p.in.sequences.offsets = {nullptr, false, true};  // as in a size query
  return p;
}

// Whether or not anything else is cut, by choice or by force.
TEST(Recompute, ListsHaveRoomForAllPieces) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const Pack pack = random_pack(random);
    const int64_t tokens = std::accumulate(pack.chunks.begin(), pack.chunks.end(), int64_t{0}) * kChunkTokens;
    const RecomputePieces pieces = pack.pieces(random_split(pack, random));
    BackwardProblem p = problem_of(pack.count(), 1, tokens, pack.heads, true);
    for (const bool supports_cut : {false, true}) {
      for (const int64_t segment : {0, 256}) {
        p.context_parallel = supports_cut;
        p.segment_chunks = supports_cut ? segment : 0;
        for (const int count : pieces.count) EXPECT_LE(count, max_entries(forward_of(p)));
      }
    }
  }
}

// Every chunk of a slice lies inside the slice's memory. Some packs reach the ends of that memory: sequences of whole
// chunks, the last one long, so that the second slice starts at the earliest possible token.
TEST(Slices, HaveRoomForStatesAndRows) {
  std::mt19937 random(4);
  const auto between = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % (high - low + 1));
  };
  int sliced = 0;
  int first_tokens = 0, last_tokens = 0, first_chunks = 0, last_chunks = 0;  // problems that use these to the end
  for (int round = 0; round < 2000; ++round) {
    const bool packed = round % 2, is_tight = round % 4 == 3;
    const int64_t heads = between(1, 64), count = between(1, std::min<int64_t>(16, kMaxPlannedSeqHeads / heads));
    std::vector<int64_t> offsets(1, 0);
    const int64_t longest = (int64_t{1} << between(6, 16)) - (round % 3 ? 0 : between(0, 63));
    for (int64_t n = 0; n < count; ++n) {
      const int64_t length = !packed         ? longest
                             : !is_tight     ? between(0, longest)
                             : n < count - 1 ? between(0, 2) * kChunkTokens
                                             : between(1, 16) * longest;
      offsets.push_back(offsets.back() + length);
    }
    const int64_t tokens = packed ? offsets.back() + (is_tight ? 0 : between(0, 200)) : longest;
    const BackwardProblem p = problem_of(count, packed ? 1 : count, tokens, heads, packed);
    const Slices slices = slices_of(p);
    sliced += slices.count > 1;
    const ChunkedSequences s = sequences_of(p.in.sequences);
    int64_t least_token = slices.tokens, most_tokens = 0, least_chunk = slices.chunks, most_chunks = 0;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t first_chunk_index = packed ? ChunkedSequences::first_chunk_index_at(offsets[n], static_cast<int>(n))
                                               : s.first_chunk_index(static_cast<int>(n));
      const int64_t length = offsets[n + 1] - offsets[n];
      for (int64_t c = 0; c < ChunkedSequences::chunks(length); ++c) {
        const bool later = first_chunk_index + c - c % slices.recompute_chunks >= slices.split;
        EXPECT_LE(later, slices.count > 1);
        const int64_t index = first_chunk_index + c - (later ? slices.split : 0);
        const int64_t token = offsets[n] + c * kChunkTokens - (later ? slices.split_token : 0);
        const int64_t end = token + std::min<int64_t>(kChunkTokens, length - c * kChunkTokens);
        EXPECT_GE(index, 0);
        EXPECT_LT(index, slices.chunks);
        EXPECT_GE(token, 0);
        EXPECT_LE(end, slices.tokens);
        if (later) least_token = std::min(least_token, token);
        if (later) least_chunk = std::min(least_chunk, index);
        if (slices.count > 1) most_tokens = std::max(most_tokens, end);
        if (slices.count > 1 && !later) most_chunks = std::max(most_chunks, index + 1);
      }
    }
    if (slices.count == 1) continue;
    first_tokens += packed && count > 1 && slices.split_token > 0 && least_token == 0;
    last_tokens += most_tokens == slices.tokens;
    first_chunks += least_chunk == 0;
    last_chunks += most_chunks == slices.split + slices.recompute_chunks - 1;
  }
  EXPECT_GT(sliced, 200);
  EXPECT_LT(sliced, 1800);
  EXPECT_GT(first_tokens, 0);
  EXPECT_GT(last_tokens, 0);
  EXPECT_GT(first_chunks, 0);
  EXPECT_GT(last_chunks, 0);
}

// Slices restart from saved states, and their lists have entries for the sequences and heads of a plan only.
TEST(Slices, NeedSavedStatesAndAPlan) {
  EXPECT_EQ(slices_of(problem_of(64, 1, 1 << 20, 16, true)).count, 2);
  EXPECT_EQ(slices_of(problem_of(65, 1, 1 << 20, 1, true)).count, 1);
  EXPECT_EQ(slices_of(problem_of(64, 1, 1 << 20, 17, true)).count, 1);
  BackwardProblem p = problem_of(64, 1, 1 << 20, 16, true);
  p.saved.present = false;
  EXPECT_EQ(slices_of(p).count, 1);
}

// Two slices of one sequence are little more than half of it each.
TEST(Slices, HalveTheStates) {
  const Slices slices = slices_of(problem_of(1, 1, 32768, 8, false));
  EXPECT_EQ(slices.count, 2);
  EXPECT_LE(slices.chunks, 512 / 2 + kSaveInterval / 2);
  EXPECT_LE(slices.tokens, slices.chunks * kChunkTokens);
  EXPECT_EQ(slices_of(problem_of(1, 1, 31 * kChunkTokens, 8, false)).count, 1);  // less than two save intervals
  BackwardProblem p = problem_of(1, 1, 32768, 8, false);
  const size_t small = backward_layout(p).bytes;
  p.small_workspace = false;
  EXPECT_EQ(slices_of(p).count, 1);
  EXPECT_LT(static_cast<double>(small), 0.7 * static_cast<double>(backward_layout(p).bytes));
}

}  // namespace
}  // namespace gatedelta::cuda::sm90
