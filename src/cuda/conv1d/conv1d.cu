// The convolution on CUDA: a validated problem becomes one kernel, a backward with dweight or dbias two, on the
// caller's stream. No instruction here is newer than compute capability 8.0.
#include "cuda/conv1d/columns_backward.cuh"
#include "cuda/conv1d/rows_backward.cuh"
#include "cuda/conv1d/update.cuh"
#include "cuda/conv1d/update_vec.cuh"
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"

namespace gatedelta::cuda {

namespace {

constexpr Capabilities kConvDevices = {8, 1 << 15, "the convolution supports 8.0 and later"};

using ForwardKernel = void (*)(ConvParams);
ForwardKernel kernel_of(const Conv1dProblem& problem, ConvKernel kind) {
  const gd_dtype type = problem.in.x.dtype;
  if (kind == ConvKernel::any) return conv_any_kernel;
  if (kind == ConvKernel::rows) {
    return type == GD_F32    ? conv_rows_kernel<GD_F32>
           : type == GD_BF16 ? conv_rows_kernel<GD_BF16>
                             : conv_rows_kernel<GD_F16>;
  }
  return type == GD_F32    ? conv_columns_kernel<GD_F32>
         : type == GD_BF16 ? conv_columns_kernel<GD_BF16>
                           : conv_columns_kernel<GD_F16>;
}

using BackwardKernel = void (*)(ConvBackwardParams);
BackwardKernel kernel_of(const Conv1dBackwardProblem& problem, ConvKernel kind) {
  const gd_dtype type = problem.in.x.dtype;
  if (kind == ConvKernel::any) return conv_any_backward_kernel;
  if (kind == ConvKernel::rows) {
    return type == GD_F32    ? conv_rows_backward_kernel<GD_F32>
           : type == GD_BF16 ? conv_rows_backward_kernel<GD_BF16>
                             : conv_rows_backward_kernel<GD_F16>;
  }
  if (is_usual(problem))
    return type == GD_F32    ? conv_columns_usual_backward_kernel<GD_F32>
           : type == GD_BF16 ? conv_columns_usual_backward_kernel<GD_BF16>
                             : conv_columns_usual_backward_kernel<GD_F16>;
  return type == GD_F32    ? conv_columns_backward_kernel<GD_F32>
         : type == GD_BF16 ? conv_columns_backward_kernel<GD_BF16>
                           : conv_columns_backward_kernel<GD_F16>;
}

using UpdateVecKernel = void (*)(UpdateVecParams);
template <gd_dtype kType>
UpdateVecKernel update_vec_kernel_of(UpdateVecLayout layout, bool one_token) {
  constexpr int kTokens = 4;
  if (layout == UpdateVecLayout::channels) return conv_update_vec_kernel<kType, kAnyColumns, kTokens>;
  if (layout == UpdateVecLayout::columns)
    return one_token ? conv_update_vec_kernel<kType, 0, 1> : conv_update_vec_kernel<kType, 0, kTokens>;
  if (layout == UpdateVecLayout::channels_of_3)
    return one_token ? conv_update_vec_kernel<kType, 3, 1> : conv_update_vec_kernel<kType, 3, kTokens>;
  return one_token ? conv_update_vec_kernel<kType, 4, 1> : conv_update_vec_kernel<kType, 4, kTokens>;
}
UpdateVecKernel update_vec_kernel_of(const Conv1dProblem& problem) {
  const UpdateVecLayout layout = state_layout(problem);
  const bool one_token = problem.in.sequences.tokens == 1;
  const gd_dtype type = problem.in.x.dtype;
  return type == GD_F32    ? update_vec_kernel_of<GD_F32>(layout, one_token)
         : type == GD_BF16 ? update_vec_kernel_of<GD_BF16>(layout, one_token)
                           : update_vec_kernel_of<GD_F16>(layout, one_token);
}

UpdateParams update_params(const Conv1dProblem& problem) {
  return {problem, update_grid(problem), update_tile(problem.in, problem.in.initial),
          update_tile(problem.in, problem.final), has_packed_taps(problem.in)};
}
int update_bytes(const UpdateParams& params) {
  return kUpdateInputBytes + static_cast<int>(params.grid.sequences) * (params.initial.bytes + params.final.bytes);
}

cudaError_t launch(const Conv1dProblem& problem, cudaStream_t stream) {
  const ConvKernel kind = conv_kernel(problem);
  if (kind == ConvKernel::update_vec) {
    const UpdateVecGrid grid = grid_of(problem.in);
    if (grid.sequences * grid.blocks == 0) return cudaSuccess;
    return launch_kernel(Pdl::kOff, update_vec_kernel_of(problem), {grid.sequences, grid.blocks}, kUpdateVecThreads, 0,
                         stream, update_vec_params(problem));
  }
  if (kind == ConvKernel::update) {
    const UpdateParams params = update_params(problem);
    if (params.grid.ctas() == 0) return cudaSuccess;
    return launch_kernel(Pdl::kOff, conv_update_kernel, params.grid.ctas(), kConvThreads, update_bytes(params), stream,
                         params);
  }
  const ConvParams params = {problem, conv_grid(problem)};
  if (params.grid.ctas() == 0) return cudaSuccess;
  return launch_kernel(Pdl::kOff, kernel_of(problem, kind), params.grid.ctas(), kConvThreads, 0, stream, params);
}

int64_t step_bytes(const TokenRows& rows) { return rows ? rows.token_stride * dtype_bytes(rows.dtype) : 0; }

// `pdl`: of the second kernel.
cudaError_t launch(const Conv1dBackwardProblem& problem, Pdl pdl, cudaStream_t stream, char* workspace) {
  const ConvKernel kind = conv_kernel(problem);
  const ConvBackwardParams params = {problem,
                                     conv_grid(problem),
                                     has_partial_sums(problem) ? reinterpret_cast<float*>(workspace) : nullptr,
                                     step_bytes(problem.in.x),
                                     step_bytes(problem.d_y),
                                     step_bytes(problem.dx)};
  const bool has_work = params.grid.ctas() > 0;
  if (has_work) {
    const cudaError_t error =
        launch_kernel(Pdl::kOff, kernel_of(problem, kind), params.grid.ctas(), kConvThreads, 0, stream, params);
    if (error) return error;
  }
  if (!params.partial) return cudaSuccess;
  const int64_t blocks = conv_ceil(problem.in.channels, 32);
  return launch_kernel(has_work ? pdl : Pdl::kOff, conv_sum_kernel, blocks, 32 * kSumRows, 0, stream, params);
}

}  // namespace

Outcome launch(const Conv1dProblem& problem, const Context& context) {
  return with_device(context.device, kConvDevices, [&](const DeviceFacts&) -> Outcome {
    if (const cudaError_t error = launch(problem, static_cast<cudaStream_t>(context.stream)))
      return failure(error, "launch the convolution's kernel");
    return {};
  });
}

Outcome launch(const Conv1dBackwardProblem& problem, const Context& context) {
  return with_device(context.device, kConvDevices, [&](const DeviceFacts&) -> Outcome {
    DeviceFacts facts{};
    if (Outcome outcome = find_facts(context.device, facts); outcome.status != GD_OK) return outcome;
    const auto stream = static_cast<cudaStream_t>(context.stream);
    if (const cudaError_t error = launch(problem, pdl_on(facts), stream, context.workspace))
      return failure(error, "launch the kernels of the convolution's backward");
    return {};
  });
}

}  // namespace gatedelta::cuda
