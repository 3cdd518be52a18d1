// Calls of what surrounds the rule in a layer: convolution, gated norm, and the layer's step as a whole.
#include <algorithm>

#include "draw.hpp"
#include "testing/conv1d.hpp"
#include "testing/gated_norm_judge.hpp"
#include "testing/layer_step.hpp"

namespace gatedelta::soak {

using testing::ConvCase;
using testing::ConvProblem;
using testing::LayerCase;
using testing::NormCase;
using testing::NormProblem;

namespace {

ConvCase draw_conv(Dice& dice, const Target& target) {
  ConvCase c;
  c.dtype = dice.of({GD_F32, GD_BF16, GD_F16});
  c.wdtype = dice.of({GD_F32, GD_BF16, GD_F16});
  c.state = dice.of({GD_F32, GD_BF16, GD_F16});
  c.D = dice.one_in(3) ? 1 + dice.below(target.cuda ? 350 : 150) : 8 * (1 + dice.below(target.cuda ? 60 : 18));
  c.W = 2 + dice.below(3);
  c.channel_major = dice.one_in(2);
  c.state_tokens_first = dice.one_in(2);
  c.bias = dice.one_in(2);
  c.silu = dice.one_in(2);
  c.i64 = dice.one_in(2);
  c.strided = dice.one_in(4);
  c.seed = dice.stream + 1;
  return c;
}

// Tokens of a prefill or of training.
void draw_tokens(ConvCase& c, Dice& dice, const Target& target) {
  const int64_t longest = target.cuda ? 900 : 200;
  if (dice.one_in(2)) {
    for (int64_t n = 1 + dice.below(7); n > 0; --n)
      c.lengths.push_back(dice.one_in(3) ? dice.below(longest) : dice.below(5));
    c.pad = dice.one_in(2) ? dice.below(70) : 0;
  } else {
    c.B = 1 + dice.below(4);
    c.T = dice.one_in(2) ? dice.below(9) : dice.below(longest);
  }
  if (dice.one_in(2)) c.S = 3 + dice.below(8);
}

Made conv_call(Operation operation, const ConvCase& c, Dice& dice, const Target& target) {
  const ConvProblem problem(c);
  return make_call(operation, testing::describe(c), dice, target, problem.forward,
                   [c](const gd_exec&, const auto& results) { return ConvProblem(c).judge_forward(results); });
}

NormCase draw_norm(Dice& dice, const Target& target) {
  NormCase c;
  c.B = 1 + dice.below(3);
  c.T = dice.below(target.cuda ? 500 : 40);
  c.H = 1 + dice.below(5);
  c.D = dice.one_in(2) ? dice.of<int64_t>({64, 128, 256}) : 16 * (1 + dice.below(32));
  c.x = dice.of({GD_F32, GD_BF16, GD_F16});
  c.z = dice.of({GD_DTYPE_NONE, GD_DTYPE_NONE, GD_F32, GD_BF16});
  c.weight = dice.of({GD_DTYPE_NONE, GD_F32, GD_BF16});
  c.y = dice.of({GD_DTYPE_NONE, GD_DTYPE_NONE, GD_F32, GD_BF16});
  c.gate = dice.of({testing::NormGateKind::none, testing::NormGateKind::silu, testing::NormGateKind::sigmoid});
  c.has_weight = !dice.one_in(4);
  c.round = dice.one_in(2);
  c.layout = dice.of({testing::NormLayout::dense, testing::NormLayout::gaps, testing::NormLayout::odd,
                      testing::NormLayout::heads_first});
  c.seed = dice.stream + 1;
  return c;
}

}  // namespace

Made draw_conv1d(Dice& dice, const Target& target) {
  ConvCase c = draw_conv(dice, target);
  draw_tokens(c, dice, target);
  c.inplace = dice.one_in(3);
  c.pool = dice.one_in(3);
  c.null_slot = dice.one_in(3);
  c.steps = dice.one_in(4);
  return conv_call(Operation::conv1d, c, dice, target);
}

Made draw_conv1d_update(Dice& dice, const Target& target) {
  ConvCase c = draw_conv(dice, target);
  c.B = 1 + dice.below(12);
  c.T = 1 + dice.below(8);
  if (dice.one_in(3)) {
    c.B = 1;
    for (int64_t n = 1 + dice.below(8); n > 0; --n) c.lengths.push_back(dice.below(9));
    c.pad = dice.below(3);
  }
  c.drafts = dice.one_in(2);
  // The state of an empty draft window is copied with its unused columns, where a NaN of 16 bits may get other bits.
  if (c.drafts && c.state != GD_F32)
    for (int64_t& length : c.lengths) length = std::max<int64_t>(length, 1);
  c.pool = !dice.one_in(3);
  c.inplace = !dice.one_in(3);
  c.null_slot = c.pool && dice.one_in(2);
  c.steps = dice.one_in(4);
  return conv_call(Operation::conv1d_update, c, dice, target);
}

Made draw_conv1d_backward(Dice& dice, const Target& target) {
  ConvCase c = draw_conv(dice, target);
  draw_tokens(c, dice, target);
  const ConvProblem problem(c);
  return make_call(Operation::conv1d_backward, testing::describe(c), dice, target, problem.backward,
                   [c](const gd_exec&, const auto& results) { return ConvProblem(c).judge_backward(results); });
}

Made draw_gated_norm(Dice& dice, const Target& target) {
  const NormCase c = draw_norm(dice, target);
  const NormProblem problem(c);
  return make_call(Operation::gated_norm, c.text(), dice, target, problem.forward,
                   [c](const gd_exec&, const auto& results) {
                     NormProblem judged(c);
                     const auto judgement = judge_gated_norm(judged, results);
                     return judgement.ok() ? "" : judgement.text();
                   });
}

Made draw_gated_norm_backward(Dice& dice, const Target& target) {
  const NormCase c = draw_norm(dice, target);
  const NormProblem problem(c);
  return make_call(Operation::gated_norm_backward, c.text(), dice, target, problem.backward,
                   [c](const gd_exec&, const auto& results) {
                     NormProblem judged(c);
                     const auto judgement = judge_gated_norm_backward(judged, results);
                     return judgement.ok() ? "" : judgement.text();
                   });
}

Made draw_layer_step(Dice& dice, const Target& target) {
  static const std::vector<LayerCase> cases = testing::layer_cases();
  LayerCase c = cases[static_cast<size_t>(dice.below(std::ssize(cases)))];
  if (c.lengths.empty()) c.B = 1 + dice.below(9);
  c.seed = dice.stream + 1;
  const testing::LayerProblem problem(c);
  return make_call(Operation::layer_step, c.text(), dice, target, problem.args,
                   [c](const gd_exec&, const auto& results) {
                     testing::LayerProblem step(c), separate(c);
                     if (std::string error = testing::run_three_calls(separate.args); !error.empty()) return error;
                     results(step.args);
                     return step.difference(step.bytes(), separate.bytes());
                   });
}

}  // namespace gatedelta::soak
