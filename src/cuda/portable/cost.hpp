// Cost of a cut of sequences: plain arithmetic that the host and the segments kernel share. The host has shapes
// (schedule/cut_search.hpp); the lengths of packed sequences are on the device (segments.cuh).
#pragma once

#include "cuda/device/host_device.hpp"

namespace gatedelta::cuda::portable {

// Microseconds, on an H200.
struct ChainCosts {
  float chunk;          // a chunk of the forward, with outputs, of a CTA that is alone on its SM
  float per_extra_cta;  // extra time of a chunk per co-resident CTA
  float ctas_per_sm;    // at most
};
// A chain kernel's cost relative to a chunk of the forward.
struct ChainWork {
  float chunk;             // with outputs
  float warmup_chunk;      // of a warm-up or a transition
  float warmup;            // chunks of a usual warm-up
  bool makes_transitions;  // its transitions compute M, too
};
struct FixedCosts {
  static constexpr float kItem = 1.0f;         // a CTA, in addition to its chunks
  static constexpr float kChain = 7.7f;        // the kernels of cuts in addition to their CTAs, for each chain
  static constexpr float kMergeStep = 2.6f;    // a step of the merge
  static constexpr float kIdle = 3.5f;         // a kernel that has nothing to do
  static constexpr float kPersistent = 0.26f;  // share of heads that count as persistent
  static constexpr float kWorth = 1.06f;       // a cut must win by this factor
};

// For numbers that are not negative: floorf and ceilf are function calls on a host.
GD_HOST_DEVICE inline float floor_of(float x) { return static_cast<float>(static_cast<int>(x)); }
GD_HOST_DEVICE inline float ceil_of(float x) { return floor_of(x) < x ? floor_of(x) + 1 : x; }

// A call's lengths in chunks, as far as the cost depends on them.
struct LengthSums {
  int longest = 0;
  int count = 0, longest_count = 0;  // sequences with tokens, and those as long as the longest
  float chunks = 0;                  // of all
};
// A call's segments. A sequence that is not cut counts as a fraction of a segment, in proportion to its length.
struct SegmentSums {
  float segments = 0, boundaries = 0;

  GD_HOST_DEVICE void add(int sequence, int length, float times = 1) {
    if (sequence <= length) {
      segments += times * (static_cast<float>(sequence) / static_cast<float>(length));
      return;
    }
    const int whole = (sequence + length - 1) / length;
    segments += times * static_cast<float>(whole);
    boundaries += times * static_cast<float>(whole - 1);
  }
};
// The next number of segments to try for the longest sequence: beyond eight not every number is tried.
GD_HOST_DEVICE inline int next_number(int segments) { return segments + 1 + segments / 9; }

// Cost of a call whose chains run one after the other, by the same segments.
struct CutCost {
  struct Chain {
    float chunk, warmup_chunk, warmup;        // see ChainWork
    float ctas, transition_ctas, whole_ctas;  // for all heads: of a segment, of its transitions, of an uncut sequence
  };
  static constexpr int kMostChains = 2;
  ChainCosts segment_costs{}, transition_costs{}, whole_costs{};
  float sm_count = 0;
  // Every chain has a second grid, for whole sequences, and one of the two grids has nothing to do. Without it whole
  // sequences run in the grid for segments.
  bool has_whole_grid = false;
  int chain_count = 0;
  Chain chains[kMostChains]{};

