// How sequences are cut into pieces of work, so that the card is full also where there are few heads (context
// parallelism): what a piece is, when an older state may be forgotten, which cut is the fastest. Plain arithmetic,
// which the kernels (schedule.cuh) and the tests share. See docs/kernels/context_parallel.md.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/tiles.hpp"

namespace gatedelta::cuda {

// Division and powers in a few instructions: few threads do a great deal of it, and each one they need not load counts.
GD_HOST_DEVICE inline float ratio(float a, float b) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return a * inverse;
#else
  return a / b;
#endif
}
GD_HOST_DEVICE inline float power_of_2(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}
GD_HOST_DEVICE inline int quotient(int a, int b) {  // rounded down; neither is negative
  const auto about = static_cast<int>(ratio(static_cast<float>(a), static_cast<float>(b)));
  const int left = a - about * b;  // small, but perhaps more than b, or negative
  const int q = about + static_cast<int>(ratio(static_cast<float>(left), static_cast<float>(b)));
  const int rest = a - q * b;
  return q + (rest >= b) - (rest < 0);
}
GD_HOST_DEVICE inline int rounds_of(int items, int blocks) { return quotient(items + blocks - 1, blocks); }

// ---- pieces of work ------------------------------------------------------------------------------------------------

enum WorkKind {
  kOutputs,  // chunks of a sequence, perhaps after some that only move the state
  kFactors,  // S_loc and M of a segment, S_out = M S_in + S_loc, for half of the columns of each
  kJoin,     // the states at the ends of segments, one after the other
};
enum Half { kWhole = -1, kNoValues = -2 };        // of the value columns; or 0, 1
enum From { kFromInitial = -1, kFromZero = -2 };  // or the number of a boundary
enum To { kToFinal = -1, kToNowhere = -2 };       // or the number of a boundary

// What a block of the main kernel takes at a time; all that is to be known of it, in a few loads.
struct alignas(64) WorkItem {
  int kind, sequence, head, key_head;  // key_head: of a join, the half it joins
  int half, batch, token, rows;        // from its first token on; no rows: nothing to do
  int silent;                          // tokens at its beginning without outputs
  int prepared;  // number of its first chunk and head in the workspace; of a join: its first image of M
  int from, to;
  int origin;   // first token of the sequence
  int pair;     // of sequence and head: which counter of readers
  int readers;  // warpgroups that have to have read the initial state before the final one may be in its place
};

struct Schedule {
  int count;  // of entries
  int taken;  // entries that blocks took one after the other
  int dealt;  // and those before, of which each block has the one with its number
};

// A boundary between segments: M of the segment before it as two 16-bit parts, each a wgmma operand, and its S_loc,
// in whose place the state at its end comes.
constexpr int kImageBytes = 128 * 128 * 2;
constexpr int kBoundaryImages = 4;  // M's upper part, its lower part, and two of floats
constexpr int kBoundaryBytes = kBoundaryImages * kImageBytes;
constexpr int kJoinImages = 3;  // that a join of half of the columns reads
// What a boundary's counter says: four warpgroups have written factors; and two a half of the state, each worth two.
enum Ready { kFactorsReady = 4, kStateReady = 8 };

// How the list of work comes to be: by a plan; or, where sequences are too many for that and work is enough, without
// one, the longest first; or, where they are as long as each other and fill the card as they are, already during
// prepare.
enum ListMode { kPlannedList, kSortedList, kEvenList };
// What is planned at most.
constexpr int kMaxPlannedSequences = 64, kMaxPlannedPairs = 1024, kMaxPlannedEntries = 6144;

// ---- when an older state may be forgotten --------------------------------------------------------------------------

// What prepare notes of a chunk and value head. A state from before is at most 2^fade of itself after it (every token
// scales it by its gate and by |1 - beta |k|^2| at most), and what the chunk writes weighs `written` at its end: the
// sum of beta_j times the decay since j. Negative: some token may make a state grow, nothing is known of weights.
struct ChunkDecay {
  float fade, written;
};

