// The kernel families, as dispatch.cpp sees them: what each refuses, and its launches. No CUDA header is needed to
// include it.
//
// check() answers from shapes, types and strides alone. A launch puts kernels on the stream and returns: it waits for
// nothing, allocates nothing and reads nothing back.
#pragma once

#include "core/backend.hpp"
#include "core/conv1d.hpp"
#include "cuda/backend.hpp"

namespace gatedelta::cuda {

// The compute capability of a device.
struct Capability {
  int major = 0, minor = 0;
};
Outcome find_capability(int device, Capability& found);

// Hopper: K = V = 128, bf16 and fp16.
namespace sm90 {
constexpr int kMajor = 9;  // the compute capability that it runs on
bool supports_layer(const Layer& in);
Outcome check(const ForwardProblem&);
Outcome check(const BackwardProblem&);
Outcome check(const SummaryProblem&);
Outcome check(const BackwardSummaryProblem&);
Outcome launch(const ForwardProblem&, const Context&);
Outcome launch(const BackwardProblem&, const Context&);
Outcome launch(const SummaryProblem&, const Context&);
Outcome launch(const BackwardSummaryProblem&, const Context&);
}  // namespace sm90

// Every device from compute capability 8.0 on: all head sizes, bf16 and fp16.
namespace portable {
Outcome check(const ForwardProblem&);
Outcome check(const BackwardProblem&);
Outcome check(const SummaryProblem&);
Outcome check(const BackwardSummaryProblem&);
Outcome launch(const ForwardProblem&, const Context&);
Outcome launch(const BackwardProblem&, const Context&);
Outcome launch(const SummaryProblem&, const Context&);
Outcome launch(const BackwardSummaryProblem&, const Context&);
}  // namespace portable

// The same devices: fp32 inputs.
namespace fp32 {
Outcome check(const ForwardProblem&);
Outcome check(const BackwardProblem&);
Outcome launch(const ForwardProblem&, const Context&);
Outcome launch(const BackwardProblem&, const Context&);
}  // namespace fp32

// The same devices. One family each.
Outcome launch(const RecurrentProblem&, const Context&);
Outcome launch(const MergeProblem&, const Context&);
Outcome launch(const Conv1dProblem&, const Context&);
Outcome launch(const Conv1dBackwardProblem&, const Context&);
Outcome launch(const GatedNormProblem&, const Context&);
Outcome launch(const GatedNormBackwardProblem&, const Context&);

}  // namespace gatedelta::cuda
