// How much of an old state is left after all chunks of a sequence (schedule/fade.hpp), by a warp.
#pragma once

#include "cuda/device/fade.hpp"
#include "cuda/device/warp.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/ptx.cuh"

namespace gatedelta::cuda::sm90 {

GD_DEVICE const ChunkDecay* decays_of(const CallParams& p, int n, int head) {
  return p.decays + head * p.sequences.workspace_chunks() + p.sequences.first_chunk_index(n);
}

GD_DEVICE Fade find_fade(const CallParams& p, int n, int head, int chunks, int lane, bool stop) {
  const ChunkDecay* const decays = decays_of(p, n, head);
  float left = 0, written = 0;
  bool weighs = true, is_gone = false;
  int window = 0;
#pragma unroll 1
  for (int done = 0; done < chunks; done += 32) {
    const int chunk = chunks - 1 - done - lane;
    const bool counts = chunk >= 0;
    const ChunkDecay decay = counts ? decays[chunk] : ChunkDecay{0, 0};
    const float sum = left + warp_inclusive_sum(decay.log2_left, lane);
    const float before = __shfl_up_sync(~0u, sum, 1);
    const unsigned unknown = __ballot_sync(~0u, !(decay.written >= 0));
    const bool mine_weighs = weighs && (unknown & (2u << lane) - 1) == 0;
    const float term = mine_weighs ? decay.written * exp2f(lane == 0 ? left : before) : 0.0f;
    const float all_written = written + warp_inclusive_sum(term, lane);
    const unsigned enough =
        __ballot_sync(~0u, counts && exp2f(sum) < kNegligible * (all_written < 1 ? all_written : 1.0f));
    if (window == 0 && enough != 0) window = done + __ffs(static_cast<int>(enough));
    is_gone = is_gone || __ballot_sync(~0u, counts && sum < kNegligibleGradientLog2) != 0;
    left = __shfl_sync(~0u, sum, 31);
    written = __shfl_sync(~0u, all_written, 31);
    weighs = weighs && unknown == 0;
    if (stop && is_gone && window > 0) break;
  }
  return {is_gone ? window : 0, left};
}

GD_DEVICE int gradient_window(const CallParams& p, int n, int head, int chunks, int lane) {
  const ChunkDecay* const decays = decays_of(p, n, head);
  float left = 0;
#pragma unroll 1
  for (int done = 0; done < chunks; done += 32) {
    const int chunk = done + lane;
    const float sum = left + warp_inclusive_sum(chunk < chunks ? decays[chunk].log2_left : 0.0f, lane);
    const unsigned enough = __ballot_sync(~0u, chunk < chunks && sum < kNegligibleGradientLog2);
    if (enough != 0) return done + __ffs(static_cast<int>(enough));
    left = __shfl_sync(~0u, sum, 31);
  }
  return chunks;
}

}  // namespace gatedelta::cuda::sm90
