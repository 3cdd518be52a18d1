// The gated norm on CUDA: a validated problem becomes one kernel on the caller's stream, a backward with dweight two.
// No instruction here is newer than compute capability 8.0. From 9.0 on the second kernel is launched with PDL.
#include "cuda/gated_norm/fast.cuh"
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"

namespace gatedelta::cuda {

namespace {

constexpr Capabilities kNormDevices = {8, 1 << 15, "the gated norm supports 8.0 and later"};

Divider divider(int64_t by) { return Divider(static_cast<uint32_t>(by)); }

// Calls f with the type of the rows as a constant if the fast kernels support the call; returns whether they do.
template <class Config, class F>
bool with_fast_type(const GatedNorm& in, std::initializer_list<const TokenRows*> others, const F& f) {
  if constexpr (Config::kHasFast) {
    if (!supports_fast_norm(in, others)) return false;
    in.x.dtype == GD_BF16 ? f(std::integral_constant<gd_dtype, GD_BF16>{})
                          : f(std::integral_constant<gd_dtype, GD_F16>{});
    return true;
  } else {
    return false;
  }
}

template <class Config>
cudaError_t launch_forward(const GatedNormProblem& problem, Pdl pdl, cudaStream_t stream) {
  const GatedNorm& in = problem.in;
  const auto launch = [&](Pdl with, auto kernel, const auto& params) {
    constexpr int kRows = kNormThreads / Config::kLanes;
    return launch_kernel(with, kernel, (in.rows() + kRows - 1) / kRows, kNormThreads, 0, stream, params);
  };
  cudaError_t error = cudaSuccess;
  if (with_fast_type<Config>(in, {&problem.y}, [&](auto type) {
        error = launch(pdl, fast_norm_kernel<Config, decltype(type)::value>, FastNormForwardParams(problem, pdl));
      }))
    return error;
  const NormParams params = {problem, divider(in.heads), divider(in.tokens), 1.0f / static_cast<float>(in.dim),
                             is_aligned(in) && is_aligned(problem.y)};
  return launch(Pdl::kOff, norm_forward_kernel<Config>, params);
}

template <class Config>
cudaError_t launch_backward(const GatedNormBackwardProblem& problem, char* workspace, cudaStream_t stream) {
  const GatedNorm& in = problem.in;
  auto* const partials = problem.dweight ? reinterpret_cast<float*>(workspace) : nullptr;
  const auto launch = [&](auto kernel, const auto& params) {
    return launch_kernel(Pdl::kOff, kernel, norm_backward_ctas(in), kNormBackwardThreads, 0, stream, params);
  };
  cudaError_t error = cudaSuccess;
  if (with_fast_type<Config>(in, {&problem.d_y, &problem.dx, &problem.dz}, [&](auto type) {
        error =
            launch(fast_norm_backward_kernel<Config, decltype(type)::value>, FastNormBackwardParams(problem, partials));
      }))
    return error;
  const NormBackwardParams params = {
      problem,
      divider(in.heads),
      divider(in.tokens),
      1.0f / static_cast<float>(in.dim),
      is_aligned(in) && is_aligned(problem.d_y) && is_aligned(problem.dx) && is_aligned(problem.dz),
      partials};
  return launch(norm_backward_kernel<Config>, params);
}

}  // namespace

Outcome launch(const GatedNormProblem& problem, const Context& context) {
  return with_device(context.device, kNormDevices, [&](const DeviceFacts&) -> Outcome {
    if (problem.in.rows() == 0) return {};
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const cudaError_t error = with_norm_config(
        problem.in.dim, [&](auto config) { return launch_forward<decltype(config)>(problem, context.pdl, stream); });
    if (error) return failure(error, "launch the gated norm's kernel");
    return {};
  });
}

Outcome launch(const GatedNormBackwardProblem& problem, const Context& context) {
  return with_device(context.device, kNormDevices, [&](const DeviceFacts&) -> Outcome {
    DeviceFacts facts{};
    if (Outcome outcome = find_facts(context.device, facts); outcome.status != GD_OK) return outcome;
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const GatedNorm& in = problem.in;
    if (in.rows() > 0) {
      const cudaError_t error = with_norm_config(
          in.dim, [&](auto config) { return launch_backward<decltype(config)>(problem, context.workspace, stream); });
      if (error) return failure(error, "launch the gated norm's backward kernel");
    }
    if (!problem.dweight) return {};
    const Pdl pdl = in.rows() > 0 ? pdl_on(facts) : Pdl::kOff;  // without rows this is the call's first kernel
    const cudaError_t error = launch_kernel(pdl, norm_sum_kernel, in.dim / kSumColumns, kSumColumns * kSumRows, 0,
                                            stream, reinterpret_cast<const float*>(context.workspace),
                                            static_cast<int>(norm_backward_ctas(in)), in.dim, problem.dweight);
    if (error) return failure(error, "launch the sum of dweight");
    return {};
  });
}

}  // namespace gatedelta::cuda
