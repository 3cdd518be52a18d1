// The backward of fp32 inputs: five to seven kernels on the caller's stream. No instruction here is newer than 8.0.
#include "cuda/fp32/backward.cuh"
#include "cuda/fp32/finish.cuh"
#include "cuda/fp32/launch.hpp"
#include "cuda/kernels.hpp"

namespace gatedelta::cuda::fp32 {

namespace {

template <template <int> class Config, template <class> class Loop>
cudaError_t launch_instance(const Params& p, int device, cudaStream_t stream) {
  return with_compiled_keys(
      p.key_dim, [&](auto keys) { return launch_loop<Config<decltype(keys)::value>, Loop>(p, device, stream); });
}

Outcome launch_all(const Params& p, bool has_saved, int device, cudaStream_t stream) {
  Launched ran;
  const int64_t chunks = p.sequences.workspace_chunks();
  const bool recomputed = has_saved || (ran(launch_prepare(p, stream), "launch the prepare kernel") &&
                                        ran(launch_reads(p, device, stream), "launch the loop of reads"));
  if (recomputed &&
      ran(launch_instance<GradientConfig, GradientLoop>(p, device, stream), "launch the loop of gradients") &&
      ran(launch_instance<KeyConfig, KeyLoop>(p, device, stream), "launch the loop of keys and queries") &&
      ran(launch_chunks<Finish>(p, chunks * p.key_heads, stream), "launch the sums over heads") &&
      ran(launch_chunks<GateGradients>(p, chunks, stream), "launch the gradients of gates") && p.head_sums)
    ran(launch_chunks<HeadSums>(p, (p.value_heads + kWarps - 1) / kWarps, stream), "launch the sums over tokens");
  return ran.outcome;
}

}  // namespace

Outcome launch(const BackwardProblem& problem, const Context& context) {
  return with_device(context.device, kAllDevices, [&](const DeviceFacts&) -> Outcome {
    return launch_all(params_of(problem, context.workspace), problem.saved.present, context.device,
                      static_cast<cudaStream_t>(context.stream));
  });
}

}  // namespace gatedelta::cuda::fp32
