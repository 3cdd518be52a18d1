// Chunked forward. Per chunk and value head, every panel of 32 value columns on its own:
//   W  = V - gamma o (K S),   U = T_g (beta o W)
//   O  = s gamma o (Q S) + P U
//   S <- gamma_L S + K^T (delta o U)
// Panels never mix, so the distribution of panels, heads and sequences over lanes cannot change a bit.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/chunk.hpp"
#include "cpu/parallel.hpp"
#include "cpu/state_panel.hpp"

namespace gatedelta::cpu::GD_ISA {

// The state of one panel: fp32 master and its B form.
template <class E>
struct PanelState {
  float* S;              // [Kp][32]
  typename E::Elem* Sb;  // B [Kp x 32]
};

// The states of one head, panel after panel.
template <class E>
struct HeadState {
  using Elem = typename E::Elem;
  float* S;
  Elem* Sb;

  HeadState(Carver& carve, const Dims& dims, int panels) {
    S = carve.take<float>(int64_t{dims.Kp} * kPanel * panels);
    Sb = carve.take<Elem>(E::b_size(dims.Kp) * panels);
  }
  PanelState<E> panel(const Dims& dims, int p) const { return {state_panel(S, dims, p), Sb + E::b_size(dims.Kp) * p}; }
};

template <class E>
struct PanelScratch {
  using Elem = typename E::Elem;
  float *W, *U;    // [64][32]
  float* product;  // [max(Kp, 64)][32]
  HiLo<Elem> Wb;   // B [64 x 32]
  HiLo<Elem> Ub;   // B [64 x 32], the low part where keys are similar
  HiLo<Elem> dUb;  // B [64 x 32] delta o U

  PanelScratch(Carver& carve, const Dims& dims) {
    W = carve.take<float>(C * kPanel);
    U = carve.take<float>(C * kPanel);
    product = carve.take<float>((dims.Kp > C ? dims.Kp : C) * kPanel);
    Wb = take_hi_lo<E>(carve, E::b_size(C));
    Ub = take_hi_lo<E>(carve, E::b_size(C));
    dUb = take_hi_lo<E>(carve, E::b_size(C));
  }
};

// W = V - gamma o (K S) in place of V in w.W, and U = T_g (beta o W). An error in what is
// written to the state stays there, so T_g, W and U are split into high and low parts (docs/numerics.md has the cost of
// every rounding).
template <class E>
void solve_panel(const PanelScratch<E>& w, const typename E::Elem* Ka, const typename E::Elem* Sb,
                 const ValueOperands<E>& value, const Dims& dims) {
  E::multiply({{Ka, Sb}}, dims.Kp, 0, C, 0, dims.Kp, w.product, kPanel);
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < kPanel; j += kVector) {
      float* v = w.W + i * kPanel + j;
      store(v, load(v) - value.read_k[i] * load(w.product + i * kPanel + j));
    }
  store_b_hi_lo<E>(w.Wb, C, w.W, kOnes.value);
  multiply_lower<E, false>(HiLoTerms<E>(value.Tg, w.Wb).terms, w.U);
}

// S <- gamma_L S + K^T (delta o U).
template <class E>
void update_panel(float* S, const PanelScratch<E>& w, const typename E::Elem* Kta, const ValueOperands<E>& value,
                  const Dims& dims) {
  store_b_hi_lo<E>(w.dUb, C, w.U, value.write_k);
  const float gamma_L = *value.gamma_L;
  for (int64_t i = 0; i < int64_t{dims.Kp} * kPanel; i += kVector) store(S + i, gamma_L * load(S + i));
  multiply_hi_lo<E, true>(Kta, w.dUb, C, dims.Kp, S);
}

template <class E>
class Forward {
 public:
  Forward(const ForwardProblem& problem, const Context& context)
      : problem_(problem),
        context_(context),
        in_(problem.in),
        dims_(padded_dims(problem.in)),
        panels_(dims_.value_panels() + (problem.transition ? dims_.key_panels() : 0)),
        plan_(plan_forward(problem.in, context.lanes)) {}

  size_t workspace() const {
    Carver carve;
    Shared shared(carve, *this);
    for (int lane = 0; lane < context_.lanes; ++lane) Lane(carve, *this);
    return carve.used();
  }

