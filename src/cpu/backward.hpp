// Chunked backward: how heads are given to lanes, and how states are replayed. The gradients of one chunk are in
// cpu/backward_chunk.hpp.
//
// The forward saves the state before every kSaveInterval chunks. An item takes these saved states from the last to the
// first; from each it replays the states before the chunks that follow, then goes back through these chunks. dq and dk
// are sums over the value heads of a group, added one after the other in fp32: by the lane that computed them, or,
// where that would leave lanes idle, by another lane after each replay.
#pragma once

#include "cpu/backward_chunk.hpp"

namespace gatedelta::cpu::GD_ISA {

template <class E>
class Backward {
 public:
  Backward(const BackwardProblem& problem, const Context& context)
      : problem_(problem),
        context_(context),
        in_(problem.in),
        dims_(padded_dims(problem.in)),
        split_groups_(backward_splits_groups(problem.in, context.lanes)) {}

  size_t workspace() const {
    Carver carve;
    Shared shared(carve, *this);
    for (int lane = 0; lane < context_.lanes; ++lane) Lane(carve, dims_, lane_heads());
    if (problem_.saved) return carve.used();
    // A forward pass without outputs recomputes the saved states; it uses the lanes' memory before the backward does.
    const size_t forward = shared.bytes + Forward<E>(states_only(nullptr), context_).workspace();
    return forward > carve.used() ? forward : carve.used();
  }

  void run() {
    Carver carve(context_.workspace);
    Shared shared(carve, *this);
    shared_ = &shared;
    lanes_ = context_.workspace + carve.used();
    Carver measure;
    Lane(measure, dims_, lane_heads());
    lane_bytes_ = measure.used();

    if (problem_.saved) {
      states_ = static_cast<const float*>(problem_.saved.data);
    } else {
      const ForwardProblem forward = states_only(shared.states);
      Context context = context_;
      context.workspace = lanes_;
      Forward<E>(forward, context).run();
      states_ = shared.states;
    }
    zero_unowned_rows();
    if (split_groups_) {
      run_heads();
    } else {
      for_each_item<typename E::Session>(
          context_, in_.sequences.count * in_.key_heads,
          [this](int index, int64_t item) { run_group(lane(index), item / in_.key_heads, item % in_.key_heads); });
    }
    sum_head_gradients();
  }

 private:
  using Lane = BackwardLane<E>;

  struct Shared {
    float* states;       // what a forward saves, if there is no `saved`
    double* dA_log;      // [N][Hv], sums over one sequence
    double* d_dt_bias;   // [N][Hv]
    float *G, *dq, *dk;  // with split groups: [N][Hv] state gradients, and the replay's dq and dk of every value head
    size_t bytes;

    Shared(Carver& carve, const Backward& b) {
      const int64_t heads = b.in_.sequences.count * b.in_.value_heads;
      dA_log = carve.take<double>(b.problem_.dA_log ? heads : 0);
      d_dt_bias = carve.take<double>(b.problem_.d_dt_bias ? heads : 0);
      states =
          carve.take<float>(b.problem_.saved ? 0 : max_saved_states(b.in_) * b.in_.value_heads * b.dims_.state_size());
      const int64_t split = b.split_groups_ ? heads : 0;
      G = carve.take<float>(split * b.dims_.state_size());
      dq = carve.take<float>(split * replay_rows(b.dims_));
      dk = carve.take<float>(split * replay_rows(b.dims_));
      bytes = carve.used();
    }
  };

  Lane lane(int index) const {
    Carver carve(lanes_ + lane_bytes_ * index);
    return Lane(carve, dims_, lane_heads());
  }
  int64_t lane_heads() const { return split_groups_ ? 0 : in_.group; }

  ForwardProblem states_only(float* states) const {
    ForwardProblem forward;
    forward.in = in_;
    forward.saved = {states, 0, true};
    return forward;
  }

  void zero_unowned_rows() {
    const Sequences& s = in_.sequences;
    if (!s.offsets) return;
    const auto zero = [&](const TokenRows& rows, int64_t heads, int64_t width) {
      if (!rows) return;
      for (int64_t t = s.used_tokens(); t < s.tokens; ++t)
        for (int64_t h = 0; h < heads; ++h)
          std::memset(static_cast<char*>(rows.data) + rows.offset(0, t, h) * dtype_bytes(rows.dtype), 0,
                      width * dtype_bytes(rows.dtype));
    };
    zero(problem_.dq, in_.key_heads, dims_.K);
    zero(problem_.dk, in_.key_heads, dims_.K);
    zero(problem_.dv, in_.value_heads, dims_.V);
    zero(problem_.dg, in_.value_heads, 1);
    zero(problem_.dbeta, in_.value_heads, 1);
  }

