// Records (Segment) of which chunks a summary reads, for each sequence and head. With skip_faded a head that fades
// reads only the chunks that matter, and its M is 0.
//   states       a head that lasts reads all of its chunks, from S_loc = 0 and M = I. One that has faded has warm-up
//                chunks alone: M has no warm-up, so it stays 0
//   gradients    all chunks are warm-up chunks, because they have no outputs
#pragma once

#include "cuda/device/fade.hpp"
#include "cuda/device/numbers.cuh"
#include "cuda/portable/summary/config.hpp"

namespace gatedelta::cuda::portable {

template <Pass kPass>
struct FindSummaries {
  GD_DEVICE static void run(const Params& p, const SummaryRange& range, int cta, int tid) {
    const int item = cta * kSegmentThreads + tid;
    if (item >= p.summaries * p.value_heads) return;
    const int row = item / p.value_heads, head = item - row * p.value_heads, n = range.first + row;
    const int64_t length = p.sequences[n].length;
    const int chunks = static_cast<int>(ChunkedSequences::chunks(length));
    const ChunkDecay* const steps = p.step_decays(p.sequences.first_chunk_index(n), head);
    // A sequence's last chunk may have one step.
    const auto decays = [&](int chunk) {
      const ChunkDecay first = steps[chunk * kStepsPerChunk];
      return chunk * kChunkTokens + kStep < length ? joined(first, steps[chunk * kStepsPerChunk + 1]) : first;
    };
    if constexpr (kPass == Pass::kBackward) {
      p.segments[item] = {n, 0, 0, range.skip_faded ? gradient_window(chunks, decays) : chunks};
    } else {
      Fade fade{0, 0};
      if (range.skip_faded || range.fade) fade = find_fade(chunks, range.skip_faded, decays);
      const bool is_faded = range.skip_faded && fade.window > 0;
      // An empty sequence has a chunk without tokens.
      p.segments[item] = is_faded ? Segment{n, chunks, 0, fade.window}
                                  : Segment{n, 0, chunks > 0 ? chunks : 1, Segment::kFromBoundary};
      if (range.fade)
        store_number(range.fade.data, range.fade.dtype, range.fade.offset(row, 0, head),
                     is_faded ? -INFINITY : fade.log2_left);
    }
  }
};

}  // namespace gatedelta::cuda::portable
