#include "inputs.hpp"

namespace gatedelta::binding {

Inputs::Inputs(Arguments& from)
    : q(from.tensor()),
      k(from.tensor()),
      v(from.tensor()),
      g(from.tensor()),
      beta(from.tensor()),
      options(from.integer()),
      cu_seqlens(from.optional_tensor()),
      initial_state(from.optional_tensor()),
      scale(from.optional_float()),
      A_log(from.optional_tensor()),
      dt_bias(from.optional_tensor()),
      initial_state_indices(from.optional_tensor()) {}

gd_inputs Inputs::describe(const Device& device, int64_t also, const Tensor* in_place) {
  const int64_t first_slot = options >> kFirstSlotShift;
  if (const int64_t taken = kInputOptions | also; (options & ((1 << kFirstSlotShift) - 1) & ~taken) || options < 0)
    refuse("options is " + std::to_string(options) + ", but this operator takes bits of " + std::to_string(taken));
  gd_inputs in{};
  // Rows with gaps inside are copied; a pool of states never is (the library refuses it).
  in.q = device.input(q, "q", 1);
  in.k = device.input(k, "k", 1);
  in.v = device.input(v, "v", 1);
  in.g = device.input(g, "g");
  in.beta = device.input(beta, "beta");
  in.A_log = device.input(A_log, "A_log");
  in.dt_bias = device.input(dt_bias, "dt_bias");
  in.cu_seqlens = device.offsets(cu_seqlens, "cu_seqlens");
  in.initial_state = in_place ? device.output(*in_place, "initial_state")
                              : device.input(initial_state, "initial_state", initial_state_indices ? 0 : 2);
  in.initial_state_indices = device.indices(initial_state_indices, "initial_state_indices");
  in.gate = has(kGateRaw) ? GD_GATE_RAW : GD_GATE_LOG;
  in.beta_kind = has(kBetaLogitDoubled) ? GD_BETA_LOGIT_DOUBLED : has(kBetaLogit) ? GD_BETA_LOGIT : GD_BETA_VALUE;
  in.state_layout = has(kStateVFirst) ? GD_STATE_VK : GD_STATE_KV;
  in.l2norm = has(kL2norm);
  in.key_head_order = has(kTiledKeyHeads) ? GD_KEY_HEADS_TILED : GD_KEY_HEADS_GROUPED;
  in.has_scale = scale.has_value();
  in.scale = static_cast<float>(scale.value_or(0));
  in.first_slot = first_slot;
  return in;
}

Tensor Inputs::empty_o(const Device& device) const {
  if (v.rank() != 4) refuse("v must have rank 4, not " + std::to_string(v.rank()));
  return device.empty(4, v.sizes(), q.dtype());
}

Tensor Inputs::empty_final_state(const Device& device) const {
  if (!has(kFinalState)) return device.nothing();
  if (q.rank() != 4) refuse("q must have rank 4, not " + std::to_string(q.rank()));
  const int64_t key_dim = q.sizes()[3], value_dim = v.sizes()[3];
  const bool value_first = has(kStateVFirst);
  const int64_t sizes[] = {sequence_count(), v.sizes()[2], value_first ? value_dim : key_dim,
                           value_first ? key_dim : value_dim};
  return device.empty(4, sizes, codes.f32);
}

int64_t Inputs::sequence_count() const {
  if (!cu_seqlens) return q.rank() > 0 ? q.sizes()[0] : 0;
  const int64_t offsets = cu_seqlens.rank() == 1 ? cu_seqlens.sizes()[0] : 0;
  if (offsets < 1) refuse("cu_seqlens must have rank 1 and at least one entry");
  return offsets - 1;
}

}  // namespace gatedelta::binding
