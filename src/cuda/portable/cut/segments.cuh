// What runs between prepare and a chain that is cut. A segment is affine in the state it begins with, S_out = M S_in +
// S_loc. Where the state before a boundary has faded, the segment behind it begins some chunks earlier with no state;
// otherwise with the state at the boundary (its entry), which comes from transitions and folds:
//   segments       what each segment begins with, by the decays that prepare has left; in a pack how long segments are
//   transitions    S_loc and M of the segments before such boundaries (states.cuh). Where S_in is the initial state, or
//                  has faded, S_loc comes from there and is the entry
//   folds          S <- M S + S_loc for the other boundaries, one after the other, in fp32
// The chain of gradients has the same segments, from the last to the first: G <- M^T G + G_loc, G_loc from transitions
// of its own (gradient_chain.cuh). Below, the segment before another one is the one that its chain comes from.
#pragma once

#include "cuda/portable/prepare/lengths.cuh"
#include "cuda/device/numbers.cuh"
#include "cuda/device/warp.cuh"

namespace gatedelta::cuda::portable {

// ---- segments ------------------------------------------------------------------------------------------------------

struct FindSegments {
  // CTAs from `slots` on copy the initial states, one each, of calls whose last segments overwrite them.
  GD_DEVICE static void run(const Params& p, const CutPrices& prices, int cta, int slots, int tid) {
    if (cta >= slots) return copy_initial(p, cta - slots, tid);
    const int lane = tid & 31, L = segment_length(p, prices, lane);
    if (cta == 0 && tid < 32) find_ranges(p, L, lane);
    const auto [n, i] = L > 0                   ? locate_segment(p, L, cta, lane)
                        : prices.has_whole_grid ? Place{-1, 0}
                                                : whole_sequence(p, cta);
    const int chunks = n >= 0 ? chunks_of(p, n) : 0;
    const int first = i * L, length = L > 0 ? min(L, chunks - first) : chunks;
    for (int head = tid; head < p.value_heads; head += kSegmentThreads) {
      const int64_t block = int64_t{cta} * p.value_heads + head;
      const Segment segment = {n, first, length, 0};
      p.segments[block] = with_warmup<Pass::kForward>(p, segment, head, chunks, L);
      if (p.gradient_segments) p.gradient_segments[block] = with_warmup<Pass::kBackward>(p, segment, head, chunks, L);
    }
  }

  GD_DEVICE static int chunks_of(const Params& p, int n) {
    return static_cast<int>(ChunkedSequences::chunks(p.sequences[n].length));
  }
  struct Place {
    int sequence, segment;  // sequence negative: none
  };
  // As without a cut, where no other grid has the whole sequences.
  GD_DEVICE static Place whole_sequence(const Params& p, int slot) {
    const int n = slot < p.sequences.count ? p.order[slot] : -1;
    return {n >= 0 && !p.is_padding(n) ? n : -1, 0};
  }
  // A sequence without tokens has a segment, which passes its state on; padding has none.
  GD_DEVICE static int count_segments(const Params& p, int L, int n) {
    if (n >= p.sequences.count || p.is_padding(n)) return 0;
    const int chunks = chunks_of(p, n);
    return chunks > 0 ? (chunks + L - 1) / L : 1;
  }
  // A warp looks at 32 sequences at a time: what a lane's one has, and all up to it.
  struct Counts {
    int mine, up_to;
  };
  GD_DEVICE static Counts count_segments_of_warp(const Params& p, int L, int n, int lane) {
    const int mine = count_segments(p, L, n);
    return {mine, warp_inclusive_sum(mine, lane)};
  }
  GD_DEVICE static Place locate_segment(const Params& p, int L, int slot, int lane) {
    int left = slot;
#pragma unroll 1
    for (int n = 0; n < p.sequences.count; n += 32) {
      const Counts counts = count_segments_of_warp(p, L, n + lane, lane);
      const int found = count_lanes(counts.up_to <= left);
      if (found < 32) return {n + found, left - shuffle(counts.up_to - counts.mine, found)};
      left -= shuffle(counts.up_to, 31);
    }
    return {-1, 0};
  }
  GD_DEVICE static void find_ranges(const Params& p, int L, int lane) {
    int first = 0;
#pragma unroll 1
    for (int n = 0; n < p.sequences.count; n += 32) {
      const Counts counts = L > 0 ? count_segments_of_warp(p, L, n + lane, lane) : Counts{0, 0};
      if (n + lane < p.sequences.count) p.ranges[n + lane] = {first + counts.up_to - counts.mine, counts.mine};
      first += shuffle(counts.up_to, 31);
    }
  }

