// Summaries on devices of compute capability 8.0 and later, for all head sizes: prepare, the records of which chunks
// are read, and a chain of the backward. No instruction here is newer than 8.0.
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"
#include "cuda/portable/launch.hpp"
#include "cuda/portable/summary/summary.cuh"

namespace gatedelta::cuda::portable {

namespace {

template <Pass kPass>
__global__ void __launch_bounds__(kSegmentThreads)
    portable_summary_kernel(const __grid_constant__ Params p, const __grid_constant__ SummaryRange range) {
  FindSummaries<kPass>::run(p, range, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}

template <Pass kPass, class Problem, class LaunchChain>
Outcome launch_summary(const Problem& problem, const Context& context, const DeviceLimits& limits, bool has_prepared,
                       const LaunchChain& launch_chain) {
  const SummaryWorkspace layout = summary_layout(problem);
  const SummaryChain chain = chain_of(problem, layout, context.workspace, limits.sm_count);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int device = context.device;
  Launched ran;
  const bool all =
      (has_prepared || ran(launch_prepare(chain.p, prepare_ctas(prepared_forward(problem)), device, stream),
                           "launch the prepare kernel")) &&
      (problem.count == 0 || ran(launch_kernel(Pdl::kOff, portable_summary_kernel<kPass>, summary_ctas(chain.p),
                                               kSegmentThreads, 0, stream, chain.p, chain.range),
                                 "launch the kernel that writes records"));
  const ChainLaunch how(chain.kind, 0, limits);
  if (all) ran(launch_chain(chain.transitions, how, device, stream), "launch the chain of a summary");
  return ran.outcome;
}

}  // namespace

Outcome launch(const SummaryProblem& problem, const Context& context) {
  return with_device(context.device, kAllDevices, [&](const DeviceFacts& facts) -> Outcome {
    return launch_summary<Pass::kForward>(problem, context, limits_of(facts), problem.prepared, launch_states);
  });
}

Outcome launch(const BackwardSummaryProblem& problem, const Context& context) {
  return with_device(context.device, kAllDevices, [&](const DeviceFacts& facts) -> Outcome {
    return launch_summary<Pass::kBackward>(problem, context, limits_of(facts), problem.saved.present,
                                           launch_grad_chain);
  });
}

}  // namespace gatedelta::cuda::portable
