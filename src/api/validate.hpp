// Every rule about arguments that does not depend on the backend, each with its own message. Validation turns argument
// structs into problems (core/problem.hpp) in two steps: first shapes, strides and flags, then what offsets and indices
// hold. The second step is for the CPU: the host does not read the memory of other devices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "api/error.hpp"
#include "core/conv1d.hpp"
#include "core/problem.hpp"

namespace gatedelta::api {

// A query reads shapes alone: its data pointers may be null, and it ignores them.
enum class Stage { query, call };

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

gd_status validate_exec(const gd_exec& exec);
// The tuning of a call, all 0 where there is none.
gd_status validate_tuning(const gd_exec& exec, gd_tuning& tuning);

gd_status validate_shapes(const gd_forward_args& args, Stage stage, ForwardProblem& problem);
gd_status validate_shapes(const gd_backward_args& args, Stage stage, BackwardProblem& problem);
gd_status validate_shapes(const gd_recurrent_args& args, Stage stage, RecurrentProblem& problem);
gd_status validate_shapes(const gd_summary_args& args, Stage stage, SummaryProblem& problem);
gd_status validate_shapes(const gd_backward_summary_args& args, Stage stage, BackwardSummaryProblem& problem);
gd_status validate_shapes(const gd_merge_args& args, Stage stage, MergeProblem& problem);
gd_status validate_shapes(const gd_gated_norm_args& args, Stage stage, GatedNormProblem& problem);
gd_status validate_shapes(const gd_gated_norm_backward_args& args, Stage stage, GatedNormBackwardProblem& problem);
gd_status validate_shapes(const gd_conv1d_args& args, Stage stage, Conv1dProblem& problem);
gd_status validate_shapes(const gd_conv1d_backward_args& args, Stage stage, Conv1dBackwardProblem& problem);

// Scratch memory of validate_contents: one bit per slot of the largest pool that is written, when slots are given.
size_t slot_bitmap_bytes(const ForwardProblem& problem);
size_t slot_bitmap_bytes(const BackwardProblem& problem);
size_t slot_bitmap_bytes(const RecurrentProblem& problem);
size_t slot_bitmap_bytes(const Conv1dProblem& problem);
size_t slot_bitmap_bytes(const Conv1dBackwardProblem& problem);

gd_status validate_contents(const ForwardProblem& problem, uint64_t* bitmap);
gd_status validate_contents(const BackwardProblem& problem, uint64_t* bitmap);
gd_status validate_contents(const RecurrentProblem& problem, uint64_t* bitmap);
gd_status validate_contents(const Conv1dProblem& problem, uint64_t* bitmap);
gd_status validate_contents(const Conv1dBackwardProblem& problem, uint64_t* bitmap);

gd_status validate_contents(const SummaryProblem& problem, uint64_t* bitmap);
gd_status validate_contents(const BackwardSummaryProblem& problem, uint64_t* bitmap);
gd_status validate_contents(const MergeProblem& problem, uint64_t* bitmap);
inline size_t slot_bitmap_bytes(const SummaryProblem&) { return 0; }
inline size_t slot_bitmap_bytes(const BackwardSummaryProblem&) { return 0; }
inline size_t slot_bitmap_bytes(const MergeProblem&) { return 0; }

// The gated norm has neither offsets nor indices.
inline size_t slot_bitmap_bytes(const GatedNormProblem&) { return 0; }
inline size_t slot_bitmap_bytes(const GatedNormBackwardProblem&) { return 0; }
inline gd_status validate_contents(const GatedNormProblem&, uint64_t*) { return GD_OK; }
inline gd_status validate_contents(const GatedNormBackwardProblem&, uint64_t*) { return GD_OK; }

}  // namespace gatedelta::api
