#include <cstring>
#include <vector>

#include "lane.hpp"
#include "testing/device.hpp"

namespace gatedelta::soak {

namespace {

using testing::CudaStream;
using testing::DeviceMemory;

class PinnedMemory {
 public:
  explicit PinnedMemory(size_t bytes) { GD_CUDA_OK(cudaMallocHost(&data_, bytes)); }
  ~PinnedMemory() { cudaFreeHost(data_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

// The block of a call on the device, its steps there, and a graph of them.
class GpuCall final : public OnDevice {
 public:
  explicit GpuCall(Call& call) : bytes_(call.block().size()), live_(bytes_, 0), first_(bytes_, 0) {
    first_.upload(call.first().data());
    const char* const host = call.block().data();
    for (const auto& step : call.steps) {
      steps_.push_back(step->clone());
      Step& copy = *steps_.back();
      copy.move([&](void* data) { return live_.data() + (static_cast<const char*>(data) - host); });
      gd_exec& exec = copy.exec();
      if (copy.workspace(&exec.workspace_bytes) != GD_OK)
        throw std::runtime_error(call.text + ": " + copy.name() + "_workspace: " + gd_last_error());
      workspaces_.push_back(std::make_unique<DeviceMemory>(exec.workspace_bytes, 64));  // its least alignment
      exec.workspace = workspaces_.back()->data();
    }
    GD_CUDA_OK(cudaDeviceSynchronize());
  }
  ~GpuCall() override {
    if (graph_) cudaGraphExecDestroy(graph_);
  }
  GpuCall(const GpuCall&) = delete;
  GpuCall& operator=(const GpuCall&) = delete;

  // While nothing else uses the device: no thread may synchronise it during a capture.
  void capture(const Call& call, cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    GD_CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    std::string error;
    for (const auto& step : steps_) {
      step->exec().stream = stream;
      if (error.empty() && step->run() != GD_OK) error = std::string(step->name()) + ": " + gd_last_error();
    }
    GD_CUDA_OK(cudaStreamEndCapture(stream, &graph));
    if (!error.empty()) throw std::runtime_error(call.text + ": " + error);
    GD_CUDA_OK(cudaGraphInstantiate(&graph_, graph, 0));
    GD_CUDA_OK(cudaGraphDestroy(graph));
  }

  size_t size() const { return bytes_; }
  const std::vector<std::unique_ptr<Step>>& steps() const { return steps_; }
  void reset(cudaStream_t stream) {
    GD_CUDA_OK(cudaMemcpyAsync(live_.data(), first_.data(), bytes_, cudaMemcpyDeviceToDevice, stream));
    for (const auto& workspace : workspaces_)
      GD_CUDA_OK(cudaMemsetAsync(workspace->data(), DeviceMemory::kPoison, workspace->size(), stream));
  }
  void replay(cudaStream_t stream) { GD_CUDA_OK(cudaGraphLaunch(graph_, stream)); }
  void fetch(char* to, cudaStream_t stream) {
    GD_CUDA_OK(cudaMemcpyAsync(to, live_.data(), bytes_, cudaMemcpyDeviceToHost, stream));
  }
  bool guards_intact() const {
    bool intact = live_.guards_intact();
    for (const auto& workspace : workspaces_) intact = intact && workspace->guards_intact();
    return intact;
  }

 private:
  size_t bytes_;
  DeviceMemory live_, first_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<std::unique_ptr<DeviceMemory>> workspaces_;
  cudaGraphExec_t graph_ = nullptr;
};

class GpuLane final : public Lane {
 public:
  GpuLane(Board& board, Place& place, bool plants, size_t most_bytes)
      : Lane(board, place, plants), results_(most_bytes) {}

  std::string run_alone(Call& call) override {
    const Busy busy(place_, call.text);
    auto device = std::make_unique<GpuCall>(call);
    device->reset(stream_);
    for (const auto& step : device->steps()) {
      step->exec().stream = stream_;
      if (std::string error = run_step(*step); !error.empty()) return error;
    }
    device->fetch(results_.data(), stream_);
    GD_CUDA_OK(cudaStreamSynchronize(stream_));
    call.keep({results_.data(), device->size()});
    const bool intact = device->guards_intact();
    device->capture(call, stream_);
    call.on_device = std::move(device);
    return intact ? "" : "wrote outside of its memory";
  }

  void run(std::span<Call* const> calls, Dice& dice) override {
    std::string all;
    for (const Call* call : calls) all += (all.empty() ? "" : "\n  and ") + call->text;
    const Busy busy(place_, all);
    std::vector<std::string> errors;
    size_t at = 0;
    for (Call* call : calls) {
      errors.push_back(start(*call, dice));
      device_of(*call).fetch(results_.data() + at, stream_);
      at += device_of(*call).size();
    }
    place_.in_call = true;  // of the device
    GD_CUDA_OK(cudaStreamSynchronize(stream_));
    place_.in_call = false;
    at = 0;
    for (size_t i = 0; i < calls.size(); ++i) {
      Call& call = *calls[i];
      const size_t size = device_of(call).size();
      if (errors[i].empty()) errors[i] = check(call, {results_.data() + at, size}, dice);
      if (errors[i].empty() && dice.one_in(16) && !device_of(call).guards_intact())
        errors[i] = "wrote outside of its memory";
      note(call, errors[i]);
      at += size;
    }
  }

 private:
  static GpuCall& device_of(Call& call) { return static_cast<GpuCall&>(*call.on_device); }

  // Puts the call on the stream.
  std::string start(Call& call, Dice& dice) {
    GpuCall& device = device_of(call);
    device.reset(stream_);
    const bool replays = dice.one_in(3);
    if (replays) {
      device.replay(stream_);
      ++board_.replays;
    }
    for (const auto& step : device.steps()) {
      step->exec().stream = stream_;
      std::string error = replays ? "" : run_step(*step);
      if (error.empty()) error = refuse_some(call, *step, dice);
      if (!error.empty()) return error;
    }
    return "";
  }

  CudaStream stream_;
  PinnedMemory results_;
};

}  // namespace

std::unique_ptr<Lane> make_gpu_lane(Board& board, Place& place, bool plants, size_t most_bytes) {
  return std::make_unique<GpuLane>(board, place, plants, most_bytes);
}

}  // namespace gatedelta::soak
