// Instances of the kernels: sizes, threads, shared memory, and which instance of a chain a call gets.
#pragma once

#include "core/problem.hpp"
#include "cuda/device/instances.hpp"
#include "cuda/portable/cost.hpp"
#include "cuda/portable/tiles.hpp"

namespace gatedelta::cuda::portable {

constexpr int kRanksPerCta = 128;  // sequences that a helper CTA of prepare ranks by length, one a thread

template <class ElemOf, int kKeysOf>
struct PrepareConfig {
  using Elem = ElemOf;
  static constexpr int kKeys = kKeysOf;
  static constexpr int kThreads = 128;
  static constexpr int kCtasPerSm = kKeys == 256 ? 2 : 5;
  static constexpr int kTiles = kKeys / kTileColumns;
  static constexpr int kTileBytes = kChunkTokens * kTileRowBytes;
  static constexpr int kHeadsAtOnce = 16;  // heads whose gates are in shared memory

  struct Smem {
    static constexpr int kK = 0;
    static constexpr int kQ = kK + kTiles * kTileBytes;
    // In the memory of K and Q after the products:
    static constexpr int kScores = 0;  // [step][6][lane] of 16 bytes: Q K^T on and below the diagonal, fp32
    static constexpr int kScoreBytes = 6 * 32 * kPacketBytes;
    static constexpr int kOperands = kScores + kStepsPerChunk * kScoreBytes;  // [step][lane] of 2 packets: K K^T, fp16
    static constexpr int kOperandBytes = 2 * 32 * kPacketBytes;
    // [step][4]: the 28 numbers below the diagonal of each 8 x 8 block on the diagonal of K K^T, fp32
    static constexpr int kTriangles = kOperands + kStepsPerChunk * kOperandBytes;
    static constexpr int kBelowBytes = 128;
    static constexpr int kInverses = kTriangles + kStepsPerChunk * 4 * kBelowBytes;  // [warp]: D, then D beta; columns
    static constexpr int kInverseBytes = 32 * kPacketBytes;
    static constexpr int kLogs = kInverses + kThreads / 32 * 2 * kInverseBytes;  // [warp][kStep]
    static constexpr int kTilesEnd = kQ + kTiles * kTileBytes;
    static_assert(kLogs + kThreads / 32 * Prepared::kVectorBytes <= kTilesEnd);
    static constexpr int kNorms = kTilesEnd;                              // r^k, then r^q
    static constexpr int kErrorFeedback = kNorms + 2 * kChunkTokens * 4;  // [step] as Prepared::kErrorFeedback
    static constexpr int kLengths = kErrorFeedback + kPacketBytes;        // [64]: |k|^2, of normalised keys with l2norm
    static constexpr int kGates = kLengths + kChunkTokens * 4;  // [heads][64]: gates in units of log 2; then betas
    GD_HOST_DEVICE static constexpr int heads(int group) { return group < kHeadsAtOnce ? group : kHeadsAtOnce; }
    GD_HOST_DEVICE static constexpr int allocated(int group) { return kGates + 2 * heads(group) * kChunkTokens * 4; }
  };
};

// A pass over the steps of a sequence: its direction, and whether it reads Q.
struct ForwardPass {
  static constexpr int kDirection = 1;
  static constexpr bool kReadsQueries = true;
};
struct StatesPass {
  static constexpr int kDirection = 1;
  static constexpr bool kReadsQueries = false;
};
struct GradientPass {
  static constexpr int kDirection = -1;
  static constexpr bool kReadsQueries = true;
};

// kWarpColumns: value columns of a warp, 16 or 32. A CTA has kWarps of them, of one head.
template <class PassOf, class ElemOf, int kKeysOf, int kWarpColumnsOf, int kWarpsOf, int kCtasPerSmOf>
struct ChainConfig {
  using Pass = PassOf;
  using Elem = ElemOf;
  static constexpr int kKeys = kKeysOf, kWarpColumns = kWarpColumnsOf, kWarps = kWarpsOf, kCtasPerSm = kCtasPerSmOf;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = kWarpColumns * kWarps;
  static constexpr int kTiles = kKeys / kTileColumns;
  static constexpr int kTileBytes = kStep * kTileRowBytes;
  static constexpr int kStages = 2;
  // Whether the instance runs transitions, too (transition_kind). With 32 columns a warp the states kernel would spill.
  static constexpr bool kHasTransitions = kWarpColumns == 16;

