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

TEST(Conv1d, KernelOfADecodeStep) {
  Conv1dProblem p = forward(inputs(64, 1, 256, GD_BF16));
  p.in.initial = {nullptr, GD_BF16, 64, 3, 3 * 256, 1, 256, {}, 0};  // [S, D] in memory
  EXPECT_EQ(conv_kernel(p), ConvKernel::rows);
  p.in.initial = {nullptr, GD_BF16, 64, 3, 3 * 256, 3, 1, {}, 0};  // [D, S]
  EXPECT_EQ(conv_kernel(p), ConvKernel::any);
  p.in.sequences.tokens = 16;
  p.in.x = p.y = rows(GD_BF16, 16, 256);
  EXPECT_EQ(conv_kernel(p), ConvKernel::rows);
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

TEST(Conv1d, LargeCallsHaveLongChunks) {
  EXPECT_EQ(conv_grid(forward(inputs(1, 4096, 8192, GD_BF16))).chunk, 64);
  EXPECT_EQ(conv_grid(packed(256, 256, 8192)).chunk, 4) << "one token each: a thread takes few sequences";
}

TEST(Conv1d, BackwardHasFewPartialSums) {
  for (const int64_t tokens : {1, 100, 4096, 1 << 20}) {
    for (const int64_t channels : {1, 64, 1000, 8192}) {
      Conv1dBackwardProblem p;
      p.in = inputs(2, tokens, channels, GD_BF16);
      p.d_y = p.in.x;
      p.dweight.dtype = GD_F32;
      for (const ConvKernel kernel : {ConvKernel::rows, ConvKernel::columns, ConvKernel::any}) {
        const ConvGrid grid = conv_backward_grid(p.in, kernel);
        EXPECT_LE(grid.slots, grid.chunks);
        EXPECT_LE(grid.ctas(), std::max(kConvBackwardCtas, grid.channel_blocks));
        EXPECT_GE(conv1d_backward_workspace(p), size_t{4} * static_cast<size_t>(grid.slots * 5 * channels));
      }
    }
  }
}

}  // namespace
}  // namespace gatedelta::cuda
