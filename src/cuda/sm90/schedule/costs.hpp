// What chunks, work items, merges and cuts cost on one CTA.
#pragma once

#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda::sm90 {

// Cycles at 1.7 GHz, fitted to the times of many cuts of many shapes on an H200 (docs/kernels/context_parallel.md).
struct Costs {
  static constexpr float kPerMicrosecond = 1700;
  static constexpr float kChunk = 3090, kHalfChunk = 2440;
  static constexpr float kWarmup = 2100, kHalfWarmup = 1250;  // a warm-up chunk
  static constexpr float kTransition = 1850;                  // a chunk of the transition, half of the columns
  static constexpr float kMerge = 4400;
  static constexpr float kItem = 15400, kTransitionItem = 7500;  // until its first chunk is loaded, and for its state
  static constexpr float kCut = 14000;  // of any cut: a longer list, and pieces that wait for each other
};

}  // namespace gatedelta::cuda::sm90
