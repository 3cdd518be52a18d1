// Ranks packed sequences by length and counts their checkpoints.
#pragma once

#include "cuda/device/chunks.cuh"
#include "cuda/portable/instances.hpp"
#include "cuda/portable/params.hpp"

namespace gatedelta::cuda::portable {

// Writes the order of packed sequences, longest first, and the number of each one's first checkpoint. Runs in helper
// CTAs of kRanksPerCta threads.
GD_DEVICE void rank_sequences(const Params& p, int helper, int tid) {
  const int count = p.sequences.count, n = helper * kRanksPerCta + tid;
  if (p.longest_first && n < count) {
    const int64_t length = p.sequences[n].length;
    int rank = 0;  // sequences that are longer, or as long and before it
    for (int m = 0; m < count; ++m) {
      const int64_t other = p.sequences[m].length;
      rank += other > length || (other == length && m < n);
    }
    p.longest_first[rank] = n;
  }
  if (p.first_checkpoint && n == 0) {
    int64_t total = 0;
    for (int m = 0; m < count; ++m) {
      p.first_checkpoint[m] = total;
      total += p.sequences[m].length / p.checkpoint_every;
    }
  }
}

}  // namespace gatedelta::cuda::portable
