#include "run.hpp"

#include <dlfcn.h>

#include <cstdlib>

namespace gatedelta::binding {

namespace {

// GATEDELTA_ISA and GATEDELTA_KERNELS, read once when this library is loaded. gatedelta._lib has refused other
// values by then.
const int32_t forced_isa = [] {
  const char* const wanted = std::getenv("GATEDELTA_ISA");
  for (int32_t isa = GD_ISA_COUNT - 1; wanted && isa > GD_ISA_AUTO; --isa)
    if (std::strcmp(gd_isa_name(isa), wanted) == 0) return isa;
  return static_cast<int32_t>(GD_ISA_AUTO);
}();
const int32_t forced_kernels = [] {
  const char* const wanted = std::getenv("GATEDELTA_KERNELS");
  return static_cast<int32_t>(wanted && std::strcmp(wanted, "portable") == 0 ? GD_KERNELS_PORTABLE : GD_KERNELS_AUTO);
}();

// torch's current stream. Where there are CUDA tensors, libtorch_cuda.so is loaded, but its symbols may not be global.
void* current_stream(int32_t device_index) {
  static const auto get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<decltype(&aoti_torch_get_current_cuda_stream)>(
        dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  }();
  if (!get) fail("this torch does not give its current CUDA stream");
  void* stream = nullptr;
  GD_TORCH(get(device_index, &stream));
  return stream;
}

}  // namespace

gd_exec TorchThreads::exec() {
  uint32_t threads = 1;
  GD_TORCH(torch_get_num_threads(&threads));
  gd_exec exec{};
  exec.device = GD_CPU;
  exec.isa = forced_isa;
  exec.num_threads = static_cast<int32_t>(threads);
  if (threads > 1) {
    exec.parallel_for = parallel_for;
    exec.parallel_for_context = this;
  }
  return exec;
}

void TorchThreads::check() const {
  if (failed_) fail("torch failed in torch_parallel_for");
}

void TorchThreads::parallel_for(void* context, int64_t count, gd_task_fn run, void* task) {
  struct Range {
    gd_task_fn run;
    void* task;
  } range{run, task};
  const AOTITorchError error = torch_parallel_for(
      0, count, 1,
      [](int64_t begin, int64_t end, void* data) {
        const Range& range = *static_cast<Range*>(data);
        for (int64_t i = begin; i < end; ++i) range.run(range.task, i);
      },
      &range);
  if (error != 0) static_cast<TorchThreads*>(context)->failed_ = true;
}

gd_exec cuda_exec(int32_t device_index) {
  gd_exec exec{};
  exec.kernels = forced_kernels;
  exec.device = GD_CUDA;
  exec.device_index = device_index;
  exec.stream = current_stream(device_index);
  return exec;
}

gd_status run_step(gd_recurrent_args& args) {
  constexpr size_t kAlign = 64;
  gd_exec& exec = args.exec;
  if (exec.device == GD_CUDA) return gd_recurrent(&args);
  alignas(kAlign) char room[160 << 10];
  exec.workspace = room;
  exec.workspace_bytes = sizeof room;
  gd_status status = gd_recurrent(&args);
  if (status != GD_WORKSPACE_TOO_SMALL) return status;  // which is refused before anything is written
  status = gd_recurrent_workspace(&args, &exec.workspace_bytes);
  if (status != GD_OK) return status;
  const size_t whole = (exec.workspace_bytes + kAlign - 1) / kAlign * kAlign;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kAlign, whole), std::free);
  if (!memory) fail("there is no memory for a workspace of " + std::to_string(whole) + " bytes");
  exec.workspace = memory.get();
  return gd_recurrent(&args);
}

}  // namespace gatedelta::binding
