// The entry points, and the backends of each.
#include <cstdarg>
#include <cstdio>
#include <iterator>

#include "api/operation.hpp"
#include "api/validate/saved.hpp"
#include "core/thread_pool.hpp"
#include "cpu/backend.hpp"
#include "cuda/backend.hpp"

namespace gatedelta::api {

namespace {

constinit thread_local char last_error[512] = "";

constexpr const char* kIsaNames[] = {"auto", "generic", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"};
static_assert(std::size(kIsaNames) == GD_ISA_COUNT);

// The backends of each operation, one per device. Which kernels serve a call on a device, the backend chooses.
const Backend<ForwardProblem>* const kForwardBackends[] = {&cpu::forward_backend, &cuda::forward_backend};
const Backend<Conv1dProblem>* const kConv1dBackends[] = {&cpu::conv1d_backend, &cuda::conv1d_backend};
const Backend<Conv1dBackwardProblem>* const kConv1dBackwardBackends[] = {&cpu::conv1d_backward_backend,
                                                                         &cuda::conv1d_backward_backend};
const Backend<BackwardProblem>* const kBackwardBackends[] = {&cpu::backward_backend, &cuda::backward_backend};
const Backend<RecurrentProblem>* const kRecurrentBackends[] = {&cpu::recurrent_backend, &cuda::recurrent_backend};
const Backend<SummaryProblem>* const kSummaryBackends[] = {&cpu::summary_backend, &cuda::summary_backend};
const Backend<BackwardSummaryProblem>* const kBackwardSummaryBackends[] = {&cpu::backward_summary_backend,
                                                                           &cuda::backward_summary_backend};
const Backend<MergeProblem>* const kMergeBackends[] = {&cpu::merge_backend, &cuda::merge_backend};
const Backend<GatedNormProblem>* const kGatedNormBackends[] = {&cpu::gated_norm_backend, &cuda::gated_norm_backend};
const Backend<GatedNormBackwardProblem>* const kGatedNormBackwardBackends[] = {&cpu::gated_norm_backward_backend,
                                                                               &cuda::gated_norm_backward_backend};

}  // namespace

const Operation<ForwardProblem> kForward = {"gd_forward_args", "chunked forward", kForwardBackends};
const Operation<Conv1dProblem> kConv1d = {"gd_conv1d_args", "convolution", kConv1dBackends};
const Operation<Conv1dBackwardProblem> kConv1dBackward = {"gd_conv1d_backward_args", "convolution's backward",
                                                          kConv1dBackwardBackends};
const Operation<BackwardProblem> kBackward = {"gd_backward_args", "chunked backward", kBackwardBackends};
const Operation<RecurrentProblem> kRecurrent = {"gd_recurrent_args", "recurrent step", kRecurrentBackends};
const Operation<SummaryProblem> kSummary = {"gd_summary_args", "summary", kSummaryBackends};
const Operation<BackwardSummaryProblem> kBackwardSummary = {"gd_backward_summary_args", "backward summary",
                                                            kBackwardSummaryBackends};
const Operation<MergeProblem> kMerge = {"gd_merge_args", "merge", kMergeBackends};
const Operation<GatedNormProblem> kGatedNorm = {"gd_gated_norm_args", "gated norm", kGatedNormBackends};
const Operation<GatedNormBackwardProblem> kGatedNormBackward = {"gd_gated_norm_backward_args", "gated norm's backward",
                                                                kGatedNormBackwardBackends};

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
gd_status gd_conv1d(const gd_conv1d_args* args) { return run_operation(kConv1d, args); }
gd_status gd_conv1d_backward(const gd_conv1d_backward_args* args) { return run_operation(kConv1dBackward, args); }
gd_status gd_backward(const gd_backward_args* args) { return run_operation(kBackward, args); }
gd_status gd_recurrent(const gd_recurrent_args* args) { return run_operation(kRecurrent, args); }

gd_status gd_forward_workspace(const gd_forward_args* args, size_t* bytes) {
  return query_workspace(kForward, args, bytes);
}

gd_status gd_conv1d_workspace(const gd_conv1d_args* args, size_t* bytes) {
  return query_workspace(kConv1d, args, bytes);
}

gd_status gd_conv1d_backward_workspace(const gd_conv1d_backward_args* args, size_t* bytes) {
  return query_workspace(kConv1dBackward, args, bytes);
}

gd_status gd_backward_workspace(const gd_backward_args* args, size_t* bytes) {
  return query_workspace(kBackward, args, bytes);
}

gd_status gd_recurrent_workspace(const gd_recurrent_args* args, size_t* bytes) {
  return query_workspace(kRecurrent, args, bytes);
}

gd_status gd_summary(const gd_summary_args* args) { return run_operation(kSummary, args); }
gd_status gd_backward_summary(const gd_backward_summary_args* args) { return run_operation(kBackwardSummary, args); }
gd_status gd_merge(const gd_merge_args* args) { return run_operation(kMerge, args); }
gd_status gd_summary_workspace(const gd_summary_args* args, size_t* bytes) {
  return query_workspace(kSummary, args, bytes);
}
gd_status gd_backward_summary_workspace(const gd_backward_summary_args* args, size_t* bytes) {
  return query_workspace(kBackwardSummary, args, bytes);
}
gd_status gd_merge_workspace(const gd_merge_args* args, size_t* bytes) { return query_workspace(kMerge, args, bytes); }

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

namespace {

// Judges a call as one that saves, which some kernels refuse.
gd_status prepare_saving(const gd_forward_args* args, Call<ForwardProblem>& call) {
  GD_TRY(check_struct(args, kForward.args_type));
  gd_forward_args saving = *args;
  saving.struct_size = sizeof saving;
  if (saving.saved_bytes == 0) saving.saved_bytes = 1;
  saving.saved_call = {};  // the answer to come
  return prepare(kForward, &saving, Stage::query, call);
}

}  // namespace

gd_status gd_forward_saved_size(const gd_forward_args* args, size_t* bytes) {
  return guarded([&] {
    Call<ForwardProblem> call;
    GD_TRY(prepare_saving(args, call));
    return answer(call.backend->saved_bytes(call.problem, args->exec), bytes);
  });
}

gd_status gd_forward_saved_call(const gd_forward_args* args, gd_saved_call* saved_call) {
  return guarded([&] {
    Call<ForwardProblem> call;
    GD_TRY(prepare_saving(args, call));
    if (!saved_call) return invalid("saved_call is null: there is nowhere to put the answer");
    *saved_call = saved_call_of(call.problem.in, args->exec, call.problem.batch_invariant);
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

void gd_thread_pool_destroy(gd_thread_pool* pool) {
  if (pool && !pool->is_inherited()) delete pool;
}

int32_t gd_thread_pool_size(const gd_thread_pool* pool) { return pool ? pool->size() : 0; }

void gd_thread_pool_parallel_for(void* pool, int64_t count, gd_task_fn run, void* task) {
  static_cast<gd_thread_pool*>(pool)->parallel_for(count, run, task);
}
