// The torch operators of namespace `gatedelta`: schemas and boxed kernels over the C ABI, through torch's stable C
// shim. One binary serves torch 2.10 and newer, of any build. The kernels read tensors, allocate outputs and workspace,
// and lend torch's threads or its current stream; the library itself checks the arguments.
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "gatedelta/gatedelta.h"
#include "inputs.hpp"
#include "operators.hpp"
#include "run.hpp"
#include "shim.h"
#include "tensor.hpp"

namespace gatedelta::binding {

namespace {

constexpr uint64_t kOldestTorch = (uint64_t{2} << 56) | (uint64_t{10} << 48);  // 2.10.0, as the shim encodes versions

constexpr char kChunkFwd[] = "chunk_fwd(" GD_INPUT_SCHEMA("=None") ") -> (Tensor o, Tensor final_state)";
constexpr char kChunkFwdSave[] =
    "chunk_fwd_save(" GD_INPUT_SCHEMA("=None") ") -> (Tensor o, Tensor final_state, Tensor saved)";

void chunk_fwd(StableIValue* stack, uint64_t, uint64_t outputs) {
  Arguments from(stack);
  Inputs inputs(from);
  const bool save = outputs == 3;

  auto args = new_args<gd_forward_args>();
  const Device device(inputs.q);
  args.in = inputs.describe(device, kFinalState | kSchedule);
  inputs.schedule(args);
  Tensor o = inputs.empty_o(device), saved;
  args.out = device.output(o, "out");
  Tensor final_state = inputs.empty_final_state(device);
  if (inputs.has(kFinalState)) args.final_state = device.output(final_state, "final_state");
  if (save) {
    args.exec.device = device.is_cuda() ? GD_CUDA : GD_CPU;  // decides what is saved
    check(gd_forward_saved_size(&args, &args.saved_bytes));
    saved = device.empty_bytes(args.saved_bytes);
    if (args.saved_bytes > 0) GD_TORCH(torch_get_mutable_data_ptr(saved.get(), &args.saved));
  }
  run_with_workspace(args, device, gd_forward_workspace, gd_forward);
  stack[0] = returned(std::move(o));
  stack[1] = returned(std::move(final_state));
  if (save) stack[2] = returned(std::move(saved));
}

// in_place: final_state is also what the sequences start from, and initial_state is absent.
constexpr char kChunkFwdOut[] = "chunk_fwd_out(" GD_INPUT_SCHEMA("")
                                ", Tensor(a!) out, Tensor(b!)? final_state, Tensor? final_state_indices, "
                                "bool in_place, Tensor(c!)? checkpoints, Tensor? checkpoint_indices, "
                                "int checkpoint_every, Tensor? checkpoint_offsets=None) -> ()";

void check_in_place(bool in_place, const Inputs& inputs, const Tensor& final_state) {
  if (in_place && (inputs.initial_state || !final_state)) {
    refuse("in_place takes the states from final_state: give that one and no initial_state");
  }
}

void chunk_fwd_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  Inputs inputs(from);
  const Tensor o = from.tensor();
  const Tensor final_state = from.optional_tensor();
  Tensor final_state_indices = from.optional_tensor();
  const bool in_place = from.boolean();
  const Tensor checkpoints = from.optional_tensor();
  Tensor checkpoint_indices = from.optional_tensor();

  auto args = new_args<gd_forward_args>();
  args.checkpoint_every = from.integer();
  Tensor checkpoint_offsets = from.optional_tensor();

