// Tiles, instances and memory of the portable kernels. What the kernels compute: tests/cpp/emulate.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "cuda/portable/backward/config.hpp"
#include "cuda/portable/schedule/launches.hpp"

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
      const int parts = 1 << params_of(problem, forward_layout(problem), nullptr, {0, kind}).log2_ctas_per_head;
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

DeviceLimits hopper(int count = 132) { return {count, 228 << 10}; }
template <class Problem>
auto layout_of(const Problem& p) {
  if constexpr (std::is_same_v<Problem, ForwardProblem>) {
    return forward_layout(p);
  } else {
    return backward_layout(p);
  }
}
template <class Problem>
Cut cut_of(const Problem& p, int multiprocessors) {
  return choose_cut(p, layout_of(p), hopper(multiprocessors));
}
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
    EXPECT_EQ(forward_layout(p).segment_capacity, 4096 / 64 / kLeastSegment);
    EXPECT_GT(cut_of(p, 132).chunks, 0) << heads;
  }
  EXPECT_GE(forward_layout(problem_of(1, 1 << 20, 1, 128, 128)).segment_capacity, 256);
  EXPECT_GE(forward_layout(problem_of(1, 1 << 20, 1, 256, 256)).segment_capacity, 64);
}

// The lengths of a pack are not known: where some are worth a cut, the segments kernel decides.
TEST(PortableCut, PacksMayBeUneven) {
  const Cut pack = cut_of(pack_of(2, 32768, 8, 128, 128), 132);
  EXPECT_GT(pack.chunks, 0);
  EXPECT_EQ(pack.cost.chain_count, 1);
  EXPECT_EQ(cut_of(problem_of(1, 32768, 8, 128, 128), 132).cost.chain_count, 0);
  EXPECT_EQ(cut_of(backward_of(pack_of(2, 32768, 4, 128, 128)), 132).cost.chain_count, 2);
  EXPECT_EQ(cut_of(pack_of(4, 4 * 8192, 64, 128, 128), 132).chunks, 0);  // equal ones fill the device
  ForwardProblem forced = pack_of(2, 32768, 32, 128, 128);
  forced.segment_chunks = 5;
  EXPECT_EQ(cut_of(forced, 132).cost.chain_count, 0);
}

LengthSums sums_of(const std::vector<int>& lengths) {
  LengthSums sums;
  sums.longest = *std::max_element(lengths.begin(), lengths.end());
  for (const int chunks : lengths) {
    sums.count += chunks > 0;
    sums.longest_count += chunks == sums.longest;
    sums.chunks += static_cast<float>(chunks);
  }
  return sums;
}
// Where equal lengths are better not cut and others are, whole sequences have a grid of their own. It is that of a call
// without cuts.
TEST(PortableCut, WholeSequencesMayHaveAGrid) {
  EXPECT_FALSE(cut_of(pack_of(2, 32768, 8, 128, 128), 132).cost.has_whole_grid);  // both are better cut
  const ForwardProblem p = pack_of(4, 4 * 8192, 32, 128, 128);
  const ForwardWorkspace layout = forward_layout(p);
  const Cut cut = choose_cut(p, layout, hopper());
  ASSERT_TRUE(cut.cost.has_whole_grid);
  EXPECT_EQ(cut.whole_kind, cut_of(problem_of(4, 8192, 32, 128, 128), 132).kind);
  alignas(64) static char workspace[64];
  const Params params = params_of(p, layout, workspace, cut), whole = whole_params(params, cut.whole_kind);
  ASSERT_NE(params.segments, nullptr);
  EXPECT_EQ(whole.segments, nullptr);
  EXPECT_EQ(whole.segment_ranges, params.segment_ranges);
  EXPECT_EQ(chain_ctas(whole), (4 * 32) << log2_ctas_per_head(128, chain_columns(cut.whole_kind)));
  EXPECT_GT(chain_ctas(params), 0);
  // The device leaves equal lengths whole, and cuts others.
  const CutCost& cost = cut.cost;
  const auto best = [&](const std::vector<int>& lengths) {
    const LengthSums sums = sums_of(lengths);
    int best = sums.longest;
    float least = cost.of(sums, {}, best);
    for (int length = cut.chunks; length < sums.longest; ++length) {
      SegmentSums segments;
      for (const int chunks : lengths) segments.add(chunks, length);
      if (const float time = cost.of(sums, segments, length); time < least) least = time, best = length;
    }
    return best;
  };
  EXPECT_EQ(best({128, 128, 128, 128}), 128);
  EXPECT_LT(best({400, 50, 40, 22}), 400);
}

