#include "run.hpp"

#include <dlfcn.h>

#include <cstdlib>

namespace gatedelta::binding {

namespace {

// GATEDELTA_ISA, read once when this library is loaded. Of a CPU instruction set it concerns CPU tensors, and
// "portable" concerns CUDA tensors.
struct ForcedIsa {
  int32_t isa = GD_ISA_AUTO, cuda_isa = GD_ISA_AUTO;
  std::string error;

  ForcedIsa() {
    const char* wanted = std::getenv("GATEDELTA_ISA");
    if (!wanted || !*wanted) return;
    if (std::strcmp(gd_isa_name(GD_ISA_CUDA_PORTABLE), wanted) == 0) {
      cuda_isa = GD_ISA_CUDA_PORTABLE;
      return;
    }
    std::string names;
    for (int32_t i = 0; i < GD_ISA_COUNT; ++i) {
      if (std::strcmp(gd_isa_name(i), wanted) == 0) {
        isa = i;
        return;
      }
      names += std::string(i ? ", " : "") + gd_isa_name(i);
    }
    error = std::string("GATEDELTA_ISA is '") + wanted + "', which is none of " + names + ", " +
            gd_isa_name(GD_ISA_CUDA_PORTABLE);
  }
};
const ForcedIsa forced_isa;

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
  if (!forced_isa.error.empty()) fail(forced_isa.error);
  uint32_t threads = 1;
  GD_TORCH(torch_get_num_threads(&threads));
  gd_exec exec{};
  exec.device = GD_CPU;
  exec.isa = forced_isa.isa;
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
  if (!forced_isa.error.empty()) fail(forced_isa.error);
  gd_exec exec{};
  exec.isa = forced_isa.cuda_isa;
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
