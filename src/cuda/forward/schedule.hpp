// How sequences are cut into pieces of work, so that the card is full also where there are few heads (context
// parallelism): what a piece is, when an older state may be forgotten, which cut is the fastest. Plain arithmetic,
// which the kernels (schedule.cuh) and the tests share. See docs/kernels/context_parallel.md.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/forward/layout.hpp"

namespace gatedelta::cuda {

// Division and powers in a few instructions: few threads do a great deal of it, and each one they need not load counts.
GD_HOST_DEVICE inline float fast_div(float a, float b) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return a * inverse;
#else
  return a / b;
#endif
}
GD_HOST_DEVICE inline float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}
GD_HOST_DEVICE inline int floor_div(int a, int b) {  // rounded down; neither is negative
  const auto about = static_cast<int>(fast_div(static_cast<float>(a), static_cast<float>(b)));
  const int left = a - about * b;  // small, but perhaps more than b, or negative
  const int q = about + static_cast<int>(fast_div(static_cast<float>(left), static_cast<float>(b)));
  const int rest = a - q * b;
  return q + (rest >= b) - (rest < 0);
}
GD_HOST_DEVICE inline int ceil_div(int items, int blocks) { return floor_div(items + blocks - 1, blocks); }

// ---- pieces of work ------------------------------------------------------------------------------------------------

// What the chain of chunks is for: outputs; the states before every chunk; or the gradients of states, from a
// sequence's last chunk to its first. Of those, `mirrored` chunk r is the one that has r after it, and everything here
// is said of mirrored chunks.
enum class Pass { kForward, kStates, kBackward };

enum WorkKind {
  kNoWork = -1,  // the end of the list
  kOutputs,      // chunks of a sequence, perhaps after some that only move the state
  kTransition,   // S_loc and M of a segment, S_out = M S_in + S_loc, for half of the columns of each
  kMerge,        // the states at the ends of segments, one after the other
  kDryRun,       // a chunk of nothing, of which nothing comes
};
enum Half { kWhole = -1, kNoValues = -2 };  // of the value columns; or 0, 1
// Or the number of a boundary. A window's end is one of the states that the forward has kept, `pair` its number.
enum From { kFromInitial = -1, kFromZero = -2, kFromSaved = -3 };
enum To { kToFinal = -1, kToNowhere = -2 };  // or the number of a boundary

// What a block of the main kernel takes at a time; all that is to be known of it, in a few loads.
struct alignas(64) WorkItem {
  int kind, sequence, head, key_head;  // key_head: of a join, the half it joins
  int half, batch, token, tokens;      // from its first token on; no rows: nothing to do
  int warmup_tokens;                   // tokens at its beginning without outputs
  int prepared;  // number of its first chunk and head in the workspace; of a join: its first image of M
  int from, to;
  int origin;    // first token of the sequence
  int seq_head;  // of sequence and head: which counter of readers
  int readers;   // warpgroups that have to have read the initial state before the final one may be in its place
  int unused;    // all 64 bytes are copied, a word per lane
};
static_assert(sizeof(WorkItem) == 64);

// A chunk of one value head, or of half of one; or a step of a join. Chunks are walked through forwards or, for
// gradients, backwards: then the ragged one comes first.
template <bool kReverse>
struct ChunkAt {
  int batch, token, tokens_left;  // rows the item has from here on; 0 or less = past the last chunk
  int warmup_tokens;              // chunks without outputs from here on, in tokens; 0 or less = none
  int head, half;                 // half: see schedule.hpp
  GD_HOST_DEVICE int tokens() const {
    return kReverse ? (tokens_left - 1) % kChunkTokens + 1 : tokens_left < kChunkTokens ? tokens_left : kChunkTokens;
  }
  GD_HOST_DEVICE bool is_whole() const {
    return kReverse ? tokens_left % kChunkTokens == 0 : tokens_left >= kChunkTokens;
  }
  GD_HOST_DEVICE bool is_warmup() const { return warmup_tokens > 0; }
  GD_HOST_DEVICE ChunkAt moved(int by) const {
    return {batch, token + by, tokens_left - by, warmup_tokens - by, head, half};
  }
  GD_HOST_DEVICE ChunkAt next() const {
    if constexpr (kReverse)
      return {batch, token - kChunkTokens, tokens_left - tokens(), warmup_tokens - kChunkTokens, head, half};
    return moved(kChunkTokens);
  }
  // The one before this, if that was whole.
  GD_HOST_DEVICE ChunkAt before() const {
    if constexpr (kReverse)
      return {batch, token + kChunkTokens, tokens_left + kChunkTokens, warmup_tokens + kChunkTokens, head, half};
    return moved(-kChunkTokens);
  }
  GD_HOST_DEVICE static ChunkAt first_of(const WorkItem& w) {
    return {w.batch, w.token, w.tokens, w.warmup_tokens, w.head, w.half};
  }
  // The item's chunk from which on there are so many tokens_left, if the ragged one came last.
  GD_HOST_DEVICE static ChunkAt of(const WorkItem& w, int left) {
    if (!kReverse) return first_of(w).moved(w.tokens - left);
    ChunkAt at = first_of(w);
    const int passed = w.tokens - left;  // whole chunks
    at.token -= passed;
    if (passed > 0) at.tokens_left = (w.tokens + kChunkTokens - 1) / kChunkTokens * kChunkTokens - passed;
    return at;
  }
};

