// A call whose tensors live on the host, as the generator makes them, and their copies on a CUDA device. Everything
// is about the thread's current device, and failures of CUDA are thrown.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "testing/calls.hpp"
#include "testing/number.hpp"

namespace gatedelta::testing {

inline void cuda_ok(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}
#define GD_CUDA_OK(call) ::gatedelta::testing::cuda_ok(call, #call)

class CudaStream {
 public:
  CudaStream() { GD_CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Device memory between two guard zones, all of it NaN at first.
class DeviceMemory {
 public:
  static constexpr unsigned char kPoison = 0xff;

  DeviceMemory(size_t bytes, size_t misalign) : bytes_(bytes), begin_(kGuard + misalign) {
    GD_CUDA_OK(cudaMalloc(&base_, whole()));
    GD_CUDA_OK(cudaMemset(base_, kPoison, whole()));
  }
  ~DeviceMemory() { cudaFree(base_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  char* data() const { return static_cast<char*>(base_) + begin_; }
  size_t size() const { return bytes_; }
  void poison() { GD_CUDA_OK(cudaMemset(data(), kPoison, bytes_)); }
  void upload(const void* from) { GD_CUDA_OK(cudaMemcpy(data(), from, bytes_, cudaMemcpyHostToDevice)); }
  void download(void* to) const { GD_CUDA_OK(cudaMemcpy(to, data(), bytes_, cudaMemcpyDeviceToHost)); }
  bool guards_intact() const {
    std::vector<unsigned char> bytes(whole());
    GD_CUDA_OK(cudaMemcpy(bytes.data(), base_, bytes.size(), cudaMemcpyDeviceToHost));
    const auto poisoned = [](unsigned char byte) { return byte == kPoison; };
    const auto payload = bytes.begin() + static_cast<std::ptrdiff_t>(begin_);
    return std::all_of(bytes.begin(), payload, poisoned) &&
           std::all_of(payload + static_cast<std::ptrdiff_t>(bytes_), bytes.end(), poisoned);
  }

 private:
  static constexpr size_t kGuard = 4096;
  size_t whole() const { return begin_ + bytes_ + kGuard; }

  void* base_ = nullptr;
  size_t bytes_, begin_;
};

template <class Args>
class DeviceCall {
  using Call = CallOf<Args>;
  static size_t bytes_of(const gd_tensor& t) {  // from the first to the last element, with the gaps between
    int64_t last = 0;
    for (int d = 0; d < t.rank; ++d) {
      if (t.shape[d] == 0) return 0;
      last += (t.shape[d] - 1) * t.stride[d];
    }
    return static_cast<size_t>((last + 1) * element_bytes(t.dtype));
  }

 public:
  // Memory for everything, filled; the workspace is of exactly the size asked for.
  explicit DeviceCall(const Args& host) : args_(host) {
    const auto from = Call::tensors(host);
    const auto to = Call::tensors(args_);
    for (size_t i = 0; i < from.size(); ++i) {
      // One tensor given twice (states in place) is one tensor here too.
      const auto same = [&](const gd_tensor* t) { return t->data && t->data == from[i]->data; };
      const size_t first = static_cast<size_t>(std::find_if(from.begin(), from.end(), same) - from.begin());
      if (!from[i]->data) {
        memory_.push_back(nullptr);
      } else if (first < i) {
        memory_.push_back(memory_[first]);
      } else {
        // Rows must be aligned, everything else lies as the generator has put it.
        const bool rows = i < Call::kRowTensors;
        const size_t misalign = rows ? 0 : reinterpret_cast<uintptr_t>(from[i]->data) % 64;
        memory_.push_back(std::make_shared<DeviceMemory>(bytes_of(*from[i]), misalign));
      }
      if (memory_[i]) to[i]->data = memory_[i]->data();
    }
    args_.exec = {};
    args_.exec.device = GD_CUDA;
    args_.exec.kernels = host.exec.kernels;
    args_.exec.tuning = host.exec.tuning;
    GD_CUDA_OK(cudaGetDevice(&args_.exec.device_index));
    if (Call::workspace(&args_, &args_.exec.workspace_bytes) != GD_OK)
      throw std::runtime_error(std::string(Call::kName) + "_workspace: " + gd_last_error());
    workspace_ = std::make_unique<DeviceMemory>(args_.exec.workspace_bytes, 64);  // its least alignment
    args_.exec.workspace = workspace_->data();
    upload(host);
  }

  Args& args() { return args_; }

  // Contents of a call of the same shapes; the workspace becomes NaN.
  void upload(const Args& host) {
    const auto from = Call::tensors(host);
    for (size_t i = 0; i < from.size(); ++i)
      if (memory_[i]) memory_[i]->upload(from[i]->data);
    workspace_->poison();
    GD_CUDA_OK(cudaDeviceSynchronize());
  }

  std::string run(cudaStream_t stream = nullptr) {
    args_.exec.stream = stream;
    const gd_status status = Call::run(&args_);
    return status == GD_OK ? "" : std::string(Call::kName) + ": " + gd_status_name(status) + ": " + gd_last_error();
  }

  // All tensors, also inputs and gaps: what was written that must not be shows on the host.
  std::string download(const Args& host) const {
    GD_CUDA_OK(cudaDeviceSynchronize());
    const auto to = Call::tensors(host);
    bool intact = workspace_->guards_intact();
    for (size_t i = 0; i < to.size(); ++i) {
      if (!memory_[i]) continue;
      memory_[i]->download(to[i]->data);
      intact = intact && memory_[i]->guards_intact();
    }
    return intact ? "" : std::string(Call::kName) + " wrote outside of a tensor or of its workspace";
  }

 private:
  Args args_;
  std::vector<std::shared_ptr<DeviceMemory>> memory_;  // of each tensor
  std::unique_ptr<DeviceMemory> workspace_;
};
using DeviceForward = DeviceCall<gd_forward_args>;
using DeviceBackward = DeviceCall<gd_backward_args>;
using DeviceRecurrent = DeviceCall<gd_recurrent_args>;

}  // namespace gatedelta::testing
