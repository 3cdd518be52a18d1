// Recurrent steps on CUDA: a validated problem becomes one kernel on the caller's stream. No instruction here is newer
// than compute capability 8.0.
#include "cuda/backend.hpp"
#include "cuda/decode/step.cuh"
#include "cuda/decode/walk.cuh"
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"

namespace gatedelta::cuda {

namespace {

template <class Config>
cudaError_t launch(void (*kernel)(DecodeParams), const RecurrentProblem& problem, cudaStream_t stream) {
  const DecodeParams params = decode_params(problem, Config::kCtaColumns);
  const int64_t ctas = decode_pairs(problem.in) * params.parts.divisor;
  if (ctas == 0) return cudaSuccess;
  return launch_kernel(false, kernel, ctas, Config::kThreads, 0, stream, params);
}
template <class Config>
cudaError_t launch_walk(const RecurrentProblem& problem, cudaStream_t stream) {
  return launch<Config>(walk_kernel<Config>, problem, stream);
}
template <class State>
cudaError_t launch_step(const RecurrentProblem& problem, cudaStream_t stream) {
  const auto kernel = problem.in.q.dtype == GD_BF16 ? step_kernel<State, __nv_bfloat16> : step_kernel<State, __half>;
  return launch<StepOf<State>>(kernel, problem, stream);
}

template <int kPerLane>
cudaError_t launch_walk(const RecurrentProblem& problem, cudaStream_t stream) {
  if (problem.in.layout == GD_STATE_KV) return launch_walk<WalkKv<kPerLane>>(problem, stream);
  return state_vector(problem) == 4 ? launch_walk<WalkVk<4, kPerLane>>(problem, stream)
                                    : launch_walk<WalkVk<8, kPerLane>>(problem, stream);
}

cudaError_t launch(const RecurrentProblem& problem, cudaStream_t stream) {
  if (takes_step(problem)) {
    switch (problem.in.initial ? problem.in.initial.dtype : problem.final.dtype) {
      case GD_F32: return launch_step<float>(problem, stream);
      case GD_BF16: return launch_step<__nv_bfloat16>(problem, stream);
      default: return launch_step<__half>(problem, stream);
    }
  }
  return problem.in.key_dim <= WalkKv<16>::kMaxKeyDim ? launch_walk<16>(problem, stream)
                                                      : launch_walk<32>(problem, stream);
}

}  // namespace

Outcome recurrent(const RecurrentProblem& problem, const Context& context) {
  return with_device(context.device, kDecodeDevices, [&](int) -> Outcome {
    if (const cudaError_t error = launch(problem, static_cast<cudaStream_t>(context.stream)))
      return failure(error, "launch the recurrent kernel");
    return {};
  });
}

}  // namespace gatedelta::cuda
