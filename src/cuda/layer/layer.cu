// The layer's step on CUDA: two or three kernels on the caller's stream, all but the first launched with PDL where the
// device has it.
#include "cuda/host/device.cuh"
#include "cuda/host/launch.cuh"
#include "cuda/kernels.hpp"
#include "cuda/layer/finish.cuh"
#include "cuda/layer/rule.cuh"

namespace gatedelta::cuda {

namespace {

template <class State, class Input>
cudaError_t launch_layer(const LayerStepProblem& problem, Pdl pdl, cudaStream_t stream) {
  using Config = LayerTile<State>;
  const LayerRuleParams rule = layer_rule_params(problem);
  const LayerFinishParams finish = layer_finish_params(problem);
  const DecodeGrid grid = grid_of(problem.rule, Config::kParts);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.x, grid.y, grid.z);
  config.blockDim = dim3(Config::kThreads);
  config.stream = stream;
  if (const cudaError_t error = cudaLaunchKernelEx(&config, layer_rule_kernel<State, Input>, rule)) return error;
  const int64_t ctas = finish.row_ctas + (int64_t{finish.shifts} + kFinishThreads - 1) / kFinishThreads;
  return launch_kernel(pdl, layer_finish_kernel<kDtype<Input>>, ctas, kFinishThreads, 0, stream, finish);
}
template <class State>
cudaError_t launch_layer(const LayerStepProblem& problem, Pdl pdl, cudaStream_t stream) {
  return problem.conv.in.x.dtype == GD_BF16 ? launch_layer<State, __nv_bfloat16>(problem, pdl, stream)
                                            : launch_layer<State, __half>(problem, pdl, stream);
}

}  // namespace

Outcome layer_step(const Conv1dProblem& conv, const RecurrentProblem& rule, const GatedNormProblem& norm,
                   const Context& context) {
  return with_device(context.device, kAllDevices, [&](const DeviceFacts&) -> Outcome {
    DeviceFacts facts{};
    if (Outcome outcome = find_facts(context.device, facts); outcome.status != GD_OK) return outcome;
    const LayerStepProblem problem = {conv, rule, norm};
    if (problem.norm.in.rows() == 0) return {};
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const Pdl pdl = pdl_on(facts);
    if (!supports_two_kernels(problem)) {
      Context next = context;
      next.pdl = pdl;
      if (Outcome outcome = launch(conv, context); outcome.status != GD_OK) return outcome;
      if (Outcome outcome = launch(rule, next); outcome.status != GD_OK) return outcome;
      return launch(norm, next);
    }
    cudaError_t error;
    switch (state_dtype(rule)) {
      case GD_F32: error = launch_layer<float>(problem, pdl, stream); break;
      case GD_BF16: error = launch_layer<__nv_bfloat16>(problem, pdl, stream); break;
      default: error = launch_layer<__half>(problem, pdl, stream);
    }
    if (error) return failure(error, "launch the layer's step");
    return {};
  });
}

}  // namespace gatedelta::cuda
