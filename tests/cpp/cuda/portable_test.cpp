// Tiles, instances and memory of the portable kernels. What the kernels compute: tests/cpp/emulate.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "cuda/portable/backward_config.hpp"
#include "cuda/portable/cut.hpp"

namespace gatedelta::cuda::portable {
namespace {

constexpr int kBankBytes = 128;  // of all banks once

// ldmatrix reads eight rows of 16 bytes at a time, each from banks of its own.
template <class Offset>
void expect_no_conflict(const Offset& offset) {
  std::set<uint32_t> banks;
  for (int row = 0; row < 8; ++row) banks.insert(offset(row) % kBankBytes);
  EXPECT_EQ(banks.size(), 8u);
}

TEST(Portable, TilesHaveNoBankConflicts) {
  for (int packet = 0; packet < 8; ++packet) expect_no_conflict([&](int row) { return tile_offset(row, packet); });
  for (int packet = 0; packet < 4; ++packet)
    expect_no_conflict([&](int row) { return values_offset<32>(row, packet); });
  for (int packet = 0; packet < 2; ++packet)
    expect_no_conflict([&](int row) { return values_offset<16>(row, packet); });
}

TEST(Portable, TilesHoldEveryPacketOnce) {
  std::set<uint32_t> tile, values;
  for (int row = 0; row < kStep; ++row)
    for (int packet = 0; packet < 8; ++packet) tile.insert(tile_offset(row, packet));
  EXPECT_EQ(tile.size(), size_t{kStep} * 8);
  EXPECT_EQ(*tile.rbegin(), uint32_t{kStep * kTileRowBytes - kPacketBytes});
  for (int row = 0; row < kStep; ++row)
    for (int packet = 0; packet < 4; ++packet) values.insert(values_offset<32>(row, packet));
  EXPECT_EQ(values.size(), size_t{kStep} * 4);
  EXPECT_EQ(*values.rbegin(), uint32_t{kStep * 64 - kPacketBytes});
}

TEST(Portable, KeysArePadded) {
  for (int size = 16; size <= 256; size += 16) {
    EXPECT_GE(compiled_keys(size), size);
    EXPECT_TRUE(compiled_keys(size) == 64 || compiled_keys(size) < 2 * size) << size;
  }
}

ForwardProblem problem_of(int64_t batch, int64_t tokens, int64_t heads, int K, int V) {
  ForwardProblem p;
  p.in.key_heads = p.in.value_heads = heads, p.in.group = 1;
  p.in.key_dim = K, p.in.value_dim = V;
  p.in.sequences = {batch, batch, tokens, {}};
  return p;
}

TEST(Portable, FewHeadsAreSplit) {
  const auto kind = [](int64_t heads, int K, int V) { return chain_kind(problem_of(1, 64, heads, K, V).in, 132); };
  EXPECT_EQ(kind(67, 128, 128), ChainKind::k128);
  EXPECT_EQ(kind(66, 128, 128), ChainKind::k128Half);
  EXPECT_EQ(kind(33, 128, 128), ChainKind::k128Quarter);
  EXPECT_EQ(kind(34, 128, 256), ChainKind::k128);
  EXPECT_EQ(kind(200, 96, 64), ChainKind::k128Half);  // half of the columns would be none
  EXPECT_EQ(kind(1, 64, 64), ChainKind::k64);
  EXPECT_EQ(kind(1, 144, 16), ChainKind::k256);
}

// docs/kernels/portable.md, and the bound that docs/design.md gives for both sets of kernels.
TEST(Portable, Workspace) {
  EXPECT_EQ(Prepared::kBytes, 3600);
  EXPECT_EQ(forward_layout(problem_of(2, 640, 4, 128, 128)).bytes, size_t{2 * 10 * 4 * 7200});
  for (const int64_t tokens : {1, 64, 1000, 32768})
    for (const int64_t heads : {1, 64})
      EXPECT_LE(forward_layout(problem_of(1, tokens, heads, 256, 256)).bytes,
                static_cast<size_t>(192 * tokens * heads + (32 << 20)));
  ForwardProblem pack = problem_of(1, 1000, 2, 64, 64);
  pack.in.sequences.count = 300;
  pack.in.sequences.offsets.present = true;
  EXPECT_EQ(prepare_helpers(pack), 3);
  EXPECT_EQ(prepare_ctas(pack), (1000 / 64 + 301) * 2 + 3);
  const size_t without = forward_layout(pack).bytes;
  pack.checkpoint_every = 64;
  EXPECT_EQ(forward_layout(pack).bytes, without + 300 * 8 + (64 - 300 * 8 % 64) % 64);
}

TEST(Portable, PartsOfAHeadAreAPowerOfTwo) {
  for (int V = 16; V <= 256; V += 16) {
    const ForwardProblem problem = problem_of(1, 64, 1, 128, V);
    for (const ChainKind kind : {ChainKind::k128Quarter, ChainKind::k128Half, ChainKind::k128}) {
      const int columns = chain_columns(kind);
      const int parts = 1 << params_of(problem, forward_layout(problem), nullptr, {0, kind}).log_parts;
      EXPECT_GE(parts * columns, V);
      EXPECT_TRUE(parts == 1 || parts / 2 * columns < V);
    }
  }
}

ForwardProblem pack_of(int64_t count, int64_t tokens, int64_t heads, int K, int V) {
  ForwardProblem p = problem_of(1, tokens, heads, K, V);
  p.in.sequences.count = count;
  p.in.sequences.offsets.present = true;
  return p;
}

Cut cut_of(const ForwardProblem& p, int multiprocessors) { return choose_cut(p, forward_layout(p), multiprocessors); }
Cut cut_of(const BackwardProblem& p, int multiprocessors) { return choose_cut(p, backward_layout(p), multiprocessors); }
BackwardProblem backward_of(const ForwardProblem& forward) {
  BackwardProblem p;
  p.in = forward.in;
  p.dv.dtype = GD_BF16;
  return p;
}

TEST(PortableCut, FewHeadsAreCut) {
  for (const int size : {64, 128, 256}) {
    const auto chunks = [&](int64_t batch, int64_t tokens, int64_t heads) {
      return cut_of(problem_of(batch, tokens, heads, size, size), 132).chunks;
    };
    EXPECT_GT(chunks(1, 32768, 8), 0) << size;
    EXPECT_GT(chunks(1, 8192, 8), 0) << size;
    EXPECT_GT(chunks(1, 32768, 32), 0) << size;
    EXPECT_EQ(chunks(8, 8192, 64), 0) << size;  // 512 heads
    EXPECT_EQ(chunks(1, 1024, 8), 0) << size;
    EXPECT_EQ(chunks(600, 8192, 1), 0) << size;
    EXPECT_EQ(cut_of(problem_of(1, 32768, 8, size, size), 1).chunks, 0) << size;  // one multiprocessor is full
  }
}

// Few heads of a few thousand tokens: the workspace's constant has room for as many segments as fill a large GPU.
TEST(PortableCut, ShortSequencesHaveRoom) {
  for (const int64_t heads : {4, 8, 16}) {
    const ForwardProblem p = problem_of(1, 4096, heads, 128, 128);
    EXPECT_EQ(forward_layout(p).entry_slots, 4096 / 64 / kLeastSegment);
    EXPECT_GT(cut_of(p, 132).chunks, 0) << heads;
  }
  EXPECT_GE(forward_layout(problem_of(1, 1 << 20, 1, 128, 128)).entry_slots, 256);
  EXPECT_GE(forward_layout(problem_of(1, 1 << 20, 1, 256, 256)).entry_slots, 64);
}

// The lengths of a pack are not known: it may be cut although equal ones would not gain, if they lose little.
TEST(PortableCut, PacksMayBeUneven) {
  const Cut pack = cut_of(pack_of(2, 32768, 32, 128, 128), 132);
  EXPECT_GT(pack.chunks, 0);
  EXPECT_EQ(pack.prices.chain_count, 1);  // the segments kernel decides
  EXPECT_EQ(cut_of(problem_of(2, 16384, 32, 128, 128), 132).chunks, 0);
  EXPECT_EQ(cut_of(pack_of(8, 8192, 8, 128, 128), 132).chunks, 0);  // the kernels of cuts would take too much
  EXPECT_EQ(cut_of(problem_of(1, 32768, 8, 128, 128), 132).prices.chain_count, 0);
  EXPECT_EQ(cut_of(backward_of(pack_of(4, 8192, 4, 128, 128)), 132).prices.chain_count, 2);
  ForwardProblem forced = pack_of(2, 32768, 32, 128, 128);
  forced.segment_chunks = 5;
  EXPECT_EQ(cut_of(forced, 132).prices.chain_count, 0);
}

// One that is not cut has narrower CTAs where these are better for a long sequence and as good for equal ones.
TEST(PortableCut, InstancesOfPacksThatAreNotCut) {
  const ForwardProblem batch = problem_of(2, 16384, 64, 128, 128), pack = pack_of(2, 32768, 64, 128, 128);
  EXPECT_EQ(cut_of(pack, 132).chunks, 0);
  EXPECT_EQ(cut_of(batch, 132).kind, ChainKind::k128);
  EXPECT_EQ(cut_of(pack, 132).kind, ChainKind::k128Half);
  EXPECT_EQ(cut_of(pack_of(8, 32768, 64, 128, 128), 132).kind, ChainKind::k128);
}

// What a call of these lengths takes, without a cut or by segments of so many chunks.
float time_of(const CutPrices& prices, const std::vector<int>& lengths, int length) {
  const int longest = *std::max_element(lengths.begin(), lengths.end());
  float segments = 0;
  for (const int chunks : lengths) segments += segments_of(chunks, length > 0 ? length : longest);
  return length > 0 ? prices.cut(segments, length, longest)
                    : prices.uncut(segments, static_cast<int>(lengths.size()), longest);
}

// Times of the H200's chain kernels (results/h200/portable.json without prepare), to a tenth.
TEST(PortableCut, PricesAreThoseOfTheDevice) {
  const auto forward = [](int heads, ChainKind kind, const std::vector<int>& lengths, int length) {
    const Layer in = problem_of(1, 64, heads, 128, 128).in;
    return time_of(CutSearch{in, {kForwardWork}, 0, 132}.prices_of(kind), lengths, length);
  };
  EXPECT_NEAR(forward(8, ChainKind::k128Quarter, {64}, 0), 122, 12);
  EXPECT_NEAR(forward(32, ChainKind::k128Half, {448, 64}, 0), 959, 96);
  EXPECT_NEAR(forward(64, ChainKind::k128, {256, 256}, 0), 826, 83);
  EXPECT_NEAR(forward(64, ChainKind::k128, {448, 64}, 0), 1420, 142);
  EXPECT_NEAR(forward(8, ChainKind::k128, {512}, 35), 289, 29);
  EXPECT_NEAR(forward(32, ChainKind::k128, {512}, 74), 713, 72);
  EXPECT_NEAR(forward(48, ChainKind::k128, {512}, 103), 959, 96);
  const auto backward = [](int heads, ChainKind kind, const std::vector<int>& lengths, int length) {
    const Layer in = problem_of(1, 64, heads, 128, 128).in;
    return time_of(CutSearch{in, {kStatesWork, kGradientsWork}, 0, 132}.prices_of(kind), lengths, length);
  };
  EXPECT_NEAR(backward(4, ChainKind::k128Quarter, {91, 20, 7, 12}, 0), 420, 42);
  EXPECT_NEAR(backward(32, ChainKind::k128, {52, 17, 46, 80, 32, 60, 156, 75}, 0), 1421, 142);
}

TEST(PortableCut, NoneWhereNoneIsAllowed) {
  ForwardProblem p = problem_of(1, 32768, 8, 128, 128);
  const size_t bytes = forward_layout(p).bytes;
  p.batch_invariant = true;
  EXPECT_EQ(cut_of(p, 132).chunks, 0);
  p.batch_invariant = false, p.context_parallel = false;
  EXPECT_EQ(cut_of(p, 132).chunks, 0);
  EXPECT_LT(forward_layout(p).bytes, bytes);
}

TEST(PortableCut, ForcedLengths) {
  ForwardProblem p = problem_of(3, 700, 40, 128, 128);
  p.segment_chunks = 2;
  const Cut cut = cut_of(p, 132);
  EXPECT_EQ(cut.chunks, 2);
  EXPECT_EQ(forward_layout(p).entry_slots, 3 * 6);
}

// Whatever the device, a cut fits into the workspace, and that into what is promised.
TEST(PortableCut, FitsIntoTheWorkspace) {
  for (const int64_t tokens : {1000, 1025, 2048, 9000, 32768, 500000})
    for (const int64_t heads : {1, 8, 33, 64})
      for (const int size : {16, 128, 256})
        for (ForwardProblem p : {problem_of(1, tokens, heads, size, size), problem_of(3, tokens, heads, size, 256),
                                 pack_of(1, tokens, heads, size, size), pack_of(5, tokens, heads, 128, size)})
          for (const bool has_states : {false, true}) {
            p.in.initial.dtype = has_states ? GD_F32 : GD_DTYPE_NONE;
            const ForwardWorkspace layout = forward_layout(p);
            EXPECT_LE(layout.bytes, static_cast<size_t>(192 * p.in.sequences.batch * tokens * heads + (32 << 20)));
            for (const int multiprocessors : {1, 8, 46, 132, 148, 300}) {
              const Cut cut = choose_cut(p, layout, multiprocessors);
              if (cut.chunks == 0) continue;
              const int64_t slots = SegmentSlots{cut.chunks * int64_t{kChunkTokens}}.count(sequences_of(p.in));
              EXPECT_LE(slots, layout.entry_slots);
            }
          }
}

TEST(PortableCut, SlotsOfSequencesDoNotCollide) {
  const int32_t offsets[] = {0, 0, 300, 300, 301, 900, 1000};
  ChunkedSequences s{6, 1, 1000, {offsets, false, true}};
  for (const int64_t chunks : {1, 2, 5, 100}) {
    const SegmentSlots slots{chunks * kChunkTokens};
    int64_t free = 0;
    for (int n = 0; n < s.count; ++n) {
      EXPECT_GE(slots.first_slot(s, n), free);
      const int64_t segments = slots.segments(s[n].length);
      free = slots.first_slot(s, n) + (segments > 1 ? segments : 1);  // one without tokens has a state to pass on
    }
    EXPECT_LE(free, slots.count(s));
  }
}

TEST(PortableCut, StatesThatAreOverwritten) {
  const Layer in = problem_of(2, 64, 2, 16, 16).in;
  float memory[4 * 512];
  const StateRows first{memory, GD_F32, 2, 512, 256, {}, 0}, second{memory + 1024, GD_F32, 2, 512, 256, {}, 0},
      between{memory + 1023, GD_F32, 1, 512, 256, {}, 0};
  EXPECT_FALSE(overlap(first, second, in));
  EXPECT_TRUE(overlap(first, first, in));
  EXPECT_TRUE(overlap(first, between, in));
  EXPECT_TRUE(overlap(second, between, in));
  EXPECT_FALSE(overlap(first, {}, in));
}

// docs/kernels/portable.md.
TEST(Portable, BackwardWorkspace) {
  constexpr size_t kChunkHeads = 2 * 10 * 4, kPrepared = 7200 + 512 + 512 + 16;  // one value head a key head
  BackwardProblem p = backward_of(problem_of(2, 640, 4, 128, 128));
  EXPECT_EQ(backward_layout(p).bytes, kChunkHeads * (kPrepared + 65536 + 16384 + 1040));
  p.dv = {};
  EXPECT_EQ(backward_layout(p).bytes, kChunkHeads * (kPrepared + 65536 + 2 * 16384 + 1040));
  p.dA_log.dtype = GD_F32;
  p.in.l2norm = true;
  EXPECT_EQ(backward_layout(p).bytes, kChunkHeads * (kPrepared + 65536 + 2 * 16384 + 1040 + 8));
  p.saved.present = true;
  EXPECT_EQ(backward_layout(p).bytes, kChunkHeads * (65536 + 2 * 16384 + 1040 + 8));
  EXPECT_EQ(saved_bytes(p.in), kChunkHeads * kPrepared);
  p = backward_of(problem_of(2, 640, 4, 256, 64));
  EXPECT_EQ(backward_layout(p).bytes, kChunkHeads * (kPrepared + 65536 + 8192 + 2 * 1040));
  p.in.l2norm = true;
  EXPECT_EQ(backward_layout(p).bytes, kChunkHeads * (kPrepared + 65536 + 8192 + 2 * 1040 + 512 * 256));
}

// docs/api.md: at most 98 MiB more than without cuts.
TEST(PortableCut, OfTheBackwardFitsIntoTheWorkspace) {
  for (const int64_t tokens : {1000, 1025, 9000, 32768, 500000})
    for (const int64_t heads : {1, 8, 33, 64})
      for (const int size : {16, 128, 256})
        for (const ForwardProblem& forward :
             {problem_of(1, tokens, heads, size, size), problem_of(3, tokens, heads, size, 256),
              pack_of(5, tokens, heads, 128, size)}) {
          BackwardProblem p = backward_of(forward);
          const BackwardWorkspace layout = backward_layout(p);
          for (const int multiprocessors : {1, 46, 132, 300}) {
            const Cut cut = choose_cut(p, layout, multiprocessors);
            if (cut.chunks == 0) continue;
            const int64_t slots = SegmentSlots{cut.chunks * int64_t{kChunkTokens}}.count(sequences_of(p.in));
            EXPECT_LE(slots, layout.forward.entry_slots);
          }
          p.context_parallel = false;
          EXPECT_EQ(cut_of(p, 132).chunks, 0);
          EXPECT_LE(layout.bytes - backward_layout(p).bytes, size_t{98} << 20);
        }
}

TEST(PortableCut, OfTheBackward) {
  const auto chunks = [](int64_t batch, int64_t tokens, int64_t heads) {
    return cut_of(backward_of(problem_of(batch, tokens, heads, 128, 128)), 132).chunks;
  };
  EXPECT_GT(chunks(1, 8192, 4), 0);
  EXPECT_GT(chunks(1, 32768, 8), 0);
  EXPECT_EQ(chunks(8, 4096, 32), 0);
  EXPECT_EQ(chunks(1, 1024, 4), 0);
  BackwardProblem p = backward_of(problem_of(3, 700, 40, 128, 128));
  p.segment_chunks = 2;
  EXPECT_EQ(cut_of(p, 132).chunks, 2);
  EXPECT_EQ(backward_layout(p).forward.entry_slots, 3 * 6);
  p.segment_chunks = 0, p.batch_invariant = true;
  EXPECT_EQ(cut_of(p, 132).chunks, 0);
}

TEST(Portable, PartsOfKeys) {
  for (int size = 16; size <= 256; size += 16) {
    EXPECT_GE(part_columns(size) * part_count(size), size);
    EXPECT_EQ(part_columns(size), compiled_keys(size) == 64 ? 64 : 128);
  }
}

}  // namespace
}  // namespace gatedelta::cuda::portable