  void run() {
    Carver carve(context_.workspace);
    Shared shared(carve, *this);
    shared_ = &shared;
    const size_t lanes_begin = carve.used();
    Carver measure;
    Lane(measure, *this);
    lane_bytes_ = measure.used();
    lanes_ = context_.workspace + lanes_begin;

    prepare_order();
    zero_unowned_rows();
    if (plan_.split) {
      run_split();
    } else {
      for_each_item<typename E::Session>(context_, plan_.items,
                                         [this](int lane, int64_t item) { run_fused(this->lane(lane), item); });
    }
  }

 private:
  using Elem = typename E::Elem;
  static constexpr int kBlockChunks = 16;  // chunks of a block, prepared together when lanes share a head

  // Shared by all lanes.
  struct Shared {
    int64_t* order;             // sequences, longest first
    int64_t* first_checkpoint;  // [N + 1]
    char* split;                // operands and states of every head, if lanes share heads

    Shared(Carver& carve, const Forward& f) {
      const int64_t n = f.in_.sequences.count;
      order = carve.take<int64_t>(n);
      first_checkpoint = carve.take<int64_t>(f.problem_.checkpoint_every ? n + 1 : 0);
      split = nullptr;
      if (f.plan_.split) {
        Carver measure;
        f.carve_key(measure);
        const size_t key = measure.used();
        Carver measure_value;
        f.carve_value(measure_value);
        split = carve.take<char>(
            static_cast<int64_t>(n * (f.in_.key_heads * key + f.in_.value_heads * measure_value.used())));
      }
    }
  };

  struct Lane {
    KeyOperands<E> key;
    KeyScratch<E> key_scratch;
    ValueOperands<E> value;
    ValueScratch value_scratch;
    PanelScratch<E> panel;
    char* states;  // HeadState of each head of the item

    Lane(Carver& carve, const Forward& f)
        : key(carve, f.dims_),
          key_scratch(carve, f.dims_),
          value(carve, f.dims_),
          value_scratch(carve, f.dims_),
          panel(carve, f.dims_),
          states(carve.take<char>(f.plan_.split ? 0 : f.head_state_bytes() * f.plan_.heads_per_item)) {}
  };

  // Split plan: a block's operands of one (sequence, key head), and of one (sequence, value head) with its state.
  void carve_key(Carver& carve) const {
    for (int c = 0; c < kBlockChunks; ++c) KeyOperands<E>(carve, dims_);
  }
  void carve_value(Carver& carve) const {
    for (int c = 0; c < kBlockChunks; ++c) ValueOperands<E>(carve, dims_);
    HeadState<E>(carve, dims_, panels_);
  }
  int64_t head_state_bytes() const {
    Carver measure;
    HeadState<E>(measure, dims_, panels_);
    return static_cast<int64_t>(measure.used());
  }

  Lane lane(int index) const {
    Carver carve(lanes_ + lane_bytes_ * index);
    return Lane(carve, *this);
  }

  void prepare_order() {
    const Sequences& sequences = in_.sequences;
    for (int64_t n = 0; n < sequences.count; ++n) shared_->order[n] = n;
    if (sequences.offsets)
      std::sort(shared_->order, shared_->order + sequences.count, [&](int64_t x, int64_t y) {
        const int64_t a = sequences[x].length, b = sequences[y].length;
        return a != b ? a > b : x < y;
      });
    if (!problem_.checkpoint_every) return;
    int64_t total = 0;
    for (int64_t n = 0; n < sequences.count; ++n) {
      shared_->first_checkpoint[n] = total;
      total += sequences[n].length / problem_.checkpoint_every;
    }
  }

  // Rows of o that no sequence owns, and padded rows.
  void zero_unowned_rows() {
    if (!problem_.o) return;
    const Sequences& sequences = in_.sequences;
    if (sequences.offsets) zero_rows({0, sequences.used_tokens(), sequences.tokens - sequences.used_tokens()});
    for (int64_t n = 0; n < sequences.count; ++n)
      if (problem_.is_padding(n)) zero_rows(sequences[n]);
  }
  void zero_rows(const SequenceSpan& span) {
    const TokenRows& o = problem_.o;
    for (int64_t t = 0; t < span.length; ++t)
      for (int64_t h = 0; h < in_.value_heads; ++h)
        std::memset(static_cast<char*>(o.data) + o.offset(span.batch, span.begin + t, h) * dtype_bytes(o.dtype), 0,
                    dims_.V * dtype_bytes(o.dtype));
  }

