// How much of an old state is left after all chunks of a sequence, from prepare's decay records. The rules are those of
// warmup.hpp, without a limit on the number of chunks.
#pragma once

#include "cuda/device/decay.hpp"

namespace gatedelta::cuda {

struct Fade {
  int window;       // last chunks that give the final state without anything older; 0: all of them, and M counts
  float log2_left;  // bound of log2 |M|, of all chunks
};

// M counts for gradients, too: it has to be below 2^-48 somewhere. `stop`: the bound is not wanted once that is known.
template <class Decays>
GD_HOST_DEVICE Fade find_fade(int chunks, bool stop, const Decays& decays) {
  constexpr int kAtOnce = 8;  // loads in flight at a time
  float log2_left = 0, left = 1, written = 0;
  bool weighs = true, is_gone = false;
  int window = 0;
  GD_NO_UNROLL for (int done = 0; done < chunks && !(stop && is_gone && window > 0); done += kAtOnce) {
    ChunkDecay some[kAtOnce];
    GD_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = chunks - 1 - done - i;
      some[i] = decays(chunk < 0 ? 0 : chunk);
    }
    GD_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      const bool counts = done + i < chunks;
      weighs = weighs && some[i].written >= 0;
      written += weighs && counts ? some[i].written * left : 0.0f;
      log2_left += counts ? some[i].log2_left : 0.0f;
      left = fast_exp2(log2_left);
      if (window == 0 && counts && left < kNegligible * (written < 1 ? written : 1.0f)) window = done + i + 1;
      is_gone = is_gone || log2_left < kNegligibleGradientLog2;
    }
  }
  return {is_gone ? window : 0, log2_left};
}

// How many of a sequence's first chunks the gradient of its initial state depends on.
template <class Decays>
GD_HOST_DEVICE int gradient_window(int chunks, const Decays& decays) {
  constexpr int kAtOnce = 16;
  float log2_left = 0;
  int window = 0;
  GD_NO_UNROLL for (int done = 0; done < chunks && window == 0; done += kAtOnce) {
    ChunkDecay some[kAtOnce];
    GD_UNROLL for (int i = 0; i < kAtOnce; ++i) some[i] = decays(done + i < chunks ? done + i : chunks - 1);
    GD_UNROLL for (int i = 0; i < kAtOnce; ++i) {
      log2_left += some[i].log2_left;
      if (window == 0 && done + i < chunks && log2_left < kNegligibleGradientLog2) window = done + i + 1;
    }
  }
  return window > 0 ? window : chunks;
}

}  // namespace gatedelta::cuda
