// The CPU backend's interface to the API layer, and what its parts share.
#pragma once

#include "core/backend.hpp"
#include "core/conv1d.hpp"

namespace gatedelta::cpu {

extern const Backend<ForwardProblem> forward_backend;
extern const Backend<BackwardProblem> backward_backend;
extern const Backend<SummaryProblem> summary_backend;
extern const Backend<BackwardSummaryProblem> backward_summary_backend;
extern const Backend<MergeProblem> merge_backend;
extern const Backend<Conv1dProblem> conv1d_backend;
extern const Backend<Conv1dBackwardProblem> conv1d_backward_backend;
extern const Backend<RecurrentProblem> recurrent_backend;
extern const Backend<GatedNormProblem> gated_norm_backend;
extern const Backend<GatedNormBackwardProblem> gated_norm_backward_backend;

// Bits of gd_isa values that are in this build / that this machine can also run.
int compiled_isas();
int usable_isas();
// Whether this machine's bf16 dot product is no faster than fp32 (Intel).
bool bf16_dot_is_slow();
// Best usable ISA; it serves every dtype (bf16 ISAs run fp32 and fp16 inputs on their ordinary vector units).
gd_isa best_isa();

// How a call runs on this machine: `lanes` independent workers, each with its own slice of the workspace.
// The lane count decides speed and workspace, never a bit of the result.
struct Context {
  gd_isa isa = GD_ISA_AUTO;  // resolved: never AUTO in a kernel
  int lanes = 1;
  gd_parallel_for_fn parallel_for = nullptr;  // null = run lanes in turn on the calling thread
  void* parallel_for_context = nullptr;
  char* workspace = nullptr;  // 64-byte aligned
};

}  // namespace gatedelta::cpu
