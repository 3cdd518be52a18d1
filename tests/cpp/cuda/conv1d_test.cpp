// Which convolution kernel takes a call, and how its tokens and channels are cut.
#include "cuda/conv1d/config.hpp"

#include <gtest/gtest.h>

namespace gatedelta::cuda {
namespace {

// Aligned tensors of one type; channels or tokens are contiguous.
TokenRows rows(gd_dtype dtype, int64_t tokens, int64_t channels, bool channel_major = false) {
  if (channel_major) return {nullptr, dtype, tokens * channels, 1, tokens};
  return {nullptr, dtype, tokens * channels, channels, 1};
}
Conv1dInputs inputs(int64_t batch, int64_t tokens, int64_t channels, gd_dtype dtype, bool channel_major = false) {
  Conv1dInputs in;
  in.sequences.count = in.sequences.batch = batch;
  in.sequences.tokens = tokens;
  in.channels = channels;
  in.taps = 4;
  in.x = rows(dtype, tokens, channels, channel_major);
  in.weight = {nullptr, dtype, 4, 1};
  return in;
}
Conv1dProblem forward(const Conv1dInputs& in, bool channel_major = false) {
  Conv1dProblem p;
  p.in = in;
  p.y = rows(in.x.dtype, in.sequences.tokens, in.channels, channel_major);
  return p;
}
Conv1dProblem packed(int64_t sequences, int64_t tokens, int64_t channels) {
  Conv1dProblem p = forward(inputs(1, tokens, channels, GD_BF16));
  p.in.sequences.count = sequences;
  p.in.sequences.offsets.present = true;
  return p;
}

TEST(Conv1d, KernelOfACall) {
  EXPECT_EQ(conv_kernel(forward(inputs(1, 64, 32, GD_BF16))), ConvKernel::rows);
  EXPECT_EQ(conv_kernel(forward(inputs(1, 64, 33, GD_BF16))), ConvKernel::any) << "channels that are no whole vector";
  EXPECT_EQ(conv_kernel(forward(inputs(1, 64, 33, GD_BF16, true), true)), ConvKernel::columns);
  EXPECT_EQ(conv_kernel(forward(inputs(1, 63, 33, GD_BF16, true), true)), ConvKernel::any)
      << "rows that are not aligned";
  EXPECT_EQ(conv_kernel(forward(inputs(1, 64, 33, GD_BF16, true), false)), ConvKernel::any) << "two orders of memory";
  Conv1dProblem p = forward(inputs(1, 64, 32, GD_BF16));
  p.y.dtype = GD_F32;
  EXPECT_EQ(conv_kernel(p), ConvKernel::any) << "two types";
  p = packed(3, 64, 32);
  EXPECT_EQ(conv_kernel(p), ConvKernel::rows);
  p.in.x = p.y = rows(GD_BF16, 64, 32, true);
  EXPECT_EQ(conv_kernel(p), ConvKernel::any) << "packed, tokens contiguous";
}

TEST(Conv1d, FastKernelsHaveFourPackedTaps) {
  for (const bool channel_major : {false, true}) {
    Conv1dProblem p = forward(inputs(1, 64, 32, GD_BF16, channel_major), channel_major);
    p.in.taps = 3;
    EXPECT_EQ(conv_kernel(p), ConvKernel::any);
    p.in.taps = 4;
    p.in.weight.channel_stride = 8;
    EXPECT_NE(conv_kernel(p), ConvKernel::any);
    p.in.weight.channel_stride = 5;
    EXPECT_EQ(conv_kernel(p), ConvKernel::any) << "taps that are not aligned";
    p.in.weight = {nullptr, GD_BF16, 1, 32};
    EXPECT_EQ(conv_kernel(p), ConvKernel::any) << "taps that are no neighbours";
  }
}

TEST(Conv1d, KernelOfADecodeStep) {
  Conv1dProblem p = forward(inputs(64, 1, 256, GD_BF16));
  p.in.weight.channel_stride = 5;
  EXPECT_EQ(conv_kernel(p), ConvKernel::update);
  p = forward(inputs(64, 8, 256, GD_BF16));
  p.in.taps = 3;
  EXPECT_EQ(conv_kernel(p), ConvKernel::update);
  p = forward(inputs(64, 8, 252, GD_BF16));
  p.final = {nullptr, GD_BF16, 64, 17, 17 * 252, 17, 1, {}, 0};
  EXPECT_EQ(conv_kernel(p), ConvKernel::rows) << "states of many columns";
  p = forward(inputs(64, 9, 256, GD_BF16));
  EXPECT_EQ(conv_kernel(p), ConvKernel::rows);
  p = packed(64, 64, 256);
  EXPECT_EQ(conv_kernel(p), ConvKernel::rows) << "one of the sequences may be long";
  p.previous_accept_lengths.present = true;
  EXPECT_EQ(conv_kernel(p), ConvKernel::update) << "windows of drafts are short";
}

ConvStates by_columns(gd_dtype dtype, int64_t channels, int64_t columns) {
  return {nullptr, dtype, 9, columns, channels * columns, 1, channels, {}, 0};
}
ConvStates by_channels(gd_dtype dtype, int64_t channels, int64_t columns) {
  return {nullptr, dtype, 9, columns, channels * columns, columns, 1, {}, 0};
}
Conv1dProblem step(int64_t tokens, gd_dtype dtype, const ConvStates& states, int64_t channels = 256) {
  Conv1dProblem p = forward(inputs(8, tokens, channels, dtype));
  p.in.initial = p.final = states;
  return p;
}

TEST(Conv1d, UsualDecodeStepsAreNear) {
  for (const gd_dtype dtype : {GD_F32, GD_BF16, GD_F16}) {
    for (const int64_t tokens : {1, 2, 8}) {
      for (const int64_t columns : {3, 4, 20})
        EXPECT_EQ(conv_kernel(step(tokens, dtype, by_columns(dtype, 256, columns))), ConvKernel::update_vec);
      for (const int64_t columns : {3, 4, 5, 16})
        EXPECT_EQ(conv_kernel(step(tokens, dtype, by_channels(dtype, 256, columns))), ConvKernel::update_vec);
      EXPECT_EQ(conv_kernel(step(tokens, dtype, {})), ConvKernel::update_vec) << "no states";
    }
  }
  Conv1dProblem p = step(4, GD_BF16, by_columns(GD_BF16, 256, 6));
  p.previous_accept_lengths.present = true;
  EXPECT_EQ(conv_kernel(p), ConvKernel::update_vec);
  p.in.initial = p.final = by_channels(GD_BF16, 256, 6);
  EXPECT_EQ(conv_kernel(p), ConvKernel::update_vec) << "drafts that fill the states";
  p.in.initial = p.final = by_channels(GD_BF16, 256, 7);
  EXPECT_EQ(conv_kernel(p), ConvKernel::update) << "drafts that leave a column as it is";
  p = step(1, GD_BF16, by_channels(GD_BF16, 256, 3));
  p.in.x.token_stride = p.y.token_stride = 1;
  EXPECT_EQ(conv_kernel(p), ConvKernel::update_vec) << "[B, D, 1]";
  p.in.weight.dtype = p.in.bias.dtype = GD_F32;
  p.in.bias.stride = 1;
  EXPECT_EQ(conv_kernel(p), ConvKernel::update_vec) << "filters of fp32";
  p.final = {};
  EXPECT_EQ(conv_kernel(p), ConvKernel::update_vec) << "no final state";
  p.in.sequences.batch = p.in.sequences.count = 1;
  p.in.x.batch_stride = 3;
  EXPECT_EQ(conv_kernel(p), ConvKernel::update_vec) << "the stride of one row acts on nothing";
}

TEST(Conv1d, OtherDecodeStepsAreNotNear) {
  const Conv1dProblem usual = step(2, GD_BF16, by_channels(GD_BF16, 256, 3));
  const auto kernel = [&](const auto& change) {
    Conv1dProblem p = usual;
    change(p);
    return conv_kernel(p);
  };
  const auto odd = reinterpret_cast<void*>(uintptr_t{8});
  EXPECT_EQ(conv_kernel(usual), ConvKernel::update_vec);
  EXPECT_EQ(conv_kernel(step(2, GD_BF16, by_channels(GD_BF16, 252, 3), 252)), ConvKernel::update);
  EXPECT_EQ(conv_kernel(step(0, GD_BF16, by_channels(GD_BF16, 256, 3))), ConvKernel::update);
  EXPECT_EQ(conv_kernel(step(2, GD_BF16, by_channels(GD_F32, 256, 3))), ConvKernel::update) << "two types";
  EXPECT_EQ(kernel([](auto& p) { p.y.dtype = GD_F32; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.y = {}; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.steps.dtype = GD_BF16; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.in.taps = 3; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.in.weight.channel_stride = 8; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.in.weight.dtype = GD_F16; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.in.bias = {nullptr, GD_F32, 1}; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.in.bias = {nullptr, GD_BF16, 2}; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.in.x.token_stride = 257; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.y.batch_stride = 516; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.in.x.head_stride = 2; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.final = by_columns(GD_BF16, 256, 3); }), ConvKernel::update) << "two layouts";
  EXPECT_EQ(kernel([](auto& p) { p.final = by_channels(GD_BF16, 256, 4); }), ConvKernel::update) << "two sizes";
  EXPECT_EQ(kernel([](auto& p) { p.in.initial.slot_stride += 4; }), ConvKernel::update);
  EXPECT_EQ(kernel([](auto& p) { p.in.initial.channel_stride = 4; }), ConvKernel::update) << "gaps";
  EXPECT_EQ(kernel([&](auto& p) { p.in.x.data = odd; }), ConvKernel::update);
  EXPECT_EQ(kernel([&](auto& p) { p.y.data = odd; }), ConvKernel::update);
  EXPECT_EQ(kernel([&](auto& p) { p.in.weight.data = odd; }), ConvKernel::update);
  EXPECT_EQ(kernel([&](auto& p) { p.final.data = odd; }), ConvKernel::update);
}

TEST(Conv1d, CtasOfANearStepCoverAllChannels) {
  for (const gd_dtype dtype : {GD_F32, GD_BF16}) {
    for (const int64_t channels : {8, 512, 520, 8192}) {
      const UpdateVecGrid grid = grid_of(inputs(7, 1, channels, dtype));
      const int64_t block = int64_t{kUpdateVecThreads} * vec_channels(dtype);
      EXPECT_EQ(grid.sequences, 7);
      EXPECT_GE(grid.blocks * block, channels);
      EXPECT_LT((grid.blocks - 1) * block, channels);
    }
  }
  EXPECT_GE(grid_of(inputs(1, 1, 8192, GD_BF16)).blocks, 16);
}

TEST(Conv1d, StatesOfADecodeStepMoveInVectors) {
  const Conv1dInputs in = inputs(64, 1, 256, GD_BF16);
  const auto tile = [&](int64_t slot, int64_t channel, int64_t column) {
    return update_tile(in, {nullptr, GD_BF16, 64, 3, slot, channel, column, {}, 0});
  };
  EXPECT_TRUE(tile(3 * 256, 1, 256).vectors && tile(3 * 256, 1, 256).by_column);
  EXPECT_TRUE(tile(3 * 256, 3, 1).vectors && !tile(3 * 256, 3, 1).by_column);
  EXPECT_TRUE(tile(4 * 256, 3, 1).vectors) << "slots with gaps";
  EXPECT_FALSE(tile(4 * 256, 4, 1).vectors) << "channels with gaps";
  EXPECT_FALSE(tile(3 * 256 + 1, 3, 1).vectors) << "slots that are not aligned";
}

TEST(Conv1d, GroupsOfADecodeStepCoverAllSequences) {
  for (const int64_t sequences : {1, 8, 63, 64, 512, 100000}) {
    for (const int64_t tokens : {0, 1, 3, 8}) {
      Conv1dProblem p = forward(inputs(sequences, tokens, 8192, GD_BF16));
      p.in.initial = p.final = {nullptr, GD_BF16, sequences, 16, 16 * 8192, 16, 1, {}, 0};
      const UpdateGrid grid = update_grid(p);
      EXPECT_GE(grid.groups * grid.sequences, sequences);
      EXPECT_LT((grid.groups - 1) * grid.sequences, sequences);
      EXPECT_LE(grid.sequences * tokens, kUpdateTokens);
      const int64_t bytes = grid.sequences * (update_tile(p.in, p.final).bytes + update_tile(p.in, p.in.initial).bytes);
      EXPECT_LE(kUpdateInputBytes + bytes, 48 << 10) << "what a kernel gets of shared memory without asking";
    }
  }
}

TEST(Conv1d, ChunksCoverAllTokens) {
  for (const int64_t tokens : {0, 1, 5, 64, 1000, 4096, 1 << 20}) {
    for (const int64_t channels : {3, 64, 8192}) {
      for (const ConvGrid& grid : {conv_grid(forward(inputs(3, tokens, channels, GD_BF16))),
                                   conv_grid(packed(7, tokens, channels)), conv_grid(packed(5000, tokens, channels))}) {
        EXPECT_GE(grid.chunk * grid.chunks_per_row, tokens);
        EXPECT_TRUE(grid.chunks_per_row == 1 || grid.chunk * (grid.chunks_per_row - 1) < tokens);
        EXPECT_LE(grid.chunk, 64);
        EXPECT_LE(grid.ctas(), kMaxConvCtas);
      }
      // Without offsets the tokens that need a state lie in the first chunk.
      EXPECT_GE(conv_grid(forward(inputs(3, tokens, channels, GD_BF16))).chunk, kMaxTaps - 1);
    }
  }
}

TEST(Conv1d, ChunksOfRowsAreFastOnesExceptInPacksOfShortSequences) {
  for (const int64_t tokens : {9, 512, 4096})
    EXPECT_EQ(conv_grid(forward(inputs(1, tokens, 8192, GD_BF16))).chunk, kConvRowTokens);
  EXPECT_EQ(conv_grid(packed(4, 4096, 8192)).chunk, kConvRowTokens);
  EXPECT_EQ(conv_grid(packed(256, 256, 8192)).chunk, 1) << "one token each";
  EXPECT_EQ(conv_grid(packed(256, 0, 8192)).chunk, 1);
  EXPECT_EQ(conv_grid(packed(0, 0, 8192)).chunk, kConvRowTokens);
}

TEST(Conv1d, ChunksOfTheBackwardAreWholeBatches) {
  for (const int64_t tokens : {1, 512, 4096, 1 << 20}) {
    for (const bool plain_ends : {false, true}) {
      const ConvGrid grid = conv_backward_grid(inputs(1, tokens, 8192, GD_BF16), ConvKernel::rows, plain_ends);
      EXPECT_EQ(grid.chunk % kConvRowBatch, 0);
      EXPECT_GE(grid.chunk, 16);
    }
  }
  EXPECT_EQ(conv_backward_grid(inputs(1, 512, 8192, GD_BF16), ConvKernel::rows, false).chunk, 16);
  EXPECT_EQ(conv_backward_grid(inputs(1, 4096, 8192, GD_BF16), ConvKernel::rows, false).chunk, 32);
  EXPECT_EQ(conv_backward_grid(inputs(1, 4096, 8192, GD_BF16), ConvKernel::rows, true).chunk, 256);
  EXPECT_EQ(conv_backward_grid(inputs(1, 16384, 8192, GD_BF16), ConvKernel::rows, true).chunk, 128);
}

TEST(Conv1d, BackwardHasFewPartialSums) {
  for (const int64_t tokens : {1, 100, 4096, 1 << 20}) {
    for (const int64_t channels : {1, 64, 1000, 8192}) {
      Conv1dBackwardProblem p;
      p.in = inputs(2, tokens, channels, GD_BF16);
      p.d_y = p.in.x;
      p.dweight.dtype = GD_F32;
      for (const ConvKernel kernel : {ConvKernel::rows, ConvKernel::columns, ConvKernel::any}) {
        for (const bool plain_ends : {false, true}) {
          const ConvGrid grid = conv_backward_grid(p.in, kernel, plain_ends);
          EXPECT_LE(grid.groups, grid.chunks);
          EXPECT_LE(grid.ctas(), std::max(kConvBackwardCtas, grid.channel_blocks));
          EXPECT_GE(conv1d_backward_workspace(p), size_t{4} * static_cast<size_t>(grid.groups * 5 * channels));
        }
      }
    }
  }
}

}  // namespace
}  // namespace gatedelta::cuda
