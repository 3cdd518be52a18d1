// The convolution's operators. x is [B, T, D]; its result lies in memory as it does, channels or tokens first.
#include <iterator>
#include <string>
#include <utility>

#include "gatedelta/gatedelta.h"
#include "operators.hpp"
#include "run.hpp"
#include "tensor.hpp"

namespace gatedelta::binding {

namespace {

#define GD_CONV_SCHEMA "Tensor x, Tensor weight, Tensor? bias, int options, Tensor? cu_seqlens, Tensor? initial_state"

// The bits of `options`. gatedelta/_operators/conv1d.py has the same; tests/python/test_conv1d.py compares them.
enum ConvOption : int64_t {
  kSilu = 1 << 0,
  kFinalState = 1 << 1,  // the operator returns it
};

struct ConvInputs {
  Tensor x, weight, bias;
  int64_t options;
  Tensor cu_seqlens, initial_state;

  explicit ConvInputs(Arguments& from)
      : x(from.tensor()),
        weight(from.tensor()),
        bias(from.optional_tensor()),
        options(from.integer()),
        cu_seqlens(from.optional_tensor()),
        initial_state(from.optional_tensor()) {}

  // With `in_place` the initial states are those of that tensor.
  gd_conv1d_inputs describe(const Device& device, int64_t taken, const Tensor* in_place = nullptr) {
    if (options & ~taken)
      refuse("options is " + std::to_string(options) + ", but this operator takes bits of " + std::to_string(taken));
    gd_conv1d_inputs in{};
    in.x = device.input(x, "x");
    if (in.x.rank != 3) refuse("x must have rank 3, not " + std::to_string(in.x.rank));
    in.weight = device.input(weight, "weight");
    in.bias = device.input(bias, "bias");
    in.cu_seqlens = device.indices(cu_seqlens, "cu_seqlens");
    in.initial_state =
        in_place ? device.output(*in_place, "initial_state") : device.input(initial_state, "initial_state");
    in.activation = options & kSilu ? GD_CONV1D_SILU : GD_CONV1D_LINEAR;
    return in;
  }

  int64_t sequence_count() const {
    if (!cu_seqlens) return x.sizes()[0];
    const int64_t offsets = cu_seqlens.rank() == 1 ? cu_seqlens.sizes()[0] : 0;
    if (offsets < 1) refuse("cu_seqlens must have rank 1 and at least one entry");
    return offsets - 1;
  }
};

// [B, T, D] in x's dtype and in its order of tokens and channels.
Tensor empty_rows(const Device& device, const Tensor& x) {
  const int64_t *sizes = x.sizes(), *strides = x.strides();
  const int64_t B = sizes[0], T = sizes[1], D = sizes[2];
  if (!(strides[1] == 1 && strides[2] != 1 && T > 1 && D > 1)) return device.empty_like(x);
  const int64_t turned[] = {T * D, 1, T}, shape[] = {B, T, D};
  AtenTensorHandle handle = nullptr;
  GD_TORCH(aoti_torch_empty_strided(3, shape, turned, x.dtype(), device.type, device.index, &handle));
  return Tensor(handle);
}

constexpr char kConv[] = "conv1d(" GD_CONV_SCHEMA ", int state_size) -> (Tensor y, Tensor final_state)";

void conv(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  ConvInputs inputs(from);
  const int64_t state_size = from.integer();
  auto args = new_args<gd_conv1d_args>();
  const Device device(inputs.x, "x");
  args.in = inputs.describe(device, kSilu | kFinalState);
  Tensor y = empty_rows(device, inputs.x), final_state = device.nothing();
  args.out = device.output(y, "out");
  if (inputs.options & kFinalState) {
    const int64_t sizes[] = {inputs.sequence_count(), inputs.x.sizes()[2], state_size};
    final_state = device.empty(3, sizes, inputs.x.dtype());
    args.final_state = device.output(final_state, "final_state");
  }
  run_with_workspace(args, device, gd_conv1d_workspace, gd_conv1d);
  stack[0] = returned(std::move(y));
  stack[1] = returned(std::move(final_state));
}

// in_place: final_state is also what the sequences start from, and initial_state is absent.
constexpr char kConvOut[] =
    "conv1d_out(" GD_CONV_SCHEMA
    ", Tensor? initial_state_indices, int first_slot, Tensor(a!)? out, Tensor(b!)? final_state, "
    "Tensor? final_state_indices, bool in_place, Tensor? previous_accept_lengths, "
    "Tensor(c!)? step_states) -> ()";

void conv_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  ConvInputs inputs(from);
  Tensor initial_state_indices = from.optional_tensor();
  const int64_t first_slot = from.integer();
  const Tensor out = from.optional_tensor();
  const Tensor final_state = from.optional_tensor();
  Tensor final_state_indices = from.optional_tensor();
  const bool in_place = from.boolean();
  Tensor previous_accept_lengths = from.optional_tensor();
  const Tensor step_states = from.optional_tensor();

  auto args = new_args<gd_conv1d_args>();
  const Device device(inputs.x, "x");
  if (in_place && (inputs.initial_state || !final_state))
    refuse("in_place takes the states from final_state: give that one and no initial_state");
  args.in = inputs.describe(device, kSilu, in_place ? &final_state : nullptr);
  args.in.initial_state_indices = device.indices(initial_state_indices, "initial_state_indices");
  args.in.first_slot = first_slot;
  args.out = device.output(out, "out");
  args.final_state = device.output(final_state, "final_state");
  args.final_state_indices = device.indices(final_state_indices, "final_state_indices");
  args.previous_accept_lengths = device.indices(previous_accept_lengths, "previous_accept_lengths");
  args.step_states = device.output(step_states, "step_states");
  run_with_workspace(args, device, gd_conv1d_workspace, gd_conv1d);
}

// wanted: bit i set = the i-th result is computed; the others come back empty.
constexpr char kConvBwd[] = "conv1d_bwd(" GD_CONV_SCHEMA
                            ", Tensor dy, Tensor? dht, int wanted) -> (Tensor dx, Tensor dweight, "
                            "Tensor dbias, Tensor d_initial_state)";

void conv_bwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  ConvInputs inputs(from);
  Tensor dy = from.tensor();
  Tensor dht = from.optional_tensor();
  const int64_t wanted = from.integer();
  auto args = new_args<gd_conv1d_backward_args>();
  const Device device(inputs.x, "x");
  args.in = inputs.describe(device, kSilu);
  args.dy = device.input(dy, "dy");
  args.dht = device.input(dht, "dht");

  const Gradient gradients[] = {
      {inputs.x, args.dx, "x"},
      {inputs.weight, args.dweight, "weight"},
      {inputs.bias, args.dbias, "bias"},
      {inputs.initial_state, args.d_initial_state, "initial_state"},
  };
  Tensor results[std::size(gradients)];
  allocate_gradients(device, gradients, wanted, results, [&](const Gradient& gradient) {
    return &gradient.of == &inputs.x ? empty_rows(device, gradient.of) : device.empty_like(gradient.of);
  });
  run_with_workspace(args, device, gd_conv1d_backward_workspace, gd_conv1d_backward);
  for (size_t i = 0; i < std::size(gradients); ++i) stack[i] = returned(std::move(results[i]));
}

constexpr Operator kOperators[] = {{kConv, conv}, {kConvOut, conv_out}, {kConvBwd, conv_bwd}};

}  // namespace

std::span<const Operator> conv1d_operators() { return kOperators; }

}  // namespace gatedelta::binding