  // --- one head's chain ----------------------------------------------------------------------------------------------

  // Panels from here on are columns of the transition M: a state that begins with the identity and has no values.
  bool is_transition(int p) const { return p >= dims_.value_panels(); }
  bool skips(int64_t n, int64_t head, int64_t chunk, int p) const {
    if (!problem_.starts) return false;
    const ForwardProblem::ChainStart& start = problem_.starts[n * in_.value_heads + head];
    return chunk < start.first_chunk || (start.faded && is_transition(p));
  }

  void begin_panel(const PanelState<E>& state, int64_t n, int64_t head, int p) {
    if (is_transition(p)) {
      const int first = (p - dims_.value_panels()) * kPanel;
      const bool faded = problem_.starts && problem_.starts[n * in_.value_heads + head].faded;
      std::memset(state.S, 0, sizeof(float) * dims_.Kp * kPanel);
      for (int j = 0; j < kPanel && first + j < dims_.K; ++j) state.S[(first + j) * kPanel + j] = faded ? 0.0f : 1.0f;
    } else {
      load_state_panel(state.S, in_.initial, in_.initial.slot(n), head, in_.layout, dims_, p);
    }
    E::store_b(state.Sb, dims_.Kp, 0, dims_.Kp, state.S, kPanel);
  }

  void end_panel(const PanelState<E>& state, int64_t n, int64_t head, int p) {
    if (is_transition(p)) {
      const Dims square = {dims_.K, dims_.K, dims_.Kp, dims_.Kp};
      return store_state_panel(problem_.transition, n, head, GD_STATE_KV, square, p - dims_.value_panels(), state.S);
    }
    store_state_panel(problem_.final, problem_.final.slot(n), head, in_.layout, dims_, p, state.S);
  }

  void advance_panel(const PanelState<E>& state, const PanelScratch<E>& w, const KeyOperands<E>& key,
                     const ValueOperands<E>& value, int64_t n, const SequenceSpan& sequence, int64_t chunk,
                     int64_t head, int p) {
    if (problem_.saved && chunk % kSaveInterval == 0) {
      const int64_t entry = (first_saved_state(in_, n, sequence) + chunk / kSaveInterval) * in_.value_heads + head;
      float* saved = static_cast<float*>(problem_.saved.data) + entry * dims_.state_size();
      std::memcpy(state_panel(saved, dims_, p), state.S, sizeof(float) * dims_.Kp * kPanel);
    }
    const ChunkSpan span = chunk_span(sequence, chunk);
    if (is_transition(p)) {
      std::memset(w.W, 0, sizeof(float) * C * kPanel);
    } else {
      load_chunk(w.W, kPanel, in_.v, span, head, dims_.V, p * kPanel, kPanel);
    }
    solve_panel<E>(w, key.Ka, state.Sb, value, dims_);
    if (problem_.o) {
      float* O = w.W;
      E::multiply({{key.Qa, state.Sb}}, dims_.Kp, 0, C, 0, dims_.Kp, O, kPanel);
      if (key.splits()) {
        store_b_hi_lo<E>(w.Ub, C, w.U, kOnes.value);
      } else {
        E::store_b(w.Ub.high, C, 0, C, w.U, kPanel);
      }
      multiply_lower_parts<E, false>(value.Pa, w.Ub, key.splits(), w.product);
      for (int i = 0; i < C; ++i) {
        const float scale = value.read_q[i];
        for (int j = 0; j < kPanel; j += kVector) {
          float* o = O + i * kPanel + j;
          store(o, scale * load(o) + load(w.product + i * kPanel + j));
        }
      }
      store_chunk(problem_.o, span, head, dims_.V, p * kPanel, kPanel, O, kPanel);
    }
    update_panel<E>(state.S, w, key.Kta, value, dims_);
    E::store_b(state.Sb, dims_.Kp, 0, dims_.Kp, state.S, kPanel);

    const int64_t done = (chunk + 1) * C, every = problem_.checkpoint_every;
    if (problem_.checkpoint_offsets) {
      if (done == problem_.checkpoint_offsets[n]) store_checkpoint(n, head, p, state.S);
    } else if (every && done <= sequence.length && done % every == 0) {
      store_checkpoint(shared_->first_checkpoint[n] + done / every - 1, head, p, state.S);
    }
  }
  void store_checkpoint(int64_t entry, int64_t head, int p, const float* S) {
    store_state_panel(problem_.checkpoints, problem_.checkpoints.slot(entry), head, in_.layout, dims_, p, S);
  }

