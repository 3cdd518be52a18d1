// The stages of context parallelism: summaries of sequences (M and S_loc), those of gradients, and the merge of many
// summaries. The chains are those of the forward and the backward.
#pragma once

#include "cpu/backward_chunk.hpp"
#include "cpu/fade.hpp"

namespace gatedelta::cpu::GD_ISA {

inline TokenRows batches_of(const TokenRows& rows, int64_t first) {
  TokenRows some = rows;
  if (rows.data) some.data = static_cast<char*>(rows.data) + first * rows.batch_stride * dtype_bytes(rows.dtype);
  return some;
}
// The layer with `count` of its sequences, from `first` on.
inline Layer sequences_of(const Layer& layer, int64_t first, int64_t count) {
  Layer some = layer;
  Sequences& s = some.sequences;
  s.count = count;
  if (s.offsets) {
    if (s.offsets.data)
      s.offsets.data =
          static_cast<const char*>(s.offsets.data) + first * dtype_bytes(s.offsets.is_int64 ? GD_I64 : GD_I32);
    return some;
  }
  s.batch = count;
  for (TokenRows* rows : {&some.q, &some.k, &some.v, &some.g, &some.beta}) *rows = batches_of(*rows, first);
  return some;
}

// S_loc and M: a forward without outputs, with M as more columns of the state.
template <class E>
class Summary {
 public:
  Summary(const SummaryProblem& problem, const Context& context)
      : problem_(problem), context_(context), forward_(forward_of(problem)) {}

  size_t workspace() const {
    Carver carve;
    carve.take<ForwardProblem::ChainStart>(heads());
    return carve.used() + Forward<E>(forward_, context_).workspace();
  }

  void run() {
    Carver carve(context_.workspace);
    auto* const starts = carve.take<ForwardProblem::ChainStart>(heads());
    if (problem_.skip_faded || problem_.fade)
      for_each_item<typename E::Session>(context_, heads(),
                                         [&](int, int64_t item) { starts[item] = find_start(item); });
    if (problem_.skip_faded) forward_.starts = starts;
    Context context = context_;
    context.workspace = context_.workspace + carve.used();
    Forward<E>(forward_, context).run();
  }

 private:
  static ForwardProblem forward_of(const SummaryProblem& problem) {
    ForwardProblem forward;
    forward.in = sequences_of(problem.in, problem.first, problem.count);
    forward.final = problem.local;
    forward.transition = problem.transition;
    return forward;
  }

  int64_t heads() const { return problem_.count * problem_.in.value_heads; }

  ForwardProblem::ChainStart find_start(int64_t item) const {
    const Layer& in = forward_.in;
    const int64_t n = item / in.value_heads, head = item % in.value_heads;
    const SequenceSpan sequence = in.sequences[n];
    const Fade fade = find_fade(in, sequence, head, problem_.skip_faded);
    const bool faded = problem_.skip_faded && fade.warmup > 0;
    if (problem_.fade)
      store_scalar(problem_.fade.data, GD_F32, problem_.fade.offset(n, 0, head),
                   faded ? -HUGE_VALF : static_cast<float>(fade.log2_left));
    return {faded ? chunks_of(sequence.length) - fade.warmup : 0, faded};
  }

  const SummaryProblem& problem_;
  const Context& context_;
  ForwardProblem forward_;
};

// G_loc: the gradient chain alone.
template <class E>
class BackwardSummary {
 public:
  BackwardSummary(const BackwardSummaryProblem& problem, const Context& context)
      : problem_(problem), context_(context), dims_(padded_dims(problem.in)) {
    backward_.in = sequences_of(problem.in, problem.first, problem.count);
    backward_.d_o = problem.in.sequences.offsets ? problem.d_o : batches_of(problem.d_o, problem.first);
  }

  size_t workspace() const { return lane_bytes() * context_.lanes; }