  // Chunks of a segment: as the host says, or of a pack what is best for its lengths, but not fewer, for which there
  // are no slots; 0: nothing is cut. Every warp finds it by itself, with a number of segments for each lane.
  GD_DEVICE static int segment_length(const Params& p, const CutPrices& prices, int lane) {
    if (prices.chain_count == 0) return p.segment_chunks;
    const int longest = chunks_of(p, p.order[0]);
    if (longest == 0) return 0;
    int number = 1;
#pragma unroll 1
    for (int i = 0; i < lane; ++i) number = next_number(number);
    int length = (longest + number - 1) / number;
    length = min(length < p.segment_chunks ? p.segment_chunks : length, longest);
    LengthSums lengths{longest};
    SegmentSums sums;
#pragma unroll 4
    for (int n = 0; n < p.sequences.count; ++n) {
      const int chunks = chunks_of(p, n);
      lengths.count += chunks > 0;
      lengths.longest_count += chunks == longest;
      lengths.chunks += static_cast<float>(chunks);
      sums.add(chunks, length);
    }
    float least = prices.of(lengths, sums, length);
#pragma unroll 1
    for (int by = 16; by > 0; by /= 2) {
      const float other = shuffle_xor(least, by);
      const int other_length = shuffle(length, lane ^ by);
      const bool is_better = other < least || (other == least && other_length > length);
      least = is_better ? other : least;
      length = is_better ? other_length : length;
    }
    return length < longest ? length : 0;
  }

  // The boundary before a segment: chunks of a warm-up that does not reach the beginning, or kFromEntry. Gradients
  // begin behind the last chunk. That one, which may have no second step, never counts: a warm-up is shorter than all
  // chunks.
  template <Pass kPass>
  GD_DEVICE static Segment with_warmup(const Params& p, Segment segment, int head, int chunks, int length) {
    constexpr bool kGradients = kPass == Pass::kBackward;
    const int boundary = kGradients ? chunks - segment.chunk - segment.chunks : segment.chunk;
    if (segment.sequence < 0 || boundary == 0) return segment;
    const ChunkDecay* const decays = p.step_decays(p.sequences.first_chunk_index(segment.sequence), head);
    const int warmup = warmup_length<kPass>(boundary, warmup_limit<kPass>(length), [&](int c) {
      const int first = (kGradients ? chunks - 1 - c : c) * kStepsPerChunk;
      return joined(decays[first], decays[first + 1]);
    });
    segment.warmup = warmup > 0 && warmup < boundary ? warmup : Segment::kFromEntry;
    return segment;
  }

  GD_DEVICE static void copy_initial(const Params& p, int item, int tid) {
    const int n = item / p.value_heads, head = item - n * p.value_heads;
    const int64_t slot = p.initial.slot(n);
    if (slot < 0) return;
    with_stored(p.initial.dtype, [&](auto stored) {
      using Word = typename decltype(stored)::Word;
      const auto* const from = static_cast<const Word*>(p.initial.data) + p.initial.offset(slot, head);
      auto* const to = static_cast<Word*>(p.initial_copy) + item * p.state_numbers();
      const int numbers = static_cast<int>(p.state_numbers());
#pragma unroll 8
      for (int i = tid; i < numbers; i += kSegmentThreads) to[i] = from[i];
    });
  }
};

// ---- folds ---------------------------------------------------------------------------------------------------------

// A CTA has eight value columns of a head of a sequence: S in shared memory, rows of M^T in stages. A quarter of the
// threads multiplies a quarter of the rows that are there; a thread has 4 x 4 numbers of the product, so that what it
// loads serves four times. The quarters' sums meet in shared memory.
template <class Config>
struct Fold {
  using Smem = typename Config::Smem;
  static constexpr int kKeys = Config::kKeys, kBlocks = kKeys / Config::kDepth;