  // --- how heads are given to lanes ----------------------------------------------------------------------------------

  int64_t replays_of(int64_t n) const {
    return (chunks_of(in_.sequences[n].length) + kSaveInterval - 1) / kSaveInterval;
  }

  // One item does all value heads of a key head.
  void run_group(const Lane& w, int64_t n, int64_t key_head) {
    const auto head = [&](int64_t h) { return in_.value_head(key_head * in_.group + h); };
    const auto G = [&](int64_t h) { return w.G + h * dims_.state_size(); };
    for (int64_t h = 0; h < in_.group; ++h) begin_head(G(h), n, head(h));
    for (int64_t replay = replays_of(n) - 1; replay >= 0; --replay) {
      for (int64_t h = 0; h < in_.group; ++h) run_replay(w, n, replay, head(h), G(h), w.dq, w.dk, h == 0);
      store_key_gradients(w, n, replay, key_head, w.dq, w.dk);
    }
    for (int64_t h = 0; h < in_.group; ++h) end_head(G(h), n, head(h));
  }

  // Each item is one value head of one replay. Once all heads of a replay are done, their dq and dk are summed, in the
  // same order as in run_group.
  void run_heads() {
    int64_t steps = 1;
    for (int64_t n = 0; n < in_.sequences.count; ++n) steps = std::max(steps, replays_of(n));
    for (int64_t step = 0; step < steps; ++step) {
      for_each_item<typename E::Session>(context_, in_.sequences.count * in_.value_heads, [&](int index, int64_t item) {
        const int64_t n = item / in_.value_heads, head = in_.value_head(item % in_.value_heads),
                      replay = replays_of(n) - 1 - step;
        float* G = shared_->G + item * dims_.state_size();
        if (step == 0) begin_head(G, n, head);
        if (replay >= 0)
          run_replay(lane(index), n, replay, head, G, shared_->dq + item * replay_rows(dims_),
                     shared_->dk + item * replay_rows(dims_), true);
        if (replay == 0 || (replay < 0 && step == 0)) end_head(G, n, head);
      });
      for_each_item<typename E::Session>(context_, in_.sequences.count * in_.key_heads, [&](int index, int64_t item) {
        const int64_t n = item / in_.key_heads, key_head = item % in_.key_heads, replay = replays_of(n) - 1 - step;
        if (replay < 0) return;
        const int64_t first = (n * in_.value_heads + key_head * in_.group) * replay_rows(dims_);
        for (float* sum : {shared_->dq + first, shared_->dk + first})
          for (int64_t h = 1; h < in_.group; ++h)
            for (int64_t i = 0; i < replay_rows(dims_); i += kVector)
              store(sum + i, load(sum + i) + load(sum + h * replay_rows(dims_) + i));
        store_key_gradients(lane(index), n, replay, key_head, shared_->dq + first, shared_->dk + first);
      });
    }
  }

  void begin_head(float* G, int64_t n, int64_t head) {
    for (int p = 0; p < dims_.value_panels(); ++p)
      load_state_panel(state_panel(G, dims_, p), problem_.d_final, problem_.d_final.slot(n), head, in_.layout, dims_,
                       p);
    if (problem_.dA_log) shared_->dA_log[n * in_.value_heads + head] = 0;
    if (problem_.d_dt_bias) shared_->d_dt_bias[n * in_.value_heads + head] = 0;
  }
  void end_head(float* G, int64_t n, int64_t head) {
    for (int p = 0; p < dims_.value_panels(); ++p)
      store_state_panel(problem_.d_initial, problem_.d_initial.slot(n), head, in_.layout, dims_, p,
                        state_panel(G, dims_, p));
  }

  ChunkGradients<E> gradients() const { return {problem_, dims_, shared_->dA_log, shared_->d_dt_bias}; }

  int chunks_of_replay(int64_t n, int64_t replay) const {
    return static_cast<int>(
        std::min<int64_t>(kSaveInterval, chunks_of(in_.sequences[n].length) - replay * kSaveInterval));
  }

  void run_replay(const Lane& w, int64_t n, int64_t replay, int64_t head, float* G, float* dq, float* dk,
                  bool first_of_group) {
    const SequenceSpan sequence = in_.sequences[n];
    const int count = chunks_of_replay(n, replay);
    replay_states(w, n, sequence, replay * kSaveInterval, count, head);
    for (int c = count - 1; c >= 0; --c) {
      const int64_t chunk = replay * kSaveInterval + c;
      gradients().run(w, n, chunk_span(sequence, chunk), chunk_span(sequence, c ? chunk - 1 : chunk), c, head, G, dq,
                      dk, first_of_group);
    }
  }

