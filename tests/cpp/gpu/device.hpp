// What the tests of a CUDA device alone share: graphs and streams.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {

using Gpu = OnEngine;

// Calls captured in a graph. A graph holds pointers and shapes; every launch reads the tensors' contents anew.
class Replay {
 public:
  // `calls(stream)` makes the calls and returns "" or what went wrong, which error() then returns.
  template <class Calls>
  explicit Replay(const Calls& calls) {
    cudaGraph_t graph = nullptr;
    GD_CUDA_OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    error_ = calls(static_cast<cudaStream_t>(stream_));
    GD_CUDA_OK(cudaStreamEndCapture(stream_, &graph));
    if (error_.empty()) GD_CUDA_OK(cudaGraphInstantiate(&replay_, graph, 0));
    GD_CUDA_OK(cudaGraphDestroy(graph));
  }
  ~Replay() {
    if (replay_) cudaGraphExecDestroy(replay_);
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  const std::string& error() const { return error_; }
  void launch() { GD_CUDA_OK(cudaGraphLaunch(replay_, stream_)); }

 private:
  CudaStream stream_;
  cudaGraphExec_t replay_ = nullptr;
  std::string error_;
};

// The call of the first case is captured, and replayed with the contents of the first, the second and the first.
template <class Args>
void check_replay(const std::string& first_spec, const std::string& second_spec) {
  using Op = Operation<Args>;
  Judge first(parse_case(first_spec)), second(parse_case(second_spec));
  DeviceCall<Args> device(with_kernels(Op::args(first.problem())));
  Replay replay([&](cudaStream_t stream) { return device.run(stream); });
  ASSERT_EQ(replay.error(), "");
  for (Judge* judge : {&first, &second, &first}) {
    const Judgement judgement = Op::judge(*judge, GD_ISA_AUTO, [&](const Args& host) {
      device.upload(host);
      replay.launch();
      return device.download(host);
    });
    expect_ok(judgement, judge->problem().spec, Op::kName);
  }
}

template <class Args>
void check_on_a_stream(const std::string& spec) {
  using Op = Operation<Args>;
  Judge judge(parse_case(spec));
  const CudaStream stream;
  const Judgement judgement = Op::judge(judge, GD_ISA_AUTO, [&](const Args& host) {
    DeviceCall<Args> device(with_kernels(host));
    if (std::string error = device.run(stream); !error.empty()) return error;
    return device.download(host);
  });
  expect_ok(judgement, judge.problem().spec, Op::kName);
}

// A backward that uses what a forward saved.
inline std::string from_saved(gd_forward_args forward, gd_backward_args host,
                              gd_context_parallel forward_cuts = GD_CP_AUTO,
                              gd_context_parallel backward_cuts = GD_CP_AUTO) {
  forward.final_state = forward.final_state_indices = forward.checkpoints = forward.checkpoint_indices = {};
  forward.checkpoint_every = 0;
  forward = with_kernels(forward);
  gd_forward_args query = forward;
  query.exec = {};
  query.exec.device = GD_CUDA;
  query.exec.kernels = kForcedKernels;
  size_t bytes = 0;
  if (gd_forward_saved_size(&query, &bytes) != GD_OK) return gd_last_error();
  if (gd_forward_saved_call(&query, &host.saved_call) != GD_OK) return gd_last_error();
  const DeviceMemory saved(bytes, 64);
  forward.saved = saved.data();
  forward.saved_bytes = bytes;
  forward.context_parallel = forward_cuts;
  DeviceForward training(forward);
  if (std::string error = training.run(); !error.empty()) return error;
  host.saved = saved.data();
  host.saved_bytes = bytes;
  host.context_parallel = backward_cuts;
  DeviceBackward device(with_kernels(host));
  if (std::string error = device.run(); !error.empty()) return error;
  std::string error = device.download(host);
  return saved.guards_intact() ? error : "wrote outside of the saved memory";
}

}  // namespace gatedelta::testing
