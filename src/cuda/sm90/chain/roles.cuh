// Body of every chain kernel: sets up shared memory and starts each warpgroup's role.
#pragma once

#include "cuda/sm90/chain/boundary.cuh"
#include "cuda/sm90/chain/keys.cuh"
#include "cuda/sm90/chain/loads.cuh"
#include "cuda/sm90/chain/math.cuh"
#include "cuda/sm90/chain/scores.cuh"
#include "cuda/sm90/chain/state_io.cuh"
#include "cuda/sm90/chain/work.cuh"

namespace gatedelta::cuda::sm90 {

// `AnyChain` is Chain or a pass derived from it. Its run_math(math_wg) is the only role in which the passes differ.
template <class AnyChain, class... More>
GD_DEVICE void run_roles(const CallParams& p, More... more) {
  extern __shared__ uint8_t dynamic_smem[];
  using Registers = ChainRegisters;
  uint32_t smem = tile_aligned(shared_address(dynamic_smem));
  asm volatile("" : "+r"(smem));  // NOTE(ptxas): keeps the address in a register instead of recomputing it at each use
  const AnyChain chain(p, __shfl_sync(~0u, smem, 0), more...);
  // R is lower triangular: its blocks above the diagonal are zeroed here and never written again.
  for (int i = threadIdx.x; i < kOperandStages * kTileBytes / 16; i += kChainThreads)
    store_shared_words(chain.r_tile(0) + i * 16, make_uint4(0, 0, 0, 0));
  if (threadIdx.x == 0) chain.init_barriers();
  fence_async_shared();
  __syncthreads();
  chain.begin();
  const auto warpgroup = static_cast<ChainWarpgroup>(__shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0));
  if (warpgroup == ChainWarpgroup::kKeys) {
    shrink_registers<Registers::kKeys>();
    chain.run_keys();
  } else if (warpgroup == ChainWarpgroup::kScores) {
    shrink_registers<Registers::kScores>();
    chain.run_scores();
  } else {
    grow_registers<Registers::kMath>();
    chain.run_math(static_cast<int>(warpgroup) - static_cast<int>(ChainWarpgroup::kMath0));
  }
  chain.end();
}

}  // namespace gatedelta::cuda::sm90
