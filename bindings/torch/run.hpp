// Where a call runs: on torch's threads, or on torch's current stream, with a workspace torch allocates.
#pragma once

#include "tensor.hpp"

namespace gatedelta::binding {

// torch's threads behind the library's parallel_for, so that torch.set_num_threads() acts.
class TorchThreads {
 public:
  gd_exec exec();
  void check() const;

 private:
  static void parallel_for(void* context, int64_t count, gd_task_fn run, void* task);

  // An exception must not cross the C ABI, so a failure of torch's waits here until the call is over.
  bool failed_ = false;
};

gd_exec cuda_exec(int32_t device_index);

template <typename Args>
Args new_args() {
  Args args{};
  args.struct_size = sizeof args;
  return args;
}

// A result of a backward: the input it is the gradient of, its place in the call's struct, and its name in messages.
struct Gradient {
  const Tensor& of;
  gd_tensor& place;
  const char* name;
};
// allocate(gradient) makes the tensors of results whose bit in `wanted` is set; the others are empty.
template <size_t kCount, class Allocate>
void allocate_gradients(const Device& device, const Gradient (&gradients)[kCount], int64_t wanted,
                        Tensor (&results)[kCount], const Allocate& allocate) {
  for (size_t i = 0; i < kCount; ++i) {
    const Gradient& gradient = gradients[i];
    if (!(wanted >> i & 1)) {
      results[i] = device.nothing();
      continue;
    }
    if (!gradient.of) {
      refuse(std::string("the gradient of ") + gradient.name + " is wanted, but there is no " + gradient.name);
    }
    results[i] = allocate(gradient);
    gradient.place = device.output(results[i], gradient.name);
  }
}

// Queries the workspace, allocates it, runs. `workspace` and `run` are a pair of functions of the C ABI. On CUDA the
// kernels may still run when the workspace is freed: torch reuses it only for later work of the same stream.
template <typename Args>
void run_with_workspace(Args& args, const Device& device, gd_status (*workspace)(const Args*, size_t*),
                        gd_status (*run)(const Args*)) {
  TorchThreads threads;
  args.exec = device.is_cuda() ? cuda_exec(device.index) : threads.exec();
  check(workspace(&args, &args.exec.workspace_bytes));
  const Tensor memory = device.empty_bytes(args.exec.workspace_bytes);
  GD_TORCH(torch_get_mutable_data_ptr(memory.get(), &args.exec.workspace));
  check(run(&args));
  threads.check();
}

// The recurrent step's way to do the same, for calls of few microseconds: on CUDA it has no workspace, and that of a
// small call on the CPU fits on the stack. There is then one call of the library, and no allocation.
gd_status run_step(gd_recurrent_args& args);

inline void run_step(gd_recurrent_args& args, const Device& device) {
  TorchThreads threads;
  args.exec = device.is_cuda() ? cuda_exec(device.index) : threads.exec();
  check(run_step(args));
  threads.check();
}

}  // namespace gatedelta::binding
