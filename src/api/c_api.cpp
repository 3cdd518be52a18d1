// The entry points: check the struct, validate, resolve lanes and ISA, check the workspace, run.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <iterator>

#include "api/error.hpp"
#include "api/validate.hpp"
#include "core/thread_pool.hpp"
#include "cpu/backend.hpp"
#include "cuda/backend.hpp"

namespace gatedelta::api {

namespace {

constinit thread_local char last_error[512] = "";

constexpr const char* kIsaNames[] = {"auto", "generic", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"};
static_assert(std::size(kIsaNames) == GD_ISA_COUNT);

// What each operation calls; overloads, so that one template serves all three.
size_t workspace_bytes(const ForwardProblem& p, const cpu::Context& c) { return cpu::forward_workspace(p, c); }
size_t workspace_bytes(const BackwardProblem& p, const cpu::Context& c) { return cpu::backward_workspace(p, c); }
size_t workspace_bytes(const RecurrentProblem& p, const cpu::Context& c) { return cpu::recurrent_workspace(p, c); }
void run(const ForwardProblem& p, const cpu::Context& c) { cpu::forward(p, c); }
void run(const BackwardProblem& p, const cpu::Context& c) { cpu::backward(p, c); }
void run(const RecurrentProblem& p, const cpu::Context& c) { cpu::recurrent(p, c); }

gd_status check_saved_size(size_t given, size_t needed) {
  if (given >= needed) return GD_OK;
  return refuse(GD_WORKSPACE_TOO_SMALL, "saved has %zu bytes, needs %zu", given, needed);
}
gd_status check_saved(const gd_forward_args& args, const ForwardProblem& p, const cpu::Context& c) {
  return p.saved ? check_saved_size(args.saved_bytes, cpu::forward_saved(p, c)) : GD_OK;
}
gd_status check_saved(const gd_backward_args& args, const BackwardProblem& p, const cpu::Context& c) {
  return p.saved ? check_saved_size(args.saved_bytes, cpu::backward_saved(p, c)) : GD_OK;
}
gd_status check_saved(const gd_recurrent_args&, const RecurrentProblem&, const cpu::Context&) { return GD_OK; }
template <class Args, class Problem>
gd_status check_cuda_saved(const Args& args, const Problem& p) {
  return p.saved ? check_saved_size(args.saved_bytes, cuda::saved_bytes(p.in)) : GD_OK;
}
gd_status check_cuda_saved(const gd_recurrent_args&, const RecurrentProblem&) { return GD_OK; }

// Fields a newer ABI appends are fine as long as they are unused, that is zero.
template <class Args>
gd_status check_struct(const Args* args, const char* type) {
  constexpr size_t kLargest = 1 << 16;  // anything beyond is an uninitialised field, not a newer ABI
  if (!args) return invalid("%s is null", type);
  const size_t size = args->struct_size;
  if (size < sizeof(Args) || size > kLargest)
    return refuse(GD_ABI_MISMATCH, "%s.struct_size is %zu, must be %zu: %s", type, size, sizeof(Args),
                  size < sizeof(Args) ? "not set, or a struct from an older ABI" : "not set");
  const char* bytes = reinterpret_cast<const char*>(args);
  if (std::any_of(bytes + sizeof(Args), bytes + size, [](char byte) { return byte != 0; }))
    return refuse(GD_ABI_MISMATCH,
                  "%s.struct_size is %zu, must be %zu: a struct from a newer ABI, with fields set that "
                  "this library does not know",
                  type, size, sizeof(Args));
  return GD_OK;
}

gd_status resolve(const gd_exec& exec, cpu::Context& context) {
  if (exec.isa == GD_ISA_AUTO) {
    context.isa = cpu::best_isa();
  } else {
    const int bit = 1 << exec.isa;
    if (!(cpu::compiled_isas() & bit))
      return refuse(GD_UNSUPPORTED, "isa is %s, which is not in this build", kIsaNames[exec.isa]);
    if (!(cpu::usable_isas() & bit))
      return refuse(GD_UNSUPPORTED, "isa is %s, which this machine cannot run", kIsaNames[exec.isa]);
    context.isa = static_cast<gd_isa>(exec.isa);
  }
  context.lanes = exec.num_threads ? exec.num_threads : exec.parallel_for ? cpu_count() : 1;
  context.parallel_for = exec.parallel_for;
  context.parallel_for_context = exec.parallel_for_context;
  return GD_OK;
}

// A validated call. On the CPU its workspace is the bitmap of written slots, then the backend's own.
template <class Problem>
struct Call {
  Problem problem;
  cpu::Context context;
  size_t bitmap_bytes = 0, bytes = 0;
};

// What is different on CUDA. It has the forward and the backward so far.
size_t cuda_workspace_bytes(const ForwardProblem& p) { return cuda::forward_workspace(p); }
size_t cuda_workspace_bytes(const BackwardProblem& p) { return cuda::backward_workspace(p); }
cuda::Outcome call_cuda(const ForwardProblem& p, const cuda::Context& c) { return cuda::forward(p, c); }
cuda::Outcome call_cuda(const BackwardProblem& p, const cuda::Context& c) { return cuda::backward(p, c); }

template <class Args, class Problem>
gd_status prepare_cuda(const Args& args, Stage stage, Call<Problem>& call) {
  GD_TRY(validate_shapes(args, stage, call.problem));
  GD_TRY(validate_cuda(stage, call.problem));
  if (!cuda::is_compiled()) return refuse(GD_UNSUPPORTED, "device is GD_CUDA, but this build has no CUDA backend");
  call.bytes = cuda_workspace_bytes(call.problem);
  return GD_OK;
}
gd_status prepare_cuda(const gd_recurrent_args&, Stage, Call<RecurrentProblem>&) {
  return refuse(GD_UNSUPPORTED, "device is GD_CUDA, which has gd_forward and gd_backward only for now");
}

template <class Problem>
gd_status run_cuda(const Problem& problem, const gd_exec& exec) {
  const cuda::Outcome outcome =
      call_cuda(problem, {exec.device_index, exec.stream, static_cast<char*>(exec.workspace)});
  return outcome.status == GD_OK ? GD_OK : refuse(outcome.status, "%s", outcome.message);
}
gd_status run_cuda(const RecurrentProblem&, const gd_exec&) {
  return GD_UNSUPPORTED;  // prepare_cuda has said so
}

template <class Args, class Problem>
gd_status prepare(const Args* args, const char* type, Stage stage, Call<Problem>& call) {
  GD_TRY(check_struct(args, type));
  GD_TRY(validate_exec(args->exec));
  if (args->exec.device == GD_CUDA) return prepare_cuda(*args, stage, call);
  GD_TRY(validate_shapes(*args, stage, call.problem));
  GD_TRY(resolve(args->exec, call.context));
  call.bitmap_bytes = slot_bitmap_bytes(call.problem);
  call.bytes = call.bitmap_bytes + workspace_bytes(call.problem, call.context);
  return GD_OK;
}

gd_status check_workspace(const gd_exec& exec, size_t needed) {
  if (exec.workspace_bytes < needed)
    return refuse(GD_WORKSPACE_TOO_SMALL, "workspace has %zu bytes, needs %zu", exec.workspace_bytes, needed);
  if (needed && !exec.workspace) return invalid("workspace is null, but workspace_bytes is %zu", exec.workspace_bytes);
  if (reinterpret_cast<uintptr_t>(exec.workspace) % 64)
    return invalid("workspace (%p) is not 64-byte aligned", exec.workspace);
  return GD_OK;
}

// No exception leaves the library, not even one from a caller's parallel_for.
template <class Body>
gd_status guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    return refuse(GD_INTERNAL, "exception during the call: %s", error.what());
  } catch (...) {
    return refuse(GD_INTERNAL, "unknown exception during the call");
  }
}

template <class Problem, class Args>
gd_status call_operation(const Args* args, const char* type) {
  return guarded([&] {
    Call<Problem> call;
    GD_TRY(prepare(args, type, Stage::call, call));
    if (args->exec.device == GD_CUDA) {
      GD_TRY(check_cuda_saved(*args, call.problem));
      GD_TRY(check_workspace(args->exec, call.bytes));
      return run_cuda(call.problem, args->exec);
    }
    GD_TRY(check_saved(*args, call.problem, call.context));
    GD_TRY(check_workspace(args->exec, call.bytes));
    uint64_t* bitmap = call.bitmap_bytes ? static_cast<uint64_t*>(args->exec.workspace) : nullptr;
    GD_TRY(validate_contents(*args, call.problem, bitmap));
    call.context.workspace = static_cast<char*>(args->exec.workspace) + call.bitmap_bytes;
    run(call.problem, call.context);
    return GD_OK;
  });
}

template <class Problem, class Args>
gd_status query_workspace(const Args* args, const char* type, size_t* bytes) {
  return guarded([&] {
    Call<Problem> call;
    GD_TRY(prepare(args, type, Stage::query, call));
    if (!bytes) return invalid("bytes is null: there is nowhere to put the answer");
    *bytes = call.bytes;
    return GD_OK;
  });
}

}  // namespace