  const Params& p;
  const uint32_t smem = shared_base();
  const int tid, row = tid / Config::kColumns * 4, column = tid % Config::kColumns;  // of the new state: four rows
  int n, head, first_column, first_slot, segments;
  bool is_mirrored;  // of the chain of gradients, which the second half of the CTAs have
  const Segment* records;
  float* entries;
  const float* maps;

  GD_DEVICE Fold(const Params& params, int cta, int thread) : p(params), tid(thread) {
    const int parts = p.value_dim / Config::kColumns, items = p.sequences.count * p.value_heads;
    is_mirrored = cta >= items * parts;
    records = is_mirrored ? p.gradient_segments : p.segments;
    entries = is_mirrored ? p.gradient_entries : p.entries;
    maps = is_mirrored ? p.gradient_maps : p.maps;
    const int item = cta / parts % items;
    n = item / p.value_heads;
    head = item - n * p.value_heads;
    first_column = cta % parts * Config::kColumns;
    first_slot = p.ranges[n].first;
    segments = p.ranges[n].count;
  }
  // Segments as their chain takes them.
  GD_DEVICE int64_t block_of(int segment) const {
    return int64_t{first_slot + (is_mirrored ? segments - 1 - segment : segment)} * p.value_heads + head;
  }
  GD_DEVICE float* entry(int segment, int k, int c) const {
    return entries + block_of(segment) * p.state_numbers() + k * p.key_state_stride +
           (first_column + c) * p.value_state_stride;
  }
  GD_DEVICE uint32_t state_at(int k, int c) const { return smem + Smem::kState + (k * Config::kColumns + c) * 4; }

  GD_DEVICE void run() {
    if (segments < 3 || !any_entered()) return;
    // Records are asked for two steps before it is known whether they matter: a step is not to wait for one.
    int here = begins_with(1), next = begins_with(2), after = begins_with(3);
    bool is_loaded = false;  // S is in shared memory, and the first blocks of M are on their way
    int block = 0;           // of all steps
#pragma unroll 1
    for (int i = 1; i + 1 < segments; ++i) {
      const int later = begins_with(i + 3);
      const bool folds = here == Segment::kFromEntry && next == Segment::kFromEntry;
      const bool goes_on = after == Segment::kFromEntry;
      if (folds) {
        if (!is_loaded) load_state(i);
        if (!is_loaded) load_blocks(i, block);
        multiply(i, block, goes_on);
        block += kBlocks;
      }
      is_loaded = folds && goes_on;
      here = next;
      next = after;
      after = later;
    }
  }
  // A segment's warm-up; of none 0.
  GD_DEVICE int begins_with(int segment) const { return segment < segments ? records[block_of(segment)].warmup : 0; }

  // Most heads fade: they are not to wait for one record after the other.
  GD_DEVICE bool any_entered() const {
    int count = 0;
#pragma unroll 1
    for (int i = 1 + (tid & 31); i - (tid & 31) < segments; i += 32)
      count += count_lanes(begins_with(i) == Segment::kFromEntry);
    return count > 0;
  }

