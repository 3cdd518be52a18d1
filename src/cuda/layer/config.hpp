// The layer's step in two kernels: which calls they support, how the work is split, and the kernels' parameters.
//
// `layer_rule`: a CTA has 32 value columns of one head. It convolves the 128 + 128 + 32 channels of q, k and v it needs
// and then computes a decode step. It only reads conv states: other CTAs read the same ones.
// `layer_finish`: the gated norm of the outputs, and the shift of the conv states with one thread per channel.
#pragma once

#include "core/conv1d.hpp"
#include "cuda/conv1d/update_vec.hpp"
#include "cuda/decode/config.hpp"
#include "cuda/device/divider.hpp"
#include "cuda/device/rows32.hpp"
#include "cuda/gated_norm/config.hpp"

namespace gatedelta::cuda {

// The layer's step as three problems whose intermediates lie in the workspace: the rule's q, k and v are parts of the
// convolution's y, the norm's x is the rule's o.
struct LayerStepProblem {
  Conv1dProblem conv;
  RecurrentProblem rule;
  GatedNormProblem norm;
};

constexpr int kLayerTaps = 4;
constexpr int kLayerColumns = 32;  // of a CTA
// A column's sums have the order of `one_token`, so its bits are equal.
template <class State>
using LayerTile = Vk128<16 / sizeof(State), 2, 4>;
static_assert(LayerTile<float>::kCtaColumns == kLayerColumns && LayerTile<float>::kThreads == kDecodeDim);

using LayerNorm = NormConfig<16, 1>;
constexpr int kFinishThreads = 128;
constexpr int kFinishRows = kFinishThreads / LayerNorm::kLanes;
static_assert(LayerNorm::kMaxDim == kDecodeDim);

constexpr int64_t kMaxLayerShifts = int64_t{1} << 30;  // sequences x channels, of 32 bits on the device
// Sequences x value heads that the two kernels support. With more of them the step is bound by memory, and the kernels
// of the three operations, each with its own grid, are faster. Measured on an H200.
constexpr int64_t max_layer_states(gd_dtype state) { return state == GD_F32 ? 1024 : 512; }
inline bool supports_two_kernels(const LayerStepProblem& p) {
  return p.rule.in.sequences.count * p.rule.in.value_heads <= max_layer_states(state_dtype(p.rule));
}

// Whether two kernels compute the call, or three of which the second and third are launched with PDL. Other calls run
// as three operations. All have the same results.
inline bool supports_layer_step(const LayerStepProblem& p) {
  const Conv1dProblem& conv = p.conv;
  const ConvStates &initial = conv.in.initial, &final = conv.final;
  const TapWeights& weight = conv.in.weight;
  const gd_dtype type = conv.in.x.dtype;
  return supports_one_token(p.rule) && (supports_two_kernels(p) || supports_update_vec(p.conv)) &&
         p.rule.in.layout == GD_STATE_VK && p.rule.in.initial && initial && final && initial.data == final.data &&
         initial.columns == final.columns && initial.slot_stride == final.slot_stride && initial.dtype == type &&
         final.dtype == type && !conv.previous_accept_lengths && !conv.steps && conv.in.taps == kLayerTaps &&
         weight.dtype == type && weight.tap_stride == 1 && weight.channel_stride == kLayerTaps &&
         reinterpret_cast<uintptr_t>(weight.data) % 8 == 0 && conv.in.x.head_stride == 1 && fits_32bit(conv.in.x) &&
         common_type(p.norm.in, {&p.norm.y}) == type && conv.in.sequences.count * conv.in.channels <= kMaxLayerShifts &&
         p.norm.in.z && fits_32bit(p.norm.in.z) && fits_32bit(p.norm.y);
}

struct LayerRuleParams {
  OneTokenParams rule;  // q, k and v are not used: their channels are convolved here
  Rows32 x;
  ConvStates states;
  const void* weight = nullptr;  // [D, 4]
  Rows32 bias;
  uint32_t key_channels = 0;  // of q, and of k
  bool silu = false;
};
inline LayerRuleParams layer_rule_params(const LayerStepProblem& p) {
  LayerRuleParams r;
  r.rule = one_token_params(p.rule);
  r.x = Rows32(p.conv.in.x);
  r.states = p.conv.in.initial;
  r.weight = p.conv.in.weight.data;
  r.bias = Rows32(p.conv.in.bias);
  r.key_channels = static_cast<uint32_t>(p.rule.in.key_heads * kDecodeDim);
  r.silu = p.conv.in.silu;
  return r;
}

struct LayerFinishParams {
  GatedNorm norm;
  Rows32 o, z, y, x;
  ConvStates initial, final;
  Divider heads, channels;
  uint32_t rows = 0, row_ctas = 0;  // of the norm; the other CTAs shift conv states
  uint32_t shifts = 0;              // sequences x channels
};
inline LayerFinishParams layer_finish_params(const LayerStepProblem& p) {
  LayerFinishParams f;
  f.norm = p.norm.in;
  f.o = Rows32(p.norm.in.x), f.z = Rows32(p.norm.in.z), f.y = Rows32(p.norm.y), f.x = Rows32(p.conv.in.x);
  f.initial = p.conv.in.initial, f.final = p.conv.final;
  f.heads = Divider(static_cast<uint32_t>(p.norm.in.heads));
  f.channels = Divider(static_cast<uint32_t>(p.conv.in.channels));
  f.rows = static_cast<uint32_t>(p.norm.in.rows());
  f.row_ctas = (f.rows + kFinishRows - 1) / kFinishRows;
  f.shifts = static_cast<uint32_t>(p.conv.in.sequences.count * p.conv.in.channels);
  return f;
}

}  // namespace gatedelta::cuda
