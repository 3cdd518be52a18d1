// Devices and messages.
#pragma once

#include <cuda_runtime.h>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "cuda/backend.hpp"

namespace gatedelta::cuda {

// The compute capabilities that some kernels have code for, and the words of the refusal on other devices.
struct Capabilities {
  int lowest_major, highest_major;
  const char* supported;
};
constexpr Capabilities kAllDevices = {8, 1 << 15, "the library supports 8.0 and later"};

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
// Tells whether a launch went well, and keeps the outcome of one that did not.
struct Launched {
  Outcome outcome;

  bool operator()(cudaError_t error, const char* what) {
    if (error) outcome = failure(error, what);
    return !error;
  }
};

struct DeviceFacts {
  int16_t major, minor;
  int16_t multiprocessors;  // 0 = not known yet
  int16_t shared_kib;       // shared memory of a multiprocessor
};
// Code of 9.0 waits for the previous kernel (griddepcontrol.wait). Later devices run the code of 8.0, which does not.
inline Pdl pdl_on(const DeviceFacts& facts) { return pdl_if(facts.major == 9); }

// Cached for the first 64 devices.
inline Outcome find_facts(int device, DeviceFacts& facts) {
  static std::atomic<DeviceFacts> found[64];
  if (device < 64) facts = found[device].load(std::memory_order_relaxed);
  if (facts.multiprocessors > 0) return {};
  int major = 0, minor = 0, multiprocessors = 0, shared = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (!error) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (!error) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error == cudaErrorInvalidDevice)
    return failure(GD_INVALID_ARGUMENT, "device_index is %d, and there is no such CUDA device", device);
  if (error) return failure(GD_UNSUPPORTED, "no CUDA device can be used: %s", cudaGetErrorString(error));
  facts = {static_cast<int16_t>(major), static_cast<int16_t>(minor), static_cast<int16_t>(multiprocessors),
           static_cast<int16_t>(shared / 1024)};
  if (device < 64) found[device].store(facts, std::memory_order_relaxed);
  return {};
}

inline Outcome check_device(int device, const Capabilities& needed, DeviceFacts& facts) {
  if (Outcome outcome = find_facts(device, facts); outcome.status != GD_OK) return outcome;
  if (facts.major < needed.lowest_major || facts.major > needed.highest_major)
    return failure(GD_UNSUPPORTED, "device %d has compute capability %d.%d, %s", device, facts.major, facts.minor,
                   needed.supported);
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

// Calls f with the facts of a supported device, while that is the current one.
template <class F>
Outcome with_device(int device, const Capabilities& needed, const F& f) {
  DeviceFacts facts{};
  if (Outcome outcome = check_device(device, needed, facts); outcome.status != GD_OK) return outcome;
  const RelaxedCapture relaxed;
  const CurrentDevice current(device);
  if (current.error()) return failure(current.error(), "select the device");
  return f(facts);
}

}  // namespace gatedelta::cuda