  // CTAs that share a CTA's SM, where `ctas` are spread evenly.
  GD_HOST_DEVICE float extra_ctas(float ctas) const { return ceil_of(ctas / sm_count) - 1; }
  // Rounds of resident CTAs, the last one with fewer.
  GD_HOST_DEVICE float time(const ChainCosts& kind, float ctas, float chunks) const {
    const float together = kind.ctas_per_sm * sm_count, whole_rounds = floor_of(ctas / together);
    const float rest = ctas - whole_rounds * together, rounds = rest > 0 ? whole_rounds + 1 : whole_rounds;
    const float last = rest > 0 ? kind.chunk + kind.per_extra_cta * extra_ctas(rest) : 0.0f;
    return rounds * FixedCosts::kItem +
           chunks * (whole_rounds * (kind.chunk + kind.per_extra_cta * (kind.ctas_per_sm - 1)) + last);
  }
  // Where all CTAs are resident at once, those of the longest sequences share their SM only as long as shorter ones
  // last. Otherwise shorter sequences count as a fraction of the longest.
  GD_HOST_DEVICE float uncut(const LengthSums& lengths) const {
    const auto longest = static_cast<float>(lengths.longest), longest_count = static_cast<float>(lengths.longest_count);
    if (lengths.longest == 0) return 0;
    const float others = static_cast<float>(lengths.count) - longest_count;
    const float part = others > 0 ? (lengths.chunks - longest * longest_count) / (others * longest) : 0.0f;
    float sum = 0;
    for (int i = 0; i < chain_count; ++i) {
      const Chain& chain = chains[i];
      const float all = extra_ctas(static_cast<float>(lengths.count) * chain.whole_ctas),
                  equal = extra_ctas(longest_count * chain.whole_ctas);
      if (all < whole_costs.ctas_per_sm) {
        const float of_others = whole_costs.per_extra_cta * (equal + (all - equal) * part);
        sum += FixedCosts::kItem + chain.chunk * longest * (whole_costs.chunk + of_others);
      } else {
        sum += time(whole_costs, ceil_of(lengths.chunks / longest * chain.whole_ctas), chain.chunk * longest);
      }
    }
    return sum;
  }
  // The grids for whole sequences, where all sequences are cut.
  GD_HOST_DEVICE float second_grids() const {
    return has_whole_grid ? FixedCosts::kIdle * static_cast<float>(chain_count) : 0.0f;
  }
  // By segments of `length` chunks.
  GD_HOST_DEVICE float cut(const LengthSums& lengths, const SegmentSums& sums, int length) const {
    const auto L = static_cast<float>(length);
    const int steps = (lengths.longest + length - 1) / length - 2;  // of the merge
    float sum = steps > 0 ? FixedCosts::kMergeStep * static_cast<float>(steps) : 0.0f;
    sum += second_grids();
    for (int i = 0; i < chain_count; ++i) {
      const Chain& chain = chains[i];
      const float persistent = FixedCosts::kPersistent * sums.boundaries * chain.transition_ctas;
      sum += FixedCosts::kChain +
             time(transition_costs, persistent > 1 ? ceil_of(persistent) : 1.0f, L * chain.warmup_chunk);
      sum +=
          time(segment_costs, ceil_of(sums.segments * chain.ctas), L * chain.chunk + chain.warmup * chain.warmup_chunk);
    }
    return sum;
  }
  // By segments of `length` chunks; a length of the longest sequence or more is no cut. The kernels of cuts run anyway:
  // segments, merges, and for each chain transitions and perhaps its grid for segments.
  GD_HOST_DEVICE float of(const LengthSums& lengths, const SegmentSums& sums, int length) const {
    if (length < lengths.longest) return cut(lengths, sums, length);
    const int idle = 2 + (has_whole_grid ? 2 : 1) * chain_count;
    return uncut(lengths) + (has_whole_grid ? 0 : crowded(lengths)) + FixedCosts::kIdle * static_cast<float>(idle);
  }
  // Extra time of whole sequences in a grid for segments: idle CTAs unbalance it, so that some SMs get one busy CTA
  // more than an even share, where it fits.
  GD_HOST_DEVICE float crowded(const LengthSums& lengths) const {
    float sum = 0;
    for (int i = 0; i < chain_count; ++i)
      if (extra_ctas(static_cast<float>(lengths.count) * chains[i].ctas) + 1 < segment_costs.ctas_per_sm)
        sum += chains[i].chunk * static_cast<float>(lengths.longest) * segment_costs.per_extra_cta;
    return sum;
  }
};

}  // namespace gatedelta::cuda::portable