gd_status refuse(gd_status status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(last_error, sizeof last_error, format, values);
  va_end(values);
  return status;
}

gd_status invalid(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(last_error, sizeof last_error, format, values);
  va_end(values);
  return GD_INVALID_ARGUMENT;
}

}  // namespace gatedelta::api

using namespace gatedelta;
using namespace gatedelta::api;

gd_status gd_forward(const gd_forward_args* args) { return call_operation<ForwardProblem>(args, "gd_forward_args"); }

gd_status gd_backward(const gd_backward_args* args) {
  return call_operation<BackwardProblem>(args, "gd_backward_args");
}

gd_status gd_recurrent(const gd_recurrent_args* args) {
  return call_operation<RecurrentProblem>(args, "gd_recurrent_args");
}

gd_status gd_forward_workspace(const gd_forward_args* args, size_t* bytes) {
  return query_workspace<ForwardProblem>(args, "gd_forward_args", bytes);
}

gd_status gd_backward_workspace(const gd_backward_args* args, size_t* bytes) {
  return query_workspace<BackwardProblem>(args, "gd_backward_args", bytes);
}

gd_status gd_recurrent_workspace(const gd_recurrent_args* args, size_t* bytes) {
  return query_workspace<RecurrentProblem>(args, "gd_recurrent_args", bytes);
}

