// The CUDA backend's interface to the API layer. No CUDA header is needed to include it, and a build without CUDA has
// it, too: only running is refused there.
#pragma once

#include "core/backend.hpp"
#include "core/conv1d.hpp"
#include "cuda/device/pdl.hpp"

namespace gatedelta::cuda {

// dispatch.cpp
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

bool is_compiled();
// Devices of compute capability 8.0 and later, which every operation runs on; 0 where there is no driver.
int usable_devices();

struct Context {
  int device = 0;
  void* stream = nullptr;     // cudaStream_t
  char* workspace = nullptr;  // 64-byte aligned
  Pdl pdl = Pdl::kOff;        // on where the previous kernel is the library's own and allows PDL
};

// The layer's step in kernels of its own, where there are any for it. The rule's q, k and v are parts of the
// convolution's y, and the norm's x is the rule's o.
bool supports_layer_step(const Conv1dProblem& conv, const RecurrentProblem& rule, const GatedNormProblem& norm);
Outcome layer_step(const Conv1dProblem& conv, const RecurrentProblem& rule, const GatedNormProblem& norm,
                   const Context& context);

}  // namespace gatedelta::cuda
