// mbarriers of a pipeline: one full and one empty barrier per stage.
#pragma once

#include "cuda/sm90/pipeline_state.hpp"
#include "cuda/sm90/ptx.cuh"

namespace gatedelta::cuda::sm90 {

// kAt is part of the type so that it becomes an immediate offset.
template <int kStages, int kAt>
struct Pipeline {
  static constexpr int kEnd = kAt + 2 * 8 * kStages;
  uint32_t smem;
  GD_DEVICE uint32_t full(int stage) const { return smem + 8 * stage + kAt; }
  GD_DEVICE uint32_t empty(int stage) const { return smem + 8 * stage + (kAt + 8 * kStages); }
  GD_DEVICE void init(int producers, int consumers) const {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full(i), producers);
      barrier_init(empty(i), consumers);
    }
  }
  GD_DEVICE void wait_full(const PipelineState<kStages>& at) const { barrier_wait(full(at.stage), at.phase); }
  GD_DEVICE void wait_empty(const PipelineState<kStages>& at) const { barrier_wait(empty(at.stage), at.phase ^ 1); }
};

}  // namespace gatedelta::cuda::sm90
