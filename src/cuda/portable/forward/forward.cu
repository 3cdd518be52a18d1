// The chunked forward on devices of compute capability 8.0 and later, for all head sizes: two kernels on the caller's
// stream, or five or six where sequences are cut. No instruction here is newer than 8.0.
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"
#include "cuda/portable/forward/forward_chain.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda::portable {

namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    portable_forward_kernel(const __grid_constant__ Params p) {
  Forward<Config>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x)).run();
}

cudaError_t launch_forward(const Params& p, const ChainLaunch& how, int device, cudaStream_t stream) {
  return launch_chain<ForwardPass>(p, how, [&](auto config, int64_t ctas, const SharedMemory& memory) {
    using Config = decltype(config);
    return launch_large<portable_forward_kernel<Config>>(Pdl::kOff, ctas, Config::kThreads, memory, device, stream, p);
  });
}

Outcome launch(const ForwardProblem& problem, const Context& context, const DeviceLimits& limits) {
  const ForwardWorkspace layout = forward_layout(problem);
  const Cut cut = choose_cut(problem, layout, limits);
  const Params p = params_of(problem, layout, context.workspace, cut);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int device = context.device;
  Launched ran;
  if (!ran(launch_prepare(p, prepare_ctas(problem), device, stream), "launch the prepare kernel")) return ran.outcome;
  if (chain_ctas(p) == 0) return ran.outcome;
  const auto begin = [&] {
    const Params transitions = transition_params(p, cut.kind, true);
    return ran(launch_segments(p, cut.cost, stream), "launch the kernel that finds segments") &&
           ran(launch_states(transitions, transition_launch(cut, transitions, limits), device, stream),
               "launch the transitions") &&
           ran(launch_merges(p, device, stream), "launch the merges");
  };
  if (p.segment_chunks > 0 && !begin()) return ran.outcome;
  const auto run = [&](const Params& chain, const ChainLaunch& how) {
    return ran(launch_forward(chain, how, device, stream), "launch the forward kernel");
  };
  if (run(p, chain_launch(cut, p, limits)) && cut.cost.has_whole_grid)
    run(whole_params(p, cut.whole_kind), whole_launch(cut, limits));
  return ran.outcome;
}

}  // namespace

Outcome launch(const ForwardProblem& problem, const Context& context) {
  return with_device(context.device, kAllDevices,
                     [&](const DeviceFacts& facts) -> Outcome { return launch(problem, context, limits_of(facts)); });
}

}  // namespace gatedelta::cuda::portable
