// A lane's share of a key or query in shared memory: pieces of four numbers, with the pieces of eight lanes side by
// side.
#pragma once

#include "cuda/decode/config.hpp"
#include "cuda/device/ptx.cuh"

namespace gatedelta::cuda {

template <int kPerLane>
GD_DEVICE void read_share(float (&x)[kPerLane], const float4 (&from)[kPerLane / 4][kLanesPerColumn], int share) {
#pragma unroll
  for (int i = 0; i < kPerLane / 4; ++i) {
    const float4 piece = from[i][share];
    x[4 * i] = piece.x, x[4 * i + 1] = piece.y, x[4 * i + 2] = piece.z, x[4 * i + 3] = piece.w;
  }
}
template <int kPerLane>
GD_DEVICE void write_share(float4 (&to)[kPerLane / 4][kLanesPerColumn], const float (&x)[kPerLane], int share) {
#pragma unroll
  for (int i = 0; i < kPerLane / 4; ++i) to[i][share] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}

}  // namespace gatedelta::cuda