  const Device device(inputs.q);
  check_in_place(in_place, inputs, final_state);
  args.in = inputs.describe(device, kSchedule, in_place ? &final_state : nullptr);
  inputs.schedule(args);
  args.out = device.output(o, "out");
  args.final_state = device.output(final_state, "final_state");
  args.final_state_indices = device.indices(final_state_indices, "final_state_indices");
  args.checkpoints = device.output(checkpoints, "checkpoints");
  args.checkpoint_indices = device.indices(checkpoint_indices, "checkpoint_indices");
  args.checkpoint_offsets = device.indices(checkpoint_offsets, "checkpoint_offsets");
  run_with_workspace(args, device, gd_forward_workspace, gd_forward);
}

// `saved` is of a call with these very inputs. The operator cannot tell: autograd keeps both together, and
// chunk_gated_delta_rule_bwd has compared what the caller gave it.
gd_saved_call own_saved_call(const gd_backward_args& args, const Device& device) {
  auto forward = new_args<gd_forward_args>();
  if (device.is_cuda()) forward.exec = cuda_exec(device.index);
  forward.in = args.in;
  forward.batch_invariant = args.batch_invariant;
  gd_tensor& out = forward.out = args.in.v;  // its shape is all that counts
  int64_t stride = 1;
  for (int32_t d = out.rank - 1; d >= 0; --d) {
    out.stride[d] = stride;
    stride *= out.shape[d];
  }
  gd_saved_call call{};
  check(gd_forward_saved_call(&forward, &call));
  return call;
}

// wanted: bit i set = the i-th result is computed; the others come back empty.
constexpr char kChunkBwd[] = "chunk_bwd(" GD_INPUT_SCHEMA("")
                             ", Tensor do, Tensor? dht, Tensor? saved, int wanted) -> (Tensor dq, "
                             "Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dA_log, Tensor d_dt_bias, "
                             "Tensor d_initial_state)";

void chunk_bwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  Inputs inputs(from);
  Tensor d_out = from.tensor();
  Tensor dht = from.optional_tensor();
  const Tensor saved = from.optional_tensor();
  const int64_t wanted = from.integer();

  auto args = new_args<gd_backward_args>();
  const Device device(inputs.q);
  args.in = inputs.describe(device, kSchedule | kSmallWorkspace);
  inputs.schedule(args);
  args.small_workspace = inputs.has(kSmallWorkspace);
  args.do_ = device.input(d_out, "do", 1);
  args.dht = device.input(dht, "dht", 2);
  if (saved) {
    device.check(saved, "saved");
    if (saved.dtype() != codes.u8 || saved.rank() != 1) refuse("saved is not what a forward returned");
    args.saved_bytes = static_cast<size_t>(saved.sizes()[0]);
    if (args.saved_bytes > 0) GD_TORCH(torch_get_const_data_ptr(saved.get(), &args.saved));
    args.saved_call = own_saved_call(args, device);
  }

  const Gradient gradients[] = {
      {inputs.q, args.dq, "q"},
      {inputs.k, args.dk, "k"},
      {inputs.v, args.dv, "v"},
      {inputs.g, args.dg, "g"},
      {inputs.beta, args.dbeta, "beta"},
      {inputs.A_log, args.dA_log, "A_log"},
      {inputs.dt_bias, args.d_dt_bias, "dt_bias"},
      {inputs.initial_state, args.d_initial_state, "initial_state"},
  };
  Tensor results[std::size(gradients)];
  allocate_gradients(device, gradients, wanted, results, [&](const Gradient& gradient) {
    if (&gradient.of == &inputs.initial_state && inputs.initial_state_indices) {
      refuse("there is no gradient of a pool of initial states: give the states of this call's sequences instead");
    }
    return device.empty_like(gradient.of);
  });
  run_with_workspace(args, device, gd_backward_workspace, gd_backward);
  for (size_t i = 0; i < std::size(gradients); ++i) stack[i] = returned(std::move(results[i]));
}

constexpr char kRecurrent[] = "recurrent(" GD_INPUT_SCHEMA("=None") ") -> (Tensor o, Tensor final_state)";

