// Recurrent steps on CUDA: a validated problem becomes one kernel on the caller's stream. No instruction here is newer
// than compute capability 8.0.
#include "cuda/decode/fold.cuh"
#include "cuda/decode/march.cuh"
#include "cuda/decode/step_kv.cuh"
#include "cuda/decode/walk.cuh"
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"

namespace gatedelta::cuda {

namespace {

template <class Params>
cudaError_t launch_grid(void (*kernel)(Params), dim3 grid, int threads, cudaStream_t stream, const Params& params,
                        Pdl pdl = Pdl::kOff) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  return launch_kernel(pdl, kernel, grid, threads, 0, stream, params);
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

// ---- step, fold and march: a grid of heads and sequences ----

template <class Config, class Params>
cudaError_t launch_near(void (*kernel)(Params), const Params& params, const RecurrentProblem& problem,
                        cudaStream_t stream) {
  const NearGrid grid = near_grid(problem, Config::kParts);
  return launch_grid(kernel, dim3(grid.x, grid.y, grid.z), Config::kThreads, stream, params, pdl_if(params.pdl));
}

// Which instance is fastest follows from the number of states alone: measured on an H200, see docs/kernels/decode.md.
template <class Config, class State, class Input, bool kTokenFirst>
cudaError_t launch_step(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  StepParams params = step_params(problem);
  params.pdl = pdl == Pdl::kOn;
  return launch_near<Config>(step_kernel<Config, State, Input, kTokenFirst>, params, problem, stream);
}
template <class Config, class State, class Input>
cudaError_t launch_step_kv(const RecurrentProblem& problem, cudaStream_t stream) {
  return launch_near<Config>(step_kv_kernel<Config, State, Input>, step_params(problem), problem, stream);
}
template <class State, class Input>
cudaError_t launch_step(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  const int64_t states = decode_pairs(problem.in);
  const bool is_kv = problem.in.layout == GD_STATE_KV;
  if constexpr (sizeof(State) == 4) {
    if (is_kv)
      return states <= 256
                 ? launch_step<StepTile<GD_STATE_KV, 4, 4, 1>, State, Input, false>(problem, Pdl::kOff, stream)
                 : launch_step_kv<StepKv<4>, State, Input>(problem, stream);
    return states <= 96 ? launch_step<StepVk<4, 1, 2>, State, Input, true>(problem, pdl, stream)
                        : launch_step<StepVk<4, 2, 1>, State, Input, true>(problem, pdl, stream);
  } else {
    if (is_kv) return launch_step_kv<StepKv<2>, State, Input>(problem, stream);
    return states <= 4096 ? launch_step<StepVk<8, 2, 2>, State, Input, true>(problem, pdl, stream)
                          : launch_step<StepVk<8, 4, 1>, State, Input, false>(problem, pdl, stream);
  }
}

template <class Config>
cudaError_t launch_fold(const RecurrentProblem& problem, cudaStream_t stream) {
  return launch_near<Config>(fold_kernel<Config>, fold_params(problem), problem, stream);
}
template <class State, class Input, int kTokens>
cudaError_t launch_fold(const RecurrentProblem& problem, cudaStream_t stream) {
  if constexpr (sizeof(State) == 4)
    if (decode_pairs(problem.in) > 2048)
      return launch_fold<FoldConfig<State, Input, FoldKind::last, kTokens, 2, false>>(problem, stream);
  return launch_fold<FoldConfig<State, Input, FoldKind::last, kTokens, 2, true>>(problem, stream);
}
template <class State, class Input>
cudaError_t launch_fold(const RecurrentProblem& problem, cudaStream_t stream) {
  const Sequences& sequences = problem.in.sequences;
  if (sequences.offsets || sequences.tokens > 8)
    return launch_fold<FoldConfig<State, Input, FoldKind::any, 4, 2, false>>(problem, stream);
  return sequences.tokens <= 4 ? launch_fold<State, Input, 4>(problem, stream)
                               : launch_fold<State, Input, 8>(problem, stream);
}

template <class Config, class State, class Input>
cudaError_t launch_march(const RecurrentProblem& problem, cudaStream_t stream) {
  return launch_near<Config>(march_kernel<Config, State, Input>, fold_params(problem), problem, stream);
}
template <class State, class Input>
cudaError_t launch_march(const RecurrentProblem& problem, cudaStream_t stream) {
  const int64_t states = decode_pairs(problem.in);
  if (problem.in.layout == GD_STATE_KV) {
    if constexpr (sizeof(State) == 4)
      if (states <= 64) return launch_march<StepTile<GD_STATE_KV, 4, 4, 1>, State, Input>(problem, stream);
    return launch_march<StepTile<GD_STATE_KV, 4, 4, 2>, State, Input>(problem, stream);
  }
  if constexpr (sizeof(State) == 4) {
    return launch_march<StepVk<4, 2, 1>, State, Input>(problem, stream);
  } else {
    return states <= 512 ? launch_march<StepVk<8, 2, 1>, State, Input>(problem, stream)
                         : launch_march<StepVk<8, 4, 1>, State, Input>(problem, stream);
  }
}

template <class State, class Input>
cudaError_t launch_near(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  if (takes_step(problem)) return launch_step<State, Input>(problem, pdl, stream);
  if (takes_fold(problem)) return launch_fold<State, Input>(problem, stream);
  return launch_march<State, Input>(problem, stream);
}
template <class State>
cudaError_t launch_near(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  return problem.in.q.dtype == GD_BF16 ? launch_near<State, __nv_bfloat16>(problem, pdl, stream)
                                       : launch_near<State, __half>(problem, pdl, stream);
}

cudaError_t launch(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  if (!takes_march(problem)) return launch_walk(problem, stream);
  switch (state_dtype(problem)) {
    case GD_F32: return launch_near<float>(problem, pdl, stream);
    case GD_BF16: return launch_near<__nv_bfloat16>(problem, pdl, stream);
    default: return launch_near<__half>(problem, pdl, stream);
  }
}

}  // namespace

Outcome launch(const RecurrentProblem& problem, const Context& context) {
  return with_device(context.device, kAllDevices, [&](const DeviceFacts&) -> Outcome {
    if (const cudaError_t error = launch(problem, context.pdl, static_cast<cudaStream_t>(context.stream)))
      return failure(error, "launch the recurrent kernel");
    return {};
  });
}

}  // namespace gatedelta::cuda
