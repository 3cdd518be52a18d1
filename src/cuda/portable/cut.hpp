// Which cut of a call's sequences is taken: plain arithmetic on the host, from shapes and the number of
// multiprocessors. Lengths and gates are on the device: what a segment begins with is found there, and how long the
// segments of a pack are (segments.cuh).
#pragma once

#include <algorithm>
#include <climits>
#include <initializer_list>

#include "cuda/portable/config.hpp"

namespace gatedelta::cuda::portable {

constexpr ChainCosts chain_costs(ChainKind kind) {
  switch (kind) {
    case ChainKind::k64: return {1.6f, 0.4f, 4};
    case ChainKind::k128: return {3.2f, 1.8f, 2};
    case ChainKind::k128Half: return {2.15f, 1.07f, 3};
    case ChainKind::k128Quarter: return {1.9f, 0.6f, 4};
    case ChainKind::k256: break;
  }
  return {5.1f, 0.0f, 1};
}
constexpr ChainWork kForwardWork = {1.0f, 1.33f, 0.65f, 6, true}, kStatesWork = {1.12f, 1.12f, 0.7f, 6, true},
                    kGradientsWork = {1.28f, 1.28f, 1.15f, 11, false};

// Lengths that a call may have, in chunks: one sequence, and others that are not longer.
struct Lengths {
  int longest, others, other;

  float segments(int length) const {
    return segments_of(longest, length) + static_cast<float>(others) * segments_of(other, length);
  }
  float uncut(const CutPrices& prices) const {
    return prices.uncut(segments(longest), other > 0 ? others + 1 : 1, longest);
  }
};

// The cut of a call whose chains run one after the other, by the same segments.
struct CutSearch {
  static constexpr int kUncut = INT_MAX;
  struct Found {
    int chunks;  // of a segment, or kUncut
    float time;
  };

  const Layer& in;
  std::initializer_list<ChainWork> chains;  // CutPrices::kMostChains at most
  int64_t entry_slots;                      // that entries and maps have room for
  int multiprocessors;

  CutPrices prices_of(ChainKind kind) const {
    const ChainKind narrow = transition_kind(kind);
    const auto ctas = [&](ChainKind by, int columns) {
      return static_cast<float>(in.value_heads << log_parts(columns, chain_columns(by)));
    };
    CutPrices prices;
    prices.costs = chain_costs(kind), prices.transition_costs = chain_costs(narrow);
    prices.multiprocessors = static_cast<float>(multiprocessors);
    for (const ChainWork& work : chains)
      prices.chains[prices.chain_count++] = {work.chunk,
                                             kind == ChainKind::k128 ? work.segment : work.chunk,
                                             work.silent,
                                             work.warmup,
                                             ctas(kind, in.value_dim),
                                             ctas(narrow, in.value_dim + (work.makes_maps ? in.key_dim : 0))};
    return prices;
  }
  template <class Consider>
  void each_kind(const Consider& consider) const {
    if (compiled_keys(in.key_dim) != 128) return consider(chain_kind(in, multiprocessors));
    if (in.value_dim > 64) consider(ChainKind::k128);
    consider(ChainKind::k128Half);
    consider(ChainKind::k128Quarter);
  }
  // Lengths of a batch count as they are. Those of a pack are not known: they may be equal, one sequence may have all
  // tokens, or they are halfway between.
  static constexpr int kGuesses = 3;
  int guesses() const { return in.sequences.offsets && in.sequences.count > 1 ? kGuesses : 1; }
  Lengths guess(int i) const {
    const Sequences& s = in.sequences;
    const auto chunks_of = [](int64_t tokens) { return static_cast<int>(ChunkedSequences::chunks(tokens)); };
    const int mean = chunks_of(s.offsets ? s.tokens / s.count : s.tokens), others = static_cast<int>(s.count) - 1;
    return {mean + (chunks_of(s.tokens) - mean) * i / 2, others, mean - mean * i / 2};
  }

  // What the segments kernel would take of such lengths, if any segments had slots that have room.
  Found best_cut(const CutPrices& prices, const Lengths& lengths) const {
    const ChunkedSequences sequences = sequences_of(in);
    Found found{kUncut, lengths.uncut(prices) + prices.idle()};
    float least = CutCosts::kGain * found.time;
    // The host's time counts: no number of segments is tried that would fill the device several times.
    const float heads = lengths.segments(lengths.longest) * static_cast<float>(in.value_heads);
    const float most = 4 * prices.multiprocessors / heads + 1;
    for (int number = 2; number <= lengths.longest / kLeastSegment && static_cast<float>(number) <= most;
         number = next_number(number)) {
      const int length = (lengths.longest + number - 1) / number;
      if (SegmentSlots{int64_t{length} * kChunkTokens}.count(sequences) > entry_slots) break;
      const float time = prices.cut(lengths.segments(length), length, lengths.longest);
      if (time >= least) continue;
      least = time;
      found = {length, time};
    }
    return found;
  }