  void run() {
    const Layer& in = backward_.in;
    const ChunkGradients<E> gradients(backward_, dims_, nullptr, nullptr);
    for_each_item<typename E::Session>(context_, in.sequences.count * in.value_heads, [&](int index, int64_t item) {
      const int64_t n = item / in.value_heads, head = item % in.value_heads;
      const SequenceSpan sequence = in.sequences[n];
      Carver carve(context_.workspace + lane_bytes() * index);
      const BackwardLane<E> w(carve, dims_, 1);
      std::memset(w.G, 0, sizeof(float) * dims_.state_size());
      const int64_t chunks = problem_.skip_faded ? gradient_warmup(in, sequence, head) : chunks_of(sequence.length);
      for (int64_t chunk = chunks - 1; chunk >= 0; --chunk)
        gradients.advance(w, chunk_span(sequence, chunk), head, w.G);
      for (int p = 0; p < dims_.value_panels(); ++p)
        store_state_panel(problem_.d_local, n, head, in.layout, dims_, p, state_panel(w.G, dims_, p));
    });
  }

 private:
  size_t lane_bytes() const {
    Carver measure;
    BackwardLane<E>(measure, dims_, 1);
    return measure.used();
  }

  const BackwardSummaryProblem& problem_;
  const Context& context_;
  const Dims dims_;
  BackwardProblem backward_;
};

// S <- M S + value, or with M^T, one segment after the other. Panels of 32 value columns are independent of each other.
class Merge {
 public:
  Merge(const MergeProblem& problem, const Context& context)
      : problem_(problem), context_(context), dims_(dims_of(problem)) {}

  size_t workspace() const { return lane_bytes() * context_.lanes; }

  void run() {
    const int panels = dims_.value_panels();
    struct None {};
    for_each_item<None>(context_, problem_.results * problem_.heads * panels, [&](int index, int64_t item) {
      const int p = static_cast<int>(item % panels);
      const int64_t head = item / panels % problem_.heads, r = item / panels / problem_.heads;
      Carver carve(context_.workspace + lane_bytes() * index);
      const Lane w(carve, dims_);
      merge(w, r, head, p);
    });
  }

 private:
  struct Lane {
    float *S, *next, *M;  // [Kp][32] twice, and a block of M's columns [K][16]

    Lane(Carver& carve, const Dims& dims) {
      S = carve.take<float>(dims.Kp * kPanel);
      next = carve.take<float>(dims.Kp * kPanel);
      M = carve.take<float>(dims.Kp * dims.Kp);
    }
  };
  static Dims dims_of(const MergeProblem& p) {
    Layer layer;
    layer.key_dim = p.key_dim;
    layer.value_dim = p.value_dim;
    return padded_dims(layer);
  }
  size_t lane_bytes() const {
    Carver measure;
    Lane(measure, dims_);
    return measure.used();
  }

  void merge(const Lane& w, int64_t r, int64_t head, int p) const {
    const MergeProblem& f = problem_;
    const int64_t first = f.first[r], count = f.count[r];
    float *S = w.S, *next = w.next;
    if (count <= 0) std::memset(S, 0, sizeof(float) * dims_.Kp * kPanel);
    for (int64_t step = 0; step < count; ++step) {
      const int64_t i = f.transposed ? first + count - 1 - step : first + step;
      if (step == 0) {
        load_state_panel(S, f.values, i, head, f.layout, dims_, p);
        continue;
      }
      load_state_panel(next, f.values, i, head, f.layout, dims_, p);
      add_product(next, w.M, static_cast<const float*>(f.transitions.data) + f.transitions.offset(i, head), S);
      std::swap(S, next);
    }
    store_state_panel(f.state, r, head, f.layout, dims_, p, S);
  }

  // next += M S, or M^T S; four rows of M at a time, so that every load of S serves four sums.
  void add_product(float* next, float* scratch, const float* M, const float* S) const {
    constexpr int kRows = 4, kVectors = kPanel / kVector;
    const int K = dims_.K;
    if (problem_.transposed) {
      transpose(scratch, K, M, K, K, K);
      M = scratch;
    }
    for (int i = 0; i < K; i += kRows) {
      Vec acc[kRows][kVectors];
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) acc[r][v] = load(next + (i + r) * kPanel + v * kVector);
      for (int j = 0; j < K; ++j)
        for (int v = 0; v < kVectors; ++v) {
          const Vec s = load(S + j * kPanel + v * kVector);
          for (int r = 0; r < kRows; ++r) acc[r][v] += M[(i + r) * K + j] * s;
        }
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) store(next + (i + r) * kPanel + v * kVector, acc[r][v]);
    }
  }

  const MergeProblem& problem_;
  const Context& context_;
  const Dims dims_;
};

}  // namespace gatedelta::cpu::GD_ISA