// All chunks of a sequence, from the last to the first.
GD_HOST_DEVICE inline WorkItem mirrored(const WorkItem& whole, int value_heads) {
  WorkItem item = whole;
  const int before = floor_div(item.tokens + kChunkTokens - 1, kChunkTokens) - 1;
  item.token += before > 0 ? before * kChunkTokens : 0;
  item.prepared += before > 0 ? before * value_heads : 0;
  return item;
}

// Of an item of a whole sequence, the chunks from `start` to `end`.
template <Pass kPass>
GD_HOST_DEVICE void cut_item(WorkItem& item, int start, int end, int chunks, int value_heads) {
  if (end != chunks) item.to = kToNowhere;
  const int tokens = item.tokens;
  if constexpr (kPass == Pass::kBackward) {
    item = mirrored(item, value_heads);
    item.token -= start * kChunkTokens;
    item.prepared -= start * value_heads;
    item.tokens = (start == 0 ? tokens : (chunks - start) * kChunkTokens) - (chunks - end) * kChunkTokens;
  } else {
    item.token += start * kChunkTokens;
    item.prepared += start * value_heads;
    item.tokens = (end == chunks ? tokens : end * kChunkTokens) - start * kChunkTokens;
  }
}

struct Schedule {
  int count;         // of entries
  int next_ticket;   // entries that blocks took one after the other
  int static_items;  // and those before, of which each block has the one with its number
};

struct Limits {
  int blocks, entries, boundaries;
  GD_HOST_DEVICE bool operator==(const Limits& other) const {
    return blocks == other.blocks && entries == other.entries && boundaries == other.boundaries;
  }
};

// The list of the gradients of states as a forward has made it for its backward, which then need not; under the limits
// of which it was made. Entries come behind it.
struct alignas(64) SavedList {
  static constexpr int kNone = -1, kEntries = 1023;
  Schedule schedule;  // its count: kNone if there is no list, or if it would have been longer
  Limits limits;
  GD_HOST_DEVICE WorkItem* items() { return reinterpret_cast<WorkItem*>(this + 1); }
  GD_HOST_DEVICE const WorkItem* items() const { return reinterpret_cast<const WorkItem*>(this + 1); }
};
constexpr int kSavedListBytes = sizeof(SavedList) + SavedList::kEntries * sizeof(WorkItem);
static_assert(kSavedListBytes == 65536);

// A boundary between segments: M of the segment before it as two 16-bit parts, each a wgmma operand, and its S_loc,
// in whose place the state at its end comes.
constexpr int kStateTileBytes = 128 * 128 * 2;
constexpr int kBoundaryTiles = 4;  // M's upper part, its lower part, and two of floats
constexpr int kBoundaryBytes = kBoundaryTiles * kStateTileBytes;
constexpr int kMergeTiles = 3;  // that a join of half of the columns reads
// What a boundary's counter says: four warpgroups have written factors; and two a half of the state, each worth two.
enum Ready { kTransitionReady = 4, kStateReady = 8 };

