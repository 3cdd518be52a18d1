// The gated norm on CUDA: a validated problem becomes one kernel on the caller's stream, a backward with dweight two.
// No instruction here is newer than compute capability 8.0.
#include "cuda/backend.hpp"
#include "cuda/gated_norm/kernels.cuh"
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"

namespace gatedelta::cuda {

namespace {

constexpr Capabilities kNormDevices = {8, 1 << 15, "the gated norm supports 8.0 and later"};
constexpr int kRowsInFlight = 2;  // of a group of lanes in the forward, where types are fixed

Divider divider(int64_t by) { return Divider(static_cast<uint32_t>(by)); }

template <class Config, gd_dtype kFixed, int kRows>
cudaError_t launch_forward(const NormParams& params, cudaStream_t stream) {
  constexpr int kCtaRows = kNormThreads / Config::kLanes * kRows;
  const int64_t ctas = (params.problem.in.rows() + kCtaRows - 1) / kCtaRows;
  return launch_kernel(false, norm_forward_kernel<Config, kFixed, kRows>, ctas, kNormThreads, 0, stream, params);
}

template <class Config>
cudaError_t launch_forward(const GatedNormProblem& problem, cudaStream_t stream) {
  const GatedNorm& in = problem.in;
  const NormParams params = {problem, divider(in.heads), divider(in.tokens), 1.0f / static_cast<float>(in.dim),
                             is_aligned(in) && is_aligned(problem.y)};
  if constexpr (Config::kUsual) {
    const gd_dtype type = common_type(in, {&problem.y});
    if (type == GD_BF16) return launch_forward<Config, GD_BF16, kRowsInFlight>(params, stream);
    if (type == GD_F16) return launch_forward<Config, GD_F16, kRowsInFlight>(params, stream);
  }
  return launch_forward<Config, GD_DTYPE_NONE, 1>(params, stream);
}

template <class Config>
cudaError_t launch_backward(const GatedNormBackwardProblem& problem, char* workspace, cudaStream_t stream) {
  const GatedNorm& in = problem.in;
  NormBackwardParams params = {
      problem,
      divider(in.heads),
      divider(in.tokens),
      1.0f / static_cast<float>(in.dim),
      is_aligned(in) && is_aligned(problem.d_y) && is_aligned(problem.dx) && is_aligned(problem.dz),
      problem.dweight ? reinterpret_cast<float*>(workspace) : nullptr};
  auto kernel = norm_backward_kernel<Config, GD_DTYPE_NONE>;
  if constexpr (Config::kUsual) {
    const gd_dtype type = common_type(in, {&problem.d_y, &problem.dx, &problem.dz});
    if (type == GD_BF16) kernel = norm_backward_kernel<Config, GD_BF16>;
    if (type == GD_F16) kernel = norm_backward_kernel<Config, GD_F16>;
  }
  return launch_kernel(false, kernel, norm_backward_ctas(in), kNormBackwardThreads, 0, stream, params);
}

}  // namespace

Outcome gated_norm(const GatedNormProblem& problem, const Context& context) {
  return with_device(context.device, kNormDevices, [&](int) -> Outcome {
    if (problem.in.rows() == 0) return {};
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const cudaError_t error = with_norm_config(
        problem.in.dim, [&](auto config) { return launch_forward<decltype(config)>(problem, stream); });
    if (error) return failure(error, "launch the gated norm's kernel");
    return {};
  });
}

Outcome gated_norm_backward(const GatedNormBackwardProblem& problem, const Context& context) {
  return with_device(context.device, kNormDevices, [&](int) -> Outcome {
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const GatedNorm& in = problem.in;
    if (in.rows() > 0) {
      const cudaError_t error = with_norm_config(
          in.dim, [&](auto config) { return launch_backward<decltype(config)>(problem, context.workspace, stream); });
      if (error) return failure(error, "launch the gated norm's backward kernel");
    }
    if (!problem.dweight) return {};
    const cudaError_t error = launch_kernel(false, norm_sum_kernel, in.dim / kSumColumns, kSumColumns * kSumRows, 0,
                                            stream, reinterpret_cast<const float*>(context.workspace),
                                            static_cast<int>(norm_backward_ctas(in)), in.dim, problem.dweight);
    if (error) return failure(error, "launch the sum of dweight");
    return {};
  });
}

}  // namespace gatedelta::cuda
