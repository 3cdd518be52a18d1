// The layer's step in two kernels: which calls they take, how the work is split, and what the kernels get.
//
// `rule`: one CTA per 32 value columns of a head. It convolves the 128 + 128 + 32 channels it needs of q, k and v from
// the conv states, which it only reads: other CTAs need the same ones. Then it is a decode step.
// `finish`: gated norm of the outputs, one warp per row, and the shift of the conv states, one thread per channel.
#pragma once

#include "core/layer_step.hpp"
#include "cuda/decode/config.hpp"

namespace gatedelta::cuda {

// The sums of a column are in `step`'s order: the two give the same bits.
template <class State>
using LayerTile = TileConfig<GD_STATE_VK, 16 / sizeof(State), kStepDim / kLanesPerColumn, 2, 4>;

constexpr int kFinishThreads = 256;
constexpr int kFinishRows = kFinishThreads / 32;  // a warp has one row
static_assert(LayerTile<float>::kCtaColumns == 32);

// Whether the two kernels take the call; otherwise the three operations run one after the other.
inline bool takes_layer_step(const LayerStepProblem& p) {
  const Conv1dProblem& conv = p.conv;
  const GatedNormProblem& norm = p.norm;
  const auto is_16_bit = [](const TokenRows& rows) { return rows.dtype == GD_BF16 || rows.dtype == GD_F16; };
  return takes_step(p.rule) && p.rule.in.initial && p.rule.final && conv.in.initial && conv.final &&
         conv.in.initial.columns == conv.final.columns && conv.in.initial.data == conv.final.data &&
         !conv.previous_accept_lengths && !conv.steps && conv.in.x.head_stride == 1 && is_16_bit(norm.in.x) &&
         norm.in.z && is_16_bit(norm.in.z) && is_16_bit(norm.y) && is_aligned(norm.in.z) && is_aligned(norm.y) &&
         (!norm.in.weight || is_aligned(norm.in.weight.data));
}

struct LayerStepParams {
  LayerStepProblem problem;
  DecodeParams decode;
};

}  // namespace gatedelta::cuda