// How the list of work comes to be: by a plan; or, where sequences are too many for that and work is enough, without
// one, the longest first; or, where they are as long as each other and fill the card as they are, or are too short to
// be cut, already during prepare.
enum ListMode { kPlannedList, kSortedList, kEvenList };
// What is planned at most.
constexpr int kMaxPlannedSequences = 64, kMaxPlannedSeqHeads = 1024, kMaxPlannedEntries = 6144;

// ---- when an older state may be forgotten --------------------------------------------------------------------------

// What prepare notes of a chunk and value head. A state from before is at most 2^fade of itself after it (every token
// scales it by its gate and by |1 - beta |k|^2| at most), and what the chunk writes weighs `written` at its end: the
// sum of beta_j times the decay since j. Negative: some token may make a state grow, nothing is known of weights.
struct alignas(8) ChunkDecay {
  float log2_left, written;
};

// Chunks before a boundary from which the state there can be computed to fp32's accuracy without what was before them;
// all there are if they reach the beginning; none if that takes more than `limit`. What is left out is below 2^-24 of
// the older state *and* of what was written since, for if little was written the little counts.
constexpr float kNegligible = 5.9604645e-8f, kNegligibleLog2 = -24.0f;  // 2^-24
// A gradient of a state has no such weight: what is added to it depends on d_o, which may be 0 for as long as it likes.
// All that is known is what is left of the older one. Below 2^-48 of it nothing counts beside what it has led to
// before, nor beside what came since unless that is 2^-24 of it or less.
constexpr float kNegligibleGradientLog2 = -48.0f;
constexpr int kNoWarmup = -1;
template <Pass kPass = Pass::kForward, class Decays>
GD_HOST_DEVICE int warmup_length(int boundary, int limit, const Decays& decays) {
  constexpr bool kGradients = kPass == Pass::kBackward;
  constexpr float kEnough = kGradients ? kNegligibleGradientLog2 : kNegligibleLog2;
  constexpr int kAtOnce = kGradients ? 16 : 8;  // asked for before the first is looked at; for most heads these will do
  const int last = boundary <= limit ? boundary - 1 : limit;
  float log2_left = 0, left = 1, written = 0;
  bool weighs = true;
  int found = 0;
  int done = 0;
  bool is_slow = false;  // at this pace it would take much too long; nothing is lost by not looking further
  GD_NO_UNROLL for (; done < last && found == 0 && !is_slow; done += kAtOnce) {
    ChunkDecay chunks[kAtOnce];
    GD_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = boundary - 1 - done - i;
      chunks[i] = decays(chunk < 0 ? 0 : chunk);
    }
    // Without a jump: threads that jump from different places take one after the other what is left to do.
    GD_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const bool counts = done + i < last;
      log2_left += counts ? chunks[i].log2_left : 0.0f;
      bool enough = log2_left < kEnough;
      if constexpr (!kGradients) {
        weighs = weighs && chunks[i].written >= 0;
        written += weighs ? chunks[i].written * left : 0.0f;
        left = fast_exp2(log2_left);
        enough = left < kNegligible * (written < 1 ? written : 1.0f);
      }
      found = found == 0 && counts && enough ? done + i + 1 : found;
    }
    const int counted = done + kAtOnce < last ? done + kAtOnce : last;
    is_slow = log2_left * static_cast<float>(2 * limit) > kEnough * static_cast<float>(counted);
  }
  if (found > 0) return found;
  // Then it is all there are, if they are not too many. For gradients silent chunks take as long as others: that is
  // only worth it if they are few, or if the boundaries after this one will have windows.
  const bool is_worth = !kGradients || 2 * boundary <= limit ||
                        (!is_slow && log2_left * static_cast<float>(limit) <= kEnough * static_cast<float>(last));
  return boundary <= limit && is_worth ? boundary : kNoWarmup;
}

// ---- cuts ----------------------------------------------------------------------------------------------------------

// Lengths of segments in chunks; 0 = not cut.
struct Cut {
  int decaying;    // of heads whose older states fade: each segment begins some chunks early, with no state
  int persistent;  // of heads whose states last: two segments, the second of which runs through the first silently, or
                   // more, which are joined
  bool halves;     // two blocks share a head, half of its value columns each
};

GD_HOST_DEVICE inline int segments_of(int chunks, int length) {
  return length <= 0 || chunks <= length ? 1 : ceil_div(chunks, length);
}

