// The arguments all operators share: the layer's inputs and the options.
#pragma once

#include "tensor.hpp"

namespace gatedelta::binding {

// `none` is "=None" where nothing else follows: an argument left out takes torch less time than a None.
#define GD_INPUT_SCHEMA(none)                                                                          \
  "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int options, Tensor? cu_seqlens" none          \
  ", Tensor? initial_state" none ", float? scale" none ", Tensor? A_log" none ", Tensor? dt_bias" none \
  ", Tensor? initial_state_indices" none

// The bits of `options`: one argument, because each argument costs time in torch's dispatcher.
// gatedelta/_operators/ops.py has the same bits; tests/python/test_torch_calls.py compares them.
enum Option : int64_t {
  kGateRaw = 1 << 0,
  kBetaLogit = 1 << 1,
  kBetaLogitDoubled = 1 << 2,
  kStateVFirst = 1 << 3,
  kL2norm = 1 << 4,
  kFinalState = 1 << 5,  // the operator returns it
  kUncut = 1 << 6,       // GD_CP_OFF
  kBatchInvariant = 1 << 7,
  kSmallWorkspace = 1 << 8,  // of a backward
  kTiledKeyHeads = 1 << 13,  // those between are LayerOption's
};
constexpr int kFirstSlotShift = 16;  // from this bit on: gd_inputs.first_slot
constexpr int64_t kInputOptions = (kFinalState - 1) | kTiledKeyHeads;
constexpr int64_t kSchedule = kUncut | kBatchInvariant;

struct Inputs {
  Tensor q, k, v, g, beta;
  int64_t options;
  Tensor cu_seqlens, initial_state;
  std::optional<double> scale;
  Tensor A_log, dt_bias, initial_state_indices;

  explicit Inputs(Arguments& from);

  bool has(Option option) const { return (options & option) != 0; }

  // `also` holds the options this operator takes beyond those of the inputs. With `in_place` the initial states are
  // those of that tensor.
  gd_inputs describe(const Device& device, int64_t also, const Tensor* in_place = nullptr);

  template <typename Args>
  void schedule(Args& args) const {
    args.context_parallel = has(kUncut) ? GD_CP_OFF : GD_CP_AUTO;
    args.batch_invariant = has(kBatchInvariant);
  }

  // Shape [B, T, Hv, V] of o, after describe() has refused ranks above GD_MAX_RANK.
  Tensor empty_o(const Device& device) const;
  // [N, Hv, K, V] or [N, Hv, V, K] in float32, or an empty tensor without kFinalState.
  Tensor empty_final_state(const Device& device) const;

 private:
  int64_t sequence_count() const;
};

}  // namespace gatedelta::binding
