// Rings of slots in shared memory, each with a barrier for "full" and one for "empty".
#pragma once

#include "cuda/forward/layout.hpp"
#include "cuda/ptx.cuh"

namespace gatedelta::cuda {

// kAt is part of the type so that it ends up as an offset in the instructions.
template <int kSlots, int kAt>
struct Barriers {
  static constexpr int kEnd = kAt + 2 * 8 * kSlots;
  uint32_t smem;
  GD_DEVICE uint32_t full(int slot) const { return smem + 8 * slot + kAt; }
  GD_DEVICE uint32_t empty(int slot) const { return smem + 8 * slot + (kAt + 8 * kSlots); }
  GD_DEVICE void init(int producers, int consumers) const {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(full(i), producers);
      barrier_init(empty(i), consumers);
    }
  }
  GD_DEVICE void wait_full(const Ring<kSlots>& ring) const { barrier_wait(full(ring.slot), ring.parity); }
  GD_DEVICE void wait_empty(const Ring<kSlots>& ring) const { barrier_wait(empty(ring.slot), ring.parity ^ 1); }
};

}  // namespace gatedelta::cuda
