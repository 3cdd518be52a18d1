// How every entry point runs: check the struct, validate, pick a backend, check the workspace, run.
#pragma once

#include <algorithm>
#include <exception>
#include <span>

#include "api/error.hpp"
#include "api/validate.hpp"
#include "core/backend.hpp"
#include "core/names.hpp"

namespace gatedelta::api {

// An entry point's operation: its names in messages, and its backends, one for each device that has it.
template <class Problem>
struct Operation {
  const char* args_type;
  const char* name;
  std::span<const Backend<Problem>* const> backends;
};
extern const Operation<ForwardProblem> kForward;
extern const Operation<BackwardProblem> kBackward;
extern const Operation<RecurrentProblem> kRecurrent;
extern const Operation<SummaryProblem> kSummary;
extern const Operation<BackwardSummaryProblem> kBackwardSummary;
extern const Operation<MergeProblem> kMerge;
extern const Operation<GatedNormProblem> kGatedNorm;
extern const Operation<GatedNormBackwardProblem> kGatedNormBackward;
extern const Operation<Conv1dProblem> kConv1d;
extern const Operation<Conv1dBackwardProblem> kConv1dBackward;

inline gd_status report(const Outcome& outcome) {
  return outcome.status == GD_OK ? GD_OK : refuse(outcome.status, "%s", outcome.message);
}

// The device's backend, if it supports the problem; its message says what would be accepted.
template <class Problem>
gd_status pick_backend(const Operation<Problem>& operation, const Problem& problem, const gd_exec& exec,
                       const Backend<Problem>*& picked) {
  for (const Backend<Problem>* backend : operation.backends)
    if (backend->device == exec.device) {
      picked = backend;
      return report(backend->supports(problem, exec));
    }
  return refuse(GD_UNSUPPORTED, "there is no %s on device %s yet", operation.name, device_name(exec.device));
}

// For an operation that has nothing to tune.
inline gd_status refuse_tuning(const gd_exec& exec, const char* operation) {
  gd_tuning tuning;
  GD_TRY(validate_tuning(exec, tuning));
  if (tuning.segment_chunks == 0) return GD_OK;  // then the others are 0, too
  return refuse(GD_UNSUPPORTED, "segment_chunks is %d, but a %s cuts no sequence", tuning.segment_chunks, operation);
}

// A call with valid shapes, and the backend that takes it. Where the host can read offsets and indices, the workspace
// begins with a bitmap for their validation, followed by the backend's own part.
template <class Problem>
struct Call {
  Problem problem;
  const Backend<Problem>* backend = nullptr;
  size_t bitmap_bytes = 0, workspace_bytes = 0;
};

inline bool host_can_read(const gd_exec& exec) { return exec.device == GD_CPU; }

// The order of refusals: the struct, exec, arguments, then what the backend cannot do.
template <class Args, class Problem>
gd_status prepare(const Operation<Problem>& operation, const Args* args, Stage stage, Call<Problem>& call) {
  GD_TRY(check_struct(args, operation.args_type));
  GD_TRY(validate_exec(args->exec));
  if constexpr (!requires { call.problem.segment_chunks; }) GD_TRY(refuse_tuning(args->exec, operation.name));
  GD_TRY(validate_shapes(*args, stage, call.problem));
  GD_TRY(pick_backend(operation, call.problem, args->exec, call.backend));
  if (host_can_read(args->exec)) call.bitmap_bytes = slot_bitmap_bytes(call.problem);
  call.workspace_bytes = call.bitmap_bytes + call.backend->workspace_bytes(call.problem, args->exec);
  return GD_OK;
}

inline gd_status check_saved_bytes(const SavedBuffer& saved, size_t needed) {
  if (!saved || saved.bytes >= needed) return GD_OK;
  return refuse(GD_WORKSPACE_TOO_SMALL, "saved has %zu bytes, needs %zu", saved.bytes, needed);
}

inline gd_status check_workspace(const gd_exec& exec, size_t needed) {
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
      GD_TRY(check_saved_bytes(call.problem.saved, call.backend->saved_bytes(call.problem, args->exec)));
    GD_TRY(check_workspace(args->exec, call.workspace_bytes));
    char* const workspace = static_cast<char*>(args->exec.workspace);
    if (host_can_read(args->exec))
      GD_TRY(validate_contents(call.problem, call.bitmap_bytes ? reinterpret_cast<uint64_t*>(workspace) : nullptr));
    return report(call.backend->run(call.problem, args->exec, workspace + call.bitmap_bytes));
  });
}

inline gd_status answer(size_t bytes, size_t* place) {
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

}  // namespace gatedelta::api