gd_status gd_forward_saved_size(const gd_forward_args* args, size_t* bytes) {
  return guarded([&] {
    Call<ForwardProblem> call;
    GD_TRY(prepare(args, "gd_forward_args", Stage::query, call));
    if (!bytes) return invalid("bytes is null: there is nowhere to put the answer");
    *bytes = args->exec.device == GD_CUDA ? cuda::saved_bytes(call.problem.in)
                                          : cpu::forward_saved(call.problem, call.context);
    return GD_OK;
  });
}

gd_status gd_get_info(gd_info* info) {
  return guarded([&] {
    if (!info) return invalid("gd_info is null");
    if (info->struct_size < sizeof(gd_info))
      return refuse(GD_ABI_MISMATCH, "gd_info.struct_size is %zu, must be %zu: not set, or a struct from an older ABI",
                    info->struct_size, sizeof(gd_info));
    *info = {.struct_size = info->struct_size,
             .abi_version = GD_ABI_VERSION,
             .version_major = GD_VERSION_MAJOR,
             .version_minor = GD_VERSION_MINOR,
             .version_patch = GD_VERSION_PATCH,
             .cpu_isa_compiled = cpu::compiled_isas(),
             .cpu_isa_usable = cpu::usable_isas(),
             .cpu_isa_best = cpu::best_isa(),
             .cpu_count = cpu_count(),
             .cuda_compiled = cuda::is_compiled(),
             .cuda_devices = cuda::usable_devices(),
             .reserved = {}};
    return GD_OK;
  });
}

const char* gd_isa_name(int32_t isa) { return isa >= 0 && isa < GD_ISA_COUNT ? kIsaNames[isa] : nullptr; }

const char* gd_status_name(gd_status status) {
  switch (status) {
    case GD_OK: return "GD_OK";
    case GD_INVALID_ARGUMENT: return "GD_INVALID_ARGUMENT";
    case GD_UNSUPPORTED: return "GD_UNSUPPORTED";
    case GD_WORKSPACE_TOO_SMALL: return "GD_WORKSPACE_TOO_SMALL";
    case GD_ABI_MISMATCH: return "GD_ABI_MISMATCH";
    case GD_OUT_OF_RESOURCES: return "GD_OUT_OF_RESOURCES";
    case GD_INTERNAL: return "GD_INTERNAL";
  }
  return "not a gd_status";
}

const char* gd_last_error(void) { return last_error; }

struct gd_thread_pool : WorkerPool {
  using WorkerPool::WorkerPool;
};

gd_status gd_thread_pool_create(int32_t num_threads, gd_thread_pool** pool) {
  if (!pool) return invalid("pool is null: there is nowhere to put the pool");
  if (num_threads < 0 || num_threads > kMaxThreads)
    return invalid("num_threads is %d, must be from 0 to %d", num_threads, kMaxThreads);
  try {
    *pool = new gd_thread_pool(num_threads ? num_threads : cpu_count());
    return GD_OK;
  } catch (const std::exception& error) {
    return refuse(GD_OUT_OF_RESOURCES, "the system refused a thread or its memory: %s", error.what());
  }
}

void gd_thread_pool_destroy(gd_thread_pool* pool) { delete pool; }

int32_t gd_thread_pool_size(const gd_thread_pool* pool) { return pool ? pool->size() : 0; }

void gd_thread_pool_parallel_for(void* pool, int64_t count, gd_task_fn run, void* task) {
  static_cast<gd_thread_pool*>(pool)->parallel_for(count, run, task);
}
