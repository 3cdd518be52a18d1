// Kernels between prepare and a chain whose sequences are cut. A segment is affine in the state it begins with: S_out =
// M S_in + S_loc. Where the state before a boundary has faded, the segment after it begins some chunks earlier with no
// state (a warm-up). Otherwise it begins with the boundary state, which transitions and merges compute:
//   segments       decides what each segment begins with, by prepare's decays; in a pack also how long segments are
//   transitions    S_loc and M of the segments before such boundaries (backward/states_chain.cuh). Where S_in is the
//                  initial state, or has faded, S_loc is computed from there and is the boundary state
//   merge          S <- M S + S_loc for the other boundaries, one after the other, in fp32 (cut/merge.cuh)
// The gradient chain has the same segments, from the last to the first: G <- M^T G + G_loc, with G_loc by transitions
// of its own (backward/grad_chain.cuh). "Before" means earlier in the chain's direction: forward in time for states,
// backward for gradients.
#pragma once

#include "cuda/device/numbers.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/portable/prepare/lengths.cuh"

namespace gatedelta::cuda::portable {

struct FindSegments {
  // Where a call's last segments overwrite the initial states, CTAs from most_segments on copy them, one each.
  GD_DEVICE static void run(const Params& p, const CutCost& cost, int cta, int most_segments, int tid) {
    if (cta >= most_segments) return copy_initial(p, cta - most_segments, tid);
    const int lane = tid & 31, L = segment_length(p, cost, lane);
    if (cta == 0 && tid < 32) store_ranges(p, L, lane);
    const auto [n, i] = L > 0                 ? locate_segment(p, L, cta, lane)
                        : cost.has_whole_grid ? Place{-1, 0}
                                              : whole_sequence(p, cta);
    const int chunks = n >= 0 ? chunks_of(p, n) : 0;
    const int first = i * L, length = L > 0 ? min(L, chunks - first) : chunks;
    for (int head = tid; head < p.value_heads; head += kSegmentThreads) {
      const int64_t item = int64_t{cta} * p.value_heads + head;
      const Segment segment = {n, first, length, 0};
      p.segments[item] = with_warmup<Pass::kForward>(p, segment, head, chunks, L);
      if (p.gradient_segments) p.gradient_segments[item] = with_warmup<Pass::kBackward>(p, segment, head, chunks, L);
    }
  }

  GD_DEVICE static int chunks_of(const Params& p, int n) {
    return static_cast<int>(ChunkedSequences::chunks(p.sequences[n].length));
  }
  struct Place {
    int sequence, segment;  // sequence negative: none
  };
  // As without a cut, where no other grid runs the whole sequences.
  GD_DEVICE static Place whole_sequence(const Params& p, int segment) {
    const int n = segment < p.sequences.count ? p.longest_first[segment] : -1;
    return {n >= 0 && !p.is_padding(n) ? n : -1, 0};
  }
  // A sequence without tokens has a segment, which copies its state; padding has none.
  GD_DEVICE static int count_segments(const Params& p, int L, int n) {
    if (n >= p.sequences.count || p.is_padding(n)) return 0;
    const int chunks = chunks_of(p, n);
    return chunks > 0 ? (chunks + L - 1) / L : 1;
  }
  // Segments of a lane's sequence, and of all up to it; a warp counts 32 sequences at a time.
  struct Counts {
    int mine, up_to;
  };
  GD_DEVICE static Counts count_segments_of_warp(const Params& p, int L, int n, int lane) {
    const int mine = count_segments(p, L, n);
    return {mine, warp_inclusive_sum(mine, lane)};
  }
  GD_DEVICE static Place locate_segment(const Params& p, int L, int segment, int lane) {
    int left = segment;
#pragma unroll 1
    for (int n = 0; n < p.sequences.count; n += 32) {
      const Counts counts = count_segments_of_warp(p, L, n + lane, lane);
      const int found = count_lanes(counts.up_to <= left);
      if (found < 32) return {n + found, left - shuffle(counts.up_to - counts.mine, found)};
      left -= shuffle(counts.up_to, 31);
    }
    return {-1, 0};
  }
  GD_DEVICE static void store_ranges(const Params& p, int L, int lane) {
    int first = 0;
#pragma unroll 1
    for (int n = 0; n < p.sequences.count; n += 32) {
      const Counts counts = L > 0 ? count_segments_of_warp(p, L, n + lane, lane) : Counts{0, 0};
      if (n + lane < p.sequences.count) p.segment_ranges[n + lane] = {first + counts.up_to - counts.mine, counts.mine};
      first += shuffle(counts.up_to, 31);
    }
  }

  // Chunks of a segment; 0: nothing is cut. In a pack the best for its lengths, but not fewer than the host says,
  // because the memory holds no more segments. Every warp computes it by itself, each lane for another number of
  // segments.
  GD_DEVICE static int segment_length(const Params& p, const CutCost& cost, int lane) {
    if (cost.chain_count == 0) return p.segment_chunks;
    const int longest = chunks_of(p, p.longest_first[0]);
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
    float least = cost.of(lengths, sums, length);
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

  // Sets what a segment begins with: a warm-up that does not reach the beginning, or kFromBoundary. The gradient chain
  // starts after the last chunk. Its decay record may be incomplete but is never read: a warm-up is shorter than the
  // sequence.
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
    segment.warmup = warmup > 0 && warmup < boundary ? warmup : Segment::kFromBoundary;
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

}  // namespace gatedelta::cuda::portable
