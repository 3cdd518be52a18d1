// How many kernels a step of the layer is.
#include "cuda/layer/config.hpp"

#include <gtest/gtest.h>

namespace gatedelta::cuda {
namespace {

constexpr int64_t kKeyHeads = 2, kHeads = 4, kChannels = (2 * kKeyHeads + kHeads) * kDecodeDim;

// A decode step with all tensors in the usual order.
LayerStepProblem usual_step(int64_t sequences, gd_dtype state = GD_F32) {
  const auto address = [](int64_t n) { return reinterpret_cast<void*>(n << 32); };
  const auto rows = [&](int64_t n, int64_t heads, int64_t row = 0) {
    const int64_t stride = row ? row : heads * kDecodeDim;
    return TokenRows{address(n), GD_BF16, stride, stride, kDecodeDim};
  };
  LayerStepProblem p;
  p.conv.in.sequences = p.rule.in.sequences = {sequences, sequences, 1, {}};
  p.conv.in.channels = kChannels;
  p.conv.in.taps = kLayerTaps;
  p.conv.in.x = {address(1), GD_BF16, kChannels, kChannels, 1};
  p.conv.y = {address(2), GD_BF16, kChannels, kChannels, 1};
  p.conv.in.weight = {address(3), GD_BF16, kLayerTaps, 1};
  p.conv.in.initial = p.conv.final = {address(4), GD_BF16, 1 << 20, 3, 3 * kChannels, 1, kChannels, {}, 0};
  p.rule.in.key_heads = kKeyHeads, p.rule.in.value_heads = kHeads, p.rule.in.group = kHeads / kKeyHeads;
  p.rule.in.key_dim = p.rule.in.value_dim = kDecodeDim;
  p.rule.in.layout = GD_STATE_VK;
  p.rule.in.q = rows(2, kKeyHeads, kChannels), p.rule.in.k = rows(5, kKeyHeads, kChannels);
  p.rule.in.v = rows(6, kHeads, kChannels), p.rule.o = rows(7, kHeads);
  p.rule.in.initial = p.rule.final = {
      address(8), state, 1 << 20, kHeads * kDecodeDim * kDecodeDim, kDecodeDim * kDecodeDim, {nullptr, false, true}};
  p.norm.in.batch = sequences, p.norm.in.tokens = 1, p.norm.in.heads = kHeads, p.norm.in.dim = kDecodeDim;
  p.norm.in.x = p.rule.o, p.norm.in.z = rows(9, kHeads), p.norm.y = rows(10, kHeads);
  return p;
}

TEST(LayerStep, FewStatesTakeTwoKernels) {
  for (const gd_dtype state : {GD_F32, GD_BF16, GD_F16}) {
    EXPECT_TRUE(supports_layer_step(usual_step(1, state)) && supports_two_kernels(usual_step(1, state)));
    const LayerStepProblem few = usual_step(max_layer_states(state) / kHeads, state);
    const LayerStepProblem many = usual_step(max_layer_states(state) / kHeads + 1, state);
    EXPECT_TRUE(supports_layer_step(few) && supports_two_kernels(few));
    EXPECT_TRUE(supports_layer_step(many) && !supports_two_kernels(many));
  }
}

// Of three kernels the first one must let the second one start, which of the convolution's kernels `update_vec` does.
TEST(LayerStep, ManyStatesNeedTheUsualConvolution) {
  for (const int64_t sequences : {int64_t{1}, max_layer_states(GD_F32)}) {
    LayerStepProblem p = usual_step(sequences);
    p.conv.in.initial.column_stride += 1, p.conv.final.column_stride += 1;  // not aligned
    p.conv.in.initial.slot_stride += 3, p.conv.final.slot_stride += 3;
    EXPECT_EQ(supports_layer_step(p), sequences == 1);
  }
}

TEST(LayerStep, OtherCallsAreThreeOperations) {
  LayerStepProblem p = usual_step(8);
  p.rule.in.layout = GD_STATE_KV;
  EXPECT_FALSE(supports_layer_step(p));
  p = usual_step(8);
  p.conv.in.taps = 3;
  EXPECT_FALSE(supports_layer_step(p));
  p = usual_step(8);
  p.conv.in.sequences.tokens = p.rule.in.sequences.tokens = 2;
  EXPECT_FALSE(supports_layer_step(p));
}

}  // namespace
}  // namespace gatedelta::cuda
