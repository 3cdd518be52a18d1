// Tiles, instances and memory of the portable kernels. What the kernels compute: tests/cpp/emulate.
#include <gtest/gtest.h>

#include <set>

#include "cuda/portable/backward_config.hpp"

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
                static_cast<size_t>(192 * tokens * heads + (1 << 20)));
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
    for (const int columns : {32, 64, 128}) {
      const int parts = 1 << params_of(problem, nullptr, columns).log_parts;
      EXPECT_GE(parts * columns, V);
      EXPECT_TRUE(parts == 1 || parts / 2 * columns < V);
    }
  }
}

BackwardProblem backward_of(const ForwardProblem& forward) {
  BackwardProblem p;
  p.in = forward.in;
  p.dv.dtype = GD_BF16;
  return p;
}

// docs/kernels/portable.md.
TEST(Portable, BackwardWorkspace) {
  constexpr size_t kChunkHeads = 2 * 10 * 4, kPrepared = 7200 + 512 + 512;  // one value head a key head
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

TEST(Portable, PartsOfKeys) {
  for (int size = 16; size <= 256; size += 16) {
    EXPECT_GE(part_columns(size) * part_count(size), size);
    EXPECT_EQ(part_columns(size), compiled_keys(size) == 64 ? 64 : 128);
  }
}

}  // namespace
}  // namespace gatedelta::cuda::portable