  // --- fused ---------------------------------------------------------------------------------------------------------

  void run_fused(const Lane& lane, int64_t item) {
    const int heads = plan_.heads_per_item;
    const int64_t items_per_sequence = in_.value_heads / heads;
    const int64_t n = shared_->order[item / items_per_sequence], first = item % items_per_sequence * heads;
    if (problem_.is_padding(n)) return;
    const SequenceSpan sequence = in_.sequences[n];
    const int64_t state_bytes = head_state_bytes();
    const auto state = [&](int h) {
      Carver carve(lane.states + state_bytes * h);
      return HeadState<E>(carve, dims_, panels_);
    };
    for (int h = 0; h < heads; ++h)
      for (int p = 0; p < panels_; ++p) begin_panel(state(h).panel(dims_, p), n, in_.value_head(first + h), p);
    for (int64_t chunk = 0; chunk < chunks_of(sequence.length); ++chunk) {
      const ChunkSpan span = chunk_span(sequence, chunk);
      int64_t prepared = -1;  // key head
      for (int h = 0; h < heads; ++h) {
        const int64_t head = in_.value_head(first + h);
        if (skips(n, head, chunk, 0)) continue;
        if (in_.key_head(head) != std::exchange(prepared, in_.key_head(head)))
          prepare_key<E>(lane.key, lane.key_scratch, dims_, in_, span, in_.key_head(head), bool(problem_.o), false);
        prepare_value<E>(lane.value, lane.value_scratch, lane.key_scratch, in_, span, head, bool(problem_.o),
                         lane.key.splits());
        const HeadState<E> head_state = state(h);
        for (int p = 0; p < panels_ && !skips(n, head, chunk, p); ++p) {
          if (!is_transition(p)) prefetch_next(sequence, chunk, first, h, p);
          advance_panel(head_state.panel(dims_, p), lane.panel, lane.key, lane.value, n, sequence, chunk, head, p);
        }
      }
    }
    for (int h = 0; h < heads; ++h)
      for (int p = 0; p < panels_; ++p) end_panel(state(h).panel(dims_, p), n, in_.value_head(first + h), p);
  }

  // Prefetches what a panel and the next one will touch, and a share of k and q of the next head.
  void prefetch_next(const SequenceSpan& sequence, int64_t chunk, int64_t first, int h, int p) const {
    const int panels = dims_.value_panels();
    const ChunkSpan span = chunk_span(sequence, chunk);
    const bool last_panel = p + 1 == panels, last_head = h + 1 == plan_.heads_per_item;
    const int64_t head = in_.value_head(first + h);
    if (!last_panel) prefetch_panel(span, head, p, span, head, p + 1);
    if (last_head && chunk + 1 == chunks_of(sequence.length)) return;
    const ChunkSpan next = last_head ? chunk_span(sequence, chunk + 1) : span;
    const int64_t next_head = in_.value_head(last_head ? first : first + h + 1), key_head = in_.key_head(next_head);
    if (last_panel) prefetch_panel(span, head, p, next, next_head, 0);
    if (key_head == in_.key_head(head) && !last_head) return;
    const int begin = next.rows * p / panels, end = next.rows * (p + 1) / panels;
    prefetch_rows(in_.k, next, begin, end, key_head, 0, dims_.K);
    if (problem_.o) prefetch_rows(in_.q, next, begin, end, key_head, 0, dims_.K);
  }

  // Prefetches the rows of o that a panel writes, and v of the next panel.
  void prefetch_panel(const ChunkSpan& span, int64_t head, int p, const ChunkSpan& next, int64_t next_head,
                      int next_panel) const {
    if (problem_.o) prefetch_rows<true>(problem_.o, span, 0, span.rows, head, p * kPanel, kPanel);
    prefetch_rows(in_.v, next, 0, next.rows, next_head, next_panel * kPanel, kPanel);
  }

  // --- split ---------------------------------------------------------------------------------------------------------