// About what takes how long on a block, in units of 1/1.7 ns: fitted to what many cuts of many shapes took on an H200
// (docs/kernels/context_parallel.md).
struct Costs {
  static constexpr float kPerMicrosecond = 1700;
  static constexpr float kChunk = 3090, kHalfChunk = 2440;
  static constexpr float kWarmup = 2100, kHalfWarmup = 1250;  // without outputs
  static constexpr float kTransition = 1850;                  // of half of the columns
  static constexpr float kMerge = 4400;
  static constexpr float kItem = 15400, kTransitionItem = 7500;  // until the first chunk is there, and for the state
  static constexpr float kCut = 14000;  // where anything is cut: its list takes longer, and pieces wait for each other
};

// Where segment i of a sequence begins. Heads that fade: equal ones.
GD_HOST_DEVICE inline int decaying_begin(int chunks, int segments, int i) {
  const int each = floor_div(chunks, segments), more = chunks - each * segments;
  return each * i + (i < more ? i : more);
}
// Heads that last: the first of the joined segments is shorter. It hands its state on when it has ended, with outputs,
// about when the others have their factors, without. Of two, the second runs through the first. In a backward silent
// chunks take as long as others do: segments are equal, and of two the second would gain nothing.
constexpr int kWorthMerging = 48;  // chunks of a sequence: fewer take less time than factors and joins
template <Pass kPass = Pass::kForward>
GD_HOST_DEVICE int persistent_segments(int chunks, int length) {
  const int segments = segments_of(chunks, length);
  return kPass == Pass::kForward || segments != 2 ? segments : chunks < kWorthMerging ? 1 : 3;
}
// Where the segments of one head begin: the first may be another length than the rest, of which some are a chunk
// longer.
struct Borders {
  int first, each, longer;  // chunks of the first; of the rest, of which so many have one more
  GD_HOST_DEVICE Borders(int chunks, int segments, int first_chunks) : first(first_chunks) {
    const int rest = first > 0 ? segments - 1 : segments;
    each = floor_div(chunks - first, rest);
    longer = chunks - first - each * rest;
  }
  GD_HOST_DEVICE int operator[](int i) const {
    const int before = first > 0 && i > 0 ? i - 1 : i;
    return (i > 0 ? first : 0) + each * before + (before < longer ? before : longer);
  }
};
template <Pass kPass>
GD_HOST_DEVICE Borders persistent_borders(int chunks, int segments) {
  if (kPass != Pass::kForward || segments == 1) return {chunks, segments, 0};
  const float first = segments == 2
                          ? static_cast<float>(chunks) * (Costs::kChunk / (2 * Costs::kChunk - Costs::kWarmup))
                          : static_cast<float>(chunks) * fast_div(0.56f, static_cast<float>(segments) - 0.44f);
  return {chunks, segments, first < 1 ? 1 : static_cast<int>(first)};
}
template <Pass kPass = Pass::kForward>
GD_HOST_DEVICE int persistent_begin(int chunks, int segments, int i) {
  return persistent_borders<kPass>(chunks, segments)[i];
}

// A window that would take longer than what it saves is none. Gradients need four times as much to be forgotten; twice
// the limit lets gates as models have them have windows also where segments are short.
template <Pass kPass = Pass::kForward>
GD_HOST_DEVICE int warmup_limit(int length) {
  const int limit = length < 8 ? 12 : length > 20 ? 30 : length * 3 / 2;
  return kPass == Pass::kBackward ? 2 * limit : limit;
}
// What a chunk leaves of an older state, if the head fades; about.
template <Pass kPass>
GD_HOST_DEVICE float usual_log2_left() {
  return (kPass == Pass::kBackward ? kNegligibleGradientLog2 : kNegligibleLog2) /
         static_cast<float>(warmup_limit<kPass>(0));
}

// Whether a piece of a head that fades takes longer than all that is done for the last segment of one that lasts.
GD_HOST_DEVICE inline bool is_longer_than_chain(const Cut& cut, int chunks) {
  const int pieces = segments_of(chunks, cut.decaying), segments = segments_of(chunks, cut.persistent);
  const float chunk = cut.halves ? Costs::kHalfChunk : Costs::kChunk;
  const auto length = static_cast<float>(chunks);
  return fast_div(length, static_cast<float>(pieces)) * chunk >
         fast_div(length, static_cast<float>(segments)) * (chunk + Costs::kTransition) +
             static_cast<float>(segments) * Costs::kMerge;
}

