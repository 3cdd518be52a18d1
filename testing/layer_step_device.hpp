// The layer's step on a CUDA device, and the three calls it stands for.
#pragma once

#include "testing/device.hpp"
#include "testing/layer_step.hpp"

namespace gatedelta::testing {

using DeviceLayerStep = DeviceCall<gd_layer_step_args>;

// The three calls on the tensors of a step, one after the other in its stream. Returns "" or the refusal.
inline std::string run_three_calls(DeviceLayerStep& step, cudaStream_t stream = nullptr) {
  const gd_layer_step_args& args = step.args();
  const gd_tensor &x = args.conv.in.x, &y = args.norm.out;
  const auto bytes = static_cast<size_t>(element_bytes(x.dtype));
  const DeviceMemory convolved(static_cast<size_t>(x.shape[0] * x.shape[1] * x.shape[2]) * bytes, 0);
  const DeviceMemory o(static_cast<size_t>(element_count(y)) * bytes, 0);
  ThreeCalls calls(args, convolved.data(), o.data());
  const auto run = [&](const char* name, auto& call, auto query, auto function) -> std::string {
    call.exec.stream = stream;
    call.exec.workspace = nullptr;
    call.exec.workspace_bytes = 0;
    size_t needed = 0;
    if (query(&call, &needed) != GD_OK) return std::string(name) + ": " + gd_last_error();
    const DeviceMemory workspace(needed, 64);
    if (needed) call.exec.workspace = workspace.data();
    call.exec.workspace_bytes = needed;
    if (function(&call) != GD_OK) return std::string(name) + ": " + gd_last_error();
    GD_CUDA_OK(cudaDeviceSynchronize());
    return "";
  };
  std::string error = run("gd_conv1d", calls.conv, gd_conv1d_workspace, gd_conv1d);
  if (error.empty()) error = run("gd_recurrent", calls.rule, gd_recurrent_workspace, gd_recurrent);
  if (error.empty()) error = run("gd_gated_norm", calls.norm, gd_gated_norm_workspace, gd_gated_norm);
  return error;
}

}  // namespace gatedelta::testing
