// The one tolerance table of every test, in every language.
#pragma once

#include <string>

#include "gatedelta/gatedelta.h"
#include "testing/case.hpp"

namespace gatedelta::testing {

// |got - truth| <= relative |truth| + absolute sqrt(n), L2 norms over one head's n values.
struct Tolerance {
  double relative = 0, absolute = 0;
};

enum class Quantity {
  o,
  final_state,
  checkpoints,
  step_states,
  transition,
  dq,
  dk,
  dv,
  dg,
  dbeta,
  dA_log,
  d_dt_bias,
  d_initial_state
};
const char* name_of(Quantity quantity);
bool quantity_from(const std::string& name, Quantity& quantity);

// The format of products inside a call: bf16 in the chunked forms of bf16 inputs on an ISA that has bf16 products,
// otherwise (and in recurrent calls always) fp32. The CUDA kernels' products have 16-bit operands, too, and more of
// them, except for fp32 inputs.
enum class Compute { fp32, bf16, tensor_cores };
Compute chunk_compute(gd_dtype inputs, gd_isa isa);  // GD_ISA_AUTO: the loosest, bf16 for bf16 inputs
Compute cuda_compute(gd_dtype inputs);

// How hard the inputs of a case are.
enum class InputClass {
  benchmark,  // inputs of layers and benchmarks; the promised bounds are about these
  small,      // the same with few tokens or small heads
  hostile,    // keys that resemble each other or are not normalised, or beta of 1 to 2 throughout
  resetting   // gates of -10 per token and below, down to -inf
};
InputClass class_of(const Case& c);

// `stored` is the dtype of the tensor compared; its own rounding is part of the bound.
Tolerance tolerance(Quantity quantity, Compute compute, gd_dtype stored, const Case& c);

// For an operation that is computed in fp32 throughout and whose sums are short: the gated norm.
Tolerance fp32_tolerance(gd_dtype stored);

}  // namespace gatedelta::testing
