// What a cut of sequences costs: plain arithmetic that the host and the segments kernel share. The host knows shapes
// (cut.hpp); the lengths of packed sequences are on the device (segments.cuh).
#pragma once

#include "cuda/host_device.hpp"

namespace gatedelta::cuda::portable {

// Microseconds, on an H200.
struct ChainCosts {
  float chunk;     // of the forward, with outputs, of a CTA that is alone on its multiprocessor
  float beside;    // more of it for every other CTA there
  float resident;  // CTAs of a multiprocessor
};
// A chain kernel of a call, against the forward's.
struct ChainWork {
  float chunk;      // with outputs
  float segment;    // with outputs in a segment, where a warp has 32 columns
  float silent;     // of a warm-up or a transition
  float warmup;     // chunks of a usual one
  bool makes_maps;  // its transitions have columns for M, too
};
struct CutCosts {
  // What kernels take besides their chunks and steps, each with its launch.
  static constexpr float kSegments = 7, kTransitions = 15, kFolds = 5;
  static constexpr float kFoldStep = 3.0f;
  static constexpr float kIdle = 3.5f;         // of each of them where it has nothing to do
  static constexpr float kPersistent = 0.25f;  // the share of heads taken for persistent
  // A cut is taken where its estimate is below this share of the time without one.
  static constexpr float kGain = 0.87f;
  // Of a pack whose lengths turn out to need no cut: the kernels of cuts run, and may take so much.
  static constexpr float kMostLoss = 1.1f;
  // Of another instance for a pack of equal lengths that is not cut.
  static constexpr float kSameTime = 1.02f;
};

// Of numbers that are not negative; floorf and ceilf are calls on a host.
GD_HOST_DEVICE inline float floor_of(float x) { return static_cast<float>(static_cast<int>(x)); }
GD_HOST_DEVICE inline float ceil_of(float x) { return floor_of(x) < x ? floor_of(x) + 1 : x; }

// Segments of a sequence, both in chunks. One that is not cut counts as the part of a segment that it is.
GD_HOST_DEVICE inline float segments_of(int sequence, int segment) {
  if (sequence <= segment) return sequence == 0 ? 0.0f : static_cast<float>(sequence) / static_cast<float>(segment);
  const int whole = (sequence + segment - 1) / segment;
  return static_cast<float>(whole);
}
// Numbers of segments that are tried for the longest sequence, one after the other: beyond eight not every one.
GD_HOST_DEVICE inline int next_number(int segments) { return segments + 1 + segments / 9; }

// Of a call whose chains run one after the other, by the same segments.
struct CutPrices {
  struct Chain {
    float chunk, segment_chunk, silent, warmup;  // see ChainWork
    float ctas, transition_ctas;                 // for all heads of a segment
  };
  static constexpr int kMostChains = 2;
  ChainCosts costs{}, transition_costs{};
  float multiprocessors = 0;
  int chain_count = 0;
  Chain chains[kMostChains]{};

  // Rounds of as many CTAs as are resident, the last one with fewer.
  GD_HOST_DEVICE float time(const ChainCosts& kind, float ctas, float chunks) const {
    const float together = kind.resident * multiprocessors, whole_rounds = floor_of(ctas / together);
    const float rest = ceil_of((ctas - whole_rounds * together) / multiprocessors);  // CTAs of a multiprocessor
    const float last = rest > 0 ? kind.chunk + kind.beside * (rest - 1) : 0.0f;
    return chunks * (whole_rounds * (kind.chunk + kind.beside * (kind.resident - 1)) + last);
  }
  // Of `count` sequences that make up so many of the longest one. Where all CTAs are resident at once, those of the
  // longest have others beside them only as long as these last.
  GD_HOST_DEVICE float uncut(float sequences, int count, int longest) const {
    float sum = 0;
    for (int i = 0; i < chain_count; ++i) {
      const float chunks = chains[i].chunk * static_cast<float>(longest);
      const float beside = ceil_of(static_cast<float>(count) * chains[i].ctas / multiprocessors) - 1;
      if (count > 1 && beside < costs.resident) {
        sum += chunks * (costs.chunk + costs.beside * beside * (sequences - 1) / static_cast<float>(count - 1));
      } else {
        sum += time(costs, ceil_of(sequences * chains[i].ctas), chunks);
      }
    }
    return sum;
  }
  GD_HOST_DEVICE float idle() const { return CutCosts::kIdle * static_cast<float>(2 + chain_count); }
  // segments: of all sequences, each of `length` chunks.
  GD_HOST_DEVICE float cut(float segments, int length, int longest) const {
    const auto L = static_cast<float>(length);
    const int steps = (longest + length - 1) / length - 2;  // of a fold
    float sum = CutCosts::kSegments + CutCosts::kFolds;
    if (steps > 0) sum += CutCosts::kFoldStep * static_cast<float>(steps);
    for (int i = 0; i < chain_count; ++i) {
      const Chain& chain = chains[i];
      const float persistent = floor_of(CutCosts::kPersistent * segments * chain.transition_ctas) + 1;
      sum += CutCosts::kTransitions + time(transition_costs, persistent, L * chain.silent);
      sum += time(costs, ceil_of(segments * chain.ctas), L * chain.segment_chunk + chain.warmup * chain.silent);
    }
    return sum;
  }
  // Of segments as long as the longest sequence, which are no cut, or of shorter ones. The kernels of cuts run anyway.
  GD_HOST_DEVICE float of(float segments, int count, int length, int longest) const {
    return length < longest ? cut(segments, length, longest)
                            : CutCosts::kGain * (uncut(segments, count, longest) + idle());
  }
};

}  // namespace gatedelta::cuda::portable
