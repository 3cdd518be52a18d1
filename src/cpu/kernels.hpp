// The functions each ISA file exports; dispatch.cpp picks a table.
#pragma once

#include "cpu/backend.hpp"

namespace gatedelta::cpu {

struct Kernels {
  size_t (*forward_workspace)(const ForwardProblem&, const Context&);
  void (*forward)(const ForwardProblem&, const Context&);
  size_t (*backward_workspace)(const BackwardProblem&, const Context&);
  void (*backward)(const BackwardProblem&, const Context&);
  size_t (*summary_workspace)(const SummaryProblem&, const Context&);
  void (*summary)(const SummaryProblem&, const Context&);
  size_t (*backward_summary_workspace)(const BackwardSummaryProblem&, const Context&);
  void (*backward_summary)(const BackwardSummaryProblem&, const Context&);
  size_t (*merge_workspace)(const MergeProblem&, const Context&);
  void (*merge)(const MergeProblem&, const Context&);
  size_t (*conv1d_workspace)(const Conv1dProblem&, const Context&);
  void (*conv1d)(const Conv1dProblem&, const Context&);
  size_t (*conv1d_backward_workspace)(const Conv1dBackwardProblem&, const Context&);
  void (*conv1d_backward)(const Conv1dBackwardProblem&, const Context&);
  size_t (*recurrent_workspace)(const RecurrentProblem&, const Context&);
  void (*recurrent)(const RecurrentProblem&, const Context&);
  void (*gated_norm)(const GatedNormProblem&, const Context&);
  size_t (*gated_norm_backward_workspace)(const GatedNormBackwardProblem&, const Context&);
  void (*gated_norm_backward)(const GatedNormBackwardProblem&, const Context&);
};

#define GD_DECLARE_ISA(name)    \
  namespace name {              \
  extern const Kernels kernels; \
  }
GD_DECLARE_ISA(generic)
GD_DECLARE_ISA(avx2)
GD_DECLARE_ISA(avx512)
GD_DECLARE_ISA(avx512_bf16)
GD_DECLARE_ISA(amx)
GD_DECLARE_ISA(neon)
GD_DECLARE_ISA(neon_bf16)
#undef GD_DECLARE_ISA

}  // namespace gatedelta::cpu
