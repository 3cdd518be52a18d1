// The cost model: how long a cut takes on the GPU, and which of the candidates is the fastest.
#pragma once

#include "cuda/device/decay.hpp"
#include "cuda/sm90/schedule/balanced_list.hpp"
#include "cuda/sm90/schedule/cut.hpp"

namespace gatedelta::cuda::sm90 {

// Whether a piece of a decaying head takes longer than everything up to the last segment of a persistent one.
GD_HOST_DEVICE inline bool is_longer_than_chain(const Cut& cut, int chunks) {
  const int pieces = segments_of(chunks, cut.decaying), segments = segments_of(chunks, cut.persistent);
  const float chunk = cut.halves ? Costs::kHalfChunk : Costs::kChunk;
  const auto length = static_cast<float>(chunks);
  return fast_div(length, static_cast<float>(pieces)) * chunk >
         fast_div(length, static_cast<float>(segments)) * (chunk + Costs::kTransition) +
             static_cast<float>(segments) * Costs::kMerge;
}

// Sequences of one length, and how many of their heads are decaying and persistent.
struct LengthClass {
  int chunks, decaying, persistent;
};
constexpr int kMaxClasses = 4;
constexpr int kShares = 5;                                 // 0, 1/4, 1/2, 3/4 and all of the heads are persistent
constexpr int kCutBlocks = 16;                             // CTAs that search the cuts for one share
constexpr int kPrepareHelpers = 1 + kShares * kCutBlocks;  // CTAs of prepare that sort and search cuts

// ChunkedSequences grouped by length. The result does not depend on the order in which they are added.
struct Lengths {
  int longest = 0, count = 0;       // count: of different lengths
  int different[kMaxClasses] = {};  // the first few of those
  int chunks[kMaxClasses] = {}, sequences[kMaxClasses] = {};

  // Up to kMaxClasses lengths: a class each, longest first. More: quarters of the longest length.
  GD_HOST_DEVICE int class_of(int length) const {
    if (count > kMaxClasses) return floor_div((longest - length) * kMaxClasses, longest);
    int longer = 0;
    GD_UNROLL for (int i = 0; i < kMaxClasses; ++i) longer += i < count && different[i] > length;
    return longer;
  }
  GD_HOST_DEVICE int classes(int heads, int share, LengthClass* classes) const {
    const int persistent = floor_div(heads * share + (kShares - 1) / 2, kShares - 1);
    int found = 0;
    for (int i = 0; i < kMaxClasses; ++i)
      if (sequences[i] > 0)
        classes[found++] = {floor_div(chunks[i] + sequences[i] / 2, sequences[i]), sequences[i] * (heads - persistent),
                            sequences[i] * persistent};
    return found;
  }
};
GD_HOST_DEVICE inline bool is_first_of_its_length(const int* chunks, int n) {
  bool is_first = true;
  for (int before = 0; before < n; ++before) is_first = is_first && chunks[before] != chunks[n];
  return is_first;
}
// Host versions; on the device one thread handles one sequence.
inline Lengths lengths_of(const int* chunks, int count) {
  Lengths lengths;
  for (int n = 0; n < count; ++n) {
    if (chunks[n] == 0 || !is_first_of_its_length(chunks, n)) continue;
    if (lengths.count < kMaxClasses) lengths.different[lengths.count] = chunks[n];
    ++lengths.count;
    if (chunks[n] > lengths.longest) lengths.longest = chunks[n];
  }
  for (int n = 0; n < count; ++n) {
    if (chunks[n] == 0) continue;
    const int i = lengths.class_of(chunks[n]);
    lengths.chunks[i] += chunks[n];
    ++lengths.sequences[i];
  }
  return lengths;
}
inline int length_classes(const int* chunks, int count, int heads, int share, LengthClass* classes) {
  return lengths_of(chunks, count).classes(heads, share, classes);
}

struct Pieces {
  int number = 0;
  float size = 0;
};
// Pieces of the sequences of one length, by their class in the work list (EntryCounts).
struct ClassPieces {
  Pieces first, decaying, persistent, merges, waiting;
  int most, boundaries;  // most: entries if the heads turn out to be of the other kind
};
GD_HOST_DEVICE inline ClassPieces pieces_of(const Cut& cut, const LengthClass& c) {
  constexpr float kUsualWarmup = 6;  // chunks, for the gates of real models
  const int per_head = cut.halves ? 2 : 1;
  const float chunk = cut.halves ? Costs::kHalfChunk : Costs::kChunk;
  const float warmup_tokens = cut.halves ? Costs::kHalfWarmup : Costs::kWarmup;
  const auto chunks = static_cast<float>(c.chunks);
  const int pieces = segments_of(c.chunks, cut.decaying);
  // If the warm-up of every boundary may reach the beginning, persistent heads are cut like decaying ones.
  const int last = c.chunks - floor_div(c.chunks, pieces);
  const bool are_alike = pieces > 1 && last <= warmup_limit(cut.decaying);
  const int segments = are_alike ? 1 : segments_of(c.chunks, cut.persistent);
  ClassPieces p;
  const float early = kUsualWarmup * fast_div(static_cast<float>(pieces - 1), static_cast<float>(pieces));
  p.decaying = {c.decaying * pieces * per_head,
                fast_div(chunks, static_cast<float>(pieces)) * chunk + early * warmup_tokens + Costs::kItem};
  const int begin = segments > 1 ? persistent_begin(c.chunks, segments, 1) : c.chunks;
  if (are_alike) {
    p.persistent = {c.persistent * pieces * per_head, fast_div(chunks, static_cast<float>(pieces)) * chunk +
                                                          static_cast<float>(last) * warmup_tokens + Costs::kItem};
  } else if (segments <= 2) {
    p.persistent = {c.persistent * segments * per_head, static_cast<float>(begin) * chunk + Costs::kItem};
  } else {
    const float rest = fast_div(chunks - static_cast<float>(begin), static_cast<float>(segments - 1));
    p.first = {c.persistent * (2 * (segments - 2) + per_head), rest * Costs::kTransition + Costs::kTransitionItem};
    p.merges = {c.persistent * 2, static_cast<float>(segments - 2) * Costs::kMerge};
    p.waiting = {c.persistent * (segments - 1) * per_head, rest * chunk + Costs::kItem};
  }
  p.boundaries = segments > 2 ? c.persistent * (segments - 1) : 0;
  const int merged = segments * per_head + 2 * segments;
  p.most = (c.decaying + c.persistent) * (pieces * per_head > merged ? pieces * per_head : merged);
  return p;
}

struct PiecesOf {
  ClassPieces classes[kMaxClasses];
  PiecesOf(const Cut& cut, const LengthClass* lengths, int count) {
    for (int i = 0; i < count; ++i) classes[i] = pieces_of(cut, lengths[i]);
  }
};

// Simulates CTAs that take pieces one after the other. CTAs that become free at about the same time form a group; there
// are at most kGroups, earliest first. Loops over groups have constant bounds and select instead of branching:
// everything stays in registers and the threads of a warp stay together.
struct Timeline {
  static constexpr int kGroups = 3;
  static constexpr float kNone = 1e30f;
  float free[kGroups];  // when each group is; kNone: no such group
  int blocks[kGroups];
  int all;
  float end = 0;

