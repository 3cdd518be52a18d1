// The chain kernels in numbers: roles, pipelines, shared-memory plan, registers and named barriers. One CTA per SM;
// forward, states and gradient chain share all of it.
#pragma once

#include "cuda/sm90/pipeline_state.hpp"
#include "cuda/sm90/prepare/config.hpp"
#include "cuda/sm90/schedule/work_item.hpp"
#include "cuda/sm90/tiles.hpp"

namespace gatedelta::cuda::sm90 {

// ---- roles ---------------------------------------------------------------------------------------------------------

enum class ChainWarpgroup {
  kKeys,    // builds tril(Q K^T) for scores, and X
  kScores,  // builds R; two of its warps also issue all loads
  kMath0,   // state and output, 64 value columns
  kMath1,   // the other 64
};
constexpr int kMathWarpgroups = 2;
constexpr int kWarpgroupThreads = 128;
constexpr int kChainThreads = kWarpgroupThreads * (2 + kMathWarpgroups);

// Warps of the scores warpgroup that also load.
enum LoadWarp { kLoadsKeysQueries, kLoadsValues };

// Registers per thread. The sum over the warpgroups must fit what the launch allocates, or setmaxnreg deadlocks.
struct ChainRegisters {
  static constexpr int kLaunch = 128, kKeys = 80, kScores = 80, kMath = 176;
  static_assert(kKeys + kScores + 2 * kMath <= 4 * kLaunch);
};

// ---- pipelines -----------------------------------------------------------------------------------------------------

enum Stages {
  kLoadStages = 3,     // K, Q, T and the chunk's vectors; in a merge, one tile of a boundary
  kValueStages = 3,    // V on the way in, O on the way out
  kScoreStages = 2,    // tril(Q K^T), from keys to scores
  kOperandStages = 2,  // X and R, from keys and scores to math
  kWorkStages = 8,     // entries of the work list
  kMergeStages = 2,    // merged states that are stored but not yet published
};

// The work pipeline's position as one counter: it is read once per item, and one register is cheaper than two.
struct WorkPipelineState {
  int count = 0;
  GD_HOST_DEVICE PipelineState<kWorkStages> at() const {
    return {count % kWorkStages, static_cast<uint32_t>(count / kWorkStages) & 1};
  }
  GD_HOST_DEVICE void advance() { ++count; }
};
static_assert((kWorkStages & (kWorkStages - 1)) == 0);

// ---- shared memory -------------------------------------------------------------------------------------------------

// Offsets, not a struct: as constants they end up in the instructions.
struct ChainSmem {
  static constexpr int kKeysQueries = 0;                                            // [stage][Q0 K0 Q1 K1]
  static constexpr int kValues = kKeysQueries + kLoadStages * 4 * kTileBytes;       // [stage][V0 V1], then O0, O1
  static constexpr int kX = kValues + kValueStages * kMathWarpgroups * kTileBytes;  // X^T [128][64]
  static constexpr int kR = kX + kOperandStages * 2 * kTileBytes;
  static constexpr int kPrepared = kR + kOperandStages * kTileBytes;                // T and the vectors
  static constexpr int kScores = kPrepared + kLoadStages * kBackwardPreparedBytes;  // tril(Q K^T), blocks by lane
  static constexpr int kWork = kScores + kScoreStages * kTriangleBytes;             // WorkItem [stage]
  static constexpr int kBarriers = kWork + kWorkStages * static_cast<int>(sizeof(WorkItem));
  static constexpr int kBytes =
      kBarriers + 2 * 8 * (kLoadStages + kValueStages + kScoreStages + kOperandStages + kWorkStages + kMergeStages);
  static constexpr int kAllocated = kBytes + kTileAlign;
};
static_assert(ChainSmem::kAllocated <= kMaxSharedBytes);

// ---- named barriers ------------------------------------------------------------------------------------------------

enum ChainBarrier {
  kOutputStaged = 1,                             // O of a chunk is in its stage: one per math warpgroup and stage
  kItemDone = kOutputStaged + 2 * kValueStages,  // the last step of an item: one per math warpgroup
};

}  // namespace gatedelta::cuda::sm90
