// Chooses the cut of a call's sequences: plain arithmetic on the host, from shapes and the number of SMs. Lengths and
// gates are on the device, which decides what a segment begins with and how long the segments of a pack are
// (segments.cuh).
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuda/portable/workspace.hpp"

namespace gatedelta::cuda::portable {

// ctas_per_sm: as registers allow.
constexpr ChainCosts chain_costs(ChainKind kind) {
  switch (kind) {
    case ChainKind::k64: return {2.6f, 0.7f, 4};
    case ChainKind::k128: return {3.1f, 1.4f, 2};
    case ChainKind::k128Half: return {1.97f, 1.1f, 3};
    case ChainKind::k128Quarter: return {1.84f, 0.6f, 6};
    case ChainKind::k256: break;
  }
  return {5.1f, 0.0f, 1};
}
constexpr ChainWork kForwardWork = {1.0f, 0.8f, 8, true}, kStatesWork = {1.13f, 0.78f, 8.6f, true},
                    kGradientsWork = {1.25f, 0.98f, 7.7f, false};

// Guessed lengths of a pack, in chunks: the longest sequence, and the others, all equal.
struct Lengths {
  int longest, others, other;
  float weight;

  LengthSums sums() const {
    const bool are_equal = other == longest;
    return {longest, other > 0 ? others + 1 : 1, are_equal ? others + 1 : 1,
            static_cast<float>(longest) + static_cast<float>(others) * static_cast<float>(other)};
  }
  SegmentSums segments(int length) const {
    SegmentSums sums;
    sums.add(longest, length);
    sums.add(other, length, static_cast<float>(others));
    return sums;
  }
};

// The cut of a call whose chains run one after the other, by the same segments.
struct CutSearch {
  const Layer& in;
  std::initializer_list<ChainWork> chains;  // CutCost::kMostChains at most
  int64_t segment_capacity;                 // that the memory for boundary states and transitions holds
  DeviceLimits device;

  bool is_pack() const { return in.sequences.offsets && in.sequences.count > 1; }
  static int64_t chunks_of(int64_t tokens) { return ChunkedSequences::chunks(tokens); }
  float ctas(ChainKind kind, int columns) const {
    return static_cast<float>(in.value_heads << log2_ctas_per_head(columns, chain_columns(kind)));
  }
  ChainCosts costs_of(ChainKind kind) const {
    ChainCosts costs = chain_costs(kind);
    costs.ctas_per_sm = std::min(costs.ctas_per_sm, static_cast<float>(device.ctas_per_sm(chain_bytes(kind))));
    return costs;
  }
  CutCost cost_of(ChainKind kind) const { return cost_of(kind, kind, false); }
  CutCost cost_of(ChainKind kind, ChainKind whole_kind, bool has_whole_grid) const {
    const ChainKind narrow = transition_kind(kind);
    CutCost cost;
    cost.segment_costs = costs_of(kind), cost.transition_costs = costs_of(narrow);
    cost.whole_costs = costs_of(whole_kind);
    cost.sm_count = static_cast<float>(device.sm_count);
    cost.has_whole_grid = has_whole_grid;
    for (const ChainWork& work : chains)
      cost.chains[cost.chain_count++] = {work.chunk,
                                         work.warmup_chunk,
                                         work.warmup,
                                         ctas(kind, in.value_dim),
                                         ctas(narrow, in.value_dim + (work.makes_transitions ? in.key_dim : 0)),
                                         ctas(whole_kind, in.value_dim)};
    return cost;
  }
  // Calls consider(kind) for the instances of the call's K, the widest first.
  template <class Consider>
  void each_kind(const Consider& consider) const {
    if (compiled_keys(in.key_dim) != 128) return consider(chain_kind(in, device.sm_count));
    if (in.value_dim > 64) consider(ChainKind::k128);
    consider(ChainKind::k128Half);
    consider(ChainKind::k128Quarter);
  }
  // A batch has known lengths. Those of a pack are guessed: (0) equal; (1) cut at random places, where the longest is
  // expected to have (1 + 1/2 + ... + 1/N) / N of the tokens; (2) the longest of (1) with half of all other tokens in
  // addition.
  static constexpr int kGuesses = 3;
  static constexpr float kNever = 1e30f;
  // Within this factor times count as equal, and the widest instance wins: it reads K, Q and prepare's results once for
  // more columns.
  static constexpr float kTie = 1.02f;
  static constexpr float kSameTime = 1.05f;  // likewise for instances for equal lengths that are not cut
  int guesses() const { return is_pack() ? kGuesses : 1; }
  Lengths guess(int i) const {
    const Sequences& s = in.sequences;
    const int others = static_cast<int>(s.count) - 1, chunks = static_cast<int>(chunks_of(s.tokens));
    if (!is_pack()) return {chunks, others, others > 0 ? chunks : 0, 1};
    float part = 1;
    for (int n = 2; i > 0 && n <= others + 1; ++n) part += 1.0f / static_cast<float>(n);
    part /= static_cast<float>(others + 1);
    if (i == 2) part += (1 - part) / 2;
    constexpr float kWeights[] = {2, 2, 1};
    const int longest = std::max(1, static_cast<int>(part * static_cast<float>(chunks)));
    const int other = i == 0 ? longest : std::max(1, (chunks - longest) / others);
    return {longest, others, other, kWeights[i]};
  }

