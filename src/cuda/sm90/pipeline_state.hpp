// Positions in a pipeline of shared-memory stages; plain arithmetic that the tests share.
#pragma once

#include <cstdint>

#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda::sm90 {

// A stage of a pipeline and the mbarrier phase a consumer waits for there; a producer waits for the other phase.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  GD_HOST_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  GD_HOST_DEVICE int previous_stage() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

}  // namespace gatedelta::cuda::sm90
