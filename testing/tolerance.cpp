#include "testing/tolerance.hpp"

#include <cmath>
#include <utility>

namespace gatedelta::testing {

namespace {

constexpr std::pair<Quantity, const char*> kNames[] = {
    {Quantity::o, "o"},
    {Quantity::final_state, "final_state"},
    {Quantity::checkpoints, "checkpoints"},
    {Quantity::step_states, "step_states"},
    {Quantity::dq, "dq"},
    {Quantity::dk, "dk"},
    {Quantity::dv, "dv"},
    {Quantity::dg, "dg"},
    {Quantity::dbeta, "dbeta"},
    {Quantity::dA_log, "dA_log"},
    {Quantity::d_dt_bias, "d_dt_bias"},
    {Quantity::d_initial_state, "d_initial_state"},
};

// Relative bounds per input class. The benchmark column of bf16 and of fp32 is what the project promises; the others
// allow for what the inputs do to any fp32 or bf16 computation:
//   hostile    with keys that resemble each other or beta up to 2 the solve inside a chunk adds up more terms of one
//              sign, and rounding errors are carried on instead of being erased;
//   resetting  the decay between two tokens is e to the difference of two fp32 sums of g, so a reset of -80 costs the
//              tokens around it a relative 1e-5; and what survives a reset is small against what the sums hold.
struct Row {
  double benchmark, hostile, resetting;
};
constexpr Row kOutput[] = {/* fp32 */ {1e-5, 3e-5, 5e-5}, /* bf16 */ {4.0e-3, 8e-3, 5e-3}};
constexpr Row kState[] = {/* fp32 */ {1e-5, 3e-5, 5e-5}, /* bf16 */ {2.5e-3, 8e-3, 5e-3}};
constexpr Row kGradient[] = {/* fp32 */ {1e-5, 3e-5, 1e-4}, /* bf16 */ {5e-3, 1e-2, 8e-3}};
// dg after a reset is e^g times a state: arbitrarily small, while the sums it comes from hold values of order 1. Their
// rounding is all that can be asked for, so dg and what follows from it have an absolute part there.
constexpr double kGateAbsolute[] = {/* fp32 */ 2e-6, /* bf16 */ 2e-3};

// Relative L2 error of rounding to the stored dtype, from random mantissas, with some room for short rows.
double rounding(gd_dtype stored) { return stored == GD_BF16 ? 1.9e-3 : stored == GD_F16 ? 2.4e-4 : 0; }

}  // namespace

const char* name_of(Quantity quantity) {
  for (const auto& [each, name] : kNames) {
    if (each == quantity) return name;
  }
  return "?";
}

bool quantity_from(const std::string& name, Quantity& quantity) {
  for (const auto& [each, text] : kNames) {
    if (name == text) {
      quantity = each;
      return true;
    }
  }
  return false;
}

Compute compute_of(gd_dtype inputs, gd_isa isa) {
  const bool bf16_products =
      isa == GD_ISA_AUTO || isa == GD_ISA_AVX512_BF16 || isa == GD_ISA_AMX || isa == GD_ISA_NEON_BF16;
  return inputs == GD_BF16 && bf16_products ? Compute::bf16 : Compute::fp32;
}

InputClass class_of(const Case& c) {
  switch (c.gate) {
    case GateKind::strong:
    case GateKind::spiky:
    case GateKind::infinite:
    case GateKind::very_negative: return InputClass::resetting;
    default: break;
  }
  const bool calm_beta = c.beta == BetaKind::unit || c.beta == BetaKind::zeros || c.beta == BetaKind::logit;
  return c.keys == KeyKind::random && calm_beta ? InputClass::benchmark : InputClass::hostile;
}

Tolerance tolerance(Quantity quantity, Compute compute, gd_dtype stored, InputClass inputs) {
  const int column = compute == Compute::bf16;
  const bool state =
      quantity == Quantity::final_state || quantity == Quantity::checkpoints || quantity == Quantity::step_states;
  const bool gate = quantity == Quantity::dg || quantity == Quantity::dA_log || quantity == Quantity::d_dt_bias;
  const Row& row = quantity == Quantity::o ? kOutput[column] : state ? kState[column] : kGradient[column];
  Tolerance bound;
  bound.relative = inputs == InputClass::benchmark ? row.benchmark
                   : inputs == InputClass::hostile ? row.hostile
                                                   : row.resetting;
  if (gate && inputs == InputClass::resetting) bound.absolute = kGateAbsolute[column];
  // The promised bf16 bounds of o and the gradients include their own rounding to bf16; all others do not.
  const bool included = compute == Compute::bf16 && !state && quantity != Quantity::d_initial_state;
  if (!included) bound.relative = std::hypot(bound.relative, rounding(stored));
  return bound;
}

}  // namespace gatedelta::testing
