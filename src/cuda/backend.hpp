// The CUDA backend, as the API layer and the launchers see it. No CUDA header is needed to include it, and a build
// without CUDA has it, too: only running is refused there.
#pragma once

#include "core/backend.hpp"
#include "core/conv1d.hpp"

namespace gatedelta::cuda {

extern const Backend<ForwardProblem> sm90_forward_backend;
extern const Backend<ForwardProblem> portable_forward_backend;
extern const Backend<ForwardProblem> fp32_forward_backend;
extern const Backend<BackwardProblem> sm90_backward_backend;
extern const Backend<BackwardProblem> portable_backward_backend;
extern const Backend<BackwardProblem> fp32_backward_backend;
extern const Backend<SummaryProblem> sm90_summary_backend;
extern const Backend<BackwardSummaryProblem> sm90_backward_summary_backend;
extern const Backend<SummaryProblem> portable_summary_backend;
extern const Backend<BackwardSummaryProblem> portable_backward_summary_backend;
extern const Backend<FoldProblem> fold_backend;
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
  bool early = false;         // the kernel before is one of ours that lets others start before its end, where they can
};

// Launch the kernels on the stream and return: they wait for nothing, allocate nothing and read nothing back.
Outcome forward(const ForwardProblem&, const Context&);  // by the portable kernels where the device is not a Hopper
Outcome portable_forward(const ForwardProblem&, const Context&);
Outcome backward(const BackwardProblem&, const Context&);  // likewise
Outcome portable_backward(const BackwardProblem&, const Context&);
Outcome fp32_forward(const ForwardProblem&, const Context&);  // of fp32 q, k, v
Outcome fp32_backward(const BackwardProblem&, const Context&);
Outcome summary(const SummaryProblem&, const Context&);  // likewise
Outcome portable_summary(const SummaryProblem&, const Context&);
Outcome backward_summary(const BackwardSummaryProblem&, const Context&);  // likewise
Outcome portable_backward_summary(const BackwardSummaryProblem&, const Context&);
Outcome fold(const FoldProblem&, const Context&);
Outcome conv1d(const Conv1dProblem&, const Context&);
Outcome conv1d_backward(const Conv1dBackwardProblem&, const Context&);
Outcome recurrent(const RecurrentProblem&, const Context&);
Outcome gated_norm(const GatedNormProblem&, const Context&);
Outcome gated_norm_backward(const GatedNormBackwardProblem&, const Context&);

// The layer's step in kernels of its own, where there are any for it. The rule's q, k and v are parts of the
// convolution's y, and the norm's x is the rule's o.
bool takes_layer_step(const Conv1dProblem& conv, const RecurrentProblem& rule, const GatedNormProblem& norm);
Outcome layer_step(const Conv1dProblem& conv, const RecurrentProblem& rule, const GatedNormProblem& norm,
                   const Context& context);

}  // namespace gatedelta::cuda