  // Skips numbers of segments that fill the device several times, because the search takes host time.
  template <class Try>
  void each_length(const Lengths& lengths, const Try& attempt) const {
    const float heads = lengths.segments(lengths.longest).segments * static_cast<float>(in.value_heads);
    const float most = 4 * static_cast<float>(device.sm_count) / heads + 1;
    for (int number = 2; number <= lengths.longest / kLeastSegment && static_cast<float>(number) <= most;
         number = next_number(number)) {
      const int length = (lengths.longest + number - 1) / number;
      if (SegmentLength{int64_t{length} * kChunkTokens}.most_segments(sequences_of(in.sequences)) > segment_capacity)
        break;
      attempt(length);
    }
  }
  // Times of cuts by segments that are not shorter than the host's length.
  struct Curve {
    static constexpr int kMost = 48;
    int count = 0;
    int length[kMost];  // descending; the first one is no cut
    float time[kMost];  // the least of this length and of all longer ones

    float at(int least_length) const {
      const int* const end = std::partition_point(length + 1, length + count, [&](int l) { return l >= least_length; });
      return time[end - length - 1];
    }
    float least() const { return time[count - 1]; }
  };
  Curve curve_of(const CutCost& cost, const Lengths& lengths) const {
    const LengthSums sums = lengths.sums();
    Curve curve;
    float least = kNever;
    curve.length[0] = lengths.longest, curve.time[0] = least;
    curve.count = 1;
    each_length(lengths, [&](int length) {
      if (curve.count == Curve::kMost) return;
      least = std::min(least, cost.cut(sums, lengths.segments(length), length));
      curve.length[curve.count] = length, curve.time[curve.count] = least;
      ++curve.count;
    });
    return curve;
  }

  Cut forced(int length) const {
    const Lengths lengths = guess(0);
    const SegmentSums sums = lengths.segments(length);
    Cut cut;
    float least = 0;
    each_kind([&](ChainKind kind) {
      const float time = cost_of(kind).cut(lengths.sums(), sums, length);
      if (cut.chunks > 0 && time >= least) return;
      cut = {length, kind, kind, {}, expected(lengths, length)};
      least = time;
    });
    return cut;
  }
  // Minimises the weighted sum of time / best time over the guesses.
  struct Guesses {
    int count;
    Lengths lengths[kGuesses];
    float best[kGuesses], weights[kGuesses];  // best: time so far; weights: of a microsecond

    void consider(int i, float time) {
      best[i] = std::min(best[i], time);
      weights[i] = lengths[i].weight / best[i];
    }
    template <class Time>
    float sum(const Time& time) const {
      float sum = 0;
      for (int i = 0; i < count; ++i) sum += weights[i] * time(i);
      return sum;
    }
  };
  Guesses all_guesses() const {
    Guesses all{guesses(), {}, {}, {}};
    for (int i = 0; i < all.count; ++i) all.lengths[i] = guess(i), all.best[i] = kNever;
    return all;
  }
  // The instance for sequences that are not cut, among those within kSameTime of the best one for equal lengths.
  ChainKind whole_kind() const {
    Guesses all = all_guesses();
    each_kind([&](ChainKind kind) {
      const CutCost cost = cost_of(kind);
      for (int i = 0; i < all.count; ++i) all.consider(i, cost.uncut(all.lengths[i].sums()));
    });
    ChainKind best = ChainKind::k64;
    float least = kNever;
    each_kind([&](ChainKind kind) {
      const CutCost cost = cost_of(kind);
      const float sum = all.sum([&](int i) { return cost.uncut(all.lengths[i].sums()); });
      if (cost.uncut(all.lengths[0].sums()) > kSameTime * all.best[0] || sum >= least) return;
      least = sum;
      best = kind;
    });
    return best;
  }
  // The instance for lengths that are about equal: those of a batch, and of packs that the device decides not to cut.
  ChainKind equal_kind() const {
    const LengthSums equal = guess(0).sums();
    float least = kNever;
    each_kind([&](ChainKind kind) { least = std::min(least, cost_of(kind).uncut(equal)); });
    ChainKind widest = ChainKind::k64;
    bool is_found = false;
    each_kind([&](ChainKind kind) {
      if (is_found || cost_of(kind).uncut(equal) > kTie * least) return;
      widest = kind;
      is_found = true;
    });
    return widest;
  }
  // An instance for segments, perhaps with a second grid for whole sequences.
  struct Option {
    ChainKind kind;
    CutCost cost;
    const Curve* curves;    // [kGuesses], without a second grid
    float whole[kGuesses];  // where the device cuts nothing