  void run_split() {
    Carver key_measure, value_measure;
    carve_key(key_measure);
    carve_value(value_measure);
    const int64_t key_bytes = static_cast<int64_t>(key_measure.used()),
                  value_bytes = static_cast<int64_t>(value_measure.used());
    const int64_t count = in_.sequences.count, panels = panels_;
    char* const keys = shared_->split;
    char* const values = keys + count * in_.key_heads * key_bytes;
    const auto key_operands = [&](int64_t n, int64_t key_head, int64_t c) {
      Carver carve(keys + (n * in_.key_heads + key_head) * key_bytes);
      for (int64_t i = 0; i < c; ++i) KeyOperands<E>(carve, dims_);
      return KeyOperands<E>(carve, dims_);
    };
    const auto value_operands = [&](int64_t n, int64_t head, int64_t c) {
      Carver carve(values + (n * in_.value_heads + head) * value_bytes);
      for (int64_t i = 0; i < c; ++i) ValueOperands<E>(carve, dims_);
      return ValueOperands<E>(carve, dims_);
    };
    const auto panel_state = [&](int64_t n, int64_t head, int p) {
      Carver carve(values + (n * in_.value_heads + head) * value_bytes);
      for (int c = 0; c < kBlockChunks; ++c) ValueOperands<E>(carve, dims_);
      return HeadState<E>(carve, dims_, panels_).panel(dims_, p);
    };

    int64_t longest = 0;
    for (int64_t n = 0; n < count; ++n) longest = std::max(longest, chunks_of(in_.sequences[n].length));
    for (int64_t begin = 0; begin == 0 || begin < longest; begin += kBlockChunks) {
      const int64_t block_chunks = std::min<int64_t>(kBlockChunks, longest - begin);
      for_each_item<typename E::Session>(
          context_, count * in_.key_heads * block_chunks, [&](int lane_index, int64_t item) {
            const int64_t c = item % block_chunks, key_head = item / block_chunks % in_.key_heads,
                          n = item / block_chunks / in_.key_heads;
            const SequenceSpan sequence = in_.sequences[n];
            const int64_t chunk = begin + c;
            if (chunk >= chunks_of(sequence.length) || problem_.is_padding(n)) return;
            const Lane lane = this->lane(lane_index);
            const ChunkSpan span = chunk_span(sequence, chunk);
            const KeyOperands<E> key = key_operands(n, key_head, c);
            prepare_key<E>(key, lane.key_scratch, dims_, in_, span, key_head, bool(problem_.o), false);
            for (int64_t h = 0; h < in_.group; ++h) {
              const int64_t head = in_.value_head(key_head * in_.group + h);
              if (skips(n, head, chunk, 0)) continue;
              prepare_value<E>(value_operands(n, head, c), lane.value_scratch, lane.key_scratch, in_, span, head,
                               bool(problem_.o), key.splits());
            }
          });
      for_each_item<typename E::Session>(context_, count * in_.value_heads * panels, [&](int lane_index, int64_t item) {
        const int p = static_cast<int>(item % panels);
        const int64_t head = item / panels % in_.value_heads, n = item / panels / in_.value_heads;
        if (problem_.is_padding(n)) return;
        const SequenceSpan sequence = in_.sequences[n];
        const Lane lane = this->lane(lane_index);
        const PanelState<E> state = panel_state(n, head, p);
        if (begin == 0) begin_panel(state, n, head, p);
        const int64_t chunks = chunks_of(sequence.length);
        for (int64_t c = 0; c < block_chunks && begin + c < chunks; ++c) {
          const int64_t chunk = begin + c, next = std::min(chunk + 1, chunks - 1);
          if (skips(n, head, chunk, p)) continue;
          const KeyOperands<E> key = key_operands(n, in_.key_head(head), c);
          if (!is_transition(p))
            prefetch_panel(chunk_span(sequence, chunk), head, p, chunk_span(sequence, next), head, p);
          advance_panel(state, lane.panel, key, value_operands(n, head, c), n, sequence, chunk, head, p);
        }
        const bool last = chunks == 0 ? begin == 0 : begin < chunks && chunks <= begin + kBlockChunks;
        if (last) end_panel(state, n, head, p);
      });
    }
  }

  const ForwardProblem& problem_;
  const Context& context_;
  const Layer& in_;
  const Dims dims_;
  const int panels_;  // of a head: value columns, and in a summary those of M
  const ForwardPlan plan_;
  Shared* shared_ = nullptr;
  char* lanes_ = nullptr;
  size_t lane_bytes_ = 0;
};

}  // namespace gatedelta::cpu::GD_ISA