// Of instances that take about as long the widest one, for lengths that are known to be equal: of a batch, and where
// the device cuts all others. A backward's chains take the one of the least cost.
TEST(PortableCut, InstancesOfEqualLengths) {
  const ForwardProblem batch = problem_of(4, 8192, 32, 128, 128), pack = pack_of(4, 4 * 8192, 32, 128, 128);
  EXPECT_EQ(cut_of(batch, 132).kind, ChainKind::k128);
  EXPECT_EQ(cut_of(backward_of(batch), 132).kind, ChainKind::k128Half);
  EXPECT_TRUE(cut_of(pack, 132).cost.has_whole_grid);
  EXPECT_EQ(cut_of(pack, 132).whole_kind, ChainKind::k128);
  EXPECT_EQ(cut_of(problem_of(8, 2048, 8, 128, 128), 132).kind, ChainKind::k128Half);  // much faster there
}

// Where heads fill the device, packs run with the instance of a batch of equal lengths.
TEST(PortableCut, InstancesOfPacksThatAreNotCut) {
  for (const int64_t count : {4, 8}) {
    const Cut batch = cut_of(problem_of(count, 4096, 64, 128, 128), 132),
              pack = cut_of(pack_of(count, count * 4096, 64, 128, 128), 132);
    EXPECT_EQ(pack.chunks, 0) << count;
    EXPECT_EQ(pack.kind, batch.kind) << count;
  }
}

// What a call of these lengths takes, without a cut or by segments of so many chunks.
float time_of(const CutCost& cost, const std::vector<int>& lengths, int length) {
  SegmentSums segments;
  for (const int chunks : lengths) segments.add(chunks, length > 0 ? length : 1);
  return length > 0 ? cost.cut(sums_of(lengths), segments, length) : cost.uncut(sums_of(lengths));
}

// What the kernels of forced cuts take on an H200 by its profiler, prepare and gradients excepted, to a tenth.
TEST(PortableCut, PricesAreThoseOfTheDevice) {
  const auto forward = [](int heads, ChainKind kind, const std::vector<int>& lengths, int length) {
    const Layer in = problem_of(1, 64, heads, 128, 128).in;
    return time_of(CutSearch{in, {kForwardWork}, 0, hopper()}.cost_of(kind), lengths, length);
  };
  EXPECT_NEAR(forward(8, ChainKind::k128Quarter, {128}, 0), 242, 24);
  EXPECT_NEAR(forward(8, ChainKind::k128Half, {128}, 16), 103, 10);
  EXPECT_NEAR(forward(32, ChainKind::k128, {128, 128, 128, 128}, 0), 405, 40);
  EXPECT_NEAR(forward(64, ChainKind::k128Half, {512}, 0), 1129, 141);  // an eighth: all multiprocessors are busy
  EXPECT_NEAR(forward(32, ChainKind::k128, {512}, 64), 554, 55);
  EXPECT_NEAR(forward(32, ChainKind::k128Half, {448, 64}, 0), 944, 94);
  const auto backward = [](int heads, ChainKind kind, const std::vector<int>& lengths, int length) {
    const Layer in = problem_of(1, 64, heads, 128, 128).in;
    return time_of(CutSearch{in, {kStatesWork, kGradientsWork}, 0, hopper()}.cost_of(kind), lengths, length);
  };
  EXPECT_NEAR(backward(4, ChainKind::k128Quarter, {91, 20, 7, 12}, 0), 402, 40);
  EXPECT_NEAR(backward(32, ChainKind::k128, {52, 17, 46, 80, 32, 60, 156, 75}, 0), 1374, 137);
}

// The more of a pack's lengths the device knows, the less it takes: a curve falls with its length.
TEST(PortableCut, CurvesFall) {
  const ForwardProblem p = pack_of(3, 40000, 12, 128, 128);
  const CutSearch search{p.in, {kForwardWork}, forward_layout(p).segment_capacity, hopper()};
  for (int i = 0; i < search.guesses(); ++i) {
    const CutSearch::Curve curve = search.curve_of(search.cost_of(ChainKind::k128Half), search.guess(i));
    ASSERT_GT(curve.count, 2);
    for (int at = 1; at < curve.count; ++at) {
      EXPECT_LT(curve.length[at], curve.length[at - 1]);
      EXPECT_LE(curve.time[at], curve.time[at - 1]);
      EXPECT_EQ(curve.at(curve.length[at]), curve.time[at]);
      EXPECT_EQ(curve.at(curve.length[at] + 1), curve.time[at - 1]);
    }
    EXPECT_EQ(curve.at(1 << 20), curve.time[0]);
  }
}