// Chunks before a boundary from which the state there can be computed to fp32's accuracy without what was before them;
// all there are if they reach the beginning; negative if that takes more than `limit`. What is left out is below 2^-24
// of the older state *and* of what was written since, for if little was written the little counts.
constexpr float kForgotten = 5.9604645e-8f, kForgottenLog = -24.0f;  // 2^-24
constexpr int kNoWindow = -1;
constexpr int kDecaysAtOnce = 8;  // loads under way, so that none is waited for alone
template <class Decays>
GD_HOST_DEVICE int window_before(int boundary, int limit, const Decays& decays) {
  float fade = 0, left = 1, written = 0;
  bool weighs = true;
  for (int done = 0; done < limit; done += kDecaysAtOnce) {
    ChunkDecay chunks[kDecaysAtOnce];
    for (int i = 0; i < kDecaysAtOnce; ++i) {
      const int chunk = boundary - 1 - done - i;
      chunks[i] = decays(chunk < 0 ? 0 : chunk);
    }
    for (int i = 0; i < kDecaysAtOnce; ++i) {
      const int n = done + i + 1;
      if (n == boundary || n > limit) return n == boundary ? n : kNoWindow;
      weighs = weighs && chunks[i].written >= 0;
      written += weighs ? chunks[i].written * left : 0.0f;
      fade += chunks[i].fade;
      left = power_of_2(fade);
      if (left < kForgotten * (written < 1 ? written : 1.0f)) return n;
    }
    // At this pace it would take much too long; nothing is lost by not looking further.
    if (boundary > limit &&
        fade * static_cast<float>(2 * limit) > kForgottenLog * static_cast<float>(done + kDecaysAtOnce))
      return kNoWindow;
  }
  return kNoWindow;
}

// ---- cuts ----------------------------------------------------------------------------------------------------------

// Lengths of segments in chunks; 0 = not cut.
struct Cut {
  int fading;   // of heads whose older states fade: each segment begins some chunks early, with no state
  int lasting;  // of heads whose states last: two segments, the second of which runs through the first silently, or
                // more, which are joined
  bool halves;  // two blocks share a head, half of its value columns each
};

GD_HOST_DEVICE inline int segments_of(int chunks, int length) {
  return length <= 0 || chunks <= length ? 1 : rounds_of(chunks, length);
}

// About what takes how long on a block, in units of 1/1.7 ns: fitted to what many cuts of many shapes took on an H200
// (docs/kernels/context_parallel.md).
struct Costs {
  static constexpr float kPerMicrosecond = 1700;
  static constexpr float kChunk = 3090, kHalfChunk = 2440;
  static constexpr float kSilent = 2030, kHalfSilent = 1280;  // without outputs
  static constexpr float kFactors = 2010;                     // of half of the columns
  static constexpr float kJoin = 4960;
  static constexpr float kItem = 8740, kFactorsItem = 10700;  // until the first chunk is there, and for the state
};

// Where segment i of a sequence begins. Heads that fade: equal ones.
GD_HOST_DEVICE inline int fading_begin(int chunks, int segments, int i) {
  const int each = quotient(chunks, segments), more = chunks - each * segments;
  return each * i + (i < more ? i : more);
}
// Heads that last: the first of the joined segments is shorter. It hands its state on when it has ended, with outputs,
// about when the others have their factors, without. Of two, the second runs through the first.
GD_HOST_DEVICE inline int lasting_begin(int chunks, int segments, int i) {
  if (i == 0) return 0;
  if (i == segments) return chunks;
  const float first = segments == 2
                          ? static_cast<float>(chunks) * (Costs::kChunk / (2 * Costs::kChunk - Costs::kSilent))
                          : static_cast<float>(chunks) * ratio(0.56f, static_cast<float>(segments) - 0.44f);
  const int begin = first < 1 ? 1 : static_cast<int>(first);
  return begin + fading_begin(chunks - begin, segments - 1, i - 1);
}

// A window that would take longer than what it saves is none.
GD_HOST_DEVICE inline int window_limit(int length) { return length < 8 ? 12 : length > 20 ? 30 : length * 3 / 2; }

