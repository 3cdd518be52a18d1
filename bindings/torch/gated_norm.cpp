// The gated RMSNorm's operators. Rows may have any rank from 1 to 4: missing dimensions are added in front.
#include <iterator>
#include <string>
#include <utility>

#include "gatedelta/gatedelta.h"
#include "operators.hpp"
#include "run.hpp"
#include "tensor.hpp"

namespace gatedelta::binding {

namespace {

#define GD_NORM_SCHEMA "Tensor x, Tensor? gate, Tensor? weight, float? eps, int options"

// The bits of `options`. gatedelta/_operators/norm.py has the same; tests/python/test_norm.py compares them.
enum NormOption : int64_t {
  kSigmoid = 1 << 0,          // of the gate; otherwise SiLU
  kRoundBeforeGate = 1 << 1,  // round_before_gate
};

gd_tensor as_rows(gd_tensor tensor, const char* name) {
  constexpr int32_t kRank = 4;
  if (tensor.dtype == GD_DTYPE_NONE || tensor.rank == kRank) return tensor;
  if (tensor.rank < 1 || tensor.rank > kRank)
    refuse(std::string(name) + " has rank " + std::to_string(tensor.rank) + ", must be from 1 to 4");
  gd_tensor rows = tensor;
  const int32_t missing = kRank - tensor.rank;
  rows.rank = kRank;
  for (int32_t d = 0; d < kRank; ++d) {
    rows.shape[d] = d < missing ? 1 : tensor.shape[d - missing];
    rows.stride[d] = d < missing ? 0 : tensor.stride[d - missing];
  }
  return rows;
}

struct NormInputs {
  Tensor x, gate, weight;
  std::optional<double> eps;
  int64_t options;

  explicit NormInputs(Arguments& from)
      : x(from.tensor()),
        gate(from.optional_tensor()),
        weight(from.optional_tensor()),
        eps(from.optional_float()),
        options(from.integer()) {}

  template <class Args>
  void describe(const Device& device, Args& args) {
    if (constexpr int64_t kTaken = kSigmoid | kRoundBeforeGate; options & ~kTaken)
      refuse("options is " + std::to_string(options) + ", but this operator takes bits of " + std::to_string(kTaken));
    args.x = as_rows(device.input(x, "x", 1), "x");
    args.gate = as_rows(device.input(gate, "gate", 1), "gate");
    args.weight = device.input(weight, "weight", 1);
    args.activation = options & kSigmoid ? GD_NORM_SIGMOID : GD_NORM_SILU;
    args.round_before_gate = (options & kRoundBeforeGate) != 0;
    args.has_eps = eps.has_value();
    args.eps = static_cast<float>(eps.value_or(0));
  }
};

constexpr char kNorm[] = "rms_norm_gated(" GD_NORM_SCHEMA ") -> Tensor";

void norm(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  NormInputs inputs(from);
  auto args = new_args<gd_gated_norm_args>();
  const Device device(inputs.x, "x");
  inputs.describe(device, args);
  Tensor y = device.empty_like(inputs.x);
  args.out = as_rows(device.output(y, "out"), "out");
  run_with_workspace(args, device, gd_gated_norm_workspace, gd_gated_norm);
  stack[0] = returned(std::move(y));
}

constexpr char kNormOut[] = "rms_norm_gated_out(" GD_NORM_SCHEMA ", Tensor(a!) out) -> ()";

void norm_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  NormInputs inputs(from);
  const Tensor out = from.tensor();
  auto args = new_args<gd_gated_norm_args>();
  const Device device(inputs.x, "x");
  inputs.describe(device, args);
  args.out = as_rows(device.output(out, "out"), "out");
  run_with_workspace(args, device, gd_gated_norm_workspace, gd_gated_norm);
}

// wanted: bit i set = the i-th result is computed; the others come back empty.
constexpr char kNormBwd[] =
    "rms_norm_gated_bwd(" GD_NORM_SCHEMA ", Tensor dy, int wanted) -> (Tensor dx, Tensor dgate, Tensor dweight)";

void norm_bwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  NormInputs inputs(from);
  Tensor dy = from.tensor();
  const int64_t wanted = from.integer();
  auto args = new_args<gd_gated_norm_backward_args>();
  const Device device(inputs.x, "x");
  inputs.describe(device, args);
  args.dy = as_rows(device.input(dy, "dy", 1), "dy");

  const Gradient gradients[] = {
      {inputs.x, args.dx, "x"}, {inputs.gate, args.dgate, "gate"}, {inputs.weight, args.dweight, "weight"}};
  Tensor results[std::size(gradients)];
  allocate_gradients(device, gradients, wanted, results,
                     [&](const Gradient& gradient) { return device.empty_like(gradient.of); });
  for (gd_tensor* rows : {&args.dx, &args.dgate}) {
    if (rows->dtype != GD_DTYPE_NONE) *rows = as_rows(*rows, rows == &args.dx ? "x" : "gate");
  }
  run_with_workspace(args, device, gd_gated_norm_backward_workspace, gd_gated_norm_backward);
  for (size_t i = 0; i < std::size(gradients); ++i) stack[i] = returned(std::move(results[i]));
}

constexpr Operator kOperators[] = {{kNorm, norm}, {kNormOut, norm_out}, {kNormBwd, norm_bwd}};

}  // namespace

std::span<const Operator> gated_norm_operators() { return kOperators; }

}  // namespace gatedelta::binding