  Cut forced(int length) const {
    const Lengths lengths = guess(0);
    Cut cut;
    float least = 0;
    each_kind([&](ChainKind kind) {
      const float time = prices_of(kind).cut(lengths.segments(length), length, lengths.longest);
      if (cut.chunks > 0 && time >= least) return;
      cut = {length, kind, {}};
      least = time;
    });
    return cut;
  }
  // Guesses weigh the same, by their times against those of the usual instance. A pack that is not cut may have
  // another one: narrow CTAs are better for a long sequence beside short ones, and often as good for equal ones.
  Cut chosen() const {
    const ChainKind usual = chain_kind(in, multiprocessors);
    const int count = guesses();
    Lengths lengths[kGuesses];
    float without[kGuesses];
    for (int i = 0; i < count; ++i) {
      lengths[i] = guess(i);
      without[i] = lengths[i].uncut(prices_of(usual));
    }
    Cut best{0, usual, {}};
    auto least = static_cast<float>(count);
    if (count > 1)
      each_kind([&](ChainKind kind) {
        const CutPrices prices = prices_of(kind);
        float sum = 0;
        for (int i = 0; i < count; ++i) sum += lengths[i].uncut(prices) / without[i];
        if (sum >= least || lengths[0].uncut(prices) > CutCosts::kSameTime * without[0]) return;
        best.kind = kind;
        least = sum;
      });
    // A cut takes the shortest segments that a guess wants.
    least *= CutCosts::kGain;
    each_kind([&](ChainKind kind) {
      const CutPrices prices = prices_of(kind);
      int chunks = kUncut;
      float sum = 0, highest = 0;
      for (int i = 0; i < count; ++i) {
        const Found found = best_cut(prices, lengths[i]);
        chunks = std::min(chunks, found.chunks);
        sum += found.time / without[i];
        highest = std::max(highest, found.time / without[i]);
      }
      if (chunks == kUncut || highest > CutCosts::kMostLoss || sum >= least) return;
      best = {chunks, kind, in.sequences.offsets ? prices : CutPrices{}};
      least = sum;
    });
    return best;
  }
};

// forced: chunks of a segment, or 0.
inline Cut choose_cut(const Layer& in, std::initializer_list<ChainWork> chains, int64_t entry_slots, int64_t forced,
                      int multiprocessors) {
  const CutSearch search{in, chains, entry_slots, multiprocessors};
  if (entry_slots > 0 && !forced) return search.chosen();
  if (entry_slots > 0 && forced * kChunkTokens < in.sequences.tokens) return search.forced(static_cast<int>(forced));
  return {0, chain_kind(in, multiprocessors), {}};
}
inline Cut choose_cut(const ForwardProblem& p, const ForwardWorkspace& layout, int multiprocessors) {
  return choose_cut(p.in, {kForwardWork}, layout.entry_slots, p.segment_chunks, multiprocessors);
}

// ---- launches ------------------------------------------------------------------------------------------------------

// Of the transitions of a chain: those of states have more CTAs of a head, for M.
inline Params transition_params(const Params& p, ChainKind kind, bool makes_maps) {
  const int columns = chain_columns(transition_kind(kind));
  Params transitions = p;
  transitions.log_parts = log_parts(p.value_dim, columns);
  transitions.map_column = columns << transitions.log_parts;
  if (makes_maps) transitions.log_parts = log_parts(transitions.map_column + p.key_dim, columns);
  return transitions;
}

inline int64_t chain_ctas(const Params& p) {
  const int64_t items = p.summaries ? p.summaries : p.segment_chunks ? p.slots().count(p.sequences) : p.sequences.count;
  return (items * p.value_heads) << p.log_parts;
}
inline int64_t segment_ctas(const Params& p) {
  const int64_t copies = p.initial_copy ? int64_t{p.sequences.count} * p.value_heads : 0;
  return p.slots().count(p.sequences) + copies;
}
// Both chains of a backward fold at the same time.
inline int64_t fold_ctas(const Params& p) {
  const int chains = p.gradient_segments ? 2 : 1;
  return int64_t{chains} * p.sequences.count * p.value_heads * (p.value_dim / kFoldColumns);
}

}  // namespace gatedelta::cuda::portable
