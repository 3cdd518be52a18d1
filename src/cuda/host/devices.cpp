// What the host asks of devices outside of a launch.
#include "cuda/host/device.cuh"
#include "cuda/kernels.hpp"

namespace gatedelta::cuda {

bool is_compiled() { return true; }

int usable_devices() {
  int count = 0, usable = 0;
  if (cudaGetDeviceCount(&count)) count = 0;
  for (int device = 0; device < count; ++device) {
    DeviceFacts facts{};
    usable += check_device(device, kAllDevices, facts).status == GD_OK;
  }
  cudaGetLastError();
  return usable;
}

Outcome find_capability(int device, Capability& found) {
  DeviceFacts facts{};
  const Outcome outcome = find_facts(device, facts);
  found = {facts.major, facts.minor};
  return outcome;
}

}  // namespace gatedelta::cuda
