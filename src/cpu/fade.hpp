// How much of an old state is left after some chunks: the bound by which sequences are cut (docs/kernels/
// context_parallel.md), for summaries.
#pragma once

#include "cpu/chunk.hpp"

namespace gatedelta::cpu::GD_ISA {

constexpr double kNegligibleLog2 = -24, kNegligibleGradientLog2 = -48;

// After the chunk at most 2^log2_left of an older state is left: each token scales it by its gate and by at most
// |1 - beta |k|^2|. What the chunk itself writes weighs `written` at its end, the sum of beta_j times the decay since
// j. Negative: some token may amplify the state, and the weight is unknown.
struct ChunkDecay {
  double log2_left, written;
};

inline ChunkDecay chunk_decay(const Layer& in, const ChunkSpan& span, int64_t head) {
  constexpr double kLog2e = 1.4426950408889634;
  double decay = 0, growth = 0, written = 0;
  float k[kMaxPanels * kPanelColumns];
  for (int i = span.rows - 1; i >= 0; --i) {
    const int64_t token = span.token + i;
    load_row(k, in.k.data, in.k.dtype, in.k.offset(span.batch, token, in.key_head(head)), in.key_dim);
    double length = dot(k, k, in.key_dim);
    if (in.l2norm) length /= length + 1e-6;
    const double beta = token_beta(in, span.batch, token, head);
    written += beta * std::exp2(decay);
    growth += std::log2(std::fmax(std::fabs(1 - beta * length), 1.0));
    decay += kLog2e * token_gate(in, span.batch, token, head);
  }
  return {decay + growth, growth > 0 || !(written >= 0) ? -1.0 : written};
}

// The bound of log2 |M| over all chunks of a sequence, and how many of its last chunks give its final state without
// anything older, to fp32's accuracy; 0: all of them, and M counts. M counts for gradients, too, which have no lower
// bound on what is written: so it has to be below 2^-48 somewhere. With `stop` the search ends as soon as that
// holds.
struct Fade {
  double log2_left;
  int64_t warmup;
};
inline Fade find_fade(const Layer& in, const SequenceSpan& sequence, int64_t head, bool stop) {
  Fade fade = {0, 0};
  double written = 0;
  bool weighs = true, is_gone = false;
  const int64_t chunks = chunks_of(sequence.length);
  for (int64_t i = 0; i < chunks; ++i) {
    const ChunkDecay chunk = chunk_decay(in, chunk_span(sequence, chunks - 1 - i), head);
    weighs = weighs && chunk.written >= 0;
    if (weighs) written += chunk.written * std::exp2(fade.log2_left);
    fade.log2_left += chunk.log2_left;
    if (fade.warmup == 0 && std::exp2(fade.log2_left) < std::exp2(kNegligibleLog2) * std::fmin(written, 1.0))
      fade.warmup = i + 1;
    is_gone = is_gone || fade.log2_left < kNegligibleGradientLog2;
    if (stop && is_gone && fade.warmup > 0) break;
  }
  if (!is_gone) fade.warmup = 0;
  return fade;
}

// How many of a sequence's first chunks the gradient of its initial state depends on.
inline int64_t gradient_warmup(const Layer& in, const SequenceSpan& sequence, int64_t head) {
  double log2_left = 0;
  const int64_t chunks = chunks_of(sequence.length);
  for (int64_t i = 0; i < chunks; ++i) {
    log2_left += chunk_decay(in, chunk_span(sequence, i), head).log2_left;
    if (log2_left < kNegligibleGradientLog2) return i + 1;
  }
  return chunks;
}

}  // namespace gatedelta::cpu::GD_ISA