// Whether a piece of a head that fades takes longer than all that is done for the last segment of one that lasts.
GD_HOST_DEVICE inline bool is_longer_than_chain(const Cut& cut, int chunks) {
  const int pieces = segments_of(chunks, cut.fading), segments = segments_of(chunks, cut.lasting);
  const float chunk = cut.halves ? Costs::kHalfChunk : Costs::kChunk;
  const auto length = static_cast<float>(chunks);
  return ratio(length, static_cast<float>(pieces)) * chunk >
         ratio(length, static_cast<float>(segments)) * (chunk + Costs::kFactors) +
             static_cast<float>(segments) * Costs::kJoin;
}

// Sequences of one length, and how many of their heads fade and last.
struct LengthClass {
  int chunks, fading, lasting;
};
constexpr int kMaxClasses = 4;
constexpr int kShares = 5;    // 0, a quarter, a half, three quarters and all of the heads last
constexpr int kCutParts = 8;  // blocks that look for the best cut for one share
constexpr int kPrepareHelpers = 1 + kShares * kCutParts;  // blocks of prepare that sort and choose cuts

// Of sequences of these lengths. More lengths than classes: those that are alike share one.
GD_HOST_DEVICE inline int length_classes(const int* chunks, int count, int heads, int share, LengthClass* classes) {
  int classes_count = 0, longest = 0;
  const int lasting = quotient(heads * share + (kShares - 1) / 2, kShares - 1);
  for (int n = 0; n < count; ++n) {
    if (chunks[n] > longest) longest = chunks[n];
    if (chunks[n] == 0 || classes_count > kMaxClasses) continue;
    int i = 0;
    while (i < classes_count && classes[i].chunks != chunks[n]) ++i;
    if (i < kMaxClasses) {
      if (i == classes_count) classes[classes_count++] = {chunks[n], 0, 0};
      classes[i].fading += heads - lasting;
      classes[i].lasting += lasting;
    } else {
      classes_count = kMaxClasses + 1;
    }
  }
  if (classes_count <= kMaxClasses) return classes_count;
  classes_count = 0;
  for (int part = 0; part < kMaxClasses; ++part) {  // above 3/4 of the longest, above 1/2, above 1/4, the rest
    int total = 0, number = 0;
    for (int n = 0; n < count; ++n) {
      if (chunks[n] == 0 || quotient((longest - chunks[n]) * kMaxClasses, longest) != part) continue;
      total += chunks[n];
      ++number;
    }
    if (number == 0) continue;
    classes[classes_count++] = {quotient(total + number / 2, number), number * (heads - lasting), number * lasting};
  }
  return classes_count;
}

struct Limits {
  int blocks, entries, boundaries;
};

// ---- how long a cut takes ------------------------------------------------------------------------------------------

struct Pieces {
  int number = 0;
  float size = 0;
};
// Of the sequences of one length, in the classes of the list of work: see EntryCounts.
struct ClassPieces {
  Pieces first, fading, lasting, joins, waiting;
  int most, boundaries;  // entries if heads turn out to be of the other kind; boundaries
};
GD_HOST_DEVICE inline ClassPieces pieces_of(const Cut& cut, const LengthClass& c) {
  constexpr float kWindow = 6;  // chunks, of gates as models have them
  const int per_head = cut.halves ? 2 : 1;
  const float chunk = cut.halves ? Costs::kHalfChunk : Costs::kChunk;
  const float silent = cut.halves ? Costs::kHalfSilent : Costs::kSilent;
  const auto chunks = static_cast<float>(c.chunks);
  const int pieces = segments_of(c.chunks, cut.fading), segments = segments_of(c.chunks, cut.lasting);
  ClassPieces p;
  const float early = kWindow * ratio(static_cast<float>(pieces - 1), static_cast<float>(pieces));
  p.fading = {c.fading * pieces * per_head,
              ratio(chunks, static_cast<float>(pieces)) * chunk + early * silent + Costs::kItem};
  const int begin = segments > 1 ? lasting_begin(c.chunks, segments, 1) : c.chunks;
  if (segments <= 2) {
    p.lasting = {c.lasting * segments * per_head, static_cast<float>(begin) * chunk + Costs::kItem};
  } else {
    const float rest = ratio(chunks - static_cast<float>(begin), static_cast<float>(segments - 1));
    p.first = {c.lasting * (2 * (segments - 2) + per_head), rest * Costs::kFactors + Costs::kFactorsItem};
    p.joins = {c.lasting * 2, static_cast<float>(segments - 2) * Costs::kJoin};
    p.waiting = {c.lasting * (segments - 1) * per_head, rest * chunk + Costs::kItem};
  }
  p.boundaries = segments > 2 ? c.lasting * (segments - 1) : 0;
  const int joined = segments * per_head + 2 * segments;
  p.most = (c.fading + c.lasting) * (pieces * per_head > joined ? pieces * per_head : joined);
  return p;
}

