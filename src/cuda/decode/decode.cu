// Recurrent steps on CUDA: a validated problem becomes one kernel on the caller's stream. No instruction here is newer
// than compute capability 8.0.
#include "cuda/decode/generic.cuh"
#include "cuda/decode/one_token_kv.cuh"
#include "cuda/decode/sequential_128.cuh"
#include "cuda/decode/window_mma.cuh"
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

// ---- generic ----

template <class Config>
cudaError_t launch_generic(const RecurrentProblem& problem, cudaStream_t stream) {
  const DecodeParams params = decode_params(problem, Config::kCtaColumns);
  const int64_t ctas = decode_pairs(problem.in) * params.parts.divisor;
  return launch_grid(generic_kernel<Config>, dim3(static_cast<unsigned>(ctas)), Config::kThreads, stream, params);
}
cudaError_t launch_generic(const RecurrentProblem& problem, cudaStream_t stream) {
  const bool is_wide = problem.in.key_dim > GenericKv<16>::kMaxKeyDim;
  if (problem.in.layout == GD_STATE_KV)
    return is_wide ? launch_generic<GenericKv<32>>(problem, stream) : launch_generic<GenericKv<16>>(problem, stream);
  if (is_wide) return launch_generic<GenericVk<4, 32>>(problem, stream);
  return state_vector(problem) == 4 ? launch_generic<GenericVk<4, 16>>(problem, stream)
                                    : launch_generic<GenericVk<8, 16>>(problem, stream);
}

// ---- K = V = 128: a grid of heads and sequences ----

template <class Config, class Params>
cudaError_t launch_128(void (*kernel)(Params), const Params& params, const RecurrentProblem& problem,
                       cudaStream_t stream) {
  const DecodeGrid grid = grid_of(problem, Config::kParts);
  return launch_grid(kernel, dim3(grid.x, grid.y, grid.z), Config::kThreads, stream, params, params.pdl);
}

// The number of states chooses the instance: measured on an H200, see docs/kernels/decode.md.
template <class Config, class State, class Input, bool kTokenFirst>
cudaError_t launch_one_token(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  OneTokenParams params = one_token_params(problem);
  params.pdl = pdl;
  return launch_128<Config>(one_token_kernel<Config, State, Input, kTokenFirst>, params, problem, stream);
}
template <class Config, class State, class Input>
cudaError_t launch_one_token_kv(const RecurrentProblem& problem, cudaStream_t stream) {
  return launch_128<Config>(one_token_kv_kernel<Config, State, Input>, one_token_params(problem), problem, stream);
}
template <class State, class Input>
cudaError_t launch_one_token(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  const int64_t states = decode_pairs(problem.in);
  const bool is_kv = problem.in.layout == GD_STATE_KV;
  if constexpr (sizeof(State) == 4) {
    if (is_kv)
      return states <= 256
                 ? launch_one_token<Tile128<GD_STATE_KV, 4, 4, 1>, State, Input, false>(problem, Pdl::kOff, stream)
                 : launch_one_token_kv<OneTokenKv<4>, State, Input>(problem, stream);
    return states <= 96 ? launch_one_token<Vk128<4, 1, 2>, State, Input, true>(problem, pdl, stream)
                        : launch_one_token<Vk128<4, 2, 1>, State, Input, true>(problem, pdl, stream);
  } else {
    if (is_kv) return launch_one_token_kv<OneTokenKv<2>, State, Input>(problem, stream);
    return states <= 4096 ? launch_one_token<Vk128<8, 2, 2>, State, Input, true>(problem, pdl, stream)
                          : launch_one_token<Vk128<8, 4, 1>, State, Input, false>(problem, pdl, stream);
  }
}

template <class Config>
cudaError_t launch_window_mma(const RecurrentProblem& problem, cudaStream_t stream) {
  return launch_128<Config>(window_mma_kernel<Config>, many_token_params(problem), problem, stream);
}
template <class State, class Input>
cudaError_t launch_window_mma(const RecurrentProblem& problem, cudaStream_t stream) {
  const Sequences& sequences = problem.in.sequences;
  if (sequences.offsets || sequences.tokens > 8)
    return launch_window_mma<WindowMmaConfig<State, Input, WindowKind::any, 8>>(problem, stream);
  return sequences.tokens <= 4 ? launch_window_mma<WindowMmaConfig<State, Input, WindowKind::last, 4>>(problem, stream)
                               : launch_window_mma<WindowMmaConfig<State, Input, WindowKind::last, 8>>(problem, stream);
}

template <class Config, class State, class Input>
cudaError_t launch_sequential_128(const RecurrentProblem& problem, cudaStream_t stream) {
  return launch_128<Config>(sequential_128_kernel<Config, State, Input>, many_token_params(problem), problem, stream);
}
template <class State, class Input>
cudaError_t launch_sequential_128(const RecurrentProblem& problem, cudaStream_t stream) {
  const int64_t states = decode_pairs(problem.in);
  if (problem.in.layout == GD_STATE_KV) {
    if constexpr (sizeof(State) == 4)
      if (states <= 64) return launch_sequential_128<Tile128<GD_STATE_KV, 4, 4, 1>, State, Input>(problem, stream);
    return launch_sequential_128<Tile128<GD_STATE_KV, 4, 4, 2>, State, Input>(problem, stream);
  }
  if constexpr (sizeof(State) == 4) {
    return launch_sequential_128<Vk128<4, 2, 1>, State, Input>(problem, stream);
  } else {
    return states <= 512 ? launch_sequential_128<Vk128<8, 2, 1>, State, Input>(problem, stream)
                         : launch_sequential_128<Vk128<8, 4, 1>, State, Input>(problem, stream);
  }
}

template <class State, class Input>
cudaError_t launch_128(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  if (supports_one_token(problem)) return launch_one_token<State, Input>(problem, pdl, stream);
  if (supports_window_mma(problem)) return launch_window_mma<State, Input>(problem, stream);
  return launch_sequential_128<State, Input>(problem, stream);
}
template <class State>
cudaError_t launch_128(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  return problem.in.q.dtype == GD_BF16 ? launch_128<State, __nv_bfloat16>(problem, pdl, stream)
                                       : launch_128<State, __half>(problem, pdl, stream);
}

cudaError_t launch(const RecurrentProblem& problem, Pdl pdl, cudaStream_t stream) {
  if (!supports_sequential_128(problem)) return launch_generic(problem, stream);
  switch (state_dtype(problem)) {
    case GD_F32: return launch_128<float>(problem, pdl, stream);
    case GD_BF16: return launch_128<__nv_bfloat16>(problem, pdl, stream);
    default: return launch_128<__half>(problem, pdl, stream);
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
