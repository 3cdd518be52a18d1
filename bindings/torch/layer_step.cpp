// The layer's step as one operator: convolution, rule and gated norm, with states that are updated in place.
#include <string>

#include "gatedelta/gatedelta.h"
#include "inputs.hpp"
#include "operators.hpp"
#include "run.hpp"
#include "tensor.hpp"

namespace gatedelta::binding {

namespace {

// The bits of `options`, together with some of Option (inputs.hpp) and, from kFirstSlotShift on, first_slot.
// gatedelta/_operators/layer_step.py has the same; tests/python/test_layer_step.py compares them.
enum LayerOption : int64_t {
  kConvSilu = 1 << 9,
  kNormSigmoid = 1 << 10,
  kNormRoundBeforeGate = 1 << 11,
  kStepsInState = 1 << 12,  // the states after each token go to slots of `state`; there is no final state
};
constexpr int64_t kTaken = kBetaLogit | kBetaLogitDoubled | kStateVFirst | kL2norm | kConvSilu | kNormSigmoid |
                           kNormRoundBeforeGate | kStepsInState | kTiledKeyHeads;

// Without step states, `state` gets the final ones.
constexpr char kLayerStep[] =
    "layer_step(Tensor mixed_qkv, Tensor? z, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor(a!) conv_state, Tensor A_log, Tensor? dt_bias, Tensor(b!) state, Tensor? norm_weight, int key_heads, "
    "int options, Tensor? state_indices, Tensor? final_state_indices, Tensor? cu_seqlens, Tensor? "
    "previous_accept_lengths, "
    "Tensor(c!)? step_states, Tensor? step_indices, float? scale, float? eps, Tensor(d!) out) -> ()";

void layer_step(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  Tensor x = from.tensor(), z = from.optional_tensor(), a = from.tensor(), b = from.tensor();
  Tensor conv_weight = from.tensor(), conv_bias = from.optional_tensor();
  const Tensor conv_state = from.tensor();
  Tensor A_log = from.tensor(), dt_bias = from.optional_tensor();
  const Tensor state = from.tensor();
  Tensor norm_weight = from.optional_tensor();
  auto args = new_args<gd_layer_step_args>();
  args.key_heads = from.integer();
  const int64_t options = from.integer();
  Tensor state_indices = from.optional_tensor(), final_state_indices = from.optional_tensor();
  Tensor cu_seqlens = from.optional_tensor(), previous_accept_lengths = from.optional_tensor();
  const Tensor step_states = from.optional_tensor();
  Tensor step_indices = from.optional_tensor();
  const std::optional<double> scale = from.optional_float(), eps = from.optional_float();
  const Tensor out = from.tensor();

  const auto has = [options](int64_t option) { return (options & option) != 0; };
  if ((options & ((1 << kFirstSlotShift) - 1) & ~kTaken) || options < 0)
    refuse("options is " + std::to_string(options) + ", but this operator takes bits of " + std::to_string(kTaken));
  if (has(kStepsInState) && step_states) refuse("the states after each token go to state: give no step_states");
  const Device device(x, "mixed_qkv");
  gd_conv1d_inputs& conv = args.conv.in;
  conv.x = device.input(x, "mixed_qkv");
  conv.weight = device.input(conv_weight, "conv_weight");
  conv.bias = device.input(conv_bias, "conv_bias");
  conv.initial_state = args.conv.final_state = device.output(conv_state, "conv_state");
  conv.activation = has(kConvSilu) ? GD_CONV1D_SILU : GD_CONV1D_LINEAR;

  gd_recurrent_args& rule = args.rule;
  rule.in.g = device.input(a, "a");
  rule.in.beta = device.input(b, "b");
  rule.in.A_log = device.input(A_log, "A_log");
  rule.in.dt_bias = device.input(dt_bias, "dt_bias");
  rule.in.cu_seqlens = device.offsets(cu_seqlens, "cu_seqlens");
  rule.in.initial_state = device.output(state, "state");
  rule.in.initial_state_indices = device.indices(state_indices, "state_indices");
  rule.in.gate = GD_GATE_RAW;
  rule.in.beta_kind = has(kBetaLogitDoubled) ? GD_BETA_LOGIT_DOUBLED : GD_BETA_LOGIT;
  rule.in.state_layout = has(kStateVFirst) ? GD_STATE_VK : GD_STATE_KV;
  rule.in.l2norm = has(kL2norm);
  rule.in.key_head_order = has(kTiledKeyHeads) ? GD_KEY_HEADS_TILED : GD_KEY_HEADS_GROUPED;
  rule.in.has_scale = scale.has_value();
  rule.in.scale = static_cast<float>(scale.value_or(0));
  rule.in.first_slot = options >> kFirstSlotShift;
  rule.step_states = has(kStepsInState) ? rule.in.initial_state : device.output(step_states, "step_states");
  rule.step_indices = device.indices(step_indices, "step_indices");
  if (rule.step_states.dtype == GD_DTYPE_NONE) rule.final_state = rule.in.initial_state;
  rule.final_state_indices = device.indices(final_state_indices, "final_state_indices");
  if (rule.final_state.dtype != GD_DTYPE_NONE && !final_state_indices)
    rule.final_state_indices = rule.in.initial_state_indices;
  rule.previous_accept_lengths = device.indices(previous_accept_lengths, "previous_accept_lengths");

  args.norm.gate = device.input(z, "z", 1);
  args.norm.weight = device.input(norm_weight, "norm_weight", 1);
  args.norm.activation = has(kNormSigmoid) ? GD_NORM_SIGMOID : GD_NORM_SILU;
  args.norm.round_before_gate = has(kNormRoundBeforeGate);
  args.norm.has_eps = eps.has_value();
  args.norm.eps = static_cast<float>(eps.value_or(0));
  args.norm.out = device.output(out, "out");
  run_with_workspace(args, device, gd_layer_step_workspace, gd_layer_step);
}

constexpr Operator kOperators[] = {{kLayerStep, layer_step}};

}  // namespace

std::span<const Operator> layer_step_operators() { return kOperators; }

}  // namespace gatedelta::binding