// What happens when blocks take pieces of work one after the other. Blocks that come free at about the same time are
// taken together, in at most kGroups groups; loops over them have constant bounds, so that all of it stays in
// registers.
struct Timeline {
  static constexpr int kGroups = 4;
  float free[kGroups];  // when they are
  int blocks[kGroups];
  int all;
  float end = 0;

  GD_HOST_DEVICE explicit Timeline(int count) : all(count) {
    for (int i = 0; i < kGroups; ++i) {
      free[i] = 0;
      blocks[i] = i == 0 ? count : 0;
    }
  }
  // The last of them ends then. `ready` is when the first of them may begin, `spread` how much later the last.
  GD_HOST_DEVICE float run(const Pieces& pieces, float ready = 0, float spread = 0) {
    float last = 0;
    int left = pieces.number;
    if (left >= 2 * all) {  // rounds of all blocks
      const int rounds = quotient(left, all) - 1;
      left -= rounds * all;
      for (int i = 0; i < kGroups; ++i)
        free[i] = (free[i] > ready ? free[i] : ready) + static_cast<float>(rounds) * pieces.size;
    }
    while (left > 0) {
      int first = -1, there = 0;
      float time = 0;
      for (int i = 0; i < kGroups; ++i) {
        if (blocks[i] == 0 || (first >= 0 && free[i] >= time)) continue;
        first = i;
        there = blocks[i];
        time = free[i];
      }
      const float may =
          ready + spread * ratio(static_cast<float>(pieces.number - left), static_cast<float>(pieces.number));
      const float done = (time > may ? time : may) + pieces.size;
      const int taken = left < there ? left : there;
      for (int i = 0; i < kGroups; ++i) blocks[i] -= i == first ? taken : 0;
      add(done, taken);
      if (done > last) last = done;
      left -= taken;
    }
    if (last > end) end = last;
    return last;
  }
  GD_HOST_DEVICE void add(float time, int count) {
    int nearest = -1, empty = -1;
    float distance = 0;
    for (int i = 0; i < kGroups; ++i) {
      const float d = free[i] > time ? free[i] - time : time - free[i];
      if (blocks[i] == 0) {
        empty = i;
      } else if (nearest < 0 || d < distance) {
        nearest = i;
        distance = d;
      }
    }
    const bool joins = empty < 0 || (nearest >= 0 && distance < 0.03f * time);
    for (int i = 0; i < kGroups; ++i) {
      if (i != (joins ? nearest : empty)) continue;
      const auto a = static_cast<float>(joins ? blocks[i] : 0), b = static_cast<float>(count);
      free[i] = ratio(free[i] * a + time * b, a + b);
      blocks[i] = (joins ? blocks[i] : 0) + count;
    }
  }
};