void recurrent(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  Inputs inputs(from);

  auto args = new_args<gd_recurrent_args>();
  const Device device(inputs.q);
  args.in = inputs.describe(device, kFinalState | kBatchInvariant);
  args.batch_invariant = inputs.has(kBatchInvariant);
  Tensor o = inputs.empty_o(device);
  args.out = device.output(o, "out");
  Tensor final_state = inputs.empty_final_state(device);
  if (inputs.has(kFinalState)) args.final_state = device.output(final_state, "final_state");
  run_step(args, device);
  stack[0] = returned(std::move(o));
  stack[1] = returned(std::move(final_state));
}

constexpr char kRecurrentOut[] = "recurrent_out(" GD_INPUT_SCHEMA("")
                                 ", Tensor(a!)? out, Tensor(b!)? final_state, Tensor? final_state_indices, "
                                 "bool in_place, Tensor? accept_lengths, Tensor(c!)? step_states, "
                                 "Tensor? step_indices, Tensor? previous_accept_lengths=None) -> ()";

void recurrent_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments from(stack);
  Inputs inputs(from);
  const Tensor o = from.optional_tensor();
  const Tensor final_state = from.optional_tensor();
  Tensor final_state_indices = from.optional_tensor();
  const bool in_place = from.boolean();
  Tensor accept_lengths = from.optional_tensor();
  const Tensor step_states = from.optional_tensor();
  Tensor step_indices = from.optional_tensor();
  Tensor previous_accept_lengths = from.optional_tensor();

  auto args = new_args<gd_recurrent_args>();
  const Device device(inputs.q);
  check_in_place(in_place, inputs, final_state);
  args.in = inputs.describe(device, kBatchInvariant, in_place ? &final_state : nullptr);
  args.batch_invariant = inputs.has(kBatchInvariant);
  args.out = device.output(o, "out");
  args.final_state = device.output(final_state, "final_state");
  args.final_state_indices = device.indices(final_state_indices, "final_state_indices");
  args.accept_lengths = device.indices(accept_lengths, "accept_lengths");
  args.step_states = device.output(step_states, "step_states");
  args.step_indices = device.indices(step_indices, "step_indices");
  args.previous_accept_lengths = device.indices(previous_accept_lengths, "previous_accept_lengths");
  run_step(args, device);
}

// ---- registration --------------------------------------------------------------------------------------------------

constexpr Operator kOperators[] = {
    {kChunkFwd, chunk_fwd}, {kChunkFwdSave, chunk_fwd}, {kChunkFwdOut, chunk_fwd_out},
    {kChunkBwd, chunk_bwd}, {kRecurrent, recurrent},    {kRecurrentOut, recurrent_out},
};

// The same kernels for both: the library refuses an operation that a device lacks.
constexpr const char* kDispatchKeys[] = {"CPU", "CUDA"};

// The library objects live as long as the process: deleting one would take its operators away. A failure ends the
// registration (torch has written the reason to stderr) and shows as missing operators: nothing may be thrown while the
// library is being loaded.
bool register_operators() {
  constexpr char kFile[] = "bindings/torch/ops.cpp";
  TorchLibraryHandle library = nullptr;
  if (aoti_torch_library_init_def("gatedelta", kFile, __LINE__, &library) != 0) return false;
  const std::span<const Operator> files[] = {kOperators, conv1d_operators(), gated_norm_operators(),
                                             layer_step_operators()};
  for (const auto& operators : files) {
    for (const Operator& op : operators) {
      if (aoti_torch_library_def(library, op.schema) != 0) return false;
    }
  }
  for (const char* key : kDispatchKeys) {
    if (aoti_torch_library_init_impl("gatedelta", key, kFile, __LINE__, &library) != 0) return false;
    for (const auto& operators : files) {
      for (const Operator& op : operators) {
        if (torch_library_impl(library, op.name().c_str(), op.kernel, kOldestTorch) != 0) return false;
      }
    }
  }
  return true;
}
[[maybe_unused]] const bool registered = register_operators();

}  // namespace

}  // namespace gatedelta::binding