  struct Smem {
    static constexpr int kK = 0;
    static constexpr int kQ = kK + kStages * kTiles * kTileBytes;
    static constexpr int kQueryBytes = Pass::kReadsQueries ? kStages * kTiles * kTileBytes : 0;
    static constexpr int kValues = kQ + kQueryBytes;  // [warp][token][kWarpColumns], one stage
    static constexpr int kValueBytes = kStep * kWarpColumns * 2;
    static constexpr int kPrepared = kValues + kWarps * kValueBytes;
    static constexpr int kBytes = kPrepared + kStages * Prepared::kBytes;
    static_assert(kBytes <= 99 << 10);  // what a CTA can have on every device from 8.0 on
  };
};
template <class Pass, class Elem>
using Chain64 = ChainConfig<Pass, Elem, 64, 16, 4, 4>;
template <class Pass, class Elem>
using Chain128 = ChainConfig<Pass, Elem, 128, 32, 4, 2>;
template <class Pass, class Elem>
using Chain128Half = ChainConfig<Pass, Elem, 128, 16, 4, 3>;
template <class Pass, class Elem>
using Chain128Quarter = ChainConfig<Pass, Elem, 128, 16, 2, 6>;
template <class Pass, class Elem>
using Chain256 = ChainConfig<Pass, Elem, 256, 16, 8, 1>;

// The number of value columns of a CTA changes no bit: no number goes from one warp to another. Few heads take few
// columns, so that more SMs work.
enum class ChainKind { k64, k128, k128Half, k128Quarter, k256 };
inline ChainKind chain_kind(const Layer& in, int sm_count) {
  const int keys = compiled_keys(in.key_dim);
  if (keys != 128) return keys == 64 ? ChainKind::k64 : ChainKind::k256;
  const int64_t ctas = in.sequences.count * in.value_heads * ((in.value_dim + 127) / 128);  // of whole heads
  if (2 * ctas > sm_count && in.value_dim > 64) return ChainKind::k128;
  return 4 * ctas > sm_count ? ChainKind::k128Half : ChainKind::k128Quarter;
}
// The instance for a call's transitions. Most heads have none, so more CTAs of fewer columns are better anyway.
inline ChainKind transition_kind(ChainKind kind) { return kind == ChainKind::k128 ? ChainKind::k128Half : kind; }
// Calls run(config) with the config of a kind.
template <class Pass, class Elem, class Run>
auto with_chain(ChainKind kind, const Run& run) {
  switch (kind) {
    case ChainKind::k64: return run(Chain64<Pass, Elem>{});
    case ChainKind::k128: return run(Chain128<Pass, Elem>{});
    case ChainKind::k128Half: return run(Chain128Half<Pass, Elem>{});
    case ChainKind::k128Quarter: return run(Chain128Quarter<Pass, Elem>{});
    case ChainKind::k256: break;
  }
  return run(Chain256<Pass, Elem>{});
}

constexpr int kSegmentThreads = 128;
constexpr int kMergeColumns = 8;  // value columns of a CTA of the merge
template <int kKeysOf>
struct MergeConfig {
  static constexpr int kKeys = kKeysOf, kColumns = kMergeColumns;
  static constexpr int kDepth = kKeys == 128 ? 32 : 16, kStages = kKeys == 256 ? 3 : 4;  // rows of M^T in a stage
  static_assert(kStages - 1 <= kKeys / kDepth);  // loads ahead end in the next M at the latest
  static constexpr int kSlices = 4;              // of a stage's rows, each multiplied by its warps
  static constexpr int kThreads = kSlices * (kKeys / 4) * (kColumns / 4);  // a thread sums 4 x 4 numbers

  struct Smem {
    static constexpr int kState = 0;
    static constexpr int kTransitions = kState + kKeys * kColumns * 4;
    static constexpr int kStageBytes = kDepth * kKeys * 4;
    static constexpr int kSums = kTransitions + kStages * kStageBytes;  // [slice][column][kKeys]
    static constexpr int kColumnBytes = kKeys * 4 + 16;                 // no two columns of a row in the same banks
    static constexpr int kSumBytes = kColumns * kColumnBytes;
    static constexpr int kBytes = kSums + kSlices * kSumBytes;
    static_assert(kBytes <= 99 << 10);
  };
};

// CTAs of a chain kernel for the columns of a head, rounded up to a power of two.
inline int log2_ctas_per_head(int columns, int cta_columns) {
  int log = 0;
  while ((cta_columns << log) < columns) ++log;
  return log;
}
// Value columns of a CTA, and its shared memory.
inline int chain_columns(ChainKind kind) {
  return with_chain<ForwardPass, Bf16>(kind, [](auto config) { return decltype(config)::kColumns; });
}
inline int chain_bytes(ChainKind kind) {
  return with_chain<ForwardPass, Bf16>(kind, [](auto config) { return decltype(config)::Smem::kBytes; });
}

// The limits of a device that a choice of CTAs depends on.
struct DeviceLimits {
  int sm_count;
  int shared_bytes;                       // of an SM
  static constexpr int kReserved = 1024;  // of each CTA, for the system
  int ctas_per_sm(int bytes) const { return shared_bytes / (bytes + kReserved); }
};
// CTAs per SM where `ctas` are spread evenly.
inline int even_ctas_per_sm(float ctas, int sm_count) {
  const float each = ceil_of(ctas / static_cast<float>(sm_count));
  return each > 1 ? static_cast<int>(each) : 1;
}
// Shared memory of a CTA with which exactly ctas_per_sm of them fit on an SM.
inline int shared_bytes_for(int ctas_per_sm, int shared_bytes) {
  return (shared_bytes / (ctas_per_sm + 1) - DeviceLimits::kReserved) / 128 * 128 + 128;
}

}  // namespace gatedelta::cuda::portable
