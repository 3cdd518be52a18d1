// The part of the CUDA backend that needs no CUDA: limits, sizes, and in a build without CUDA the refusal to run.
#include "cuda/backend.hpp"

#include <algorithm>

#include "cuda/conv1d/config.hpp"
#include "cuda/fp32/config.hpp"
#include "cuda/gated_norm/config.hpp"
#include "cuda/layer/config.hpp"
#include "cuda/limits.hpp"
#include "cuda/portable/backward_config.hpp"
#include "cuda/portable/summary_config.hpp"
#include "cuda/workspace/backward.hpp"
#include "cuda/workspace/summary.hpp"

namespace gatedelta::cuda {

namespace {

Context context_of(const gd_exec& exec, char* workspace) { return {exec.device_index, exec.stream, workspace}; }

// What Hopper's kernels do not take. With isa they can be left out.
template <class Problem>
Outcome check_hoppers(const Problem& p, const gd_exec& exec) {
  if (exec.isa == GD_ISA_CUDA_PORTABLE)
    return refusal(GD_UNSUPPORTED, "isa is portable: Hopper's kernels are left out");
  return check_limits(p);
}

// A query does not know the device, so the memory is enough for either kind of kernels.
template <class Problem>
size_t enough_for_both(const Problem& p, size_t hoppers, size_t (*portables)(const Problem&)) {
  return std::max(hoppers, check_portable_limits(p).status == GD_OK ? portables(p) : 0);
}
template <class Problem>
size_t saved_bytes(const Problem& p) {
  return enough_for_both<Problem>(p, saved_layout(p.in).bytes,
                                  [](const Problem& of) { return portable::saved_bytes(of.in); });
}
// Whether it is for Hopper's kernels: then they say why they do not do it.
template <class Problem>
bool asks_for_hoppers(const Problem& p, const gd_exec& exec) {
  bool asks = p.saved.present;
  if constexpr (requires { p.segment_chunks; }) asks = asks || p.segment_chunks;
  return exec.isa == GD_ISA_AUTO && asks && is_hoppers(p.in);
}
template <class Problem>
Outcome check_portables(const Problem& p, const gd_exec& exec) {
  return asks_for_hoppers(p, exec) ? check_limits(p) : check_portable_limits(p);
}
template <class Problem>
size_t portable_saved_bytes(const Problem& p) {
  return portable::saved_bytes(p.in);
}
template <class Problem>
size_t portable_summary_bytes(const Problem& p) {
  return portable::summary_layout(p).bytes;
}

}  // namespace

const Backend<ForwardProblem> sm90_forward_backend = {
    GD_CUDA,
    check_hoppers<ForwardProblem>,
    [](const ForwardProblem& p, const gd_exec&) {
      return enough_for_both<ForwardProblem>(
          p, forward_layout(p).bytes, [](const ForwardProblem& of) { return portable::forward_layout(of).bytes; });
    },
    saved_bytes<ForwardProblem>,
    [](const ForwardProblem& p, const gd_exec& exec, char* workspace) {
      return forward(p, context_of(exec, workspace));
    },
};

const Backend<ForwardProblem> portable_forward_backend = {
    GD_CUDA,
    check_portables<ForwardProblem>,
    [](const ForwardProblem& p, const gd_exec&) { return portable::forward_layout(p).bytes; },
    portable_saved_bytes<ForwardProblem>,
    [](const ForwardProblem& p, const gd_exec& exec, char* workspace) {
      return portable_forward(p, context_of(exec, workspace));
    },
};

const Backend<BackwardProblem> sm90_backward_backend = {
    GD_CUDA,
    check_hoppers<BackwardProblem>,
    [](const BackwardProblem& p, const gd_exec&) {
      return enough_for_both<BackwardProblem>(
          p, backward_layout(p).bytes, [](const BackwardProblem& of) { return portable::backward_layout(of).bytes; });
    },
    saved_bytes<BackwardProblem>,
    [](const BackwardProblem& p, const gd_exec& exec, char* workspace) {
      return backward(p, context_of(exec, workspace));
    },
};

const Backend<BackwardProblem> portable_backward_backend = {
    GD_CUDA,
    check_portables<BackwardProblem>,
    [](const BackwardProblem& p, const gd_exec&) { return portable::backward_layout(p).bytes; },
    portable_saved_bytes<BackwardProblem>,
    [](const BackwardProblem& p, const gd_exec& exec, char* workspace) {
      return portable_backward(p, context_of(exec, workspace));
    },
};

// These are the last of their device: of other types than fp32 the refusal is that of the backend before.
const Backend<ForwardProblem> fp32_forward_backend = {
    GD_CUDA,
    [](const ForwardProblem& p, const gd_exec& exec) {
      return p.in.q.dtype == GD_F32 ? check_fp32_limits(p) : portable_forward_backend.supports(p, exec);
    },
    [](const ForwardProblem& p, const gd_exec&) { return fp32::forward_layout(p).bytes; },
    [](const ForwardProblem& p) { return fp32::saved_layout(p.in).bytes; },
    [](const ForwardProblem& p, const gd_exec& exec, char* workspace) {
      return fp32_forward(p, context_of(exec, workspace));
    },
};

const Backend<BackwardProblem> fp32_backward_backend = {
    GD_CUDA,
    [](const BackwardProblem& p, const gd_exec& exec) {
      return p.in.q.dtype == GD_F32 ? check_fp32_limits(p) : portable_backward_backend.supports(p, exec);
    },
    [](const BackwardProblem& p, const gd_exec&) { return fp32::backward_layout(p).bytes; },
    [](const BackwardProblem& p) { return fp32::saved_layout(p.in).bytes; },
    [](const BackwardProblem& p, const gd_exec& exec, char* workspace) {
      return fp32_backward(p, context_of(exec, workspace));
    },
};

const Backend<SummaryProblem> sm90_summary_backend = {
    GD_CUDA,
    check_hoppers<SummaryProblem>,
    [](const SummaryProblem& p, const gd_exec&) {
      return enough_for_both<SummaryProblem>(p, summary_layout(p, true, kPreparedBytes).bytes, portable_summary_bytes);
    },
    saved_bytes<SummaryProblem>,
    [](const SummaryProblem& p, const gd_exec& exec, char* workspace) {
      return summary(p, context_of(exec, workspace));
    },
};

const Backend<SummaryProblem> portable_summary_backend = {
    GD_CUDA,
    check_portables<SummaryProblem>,
    [](const SummaryProblem& p, const gd_exec&) { return portable_summary_bytes(p); },
    portable_saved_bytes<SummaryProblem>,
    [](const SummaryProblem& p, const gd_exec& exec, char* workspace) {
      return portable_summary(p, context_of(exec, workspace));
    },
};

const Backend<BackwardSummaryProblem> sm90_backward_summary_backend = {
    GD_CUDA,
    check_hoppers<BackwardSummaryProblem>,
    [](const BackwardSummaryProblem& p, const gd_exec&) {
      return enough_for_both<BackwardSummaryProblem>(p, summary_layout(p, false, kBackwardPreparedBytes).bytes,
                                                     portable_summary_bytes);
    },
    saved_bytes<BackwardSummaryProblem>,
    [](const BackwardSummaryProblem& p, const gd_exec& exec, char* workspace) {
      return backward_summary(p, context_of(exec, workspace));
    },
};

const Backend<BackwardSummaryProblem> portable_backward_summary_backend = {
    GD_CUDA,
    check_portables<BackwardSummaryProblem>,
    [](const BackwardSummaryProblem& p, const gd_exec&) { return portable_summary_bytes(p); },
    portable_saved_bytes<BackwardSummaryProblem>,
    [](const BackwardSummaryProblem& p, const gd_exec& exec, char* workspace) {
      return portable_backward_summary(p, context_of(exec, workspace));
    },
};

const Backend<FoldProblem> fold_backend = {
    GD_CUDA,
    [](const FoldProblem&, const gd_exec&) { return Outcome{}; },
    [](const FoldProblem&, const gd_exec&) { return size_t{0}; },
    nullptr,
    [](const FoldProblem& p, const gd_exec& exec, char* workspace) { return fold(p, context_of(exec, workspace)); },
};

const Backend<Conv1dProblem> conv1d_backend = {
    GD_CUDA,
    [](const Conv1dProblem&, const gd_exec&) { return Outcome{}; },
    [](const Conv1dProblem&, const gd_exec&) { return size_t{0}; },
    nullptr,
    [](const Conv1dProblem& p, const gd_exec& exec, char* workspace) { return conv1d(p, context_of(exec, workspace)); },
};

const Backend<Conv1dBackwardProblem> conv1d_backward_backend = {
    GD_CUDA,
    [](const Conv1dBackwardProblem&, const gd_exec&) { return Outcome{}; },
    [](const Conv1dBackwardProblem& p, const gd_exec&) { return conv1d_backward_workspace(p); },
    nullptr,
    [](const Conv1dBackwardProblem& p, const gd_exec& exec, char* workspace) {
      return conv1d_backward(p, context_of(exec, workspace));
    },
};

const Backend<RecurrentProblem> recurrent_backend = {
    GD_CUDA,
    [](const RecurrentProblem& p, const gd_exec&) { return check_limits(p); },
    [](const RecurrentProblem&, const gd_exec&) { return size_t{0}; },
    nullptr,
    [](const RecurrentProblem& p, const gd_exec& exec, char* workspace) {
      return recurrent(p, context_of(exec, workspace));
    },
};

const Backend<GatedNormProblem> gated_norm_backend = {
    GD_CUDA,
    [](const GatedNormProblem& p, const gd_exec&) { return check_limits(p.in); },
    [](const GatedNormProblem&, const gd_exec&) { return size_t{0}; },
    nullptr,
    [](const GatedNormProblem& p, const gd_exec& exec, char* workspace) {
      return gated_norm(p, context_of(exec, workspace));
    },
};

const Backend<GatedNormBackwardProblem> gated_norm_backward_backend = {
    GD_CUDA,
    [](const GatedNormBackwardProblem& p, const gd_exec&) { return check_limits(p.in); },
    [](const GatedNormBackwardProblem& p, const gd_exec&) { return norm_backward_workspace(p); },
    nullptr,
    [](const GatedNormBackwardProblem& p, const gd_exec& exec, char* workspace) {
      return gated_norm_backward(p, context_of(exec, workspace));
    },
};

bool takes_layer_step(const Conv1dProblem& conv, const RecurrentProblem& rule, const GatedNormProblem& norm) {
  return takes_layer_step(LayerStepProblem{conv, rule, norm});
}

#if !GD_CUDA_COMPILED
namespace {
Outcome not_compiled() { return refusal(GD_UNSUPPORTED, "device is cuda, but this build has no CUDA backend"); }
}  // namespace

bool is_compiled() { return false; }
int usable_devices() { return 0; }
Outcome forward(const ForwardProblem&, const Context&) { return not_compiled(); }
Outcome portable_forward(const ForwardProblem&, const Context&) { return not_compiled(); }
Outcome fp32_forward(const ForwardProblem&, const Context&) { return not_compiled(); }
Outcome fp32_backward(const BackwardProblem&, const Context&) { return not_compiled(); }
Outcome backward(const BackwardProblem&, const Context&) { return not_compiled(); }
Outcome portable_backward(const BackwardProblem&, const Context&) { return not_compiled(); }
Outcome summary(const SummaryProblem&, const Context&) { return not_compiled(); }
Outcome backward_summary(const BackwardSummaryProblem&, const Context&) { return not_compiled(); }
Outcome portable_summary(const SummaryProblem&, const Context&) { return not_compiled(); }
Outcome portable_backward_summary(const BackwardSummaryProblem&, const Context&) { return not_compiled(); }
Outcome fold(const FoldProblem&, const Context&) { return not_compiled(); }
Outcome conv1d(const Conv1dProblem&, const Context&) { return not_compiled(); }
Outcome conv1d_backward(const Conv1dBackwardProblem&, const Context&) { return not_compiled(); }
Outcome recurrent(const RecurrentProblem&, const Context&) { return not_compiled(); }
Outcome gated_norm(const GatedNormProblem&, const Context&) { return not_compiled(); }
Outcome layer_step(const Conv1dProblem&, const RecurrentProblem&, const GatedNormProblem&, const Context&) {
  return not_compiled();
}
Outcome gated_norm_backward(const GatedNormBackwardProblem&, const Context&) { return not_compiled(); }
#endif

}  // namespace gatedelta::cuda
