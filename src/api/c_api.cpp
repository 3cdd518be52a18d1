// The entry points: check the struct, validate, pick a backend, check the workspace, run.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <iterator>
#include <span>

#include "api/error.hpp"
#include "api/validate.hpp"
#include "core/names.hpp"
#include "core/thread_pool.hpp"
#include "cpu/backend.hpp"
#include "cuda/backend.hpp"

namespace gatedelta::api {

namespace {

constinit thread_local char last_error[512] = "";

constexpr const char* kIsaNames[] = {"auto", "generic", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"};
static_assert(std::size(kIsaNames) == GD_ISA_COUNT);

// The backends of each operation. Those of one device are listed from the most specialised to the most general.
const Backend<ForwardProblem>* const kForwardBackends[] = {&cpu::forward_backend, &cuda::sm90_forward_backend};
const Backend<BackwardProblem>* const kBackwardBackends[] = {&cpu::backward_backend, &cuda::sm90_backward_backend};
const Backend<RecurrentProblem>* const kRecurrentBackends[] = {&cpu::recurrent_backend, &cuda::recurrent_backend};
const Backend<GatedNormProblem>* const kGatedNormBackends[] = {&cpu::gated_norm_backend, &cuda::gated_norm_backend};
const Backend<GatedNormBackwardProblem>* const kGatedNormBackwardBackends[] = {&cpu::gated_norm_backward_backend,
                                                                               &cuda::gated_norm_backward_backend};

// An entry point's operation: its names in messages, and its backends.
template <class Problem>
struct Operation {
  const char* args_type;
  const char* name;
  std::span<const Backend<Problem>* const> backends;
};
const Operation<ForwardProblem> kForward = {"gd_forward_args", "chunked forward", kForwardBackends};
const Operation<BackwardProblem> kBackward = {"gd_backward_args", "chunked backward", kBackwardBackends};
const Operation<RecurrentProblem> kRecurrent = {"gd_recurrent_args", "recurrent step", kRecurrentBackends};
const Operation<GatedNormProblem> kGatedNorm = {"gd_gated_norm_args", "gated norm", kGatedNormBackends};
const Operation<GatedNormBackwardProblem> kGatedNormBackward = {"gd_gated_norm_backward_args", "gated norm's backward",
                                                                kGatedNormBackwardBackends};

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

gd_status report(const Outcome& outcome) {
  return outcome.status == GD_OK ? GD_OK : refuse(outcome.status, "%s", outcome.message);
}

// The device's first backend that supports the problem. If none does, the refusal is that of the last one: it is the
// most general, so its message says what would be accepted.
template <class Problem>
gd_status pick_backend(const Operation<Problem>& operation, const Problem& problem, const gd_exec& exec,
                       const Backend<Problem>*& picked) {
  Outcome outcome;
  bool found = false;
  for (const Backend<Problem>* backend : operation.backends) {
    if (backend->device != exec.device) continue;
    found = true;
    outcome = backend->supports(problem, exec);
    if (outcome.status != GD_OK) continue;
    picked = backend;
    return GD_OK;
  }
  if (found) return report(outcome);
  return refuse(GD_UNSUPPORTED, "there is no %s on device %s yet", operation.name, device_name(exec.device));
}

// A call with valid shapes, and the backend that takes it. Where the host can read offsets and indices, the workspace
// begins with a bitmap for their validation, followed by the backend's own part.
template <class Problem>
struct Call {
  Problem problem;
  const Backend<Problem>* backend = nullptr;
  size_t bitmap_bytes = 0, workspace_bytes = 0;
};

bool host_can_read(const gd_exec& exec) { return exec.device == GD_CPU; }

// The order of refusals: the struct, exec, arguments, then what the backend cannot do.
template <class Args, class Problem>
gd_status prepare(const Operation<Problem>& operation, const Args* args, Stage stage, Call<Problem>& call) {
  GD_TRY(check_struct(args, operation.args_type));
  GD_TRY(validate_exec(args->exec));
  GD_TRY(validate_shapes(*args, stage, call.problem));
  GD_TRY(pick_backend(operation, call.problem, args->exec, call.backend));
  if (host_can_read(args->exec)) call.bitmap_bytes = slot_bitmap_bytes(call.problem);
  call.workspace_bytes = call.bitmap_bytes + call.backend->workspace_bytes(call.problem, args->exec);
  return GD_OK;
}

gd_status check_saved_bytes(const SavedBuffer& saved, size_t needed) {
  if (!saved || saved.bytes >= needed) return GD_OK;
  return refuse(GD_WORKSPACE_TOO_SMALL, "saved has %zu bytes, needs %zu", saved.bytes, needed);
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

template <class Args, class Problem>
gd_status run_operation(const Operation<Problem>& operation, const Args* args) {
  return guarded([&] {
    Call<Problem> call;
    GD_TRY(prepare(operation, args, Stage::call, call));
    if constexpr (requires { call.problem.saved; })
      GD_TRY(check_saved_bytes(call.problem.saved, call.backend->saved_bytes(call.problem)));
    GD_TRY(check_workspace(args->exec, call.workspace_bytes));
    char* const workspace = static_cast<char*>(args->exec.workspace);
    if (host_can_read(args->exec))
      GD_TRY(validate_contents(call.problem, call.bitmap_bytes ? reinterpret_cast<uint64_t*>(workspace) : nullptr));
    return report(call.backend->run(call.problem, args->exec, workspace + call.bitmap_bytes));
  });
}

gd_status answer(size_t bytes, size_t* place) {
  if (!place) return invalid("bytes is null: there is nowhere to put the answer");
  *place = bytes;
  return GD_OK;
}

template <class Args, class Problem>
gd_status query_workspace(const Operation<Problem>& operation, const Args* args, size_t* bytes) {
  return guarded([&] {
    Call<Problem> call;
    GD_TRY(prepare(operation, args, Stage::query, call));
    return answer(call.workspace_bytes, bytes);
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

gd_status gd_forward(const gd_forward_args* args) { return run_operation(kForward, args); }
gd_status gd_backward(const gd_backward_args* args) { return run_operation(kBackward, args); }
gd_status gd_recurrent(const gd_recurrent_args* args) { return run_operation(kRecurrent, args); }

gd_status gd_forward_workspace(const gd_forward_args* args, size_t* bytes) {
  return query_workspace(kForward, args, bytes);
}

gd_status gd_backward_workspace(const gd_backward_args* args, size_t* bytes) {
  return query_workspace(kBackward, args, bytes);
}

gd_status gd_recurrent_workspace(const gd_recurrent_args* args, size_t* bytes) {
  return query_workspace(kRecurrent, args, bytes);
}

gd_status gd_gated_norm(const gd_gated_norm_args* args) { return run_operation(kGatedNorm, args); }
gd_status gd_gated_norm_backward(const gd_gated_norm_backward_args* args) {
  return run_operation(kGatedNormBackward, args);
}
gd_status gd_gated_norm_workspace(const gd_gated_norm_args* args, size_t* bytes) {
  return query_workspace(kGatedNorm, args, bytes);
}
gd_status gd_gated_norm_backward_workspace(const gd_gated_norm_backward_args* args, size_t* bytes) {
  return query_workspace(kGatedNormBackward, args, bytes);
}

gd_status gd_forward_saved_size(const gd_forward_args* args, size_t* bytes) {
  return guarded([&] {
    Call<ForwardProblem> call;
    GD_TRY(prepare(kForward, args, Stage::query, call));
    return answer(call.backend->saved_bytes(call.problem), bytes);
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