    float time(int i, int least_length) const {
      return std::min(whole[i], curves[i].at(least_length) + cost.second_grids());
    }
  };
  Option option_of(ChainKind kind, const CutCost& cost, const Curve* curves, Guesses& all) const {
    Option option{kind, cost, curves, {}};
    for (int i = 0; i < all.count; ++i) {
      const LengthSums sums = all.lengths[i].sums();
      option.whole[i] = is_pack() ? cost.of(sums, {}, sums.longest) : cost.uncut(sums);
      all.consider(i, option.time(i, 1));
    }
    return option;
  }
  // Tries every instance and length. The least length holds for all guesses: none is cut into shorter segments. A
  // second grid is worth its cost where whole sequences may be as fast.
  Cut chosen() const {
    constexpr int kKinds = 3;
    Curve curves[kKinds][kGuesses];
    Option options[2 * kKinds];
    int kinds = 0, option_count = 0;
    Guesses all = all_guesses();
    // A backward of a batch takes the fastest instance: the widest of about equal ones is up to 5% slower.
    const bool is_backward = chains.size() > 1;
    const ChainKind equal = equal_kind(), whole = is_pack() || is_backward ? whole_kind() : equal;
    const auto uncut = [&, cost = cost_of(whole)](int i) { return cost.uncut(all.lengths[i].sums()); };
    for (int i = 0; i < all.count; ++i) all.consider(i, uncut(i));
    each_kind([&](ChainKind kind) {
      const CutCost cost = cost_of(kind);
      Curve* const mine = curves[kinds++];
      for (int i = 0; i < all.count; ++i) mine[i] = curve_of(cost, all.lengths[i]);
      options[option_count++] = option_of(kind, cost, mine, all);
      if (is_pack()) options[option_count++] = option_of(kind, cost_of(kind, equal, true), mine, all);
    });
    Cut best;
    float least = kNever;
    for (int k = 0; k < option_count; ++k) {
      const Option& option = options[k];
      for (int g = 0; g < all.count; ++g)
        for (int at = 1; at < option.curves[g].count; ++at) {
          const int length = option.curves[g].length[at];
          const float sum = all.sum([&](int i) { return option.time(i, length); });
          if (sum >= least) continue;
          least = sum;
          best = {length, option.kind, equal, is_pack() ? option.cost : CutCost{}, {}};
        }
    }
    if (FixedCosts::kWorth * least >= all.sum(uncut)) best = {0, whole, whole, {}, {}};
    if (best.chunks > 0) best.expected = expected(all.lengths[all.count - 1], best.chunks);
    return best;
  }
  // On average each sequence of a pack adds half a segment, its last one.
  SegmentSums expected(const Lengths& lengths, int length) const {
    SegmentSums sums = lengths.segments(length);
    if (is_pack())
      sums.segments = static_cast<float>(chunks_of(in.sequences.tokens)) / static_cast<float>(length) +
                      static_cast<float>(in.sequences.count) / 2;
    return sums;
  }
};

// forced: chunks of a segment, or 0.
inline Cut choose_cut(const Layer& in, std::initializer_list<ChainWork> chains, int64_t segment_capacity,
                      int64_t forced, const DeviceLimits& device) {
  const CutSearch search{in, chains, segment_capacity, device};
  if (segment_capacity > 0 && !forced) return search.chosen();
  if (segment_capacity > 0 && forced * kChunkTokens < in.sequences.tokens)
    return search.forced(static_cast<int>(forced));
  return {0, chain_kind(in, device.sm_count), {}, {}, {}};
}
inline Cut choose_cut(const ForwardProblem& p, const ForwardWorkspace& layout, const DeviceLimits& device) {
  return choose_cut(p.in, {kForwardWork}, layout.segment_capacity, p.segment_chunks, device);
}

}  // namespace gatedelta::cuda::portable