  void store_key_gradients(const Lane& w, int64_t n, int64_t replay, int64_t key_head, float* dq, float* dk) {
    for (int c = 0; c < chunks_of_replay(n, replay); ++c) {
      const ChunkSpan span = chunk_span(in_.sequences[n], replay * kSaveInterval + c);
      gradients().store_key_gradient(w, problem_.dq, in_.q, span, key_head, dq + int64_t{c} * C * dims_.Kp);
      gradients().store_key_gradient(w, problem_.dk, in_.k, span, key_head, dk + int64_t{c} * C * dims_.Kp);
    }
  }

  // --- one replay of one head ----------------------------------------------------------------------------------------

  // The states before every chunk of a replay, and the chunks' T and U.
  void replay_states(const Lane& w, int64_t n, const SequenceSpan& sequence, int64_t begin, int count, int64_t head) {
    const int64_t entry = (first_saved_state(in_, n, sequence) + begin / kSaveInterval) * in_.value_heads + head;
    std::memcpy(w.state, states_ + entry * dims_.state_size(), sizeof(float) * dims_.state_size());
    for (int c = 0; c < count; ++c) {
      const ChunkSpan span = chunk_span(sequence, begin + c);
      std::memcpy(w.replay_states + c * dims_.state_size(), w.state, sizeof(float) * dims_.state_size());
      prepare_key<E>(w.key, w.key_scratch, dims_, in_, span, in_.key_head(head), false, false);
      prepare_gates(*w.value_scratch.gates, in_, span, head);
      invert_unit_lower(w.value_scratch.T, w.key_scratch.KK, w.value_scratch.gates->beta);
      std::memcpy(w.replay_T + c * C * C, w.value_scratch.T, sizeof(float) * C * C);
      prepare_solve<E>(w.value, *w.value_scratch.gates, w.key_scratch, w.value_scratch.T, in_.scale);
      for (int p = 0; p < dims_.value_panels(); ++p) {
        prefetch_panel_share(c + 1 < count ? chunk_span(sequence, begin + c + 1) : span, c + 1 < count, head, p);
        float* S = state_panel(w.state, dims_, p);
        E::store_b(w.Sb, dims_.Kp, 0, dims_.Kp, S, kPanel);
        load_chunk(w.panel.W, kPanel, in_.v, span, head, dims_.V, p * kPanel, kPanel);
        solve_panel<E>(w.panel, w.key.Ka, w.Sb, w.value, dims_);
        float* U = w.replay_U + int64_t{c} * C * dims_.Vp + p * kPanel;
        for (int i = 0; i < C; ++i) std::memcpy(U + i * dims_.Vp, w.panel.U + i * kPanel, sizeof(float) * kPanel);
        if (c + 1 < count) update_panel<E>(S, w.panel, w.key.Kta, w.value, dims_);
      }
    }
  }

  // Prefetches a panel's share of the rows needed next: k and v of the next chunk to replay, or, after the last, what
  // the gradients read beside them.
  void prefetch_panel_share(const ChunkSpan& next, bool replays, int64_t head, int p) const {
    const int begin = next.rows * p / dims_.value_panels(), end = next.rows * (p + 1) / dims_.value_panels();
    prefetch_rows(replays ? in_.k : in_.q, next, begin, end, in_.key_head(head), 0, dims_.K);
    prefetch_rows(replays ? in_.v : problem_.d_o, next, begin, end, head, 0, dims_.V);
  }

  void sum_head_gradients() {
    const auto reduce = [&](const HeadVector& dst, const double* partial) {
      if (!dst) return;
      for (int64_t h = 0; h < in_.value_heads; ++h) {
        double total = 0;
        for (int64_t n = 0; n < in_.sequences.count; ++n) total += partial[n * in_.value_heads + h];
        store_scalar(dst.data, dst.dtype, h * dst.stride, static_cast<float>(total));
      }
    };
    reduce(problem_.dA_log, shared_->dA_log);
    reduce(problem_.d_dt_bias, shared_->d_dt_bias);
  }

  const BackwardProblem& problem_;
  const Context& context_;
  const Layer& in_;
  const Dims dims_;
  const bool split_groups_;
  Shared* shared_ = nullptr;
  const float* states_ = nullptr;
  char* lanes_ = nullptr;
  size_t lane_bytes_ = 0;
};

}  // namespace gatedelta::cpu::GD_ISA
