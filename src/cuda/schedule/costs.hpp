// Measured costs of the pieces of work.
#pragma once

#include "cuda/host_device.hpp"

namespace gatedelta::cuda {

// About what takes how long on a block, in units of 1/1.7 ns: fitted to what many cuts of many shapes took on an H200
// (docs/kernels/context_parallel.md).
struct Costs {
  static constexpr float kPerMicrosecond = 1700;
  static constexpr float kChunk = 3090, kHalfChunk = 2440;
  static constexpr float kWarmup = 2100, kHalfWarmup = 1250;  // without outputs
  static constexpr float kTransition = 1850;                  // of half of the columns
  static constexpr float kMerge = 4400;
  static constexpr float kItem = 15400, kTransitionItem = 7500;  // until the first chunk is there, and for the state
  static constexpr float kCut = 14000;  // where anything is cut: its list takes longer, and pieces wait for each other
};

}  // namespace gatedelta::cuda