  GD_HOST_DEVICE explicit Timeline(int count) : all(count) {
    for (int i = 0; i < kGroups; ++i) {
      free[i] = i == 0 ? 0.0f : kNone;
      blocks[i] = i == 0 ? count : 0;
    }
  }
  // Runs pieces and returns when the last of them ends. The first may start at `ready`, the last `spread` later.
  GD_HOST_DEVICE float run(const Pieces& pieces, float ready = 0, float spread = 0) {
    float last = 0;
    int left = pieces.number;
    if (left >= 2 * all) {  // whole rounds of all CTAs
      const int rounds = floor_div(left, all) - 1;
      left -= rounds * all;
      for (int i = 0; i < kGroups; ++i) free[i] = fmaxf(free[i], ready) + static_cast<float>(rounds) * pieces.size;
    }
    const float later = fast_div(spread, static_cast<float>(pieces.number));
    float may = ready + later * static_cast<float>(pieces.number - left);
    GD_NO_UNROLL while (left > 0) {
      const int next_ticket = left < blocks[0] ? left : blocks[0];
      const float next = may + later * static_cast<float>(next_ticket);
      const float done = fmaxf(free[0], may) + pieces.size, last_done = fmaxf(free[0], next - later) + pieces.size;
      take(next_ticket);
      add(0.5f * (done + last_done), next_ticket);
      last = fmaxf(last, last_done);
      left -= next_ticket;
      may = next;
    }
    end = fmaxf(end, last);
    return last;
  }
  // Takes CTAs from the first group; when it is empty, the others move up.
  GD_HOST_DEVICE void take(int count) {
    const bool is_all = count == blocks[0];
    blocks[0] -= count;
    for (int i = 0; i < kGroups; ++i) {
      const float next = i + 1 < kGroups ? free[(i + 1) % kGroups] : kNone;
      const int next_blocks = i + 1 < kGroups ? blocks[(i + 1) % kGroups] : 0;
      free[i] = is_all ? next : free[i];
      blocks[i] = is_all ? next_blocks : blocks[i];
    }
  }
  // Adds CTAs to the nearest group, or as a new group if that is too far away and there is room.
  GD_HOST_DEVICE void add(float time, int count) {
    int nearest = 0, there = blocks[0];
    float theirs = free[0], distance = fabsf(free[0] - time);
    for (int i = 1; i < kGroups; ++i) {
      const float d = fabsf(free[i] - time);
      const bool is_nearer = d < distance;
      nearest = is_nearer ? i : nearest;
      there = is_nearer ? blocks[i] : there;
      theirs = is_nearer ? free[i] : theirs;
      distance = is_nearer ? d : distance;
    }
    const bool is_near = distance<0.03f * time, is_full = blocks[kGroups - 1]> 0, is_added = is_near | is_full;
    const float share = fast_div(static_cast<float>(count), static_cast<float>(there + count));
    const float together = theirs + (time - theirs) * share;
    float times[kGroups];
    int counts[kGroups];
    for (int i = 0; i < kGroups; ++i) {
      const float before = i > 0 ? free[(i + kGroups - 1) % kGroups] : 0.0f;
      const int blocks_before = i > 0 ? blocks[(i + kGroups - 1) % kGroups] : 0;
      const bool is_mine = i == nearest, is_earlier = free[i] <= time, is_after = before > time;
      const float merged = is_mine ? together : free[i], inserted = fminf(fmaxf(before, time), free[i]);
      const int merged_blocks = is_mine ? there + count : blocks[i];
      int inserted_blocks = is_after ? blocks_before : count;
      inserted_blocks = is_earlier ? blocks[i] : inserted_blocks;
      times[i] = is_added ? merged : inserted;
      counts[i] = is_added ? merged_blocks : inserted_blocks;
    }
    for (int i = 0; i < kGroups; ++i) {
      free[i] = times[i];
      blocks[i] = counts[i];
    }
  }
};

// Estimated cycles of a cut: its work list, run in list order. Pieces that wait, and those they wait for, have about
// the same size in all classes and are counted as one.
constexpr float kNever = 1e30f;
constexpr float kMostRounds = 6;  // cuts with more rounds of pieces than this are not considered
GD_HOST_DEVICE inline float cycles_of(const Cut& cut, const ClassPieces* classes, int count, int longest,
                                      const Limits& limits) {
  int entries = 0, boundaries = 0, pieces = 0;
  Pieces first, merges, waiting;
  GD_NO_UNROLL for (int i = 0; i < count; ++i) {
    const ClassPieces p = classes[i];
    entries += p.most;
    boundaries += p.boundaries;
    pieces += p.decaying.number + p.persistent.number + p.waiting.number;
    first.number += p.first.number;
    first.size += static_cast<float>(p.first.number) * p.first.size;
    waiting.number += p.waiting.number;
    waiting.size += static_cast<float>(p.waiting.number) * p.waiting.size;
    merges.number += p.merges.number;
    if (p.merges.number > 0 && p.merges.size > merges.size) merges.size = p.merges.size;
  }
  const bool is_cut = cut.decaying || cut.persistent;
  const float most_halves = first.number > 0 ? limits.merged_halves : kMostHalves;
  const bool is_crowded = static_cast<float>(first.number + pieces - waiting.number) >
                          (cut.halves ? most_halves : kMostRounds) * static_cast<float>(limits.blocks);
  if (is_cut && (entries > limits.entries || boundaries > limits.boundaries || is_crowded)) return kNever;
  if (first.number > 0) {
    first.size = fast_div(first.size, static_cast<float>(first.number));
    waiting.size = fast_div(waiting.size, static_cast<float>(waiting.number));
  }

  Timeline timeline(limits.blocks);
  const bool longest_first = first.number == 0 || is_longer_than_chain(cut, longest);
  // How many of the pieces that wait for nothing stand before the merges.
  const int early = longest_first ? pieces : limits.blocks - first.number;
  float transitions = 0;
  GD_NO_UNROLL for (int pass = 0; pass < 5; ++pass) {
    const bool is_first = pass == (longest_first ? 1 : 0), is_early = pass == (longest_first ? 0 : 1);
    const bool is_one_kind = is_first || pass == 2 || pass == 4;
    int passed = 0;
    GD_NO_UNROLL for (int i = 0; i < (is_one_kind ? 1 : 2 * count); ++i) {
      Pieces some = is_first ? first : pass == 2 ? merges : waiting;
      if (!is_one_kind) {
        some = i % 2 == 0 ? classes[i / 2].decaying : classes[i / 2].persistent;
        const int before = early > passed ? early - passed : 0, now = some.number < before ? some.number : before;
        passed += some.number;
        some.number = is_early ? now : some.number - now;
      }
      if (some.number == 0) continue;
      const bool waits = pass == 2 || pass == 4;
      const float end = timeline.run(some, waits ? transitions : 0.0f, pass == 4 ? merges.size : 0.0f);
      transitions = is_first ? end : transitions;
    }
  }
  return timeline.end;
}

// The candidate cuts, by number; the first are the simplest.
constexpr int kDecayingLengths = 16, kPersistentLengths = 14;  // uncut, then 256, 192, 128, 96, ... down to 2, or to 4
constexpr int kCuts = 2 * kDecayingLengths * kPersistentLengths;
static_assert(kCuts % kCutBlocks == 0);
struct CutCost {
  float cost;
  int number;  // negative: lengths alone decide, as UncutList -number says, and the work list is complete
};
GD_HOST_DEVICE inline int length_number(int i) { return i == 0 ? 0 : (i % 2 ? 256 : 192) >> ((i - 1) / 2); }
// Sequences of more than 512 chunks get longer segments.
GD_HOST_DEVICE inline int length_scale(int longest) {
  int scale = 1;
  while (longest > 512 * scale) scale *= 2;
  return scale;
}
GD_HOST_DEVICE inline Cut cut_number(int i, int scale) {
  return {scale * length_number(i / 2 % kDecayingLengths), scale * length_number(i / 2 / kDecayingLengths), i % 2 != 0};
}
// The estimate has an error: a cut must win by more than this.
constexpr float kWorthCutting = 1.03f;
GD_HOST_DEVICE inline float cost_of(const Cut& cut, const ClassPieces* classes, int count, int longest,
                                    const Limits& limits) {
  const float time = cycles_of(cut, classes, count, longest, limits);
  return cut.decaying || cut.persistent ? time * kWorthCutting + Costs::kCut : time;
}

// Host version of the search; on the device many threads compute the cost of one cut each.
inline CutCost fastest_cut(const LengthClass* classes, int count, int longest, const Limits& limits,
                           bool supports_cut) {
  CutCost best{kNever, 0};
  for (int number = 0; number < (supports_cut ? kCuts : 2); ++number) {
    const Cut cut = cut_number(number, length_scale(longest));
    const float cost = cost_of(cut, PiecesOf(cut, classes, count).classes, count, longest, limits);
    if (cost < best.cost) best = {cost, number};
  }
  return best;
}

// Lists that lengths alone decide. Of the first two the number is that of parts per head.
enum UncutList { kMayBeCut, kWholeHeads, kHalfHeads, kBalancedHeads };

// Parts per head with which uncut sequences of one length fill the GPU, so that a cut gains nothing: 1 (whole heads),
// or 2 (halves that all run at once, for short sequences only: two halves cost more than one whole). 0: they do not
// fill it.
constexpr float kBusy = 0.9f;
constexpr int kShortChunks = 64;
GD_HOST_DEVICE inline bool are_busy(int items, int blocks) {
  return static_cast<float>(items) >= kBusy * static_cast<float>(ceil_div(items, blocks) * blocks);
}
GD_HOST_DEVICE inline int busy_parts(int heads, int64_t chunks, int blocks) {
  if (are_busy(heads, blocks)) return 1;
  return chunks <= kShortChunks && 2 * heads <= blocks && are_busy(2 * heads, blocks) ? 2 : 0;
}
GD_HOST_DEVICE inline int busy_parts(const LengthClass* classes, int count, int blocks) {
  if (count != 1) return count == 0;
  return busy_parts(classes[0].decaying + classes[0].persistent, classes[0].chunks, blocks);
}

// Whether a balanced list is faster than whole heads: each CTA has one item more, but none waits for the last round.
constexpr float kItemChunks = 6;  // an item more where all CTAs read and write states, in chunks
GD_HOST_DEVICE inline bool is_balanced(const Lengths& lengths, int heads, int blocks) {
  int chunks = 0;
  GD_UNROLL for (int i = 0; i < kMaxClasses; ++i) chunks += lengths.chunks[i] * heads;
  if (chunks == 0 || chunks < int64_t{lengths.longest} * blocks) return false;
  Timeline whole_heads(blocks);
  GD_NO_UNROLL for (int i = 0; i < kMaxClasses; ++i) if (lengths.sequences[i] > 0)
      whole_heads.run({lengths.sequences[i] * heads,
                       fast_div(static_cast<float>(lengths.chunks[i]), static_cast<float>(lengths.sequences[i]))});
  const float each = fast_div(static_cast<float>(chunks), static_cast<float>(blocks));
  return kBusy * whole_heads.end > each + kItemChunks;
}

}  // namespace gatedelta::cuda::sm90