// No more CTAs fit on a multiprocessor than are meant to, and as many do, whatever its shared memory.
TEST(PortableCut, CtasSpreadEvenly) {
  for (const int shared : {228 << 10, 164 << 10, 100 << 10})
    for (const int ctas : {1, 2, 3, 4, 5}) {
      const DeviceLimits device{132, shared};
      EXPECT_EQ(device.ctas_per_sm(shared_bytes_for(ctas, shared)), ctas) << shared;
    }
  // Where all CTAs have something to do, they even_ctas_per_sm by themselves.
  char workspace[1];
  const auto launches = [&](const ForwardProblem& p) {
    const ForwardWorkspace layout = forward_layout(p);
    const Cut cut = choose_cut(p, layout, hopper());
    const Params params = params_of(p, layout, workspace, cut), transitions = transition_params(params, cut.kind, true);
    return std::pair{chain_launch(cut, params, hopper()), transition_launch(cut, transitions, hopper())};
  };
  EXPECT_EQ(launches(problem_of(4, 8192, 16, 128, 128)).first.ctas_per_sm, 0);
  const auto [chain, transition] = launches(problem_of(1, 32768, 8, 128, 128));
  EXPECT_EQ(chain.ctas_per_sm, 0);
  EXPECT_EQ(chain.bytes(1000), 1000);
  EXPECT_EQ(transition.ctas_per_sm, 1);
  EXPECT_EQ(transition.bytes(1000), shared_bytes_for(1, 228 << 10));
  EXPECT_EQ(transition.bytes(1 << 20), 1 << 20);
  // What a kernel is allowed once has to do for all of its launches.
  for (const ChainLaunch& launch : {chain, transition, ChainLaunch(ChainKind::k128Half, 0, hopper())})
    EXPECT_EQ(launch.most_bytes(1000), transition.bytes(1000));
  const ChainLaunch pack = launches(pack_of(2, 32768, 8, 128, 128)).first;
  EXPECT_GE(pack.ctas_per_sm, 1);
  EXPECT_LE(pack.ctas_per_sm, 3);
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
  EXPECT_EQ(forward_layout(p).segment_capacity, 3 * 6);
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
              const Cut cut = choose_cut(p, layout, hopper(multiprocessors));
              if (cut.chunks == 0) continue;
              const int64_t segments =
                  SegmentLength{cut.chunks * int64_t{kChunkTokens}}.most_segments(sequences_of(p.in.sequences));
              EXPECT_LE(segments, layout.segment_capacity);
            }
          }
}

// One without tokens has a state to pass on.
int64_t segments_of(const ChunkedSequences& s, int64_t tokens) {
  int64_t segments = 0;
  for (int n = 0; n < s.count; ++n) segments += std::max<int64_t>(1, (s[n].length + tokens - 1) / tokens);
  return segments;
}
TEST(PortableCut, SegmentsHaveSlots) {
  const int32_t offsets[] = {0, 0, 300, 300, 301, 900, 1000};
  ChunkedSequences s{6, 1, 1000, {offsets, false, true}};
  for (const int64_t chunks : {1, 2, 5, 100}) {
    const int64_t tokens = chunks * kChunkTokens;
    EXPECT_LE(segments_of(s, tokens), SegmentLength{tokens}.most_segments(s));
  }
}
// No pack of so many tokens has more segments than the host allows for, and one has as many.
TEST(PortableCut, NoSlotTooMany) {
  for (int tokens = 0; tokens <= 400; ++tokens) {
    int64_t most = 0;
    for (int second = 0; second <= tokens; ++second)
      for (const int third : {second, (second + tokens) / 2, tokens}) {
        const int32_t offsets[] = {0, second, third, tokens};
        most = std::max(most, segments_of({3, 1, tokens, {offsets, false, true}}, kChunkTokens));
      }
    const int32_t offsets[] = {0, 0, 0, 0};
    EXPECT_EQ(most, SegmentLength{kChunkTokens}.most_segments({3, 1, tokens, {offsets, false, true}})) << tokens;
    const int32_t alone[] = {0, tokens};
    const ChunkedSequences one{1, 1, tokens, {alone, false, true}};
    EXPECT_EQ(segments_of(one, kChunkTokens), SegmentLength{kChunkTokens}.most_segments(one)) << tokens;
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
            const Cut cut = choose_cut(p, layout, hopper(multiprocessors));
            if (cut.chunks == 0) continue;
            const int64_t segments =
                SegmentLength{cut.chunks * int64_t{kChunkTokens}}.most_segments(sequences_of(p.in.sequences));
            EXPECT_LE(segments, layout.forward.segment_capacity);
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
  EXPECT_EQ(backward_layout(p).forward.segment_capacity, 3 * 6);
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