  GD_DEVICE void load_state(int segment) {
    sync_cta();  // the last one is not read any more
    for (int i = tid; i < kKeys * Config::kColumns; i += Config::kThreads) {
      const int k = i / Config::kColumns, c = i % Config::kColumns;
      store_shared(state_at(k, c), k < p.key_dim ? *entry(segment, k, c) : 0.0f);
    }
  }
  GD_DEVICE void load_blocks(int segment, int block) {
#pragma unroll 1
    for (int b = 0; b < Config::kStages - 1; ++b) load_block(segment, b, block + b);
  }
  // Rows of M^T; those past K and numbers past K are zero.
  GD_DEVICE void load_block(int segment, int b, int block) const {
    constexpr int kPackets = kKeys / 4, kRows = Config::kThreads / kPackets;  // of a row; at once
    const int r = tid / kPackets, c = tid % kPackets * 4, j = b * Config::kDepth + r;
    const float* const from = maps + block_of(segment) * p.key_dim * p.key_dim + j * p.key_dim + c;
    const uint32_t to = smem + Smem::kMaps + block % Config::kStages * Smem::kStageBytes + (r * kKeys + c) * 4;
    static_assert(Config::kDepth % kRows == 0);
#pragma unroll
    for (int i = 0; i < Config::kDepth; i += kRows)
      copy_async(to + i * kKeys * 4, from + i * p.key_dim, j + i < p.key_dim && c < p.key_dim);
    copy_commit();
  }

  // From the state that enters a segment to the next one's.
  GD_DEVICE void multiply(int segment, int block, bool goes_on) {
    constexpr int kQuads = kKeys / 4, kLanes = 16;  // rows of a warp are 4 x 16, columns two times four
    const int slice = tid / (2 * kQuads), place = tid % (2 * kQuads);
    const int quad = place / (2 * kLanes) * kLanes + place % kLanes, columns = place / kLanes % 2 * 4;
    float local[4], sum[4][4] = {};  // [column][row]
#pragma unroll
    for (int r = 0; r < 4; ++r) local[r] = row < p.key_dim ? *entry(segment + 1, row + r, column) : 0.0f;
#pragma unroll 1
    for (int b = 0; b < kBlocks; ++b) {
      copy_wait<Config::kStages - 2>();
      sync_cta();  // the block is there, and the one before is not read any more
      const int ahead = b + Config::kStages - 1;
      if (ahead < kBlocks) {
        load_block(segment, ahead, block + ahead);
      } else if (goes_on) {
        load_block(segment + 1, ahead - kBlocks, block + ahead);
      } else {
        copy_commit();
      }
      constexpr int kMine = Config::kDepth / Config::kSlices;
      const uint32_t map = smem + Smem::kMaps + (block + b) % Config::kStages * Smem::kStageBytes +
                           (slice * kMine * kKeys + quad * 4) * 4;
      const uint32_t state = state_at(b * Config::kDepth + slice * kMine, columns);
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        const float4 m = load_shared4(map + j * kKeys * 4), s = load_shared4(state + j * Config::kColumns * 4);
        add_product(sum[0], m, s.x);
        add_product(sum[1], m, s.y);
        add_product(sum[2], m, s.z);
        add_product(sum[3], m, s.w);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
      store_shared4(sum_at(slice, columns + c, quad * 4), sum[c][0], sum[c][1], sum[c][2], sum[c][3]);
    sync_cta();  // all sums are there, and S is not read any more
    float x[4] = {local[0], local[1], local[2], local[3]};
#pragma unroll
    for (int i = 0; i < Config::kSlices; ++i) add_product(x, load_shared4(sum_at(i, column, row)), 1);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      store_shared(state_at(row + r, column), x[r]);
      if (row < p.key_dim) *entry(segment + 1, row + r, column) = x[r];
    }
  }
  GD_DEVICE static void add_product(float (&sum)[4], const float4& m, float by) {
    sum[0] = fmaf(m.x, by, sum[0]);
    sum[1] = fmaf(m.y, by, sum[1]);
    sum[2] = fmaf(m.z, by, sum[2]);
    sum[3] = fmaf(m.w, by, sum[3]);
  }
  GD_DEVICE uint32_t sum_at(int slice, int c, int k) const {
    return smem + Smem::kSums + slice * Smem::kSumBytes + c * Smem::kColumnBytes + k * 4;
  }
};

}  // namespace gatedelta::cuda::portable