// How long a cut takes, about: its list of work, taken in the order that it will have.
constexpr float kNever = 1e30f;
constexpr int kMostRounds = 6;  // more pieces than that are not worth a thought
GD_HOST_DEVICE inline float time_of(const Cut& cut, const LengthClass* classes, int count, const Limits& limits,
                                    ClassPieces* memory) {
  int entries = 0, boundaries = 0, firsts = 0, pieces = 0;
  float joins = 0;
  for (int i = 0; i < count; ++i) {
    const ClassPieces p = memory[i] = pieces_of(cut, classes[i]);
    entries += p.most;
    boundaries += p.boundaries;
    firsts += p.first.number;
    pieces += p.fading.number + p.lasting.number + p.waiting.number;
    if (p.joins.number > 0 && p.joins.size > joins) joins = p.joins.size;
  }
  const bool is_cut = cut.fading || cut.lasting;
  if (is_cut && (entries > limits.entries || boundaries > limits.boundaries || pieces > kMostRounds * limits.blocks))
    return kNever;

  Timeline timeline(limits.blocks);
  const bool longest_first = firsts == 0 || is_longer_than_chain(cut, classes[0].chunks);
  int early = longest_first ? pieces : limits.blocks - firsts;  // of those who wait for nothing, how many before joins
  float factors = 0;
  for (int pass = 0; pass < 5; ++pass) {
    const bool is_first = pass == (longest_first ? 1 : 0), is_early = pass == (longest_first ? 0 : 1);
    int passed = 0;
    for (int i = 0; i < count; ++i) {
      const ClassPieces& p = memory[i];
      if (is_first) {
        const float end = timeline.run(p.first);
        if (end > factors) factors = end;
      } else if (pass == 2) {
        timeline.run(p.joins, factors);
      } else if (pass == 4) {
        timeline.run(p.waiting, factors, joins);
      } else {
        for (int kind = 0; kind < 2; ++kind) {
          Pieces some = kind == 0 ? p.fading : p.lasting;
          const int before = early > passed ? early - passed : 0, now = some.number < before ? some.number : before;
          passed += some.number;
          some.number = is_early ? now : some.number - now;
          timeline.run(some);
        }
      }
    }
  }
  return timeline.end;
}

// The cuts that are considered, by number; the first are the simplest.
constexpr int kFadingCount = 16, kLastingCount = 14;  // not cut; 256, 192, 128, 96 and so on down to 2, to 4
constexpr int kCuts = 2 * kFadingCount * kLastingCount;
static_assert(kCuts % kCutParts == 0);
struct PricedCut {
  float price;
  int number;  // or that there is nothing to cut, and the list of work is complete
};
constexpr int kIsListed = -1;
GD_HOST_DEVICE inline int length_number(int i) { return i == 0 ? 0 : (i % 2 ? 256 : 192) >> ((i - 1) / 2); }
GD_HOST_DEVICE inline Cut cut_number(int i) {
  return {length_number(i / 2 % kFadingCount), length_number(i / 2 / kFadingCount), i % 2 != 0};
}
// The estimate is not that good: a cut has to be better by more than this.
constexpr float kWorthCutting = 1.03f;
GD_HOST_DEVICE inline float price_of(int number, const LengthClass* classes, int count, const Limits& limits,
                                     ClassPieces* memory) {
  const float time = time_of(cut_number(number), classes, count, limits, memory);
  return number == 0 ? time : time * kWorthCutting;
}

// The fastest of them all. (On the device many threads price one each.)
inline PricedCut fastest_cut(const LengthClass* classes, int count, const Limits& limits, bool may_cut) {
  ClassPieces memory[kMaxClasses];
  PricedCut best{kNever, 0};
  for (int number = 0; number < (may_cut ? kCuts : 2); ++number) {
    const float price = price_of(number, classes, count, limits, memory);
    if (price < best.price) best = {price, number};
  }
  return best;
}

// Whether so many heads, all of one length, keep the card busy as they are, so that cutting them gains nothing.
constexpr float kBusy = 0.9f;
GD_HOST_DEVICE inline bool are_busy(int heads, int blocks) {
  return static_cast<float>(heads) >= kBusy * static_cast<float>(rounds_of(heads, blocks) * blocks);
}
GD_HOST_DEVICE inline bool keeps_busy(const LengthClass* classes, int count, int blocks) {
  return count == 1 ? are_busy(classes[0].fading + classes[0].lasting, blocks) : count == 0;
}

}  // namespace gatedelta::cuda
