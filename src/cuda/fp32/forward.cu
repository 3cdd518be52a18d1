// The forward of fp32 inputs: two kernels on the caller's stream. No instruction here is newer than 8.0.
#include "cuda/fp32/forward.cuh"
#include "cuda/fp32/launch.hpp"
#include "cuda/kernels.hpp"

namespace gatedelta::cuda::fp32 {

namespace {

template <bool kOutputs>
cudaError_t launch_forward(const Params& p, int device, cudaStream_t stream) {
  return with_compiled_keys(p.key_dim, [&](auto keys) {
    return launch_loop<ForwardConfig<decltype(keys)::value, kOutputs>, Forward>(p, device, stream);
  });
}

}  // namespace

cudaError_t launch_prepare(const Params& p, cudaStream_t stream) {
  return launch_chunks<Prepare>(p, p.sequences.workspace_chunks() * p.key_heads, stream);
}
cudaError_t launch_reads(const Params& p, int device, cudaStream_t stream) {
  return launch_forward<false>(p, device, stream);
}

Outcome launch(const ForwardProblem& problem, const Context& context) {
  return with_device(context.device, kAllDevices, [&](const DeviceFacts&) -> Outcome {
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const Params p = params_of(problem, context.workspace);
    if (const cudaError_t error = launch_prepare(p, stream)) return failure(error, "launch the prepare kernel");
    if (const cudaError_t error = launch_forward<true>(p, context.device, stream))
      return failure(error, "launch the forward kernel");
    return {};
  });
}

}  // namespace gatedelta::cuda::fp32
