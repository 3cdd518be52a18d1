// Recurrent steps on CUDA: a validated problem becomes one kernel on the caller's stream. No instruction here is newer
// than compute capability 8.0.
#include "cuda/backend.hpp"
#include "cuda/decode/fold.cuh"
#include "cuda/decode/step_kv.cuh"
#include "cuda/decode/walk.cuh"
#include "cuda/host/device.cuh"

namespace gatedelta::cuda {

namespace {

template <class Params>
cudaError_t launch_grid(void (*kernel)(Params), dim3 grid, int threads, cudaStream_t stream, const Params& params) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// ---- walk ----

template <class Config>
cudaError_t launch_walk(const RecurrentProblem& problem, cudaStream_t stream) {
  const DecodeParams params = decode_params(problem, Config::kCtaColumns);
  const int64_t ctas = decode_pairs(problem.in) * params.parts.divisor;
  return launch_grid(walk_kernel<Config>, dim3(static_cast<unsigned>(ctas)), Config::kThreads, stream, params);
}
template <int kPerLane>
cudaError_t launch_walk(const RecurrentProblem& problem, cudaStream_t stream) {
  if (problem.in.layout == GD_STATE_KV) return launch_walk<WalkKv<kPerLane>>(problem, stream);
  return state_vector(problem) == 4 ? launch_walk<WalkVk<4, kPerLane>>(problem, stream)
                                    : launch_walk<WalkVk<8, kPerLane>>(problem, stream);
}
cudaError_t launch_walk(const RecurrentProblem& problem, cudaStream_t stream) {
  return problem.in.key_dim <= WalkKv<16>::kMaxKeyDim ? launch_walk<16>(problem, stream)
                                                      : launch_walk<32>(problem, stream);
}

// ---- step and fold: a grid of heads and sequences ----

template <class Config, class Params>
cudaError_t launch_near(void (*kernel)(Params), const Params& params, const RecurrentProblem& problem,
                        cudaStream_t stream) {
  const NearGrid grid = near_grid(problem, Config::kParts);
  return launch_grid(kernel, dim3(grid.x, grid.y, grid.z), Config::kThreads, stream, params);
}

// Which instance is fastest follows from the number of states alone: measured on an H200, see docs/kernels/decode.md.
template <class State, class Input, int kColumns, int kWarps, bool kStreaming, bool kTokenFirst>
cudaError_t launch_step_vk(const RecurrentProblem& problem, cudaStream_t stream) {
  using Config = StepVk<16 / sizeof(State), kColumns, kWarps>;
  return launch_near<Config>(step_vk_kernel<Config, State, Input, kStreaming, kTokenFirst>, step_params(problem),
                             problem, stream);
}
template <class State, class Input, int kColumns>
cudaError_t launch_step_kv(const RecurrentProblem& problem, cudaStream_t stream) {
  using Config = StepKv<kColumns>;
  return launch_near<Config>(step_kv_kernel<Config, State, Input>, step_params(problem), problem, stream);
}
template <class State, class Input>
cudaError_t launch_step(const RecurrentProblem& problem, cudaStream_t stream) {
  const int64_t states = decode_pairs(problem.in);
  const bool is_kv = problem.in.layout == GD_STATE_KV;
  if constexpr (sizeof(State) == 4) {
    if (is_kv)
      return states <= 512 ? launch_step_kv<State, Input, 2>(problem, stream)
                           : launch_step_kv<State, Input, 4>(problem, stream);
    if (states <= 96 || (states > 192 && states < 2048))
      return launch_step_vk<State, Input, 1, 2, true, true>(problem, stream);
    return states <= 8192 ? launch_step_vk<State, Input, 2, 1, true, true>(problem, stream)
                          : launch_step_vk<State, Input, 2, 1, false, true>(problem, stream);
  } else {
    if (is_kv) return launch_step_kv<State, Input, 2>(problem, stream);
    return states <= 4096 ? launch_step_vk<State, Input, 2, 2, true, true>(problem, stream)
                          : launch_step_vk<State, Input, 4, 1, false, false>(problem, stream);
  }
}

template <class Config>
cudaError_t launch_fold(const RecurrentProblem& problem, cudaStream_t stream) {
  return launch_near<Config>(fold_kernel<Config>, fold_params(problem), problem, stream);
}
template <class State, class Input, int kTokens>
cudaError_t launch_fold(const RecurrentProblem& problem, cudaStream_t stream) {
  const int64_t states = decode_pairs(problem.in);
  constexpr bool kIsFloat = sizeof(State) == 4;
  if (problem.step_states) {
    if constexpr (kIsFloat)
      if (states > 64 && states <= 512)
        return launch_fold<FoldConfig<State, Input, FoldKind::every, kTokens, 2, false>>(problem, stream);
    return launch_fold<FoldConfig<State, Input, FoldKind::every, kTokens, 2, true>>(problem, stream);
  }
  if constexpr (kIsFloat)
    if (states > 2048) return launch_fold<FoldConfig<State, Input, FoldKind::last, kTokens, 2, false>>(problem, stream);
  return launch_fold<FoldConfig<State, Input, FoldKind::last, kTokens, 2, true>>(problem, stream);
}

template <class State, class Input>
cudaError_t launch_near(const RecurrentProblem& problem, cudaStream_t stream) {
  if (takes_step(problem)) return launch_step<State, Input>(problem, stream);
  if (problem.in.sequences.offsets || problem.in.sequences.tokens > 8)
    return launch_fold<FoldConfig<State, Input, FoldKind::any, 4, 2, false>>(problem, stream);
  return problem.in.sequences.tokens <= 4 ? launch_fold<State, Input, 4>(problem, stream)
                                          : launch_fold<State, Input, 8>(problem, stream);
}
template <class State>
cudaError_t launch_near(const RecurrentProblem& problem, cudaStream_t stream) {
  return problem.in.q.dtype == GD_BF16 ? launch_near<State, __nv_bfloat16>(problem, stream)
                                       : launch_near<State, __half>(problem, stream);
}

cudaError_t launch(const RecurrentProblem& problem, cudaStream_t stream) {
  if (!takes_step(problem) && !takes_fold(problem)) return launch_walk(problem, stream);
  switch (state_dtype(problem)) {
    case GD_F32: return launch_near<float>(problem, stream);
    case GD_BF16: return launch_near<__nv_bfloat16>(problem, stream);
    default: return launch_near<__half>(problem, stream);
  }
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