// Sequences of one length, and how many of their heads fade and last.
struct LengthClass {
  int chunks, decaying, persistent;
};
constexpr int kMaxClasses = 4;
constexpr int kShares = 5;      // 0, a quarter, a half, three quarters and all of the heads last
constexpr int kCutBlocks = 16;  // blocks that look for the best cut for one share
constexpr int kPrepareHelpers = 1 + kShares * kCutBlocks;  // blocks of prepare that sort and choose cuts

// Sequences put together by length, one after the other or by many threads at once: nothing depends on their order.
struct Lengths {
  int longest = 0, count = 0;       // count: of different ones
  int different[kMaxClasses] = {};  // the first of them
  int chunks[kMaxClasses] = {}, sequences[kMaxClasses] = {};

  // Few lengths: a class for each, the longest first. Many: those that are alike share one, above 3/4 of the longest,
  // above 1/2, above 1/4, and the rest.
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
// (On the device a thread looks at each.)
inline int length_classes(const int* chunks, int count, int heads, int share, LengthClass* classes) {
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
  return lengths.classes(heads, share, classes);
}

// ---- how long a cut takes ------------------------------------------------------------------------------------------

struct Pieces {
  int number = 0;
  float size = 0;
};
// Of the sequences of one length, in the classes of the list of work: see EntryCounts.
struct ClassPieces {
  Pieces first, decaying, persistent, joins, waiting;
  int most, boundaries;  // entries if heads turn out to be of the other kind; boundaries
};
GD_HOST_DEVICE inline ClassPieces pieces_of(const Cut& cut, const LengthClass& c) {
  constexpr float kUsualWarmup = 6;  // chunks, of gates as models have them
  const int per_head = cut.halves ? 2 : 1;
  const float chunk = cut.halves ? Costs::kHalfChunk : Costs::kChunk;
  const float warmup_tokens = cut.halves ? Costs::kHalfWarmup : Costs::kWarmup;
  const auto chunks = static_cast<float>(c.chunks);
  const int pieces = segments_of(c.chunks, cut.decaying);
  // Where every boundary is so near to the beginning that a window may reach it, heads that last are cut alike.
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
    p.joins = {c.persistent * 2, static_cast<float>(segments - 2) * Costs::kMerge};
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

// What happens when blocks take pieces of work one after the other. Blocks that come free at about the same time are
// taken together, in at most kGroups groups, the earliest first. Loops over groups have constant bounds, and what is
// done for one is a choice between values, not a jump: all of it stays in registers and threads stay together.
struct Timeline {
  static constexpr int kGroups = 3;
  static constexpr float kNone = 1e30f;
  float free[kGroups];  // when they are; kNone: there is no such group
  int blocks[kGroups];
  int all;
  float end = 0;

  GD_HOST_DEVICE explicit Timeline(int count) : all(count) {
    for (int i = 0; i < kGroups; ++i) {
      free[i] = i == 0 ? 0.0f : kNone;
      blocks[i] = i == 0 ? count : 0;
    }
  }
  // The last of them ends then. `ready` is when the first of them may begin, `spread` how much later the last.
  GD_HOST_DEVICE float run(const Pieces& pieces, float ready = 0, float spread = 0) {
    float last = 0;
    int left = pieces.number;
    if (left >= 2 * all) {  // rounds of all blocks
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
  // Blocks of the first group; when none of them is left, the others move up.
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
  // They join the nearest group, or are one of their own if there is room for it and that is too far away.
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
    const bool is_near = distance<0.03f * time, is_full = blocks[kGroups - 1]> 0, joins = is_near | is_full;
    const float share = fast_div(static_cast<float>(count), static_cast<float>(there + count));
    const float together = theirs + (time - theirs) * share;
    float times[kGroups];
    int counts[kGroups];
    for (int i = 0; i < kGroups; ++i) {
      const float before = i > 0 ? free[(i + kGroups - 1) % kGroups] : 0.0f;
      const int blocks_before = i > 0 ? blocks[(i + kGroups - 1) % kGroups] : 0;
      const bool is_mine = i == nearest, is_earlier = free[i] <= time, is_after = before > time;
      const float merged = is_mine ? together : free[i], inserted = fminf(fmaxf(before, time), free[i]);
      const int joined_blocks = is_mine ? there + count : blocks[i];
      int inserted_blocks = is_after ? blocks_before : count;
      inserted_blocks = is_earlier ? blocks[i] : inserted_blocks;
      times[i] = joins ? merged : inserted;
      counts[i] = joins ? joined_blocks : inserted_blocks;
    }
    for (int i = 0; i < kGroups; ++i) {
      free[i] = times[i];
      blocks[i] = counts[i];
    }
  }
};

// How long a cut takes, about, given the pieces of every class: its list of work, taken in the order that it will have.
// What waits, and what it waits for, are of about the same size in all classes and counted as one.
constexpr float kNever = 1e30f;
// More pieces than that on a block are not worth a thought. Pieces in halves are for cards that have blocks to spare:
// both halves read K and Q, and where all blocks do, that takes longer than what is saved.
constexpr float kMostRounds = 6, kMostHalves = 0.6f;
GD_HOST_DEVICE inline float cycles_of(const Cut& cut, const ClassPieces* classes, int count, int longest,
                                      const Limits& limits) {
  int entries = 0, boundaries = 0, pieces = 0;
  Pieces first, joins, waiting;
  GD_NO_UNROLL for (int i = 0; i < count; ++i) {
    const ClassPieces p = classes[i];
    entries += p.most;
    boundaries += p.boundaries;
    pieces += p.decaying.number + p.persistent.number + p.waiting.number;
    first.number += p.first.number;
    first.size += static_cast<float>(p.first.number) * p.first.size;
    waiting.number += p.waiting.number;
    waiting.size += static_cast<float>(p.waiting.number) * p.waiting.size;
    joins.number += p.joins.number;
    if (p.joins.number > 0 && p.joins.size > joins.size) joins.size = p.joins.size;
  }
  const bool is_cut = cut.decaying || cut.persistent;
  const bool is_crowded = static_cast<float>(first.number + pieces - waiting.number) >
                          (cut.halves ? kMostHalves : kMostRounds) * static_cast<float>(limits.blocks);
  if (is_cut && (entries > limits.entries || boundaries > limits.boundaries || is_crowded)) return kNever;
  if (first.number > 0) {
    first.size = fast_div(first.size, static_cast<float>(first.number));
    waiting.size = fast_div(waiting.size, static_cast<float>(waiting.number));
  }

  Timeline timeline(limits.blocks);
  const bool longest_first = first.number == 0 || is_longer_than_chain(cut, longest);
  // Of those who wait for nothing, how many come before joins.
  const int early = longest_first ? pieces : limits.blocks - first.number;
  float factors = 0;
  GD_NO_UNROLL for (int pass = 0; pass < 5; ++pass) {
    const bool is_first = pass == (longest_first ? 1 : 0), is_early = pass == (longest_first ? 0 : 1);
    const bool is_one_kind = is_first || pass == 2 || pass == 4;
    int passed = 0;
    GD_NO_UNROLL for (int i = 0; i < (is_one_kind ? 1 : 2 * count); ++i) {
      Pieces some = is_first ? first : pass == 2 ? joins : waiting;
      if (!is_one_kind) {
        some = i % 2 == 0 ? classes[i / 2].decaying : classes[i / 2].persistent;
        const int before = early > passed ? early - passed : 0, now = some.number < before ? some.number : before;
        passed += some.number;
        some.number = is_early ? now : some.number - now;
      }
      if (some.number == 0) continue;
      const bool waits = pass == 2 || pass == 4;
      const float end = timeline.run(some, waits ? factors : 0.0f, pass == 4 ? joins.size : 0.0f);
      factors = is_first ? end : factors;
    }
  }
  return timeline.end;
}

// The cuts that are considered, by number; the first are the simplest.
constexpr int kDecayingLengths = 16, kPersistentLengths = 14;  // not cut; 256, 192, 128, 96 and so on down to 2, to 4
constexpr int kCuts = 2 * kDecayingLengths * kPersistentLengths;
static_assert(kCuts % kCutBlocks == 0);
struct CutCost {
  float cost;
  int number;  // negative: there is nothing to cut; the list of work is complete, of so many parts of each head
};
GD_HOST_DEVICE inline int length_number(int i) { return i == 0 ? 0 : (i % 2 ? 256 : 192) >> ((i - 1) / 2); }
// Sequences of more than 512 chunks are cut into longer segments.
GD_HOST_DEVICE inline int length_scale(int longest) {
  int scale = 1;
  while (longest > 512 * scale) scale *= 2;
  return scale;
}
GD_HOST_DEVICE inline Cut cut_number(int i, int scale) {
  return {scale * length_number(i / 2 % kDecayingLengths), scale * length_number(i / 2 / kDecayingLengths), i % 2 != 0};
}
// The estimate is not that good: a cut has to be better by more than this.
constexpr float kWorthCutting = 1.03f;
GD_HOST_DEVICE inline float cost_of(const Cut& cut, const ClassPieces* classes, int count, int longest,
                                    const Limits& limits) {
  const float time = cycles_of(cut, classes, count, longest, limits);
  return cut.decaying || cut.persistent ? time * kWorthCutting + Costs::kCut : time;
}

// The fastest of them all. (On the device many threads price one each.)
inline CutCost fastest_cut(const LengthClass* classes, int count, int longest, const Limits& limits, bool may_cut) {
  CutCost best{kNever, 0};
  for (int number = 0; number < (may_cut ? kCuts : 2); ++number) {
    const Cut cut = cut_number(number, length_scale(longest));
    const float cost = cost_of(cut, PiecesOf(cut, classes, count).classes, count, longest, limits);
    if (cost < best.cost) best = {cost, number};
  }
  return best;
}

// Whether sequences, all of one length, keep the card busy as they are, so that cutting them gains nothing: 1 with
// whole heads, 2 with halves of heads that all run at once, if they are short, 0 if not. (Two halves take longer than
// one whole; where sequences are long, pieces of whole heads win.)
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

// ---- the list of work ----------------------------------------------------------------------------------------------

// Entries by when they come in the list, of a pair of sequence and head or of many: what others wait for, what waits
// for nothing, joins; and boundaries, behind each of which a head waits. Sixteen bits each, so that one number adds
// them up.
struct EntryCounts {
  unsigned long long all;
  enum Class { kFirst, kFree, kMerges, kBoundaries };
  GD_HOST_DEVICE void add(Class c, int n) { all += static_cast<unsigned long long>(n) << (16 * c); }
  GD_HOST_DEVICE int operator[](Class c) const { return static_cast<int>(all >> (16 * c) & 0xffff); }
  GD_HOST_DEVICE int entries(int per_head) const {
    return (*this)[kFirst] + (*this)[kFree] + (*this)[kMerges] + per_head * (*this)[kBoundaries];
  }
};
static_assert(kMaxPlannedEntries < 1 << 16);

// Segments of a sequence's heads that last or fade.
template <Pass kPass>
GD_HOST_DEVICE int segments_of(const Cut& cut, int chunks, bool persists) {
  return persists ? persistent_segments<kPass>(chunks, cut.persistent) : segments_of(chunks, cut.decaying);
}
GD_HOST_DEVICE inline EntryCounts entries_of(int segments, int chunks, bool persists, int per_head) {
  EntryCounts counts{0};
  if (persists && segments > 2) {
    counts.add(EntryCounts::kFirst, per_head + 2 * (segments - 2));
    counts.add(EntryCounts::kMerges, 2);
    counts.add(EntryCounts::kBoundaries, segments - 1);
  } else if (chunks > 0) {
    counts.add(EntryCounts::kFree, per_head * segments);
  }
  return counts;
}

// Whether there is room for a list; if not, less is cut: more heads last than the choice of the cut knew of, or lengths
// that share a class are too different. Not cut at all, it always fits.
GD_HOST_DEVICE inline bool fits(Cut& cut, const EntryCounts& total, const Limits& limits) {
  if (total[EntryCounts::kBoundaries] <= limits.boundaries && total.entries(cut.halves ? 2 : 1) <= limits.entries)
    return true;
  if (!cut.decaying && !cut.persistent) return true;
  if (!cut.persistent) cut.decaying = 0;
  cut.persistent = 0;
  return false;
}

// What is the same for all pairs.
struct ListPlan {
  Cut cut;
  EntryCounts total;
  int blocks;
  bool longest_first;  // see is_longer_than_chain
  int value_heads;
  bool in_place;  // a final state may come in the initial one's place
};

// The entries of a pair, of which a thread puts every `lanes`th: put(number in the list, item). `whole` is the item of
// all of its chunks, in the forward's order; `before` are entries of the pairs before it; windows[i] is that of
// boundary i + 1, if the head fades. All kinds in one loop, so that threads have different ones at the same time.
template <Pass kPass, class Put>
GD_HOST_DEVICE void list_seq_head(const ListPlan& plan, const WorkItem& whole, int seq_head, int chunks, int segments,
                                  bool persists, const EntryCounts& before, const uint8_t* windows, int lane, int lanes,
                                  const Put& put) {
  if (chunks == 0) return;
  const Cut& cut = plan.cut;
  const int per_head = cut.halves ? 2 : 1;
  const int boundary = before[EntryCounts::kBoundaries];
  const int firsts = plan.total[EntryCounts::kFirst], frees = plan.total[EntryCounts::kFree],
            joins = plan.total[EntryCounts::kMerges];
  // Joins come when the first of what they wait for may have ended; until then there is other work. Where that is
  // long, it comes before all.
  const int idle = plan.blocks > firsts ? plan.blocks - firsts : 0;
  const int frees_first = plan.longest_first || frees < idle ? frees : idle;
  const int first = (plan.longest_first ? frees : 0) + before[EntryCounts::kFirst];
  const int waiting = firsts + frees + joins + per_head * boundary;

  const bool is_merged = persists && segments > 2;
  const Borders begins = persists ? persistent_borders<kPass>(chunks, segments) : Borders(chunks, segments, 0);
  const int outputs = per_head * segments, factors = is_merged ? 2 * (segments - 2) : 0;
  GD_NO_UNROLL for (int i = lane; i < outputs + factors + (is_merged ? 2 : 0); i += lanes) {
    const int more = i - outputs;  // from here on: factors, two of each segment, then joins, two
    WorkItem item = whole;
    if (more >= factors) {
      item.kind = kMerge;
      item.half = kNoValues;
      item.key_head = more - factors;
      item.tokens = item.warmup_tokens = kMergeTiles * kChunkTokens * (segments - 2);
      item.from = boundary;
      item.to = boundary + 1;
      item.prepared = (boundary + 1) * kBoundaryTiles;
      put(firsts + frees_first + before[EntryCounts::kMerges] + more - factors, item);
      continue;
    }
    const bool is_output = more < 0;
    const int segment = is_output ? i >> (per_head - 1) : 1 + (more >> 1), begin = begins[segment];
    const bool has_warmup = !is_merged && segment > 0;
    const int window = !has_warmup ? 0 : persists ? begin : windows[segment - 1];
    cut_item<kPass>(item, begin - window, begins[segment + 1], chunks, plan.value_heads);
    item.half = !is_output ? more & 1 : cut.halves ? i & 1 : kWhole;
    int at;
    if (!is_output) {
      item.kind = kTransition;
      item.warmup_tokens = item.tokens;
      item.from = kFromZero;
      item.to = boundary + segment;
      at = first + per_head + more;
    } else if (is_merged) {
      item.from = segment > 0 ? boundary + segment - 1 : item.from;
      item.to = segment > 0 ? item.to : boundary;
      at = segment > 0 ? waiting + i - per_head : first + i;
    } else {
      item.warmup_tokens = window * kChunkTokens;
      item.from = window < begin ? kFromZero : item.from;
      item.seq_head = seq_head;
      if (segment == segments - 1 && segment > 0 && plan.in_place) {
        item.readers = 2;
        GD_NO_UNROLL for (int other = 1; other < segment && begins[other] <= warmup_limit<kPass>(cut.decaying); ++other)
            item.readers += windows[other - 1] == begins[other] ? 2 : 0;
      }
      const int free = before[EntryCounts::kFree] + i;
      at = plan.longest_first ? free : firsts + free + (free < frees_first ? 0 : joins);
    }
    put(at, item);
  }
}

}  // namespace gatedelta::cuda
