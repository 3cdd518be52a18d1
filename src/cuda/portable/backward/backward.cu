// The chunked backward on devices of compute capability 8.0 and later, for all head sizes: four to eleven kernels on
// the caller's stream, twice as many with small_workspace. No instruction here is newer than 8.0.
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"
#include "cuda/portable/backward/gates.cuh"
#include "cuda/portable/launch.hpp"

namespace gatedelta::cuda::portable {

namespace {

template <class Elem>
__global__ void __launch_bounds__(kGateThreads)
    portable_gate_gradients_kernel(const __grid_constant__ BackwardParams p) {
  GateGradients<Elem>::run(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}
template <class Elem>
__global__ void __launch_bounds__(kProjectThreads) portable_project_kernel(const __grid_constant__ BackwardParams p) {
  Project<Elem>::run(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}
__global__ void __launch_bounds__(kHeadSumThreads) portable_head_sums_kernel(const __grid_constant__ BackwardParams p) {
  HeadSums::run(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}

template <class Elem>
Outcome launch_slice(const BackwardProblem& problem, const BackwardParams& p, const Cut& cut, const Context& context,
                     const DeviceLimits& limits) {
  const Params states = states_params(p), gradients = gradient_pass_params(p);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int device = context.device;
  Launched ran;
  const auto small = [&](auto kernel, int64_t ctas, int threads) {
    return ctas == 0 ? cudaSuccess : launch_kernel(Pdl::kOff, kernel, ctas, threads, 0, stream, p);
  };
  const auto begin_chains = [&] {
    const Params of_states = transition_params(states, cut.kind, true),
                 of_gradients = transition_params(gradients, cut.kind, false);
    return ran(launch_segments(p, cut.cost, stream), "launch the kernel that finds segments") &&
           ran(launch_states(of_states, transition_launch(cut, of_states, limits), device, stream),
               "launch the transitions of states") &&
           ran(launch_grad_chain(of_gradients, transition_launch(cut, of_gradients, limits), device, stream),
               "launch the transitions of gradients") &&
           ran(launch_merges(p, device, stream), "launch the merges");
  };
  const ChainLaunch how = chain_launch(cut, p, limits), whole = whole_launch(cut, limits);
  const auto run_chains = [&](const Params& of_states, const Params& of_gradients, const ChainLaunch& with) {
    return ran(launch_states(of_states, with, device, stream), "launch the states kernel") &&
           ran(launch_grad_chain(of_gradients, with, device, stream), "launch the chain of gradients");
  };
  const bool all = (problem.saved || ran(launch_prepare(p, prepare_ctas(forward_of(problem)), device, stream),
                                         "launch the prepare kernel")) &&
                   (p.segment_chunks == 0 || begin_chains()) && run_chains(states, gradients, how) &&
                   (!cut.cost.has_whole_grid ||
                    run_chains(whole_params(states, whole.kind), whole_params(gradients, whole.kind), whole)) &&
                   ran(launch_gradients(p, gradient_ctas(problem), device, stream), "launch the gradients kernel") &&
                   ran(small(portable_gate_gradients_kernel<Elem>, gate_ctas(problem), kGateThreads),
                       "launch the gradients of gates") &&
                   (!p.key_sums || ran(small(portable_project_kernel<Elem>, project_ctas(problem), kProjectThreads),
                                       "launch the projection of l2norm"));
  if (all && p.head_sums)
    ran(small(portable_head_sums_kernel, p.value_heads, kHeadSumThreads), "launch the sums over tokens");
  return ran.outcome;
}

template <class Elem>
Outcome launch(const BackwardProblem& problem, const Context& context, const DeviceLimits& limits) {
  const BackwardWorkspace layout = backward_layout(problem);
  const Cut cut = choose_cut(problem, layout, limits);
  for (int i = 0; i < slice_count(problem); ++i) {
    const BackwardParams p = params_of(problem, layout, context.workspace, cut, i);
    const Outcome outcome = launch_slice<Elem>(slice_of(problem, i), p, cut, context, limits);
    if (outcome.status != GD_OK) return outcome;
  }
  return {};
}

}  // namespace

Outcome launch(const BackwardProblem& problem, const Context& context) {
  return with_device(context.device, kAllDevices, [&](const DeviceFacts& facts) -> Outcome {
    const DeviceLimits limits = limits_of(facts);
    return problem.in.q.dtype == GD_BF16 ? launch<Bf16>(problem, context, limits)
                                         : launch<Fp16>(problem, context, limits);
  });
}

}  // namespace gatedelta::cuda::portable
