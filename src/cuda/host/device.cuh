// Devices and messages.
#pragma once

#include <cuda_runtime.h>
#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "cuda/backend.hpp"

namespace gatedelta::cuda {

constexpr int kSupportedMajor = 9;  // compute capability: the kernels are sm_90a code and nothing else
[[gnu::format(printf, 2, 3)]] inline Outcome failure(gd_status status, const char* format, ...) {
  Outcome outcome{status};
  va_list values;
  va_start(values, format);
  std::vsnprintf(outcome.message, sizeof outcome.message, format, values);
  va_end(values);
  cudaGetLastError();  // clear it: the next launch would report it again
  return outcome;
}
inline Outcome failure(cudaError_t error, const char* what) {
  return failure(GD_INTERNAL, "CUDA failed to %s: %s", what, cudaGetErrorString(error));
}

inline Outcome check_device(int device) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error == cudaErrorInvalidDevice)
    return failure(GD_INVALID_ARGUMENT, "device_index is %d, and there is no such CUDA device", device);
  if (error) return failure(GD_UNSUPPORTED, "no CUDA device can be used: %s", cudaGetErrorString(error));
  if (major != kSupportedMajor)
    return failure(GD_UNSUPPORTED, "device %d has compute capability %d.%d, the CUDA backend supports 9.0 (Hopper)",
                   device, major, minor);
  return {};
}

// Scope guard: makes a device the thread's current one.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ || before_ == device) return;
    error_ = cudaSetDevice(device);
    changed_ = !error_;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  cudaError_t error_;
  int before_ = 0;
  bool changed_ = false;
};

// A kernel's first use loads its module, which the stricter stream-capture modes reject.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Number of SMs of a supported device. Cached for the first 64 devices.
inline Outcome count_multiprocessors(int device, int& count) {
  static std::atomic<int> counted[64];
  if (device < 64) count = counted[device].load(std::memory_order_relaxed);
  if (count > 0) return {};
  if (Outcome outcome = check_device(device); outcome.status != GD_OK) return outcome;
  if (const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device))
    return failure(error, "count multiprocessors");
  if (device < 64) counted[device].store(count, std::memory_order_relaxed);
  return {};
}

// Calls f with the number of multiprocessors of a supported device, while that is the current one.
template <class F>
Outcome with_device(int device, const F& f) {
  int multiprocessors = 0;
  if (Outcome outcome = count_multiprocessors(device, multiprocessors); outcome.status != GD_OK) return outcome;
  const RelaxedCapture relaxed;
  const CurrentDevice current(device);
  if (current.error()) return failure(current.error(), "select the device");
  return f(multiprocessors);
}

}  // namespace gatedelta::cuda
