// Chunked backward (docs/math.md, section on gradients), chunks in reverse with G = dL/dS after the chunk:
//   dU = P^T dO + delta o (K G)          P = s tril(QK) o Gamma,   T_g = Gamma o T
//   Z  = T_g^T dU,  dV = beta o Z,  Y = -gamma o dV
//   F  = s Gamma o tril(dO U^T),  E = -Gamma o stril(dV U^T)
//   dQ = s gamma o (dO S^T) + F K
//   dK = [Y S^T + E K]_read + [delta o (U G^T) + F^T Q + E^T K]_write
//   G <- gamma_L G + K^T Y + Q^T (s gamma o dO)
// dg_t counts what crosses the decay of token t, in fp32 sums of products that are at hand:
//   dg_t = gamma_L <G, S>                            from the incoming to the outgoing state
//        + sum_{j<t} kappa_j                         from a write to the outgoing state: kappa = delta o <U, K G>
//        + sum_{i>=t} sigma_i                        from the incoming state to a read:  q.(s gamma o dO S^T) + k.(Y
//        S^T)
//        + sum_{i>=t>j} (F o QK + E o KK)_ij         from a write to a read
//
// The states S before each chunk come from the window states the forward saved: an item walks its windows from the last
// to the first, replays the window's states, then goes back through its chunks. The value heads of a group are summed
// into dq and dk one after the other in fp32: by the lane that computed them, or, where that would leave lanes idle,
// after each window by another.
#pragma once

#include "cpu/forward.hpp"

namespace gatedelta::cpu::GD_ISA {

// beta this small makes <Z, U> / beta useless; then dbeta = <Z, e> with the prediction error e itself.
constexpr float kTinyBeta = 1e-20f;

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
    for (int lane = 0; lane < context_.lanes; ++lane) Lane(carve, *this);
    if (problem_.saved) return carve.used();
    // The states are recomputed by a forward pass without outputs; it uses the lanes' memory before the backward does.
    const size_t replay = shared.bytes + Forward<E>(states_only(nullptr), context_).workspace();
    return replay > carve.used() ? replay : carve.used();
  }

  void run() {
    Carver carve(context_.workspace);
    Shared shared(carve, *this);
    shared_ = &shared;
    lanes_ = context_.workspace + carve.used();
    Carver measure;
    Lane(measure, *this);
    lane_bytes_ = measure.used();

    if (problem_.saved) {
      states_ = static_cast<const float*>(problem_.saved);
    } else {
      const ForwardProblem replay = states_only(shared.states);
      Context context = context_;
      context.workspace = lanes_;
      Forward<E>(replay, context).run();
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
  using Elem = typename E::Elem;

  struct Shared {
    float* states;       // window states, if the forward did not save them
    double* dA_log;      // [N][Hv], sums over one sequence
    double* d_dt_bias;   // [N][Hv]
    float *G, *dq, *dk;  // with split groups: [N][Hv] states, and the window's gradients of every value head
    size_t bytes;

    Shared(Carver& carve, const Backward& b) {
      const int64_t heads = b.in_.sequences.count * b.in_.value_heads;
      dA_log = carve.take<double>(b.problem_.dA_log ? heads : 0);
      d_dt_bias = carve.take<double>(b.problem_.d_dt_bias ? heads : 0);
      states = carve.take<float>(b.problem_.saved ? 0 : max_windows(b.in_) * b.in_.value_heads * b.dims_.state_size());
      const int64_t split = b.split_groups_ ? heads : 0;
      G = carve.take<float>(split * b.dims_.state_size());
      dq = carve.take<float>(split * b.window_rows());
      dk = carve.take<float>(split * b.window_rows());
      bytes = carve.used();
    }
  };

  struct Lane {
    KeyOperands<E> key;
    KeyScratch<E> key_scratch;
    ValueOperands<E> value;
    ValueScratch value_scratch;
    PanelScratch<E> panel;
    // Key side, once per chunk.
    float* Qt;      // [Kp][64]
    Elem* Qta;      // A [Kp x 64]
    Elem *Kb, *Qb;  // B [64 x 32] per key panel
    // Value side.
    float* turned;                            // [max(Kp, 64)][64] scratch for transposes
    Pieces<Elem> TgtA;                        // A [64 x 64] T_g^T, upper
    Elem* PtA;                                // A [64 x 64] P^T, upper
    Elem *FA, *FtA, *EA, *EtA;                // A [64 x 64]
    float *F, *E_;                            // [64][64]
    float *dO, *U, *dV;                       // [64][Vp]
    float* Z;                                 // [64][32]
    Elem *dOa, *Ua, *dVa;                     // A [64 x Vp]
    Elem* Utb[2];                             // B [Vp x 32] of U^T
    Pieces<Elem> dUb;                         // B [64 x 32]
    Elem* dOb;                                // B [64 x 32]
    Pieces<Elem> Yb;                          // B [64 x 32]
    Elem* Sb;                                 // B [Kp x 32]
    Pieces<Elem> Gb;                          // B [Kp x 32]
    Elem *Stb, *Gtb;                          // B [Vp x 32] of S^T, G^T per key panel
    float *dq_panel, *dkw_panel, *dkr_panel;  // [64][32]
    float* scratch;                           // [64][64]
    // Per item.
    float* G;              // states of the group's heads (unless groups are split)
    float* replay;         // state while a window is replayed, panel by panel
    float* window_states;  // [kWindow] states before each chunk
    float* window_T;       // [kWindow][64][64]
    float *dq, *dk;        // [kWindow][64][Kp], sums over the group

    Lane(Carver& carve, const Backward& b)
        : key(carve, b.dims_),
          key_scratch(carve, b.dims_),
          value(carve, b.dims_),
          value_scratch(carve, b.dims_),
          panel(carve, b.dims_) {
      const Dims& d = b.dims_;
      Qt = carve.take<float>(d.Kp * C);
      Qta = carve.take<Elem>(E::a_size(d.Kp, C));
      Kb = carve.take<Elem>(E::b_size(C) * d.key_panels());
      Qb = carve.take<Elem>(E::b_size(C) * d.key_panels());
      turned = carve.take<float>((d.Kp > C ? d.Kp : C) * C);
      TgtA = take_pieces<E>(carve, E::a_size(C, C));
      for (Elem** square : {&PtA, &FA, &FtA, &EA, &EtA}) *square = carve.take<Elem>(E::a_size(C, C));
      F = carve.take<float>(C * C);
      E_ = carve.take<float>(C * C);
      for (float** rows : {&dO, &U, &dV}) *rows = carve.take<float>(C * d.Vp);
      Z = carve.take<float>(C * kPanel);
      for (Elem** rows : {&dOa, &Ua, &dVa}) *rows = carve.take<Elem>(E::a_size(C, d.Vp));
      for (Elem*& p : Utb) p = carve.take<Elem>(E::b_size(d.Vp));
      dUb = take_pieces<E>(carve, E::b_size(C));
      dOb = carve.take<Elem>(E::b_size(C));
      Yb = take_pieces<E>(carve, E::b_size(C));
      Sb = carve.take<Elem>(E::b_size(d.Kp));
      Gb = take_pieces<E>(carve, E::b_size(d.Kp));
      Stb = carve.take<Elem>(E::b_size(d.Vp) * d.key_panels());
      Gtb = carve.take<Elem>(E::b_size(d.Vp) * d.key_panels());
      for (float** p : {&dq_panel, &dkw_panel, &dkr_panel}) *p = carve.take<float>(C * kPanel);
      scratch = carve.take<float>(C * C);
      G = carve.take<float>(b.split_groups_ ? 0 : d.state_size() * b.in_.group);
      replay = carve.take<float>(d.state_size());
      window_states = carve.take<float>(d.state_size() * kWindow);
      window_T = carve.take<float>(C * C * kWindow);
      dq = carve.take<float>(b.window_rows());
      dk = carve.take<float>(b.window_rows());
    }
  };

  int64_t window_rows() const { return int64_t{kWindow} * C * dims_.Kp; }

  Lane lane(int index) const {
    Carver carve(lanes_ + lane_bytes_ * index);
    return Lane(carve, *this);
  }

  ForwardProblem states_only(float* states) const {
    ForwardProblem replay;
    replay.in = in_;
    replay.saved = states;
    return replay;
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

  // --- how heads are dealt out ---------------------------------------------------------------------------------------

  int64_t windows_of(int64_t n) const { return (chunks_of(in_.sequences[n].length) + kWindow - 1) / kWindow; }

  // One item does all value heads of a key head.
  void run_group(const Lane& w, int64_t n, int64_t key_head) {
    const int64_t first = key_head * in_.group;
    const auto G = [&](int64_t h) { return w.G + h * dims_.state_size(); };
    for (int64_t h = 0; h < in_.group; ++h) begin_head(G(h), n, first + h);
    for (int64_t window = windows_of(n) - 1; window >= 0; --window) {
      for (int64_t h = 0; h < in_.group; ++h) run_window(w, n, window, first + h, G(h), w.dq, w.dk, h == 0);
      store_key_gradients(w, n, window, key_head, w.dq, w.dk);
    }
    for (int64_t h = 0; h < in_.group; ++h) end_head(G(h), n, first + h);
  }

  // Value heads on their own, window by window; the group's sum, in the same order, once all of a window are done.
  void run_heads() {
    int64_t steps = 1;
    for (int64_t n = 0; n < in_.sequences.count; ++n) steps = std::max(steps, windows_of(n));
    for (int64_t step = 0; step < steps; ++step) {
      for_each_item<typename E::Session>(context_, in_.sequences.count * in_.value_heads, [&](int index, int64_t item) {
        const int64_t n = item / in_.value_heads, head = item % in_.value_heads, window = windows_of(n) - 1 - step;
        float* G = shared_->G + item * dims_.state_size();
        if (step == 0) begin_head(G, n, head);
        if (window >= 0)
          run_window(lane(index), n, window, head, G, shared_->dq + item * window_rows(),
                     shared_->dk + item * window_rows(), true);
        if (window == 0 || (window < 0 && step == 0)) end_head(G, n, head);
      });
      for_each_item<typename E::Session>(context_, in_.sequences.count * in_.key_heads, [&](int index, int64_t item) {
        const int64_t n = item / in_.key_heads, key_head = item % in_.key_heads, window = windows_of(n) - 1 - step;
        if (window < 0) return;
        const int64_t first = (n * in_.value_heads + key_head * in_.group) * window_rows();
        for (float* sum : {shared_->dq + first, shared_->dk + first})
          for (int64_t h = 1; h < in_.group; ++h)
            for (int64_t i = 0; i < window_rows(); i += kVector)
              store(sum + i, load(sum + i) + load(sum + h * window_rows() + i));
        store_key_gradients(lane(index), n, window, key_head, shared_->dq + first, shared_->dk + first);
      });
    }
  }

  void begin_head(float* G, int64_t n, int64_t head) {
    for (int p = 0; p < dims_.value_panels(); ++p)
      load_state_panel(state_panel(G, dims_, p), problem_.d_final, n, head, in_.layout, dims_, p);
    if (problem_.dA_log) shared_->dA_log[n * in_.value_heads + head] = 0;
    if (problem_.d_dt_bias) shared_->d_dt_bias[n * in_.value_heads + head] = 0;
  }
  void end_head(float* G, int64_t n, int64_t head) {
    for (int p = 0; p < dims_.value_panels(); ++p)
      store_state_panel(problem_.d_initial, n, head, in_.layout, dims_, p, state_panel(G, dims_, p));
  }

  int window_chunks(int64_t n, int64_t window) const {
    return static_cast<int>(std::min<int64_t>(kWindow, chunks_of(in_.sequences[n].length) - window * kWindow));
  }

  void run_window(const Lane& w, int64_t n, int64_t window, int64_t head, float* G, float* dq, float* dk,
                  bool first_of_group) {
    const SequenceSpan sequence = in_.sequences[n];
    const int count = window_chunks(n, window);
    replay_window(w, n, sequence, window * kWindow, count, head / in_.group, head);
    for (int c = count - 1; c >= 0; --c)
      chunk_gradients(w, n, chunk_span(sequence, window * kWindow + c), c, head / in_.group, head, G, dq, dk,
                      first_of_group);
  }

  void store_key_gradients(const Lane& w, int64_t n, int64_t window, int64_t key_head, float* dq, float* dk) {
    for (int c = 0; c < window_chunks(n, window); ++c) {
      const ChunkSpan span = chunk_span(in_.sequences[n], window * kWindow + c);
      store_key_gradient(w, problem_.dq, in_.q, span, key_head, dq + int64_t{c} * C * dims_.Kp);
      store_key_gradient(w, problem_.dk, in_.k, span, key_head, dk + int64_t{c} * C * dims_.Kp);
    }
  }

  // --- one window of one head ----------------------------------------------------------------------------------------

  // The states before every chunk of a window, and their T.
  void replay_window(const Lane& w, int64_t n, const SequenceSpan& sequence, int64_t begin, int count, int64_t key_head,
                     int64_t head) {
    const int64_t slot = (first_window(in_, n, sequence) + begin / kWindow) * in_.value_heads + head;
    std::memcpy(w.replay, states_ + slot * dims_.state_size(), sizeof(float) * dims_.state_size());
    for (int c = 0; c < count; ++c) {
      const ChunkSpan span = chunk_span(sequence, begin + c);
      std::memcpy(w.window_states + c * dims_.state_size(), w.replay, sizeof(float) * dims_.state_size());
      prepare_key<E>(w.key, w.key_scratch, dims_, in_, span, key_head, false, false);
      prepare_gates(*w.value_scratch.gates, in_, span, head);
      invert_unit_lower(w.value_scratch.T, w.key_scratch.KK, w.value_scratch.gates->beta);
      std::memcpy(w.window_T + c * C * C, w.value_scratch.T, sizeof(float) * C * C);
      if (c + 1 == count) return;
      prepare_solve<E>(w.value, *w.value_scratch.gates, w.key_scratch, w.value_scratch.T, in_.scale);
      for (int p = 0; p < dims_.value_panels(); ++p) {
        float* S = state_panel(w.replay, dims_, p);
        E::store_b(w.Sb, dims_.Kp, 0, dims_.Kp, S, kPanel);
        load_chunk(w.panel.W, kPanel, in_.v, span, head, dims_.V, p * kPanel, kPanel);
        solve_panel<E>(w.panel, w.key.Ka, w.Sb, w.value, dims_);
        update_panel<E>(S, w.panel, w.key.Kta, w.value, dims_);
      }
    }
  }

  static void pack_square_turned(Elem* dst, const float* src, float* turned) {
    transpose(turned, C, src, C, C, C);
    pack_square<E>(dst, turned);
  }

  static void pack_square_scaled(Elem* dst, const float* src, const float* column_scale, float* scaled) {
    for (int i = 0; i < C; ++i)
      for (int j = 0; j < C; j += kVector) store(scaled + i * C + j, load(src + i * C + j) * load(column_scale + j));
    pack_square<E>(dst, scaled);
  }

  static void scale_rows(float* c, const float* scale, float factor) {
    for (int i = 0; i < C; ++i) {
      const float s = scale[i] * factor;
      for (int j = 0; j < kPanel; j += kVector) store(c + i * kPanel + j, load(c + i * kPanel + j) * s);
    }
  }

  // B form of the transpose of a [Kp][32] panel, as rows [32 p, ...) of every key panel's [Vp x 32].
  void pack_turned_state(const Lane& w, Elem* dst, const float* panel, int p) {
    transpose(w.turned, dims_.Kp, panel, kPanel, dims_.Kp, kPanel);
    for (int kp = 0; kp < dims_.key_panels(); ++kp)
      E::store_b(dst + E::b_size(dims_.Vp) * kp, dims_.Vp, p * kPanel, kPanel, w.turned + kp * kPanel, dims_.Kp);
  }

  void chunk_gradients(const Lane& w, int64_t n, const ChunkSpan& span, int c, int64_t key_head, int64_t head, float* G,
                       float* dq_window, float* dk_window, bool first_of_group) {
    const KeyScratch<E>& key = w.key_scratch;
    Gates& gates = *w.value_scratch.gates;
    const float s = in_.scale;
    const int Kp = dims_.Kp, Vp = dims_.Vp;

    prepare_key<E>(w.key, key, dims_, in_, span, key_head, true, true);
    transpose(w.Qt, C, key.Q, Kp, C, Kp);
    for (int i = 0; i < Kp; ++i) E::store_a_row(w.Qta, C, i, w.Qt + i * C);
    for (int kp = 0; kp < dims_.key_panels(); ++kp) {
      E::store_b(w.Kb + E::b_size(C) * kp, C, 0, C, key.K + kp * kPanel, Kp);
      E::store_b(w.Qb + E::b_size(C) * kp, C, 0, C, key.Q + kp * kPanel, Kp);
    }
    prepare_gates(gates, in_, span, head);

    float* const square = w.value_scratch.square;
    const float* T = w.window_T + c * C * C;
    prepare_solve<E>(w.value, gates, key, T, s);
    for (int i = 0; i < C * C; i += kVector) store(square + i, load(T + i) * load(gates.Gamma + i));
    transpose(w.turned, C, square, C, C, C);
    for (int i = 0; i < C; ++i) store_a_pieces<E>(w.TgtA, C, i, w.turned + i * C);
    score_square<E>(square, gates, key, s);
    pack_square_turned(w.PtA, square, w.turned);

    float state_product = 0;       // <G, S>
    float zu[C] = {}, ze[C] = {};  // <Z_i, U_i>, <Z_i, e_i>
    float sigma[C] = {}, kappa[C] = {};
    for (int p = 0; p < dims_.value_panels(); ++p) {
      const PanelScratch<E>& pw = w.panel;
      const float* S = state_panel(w.window_states + c * dims_.state_size(), dims_, p);
      float* Gp = state_panel(G, dims_, p);
      // W and U.
      load_chunk(w.panel.W, kPanel, in_.v, span, head, dims_.V, p * kPanel, kPanel);
      E::store_b(w.Sb, Kp, 0, Kp, S, kPanel);
      solve_panel<E>(pw, w.key.Ka, w.Sb, w.value, dims_);
      const float* U = pw.U;
      // dU = P^T dO + delta o (K G).
      float* dO = w.Z;
      load_chunk(dO, kPanel, problem_.d_o, span, head, dims_.V, p * kPanel, kPanel);
      for (int i = 0; i < C; ++i) {
        std::memcpy(w.dO + i * Vp + p * kPanel, dO + i * kPanel, sizeof(float) * kPanel);
        std::memcpy(w.U + i * Vp + p * kPanel, U + i * kPanel, sizeof(float) * kPanel);
      }
      E::store_b(w.dOb, C, 0, C, dO, kPanel);
      store_b_pieces<E>(w.Gb, Kp, Gp, kOnes.value);
      float* dU = pw.product;
      multiply_pieces<E>(w.key.Ka, w.Gb, Kp, C, dU);
      scale_rows(dU, w.value.write_k, 1.0f);
      for (int i = 0; i < C; ++i) kappa[i] += dot(U + i * kPanel, dU + i * kPanel, kPanel);
      multiply_upper<E, true>({{w.PtA, w.dOb}}, dU);
      // Z, dV, Y; the state still needs s gamma o dO.
      scale_rows(dO, w.value.read_q, 1.0f);
      E::store_b(w.dOb, C, 0, C, dO, kPanel);
      float* Z = w.Z;
      store_b_pieces<E>(w.dUb, C, dU, kOnes.value);
      multiply_upper<E, false>(PieceTerms<E>(w.TgtA, w.dUb).terms, Z);
      for (int i = 0; i < C; ++i) {
        zu[i] += dot(Z + i * kPanel, U + i * kPanel, kPanel);
        if (i < span.rows && std::fabs(gates.beta[i]) < kTinyBeta) ze[i] += error_product(w, gates, Z, U, pw.W, i);
        float* dV = w.dV + i * Vp + p * kPanel;
        for (int j = 0; j < kPanel; j += kVector) {
          const Vec value = gates.beta[i] * load(Z + i * kPanel + j);
          store(dV + j, value);
          store(Z + i * kPanel + j, value * -w.value.read_k[i]);  // Y, as it meets K
        }
      }
      store_b_pieces<E>(w.Yb, C, Z, kOnes.value);
      // S^T and G^T for the key side, then G moves on.
      pack_turned_state(w, w.Stb, S, p);
      pack_turned_state(w, w.Gtb, Gp, p);
      Vec product = {};
      for (int i = 0; i < Kp * kPanel; i += kVector) product += load(S + i) * load(Gp + i);
      state_product += sum(product);
      for (int i = 0; i < Kp * kPanel; i += kVector) store(Gp + i, gates.gamma_L * load(Gp + i));
      multiply_pieces<E, true>(w.key.Kta, w.Yb, C, Kp, Gp);
      E::template multiply<true>({{w.Qta, w.dOb}}, C, 0, Kp, 0, C, Gp, kPanel);
    }
    if (problem_.dv) store_chunk(problem_.dv, span, head, dims_.V, 0, Vp, w.dV, Vp);

    // F and E contract over all value columns.
    for (int i = 0; i < C; ++i) {
      E::store_a_row(w.dOa, Vp, i, w.dO + i * Vp);
      E::store_a_row(w.Ua, Vp, i, w.U + i * Vp);
      E::store_a_row(w.dVa, Vp, i, w.dV + i * Vp);
    }
    for (int p = 0; p < dims_.value_panels(); ++p) {
      transpose(w.turned, C, w.U + p * kPanel, Vp, C, kPanel);
      for (int half = 0; half < 2; ++half) E::store_b(w.Utb[half], Vp, p * kPanel, kPanel, w.turned + half * kPanel, C);
    }
    multiply_to_lower<E>(w.dOa, w.Utb[0], w.Utb[1], Vp, w.F);
    multiply_to_lower<E>(w.dVa, w.Utb[0], w.Utb[1], Vp, w.E_);
    keep_lower(w.F, w.F);
    keep_lower(w.E_, w.E_);
    for (int i = 0; i < C * C; i += kVector) {
      store(w.F + i, s * load(gates.Gamma + i) * load(w.F + i));
      store(w.E_ + i, -load(gates.Gamma + i) * load(w.E_ + i));
    }
    for (int i = 0; i < C; ++i) w.E_[i * C + i] = 0.0f;
    add_pairs(sigma, w.F, key.QK);
    add_pairs(sigma, w.E_, key.KK);
    // As they meet Q and K: columns scaled by the norms of the rows they meet.
    pack_square_scaled(w.FA, w.F, key.rk, w.turned);
    pack_square_scaled(w.EA, w.E_, key.rk, w.turned);
    transpose(w.scratch, C, w.F, C, C, C);
    pack_square_scaled(w.FtA, w.scratch, key.rq, w.turned);
    transpose(w.scratch, C, w.E_, C, C, C);
    pack_square_scaled(w.EtA, w.scratch, key.rk, w.turned);

    for (int kp = 0; kp < dims_.key_panels(); ++kp) {
      const Elem *Kb = w.Kb + E::b_size(C) * kp, *Qb = w.Qb + E::b_size(C) * kp;
      const Elem *Stb = w.Stb + E::b_size(Vp) * kp, *Gtb = w.Gtb + E::b_size(Vp) * kp;
      E::multiply({{w.dOa, Stb}}, Vp, 0, C, 0, Vp, w.dq_panel, kPanel);
      scale_rows(w.dq_panel, gates.gamma, s);
      for (int i = 0; i < C; ++i)
        sigma[i] += key.rq[i] * dot(key.Q + i * Kp + kp * kPanel, w.dq_panel + i * kPanel, kPanel);
      multiply_lower<E, true>({{w.FA, Kb}}, w.dq_panel);

      E::multiply({{w.Ua, Gtb}}, Vp, 0, C, 0, Vp, w.dkw_panel, kPanel);
      scale_rows(w.dkw_panel, gates.delta, 1.0f);
      multiply_upper<E, true>({{w.FtA, Qb}, {w.EtA, Kb}}, w.dkw_panel);

      E::multiply({{w.dVa, Stb}}, Vp, 0, C, 0, Vp, w.dkr_panel, kPanel);
      scale_rows(w.dkr_panel, gates.gamma, -1.0f);
      for (int i = 0; i < C; ++i)
        sigma[i] += key.rk[i] * dot(key.K + i * Kp + kp * kPanel, w.dkr_panel + i * kPanel, kPanel);
      multiply_lower<E, true>({{w.EA, Kb}}, w.dkr_panel);

      for (int i = 0; i < C; ++i) {
        const float *dq = w.dq_panel + i * kPanel, *dkw = w.dkw_panel + i * kPanel, *dkr = w.dkr_panel + i * kPanel;
        float* dq_sum = dq_window + (int64_t{c} * C + i) * Kp + kp * kPanel;
        float* dk_sum = dk_window + (int64_t{c} * C + i) * Kp + kp * kPanel;
        for (int j = 0; j < kPanel; j += kVector) {
          const Vec dk = load(dkw + j) + load(dkr + j);
          store(dq_sum + j, first_of_group ? load(dq + j) : load(dq_sum + j) + load(dq + j));
          store(dk_sum + j, first_of_group ? dk : load(dk_sum + j) + dk);
        }
      }
    }
    store_gate_gradients(n, span, head, gates, state_product, sigma, kappa, zu, ze);
  }

  // Row sums minus column sums of F o QK (lower triangles): summed over i >= t, pairs on one side of t cancel.
  static void add_pairs(float* sigma, const float* F, const float* QK) {
    Vec columns[C / kVector] = {};
    for (int i = 0; i < C; ++i) {
      Vec row = {};
      for (int j = 0; j <= i; j += kVector) {
        // F is 0 above the diagonal, but QK may hold anything there.
        const Vec x = iota() + j <= i ? load(F + i * C + j) * load(QK + i * C + j) : Vec{};
        row += x;
        columns[j / kVector] += x;
      }
      sigma[i] += sum(row);
    }
    for (int j = 0; j < C; j += kVector) store(sigma + j, load(sigma + j) - columns[j / kVector]);
  }

  // <Z_i, e_i> over one panel, with the prediction error e_i = W_i - sum_{j<i} Gamma_ij (k_i . k_j) U_j.
  static float error_product(const Lane& w, const Gates& gates, const float* Z, const float* U, const float* W, int i) {
    float e[kPanel];
    std::memcpy(e, W + i * kPanel, sizeof e);
    for (int j = 0; j < i; ++j) {
      const float a = gates.Gamma[i * C + j] * w.key_scratch.KK[i * C + j];
      for (int x = 0; x < kPanel; ++x) e[x] -= a * U[j * kPanel + x];
    }
    return dot(Z + i * kPanel, e, kPanel);
  }

  void store_gate_gradients(int64_t n, const ChunkSpan& span, int64_t head, const Gates& gates, float state_product,
                            const float* sigma, const float* kappa, const float* zu, const float* ze) {
    double later = 0, earlier = 0, dg[C];
    for (int i = C - 1; i >= 0; --i) dg[i] = later += sigma[i];
    for (int i = 0; i < C; ++i) {
      dg[i] += earlier + double{gates.gamma_L} * state_product;
      earlier += kappa[i];
    }
    const bool raw = in_.gate == GD_GATE_RAW;
    const double decay = raw ? -std::exp(double{head_value(in_.A_log, head)}) : 0;
    const float bias = raw ? head_value(in_.dt_bias, head) : 0;
    double dA_log = 0, d_dt_bias = 0;
    for (int i = 0; i < span.rows; ++i) {
      double gradient = dg[i];
      if (raw) {
        const float x = load_scalar(in_.g.data, in_.g.dtype, in_.g.offset(span.batch, span.token + i, head)) + bias;
        dA_log += gradient * gates.g[i];
        gradient *= decay * (x > 20.0f ? 1.0f : sigmoid(x));
        d_dt_bias += gradient;
      }
      if (problem_.dg)
        store_scalar(problem_.dg.data, problem_.dg.dtype, problem_.dg.offset(span.batch, span.token + i, head),
                     static_cast<float>(gradient));
      if (problem_.dbeta) {
        const float beta = gates.beta[i];
        float d = std::fabs(beta) < kTinyBeta ? ze[i] : zu[i] / beta;
        if (in_.beta_kind == GD_BETA_LOGIT) d *= beta * (1.0f - beta);
        if (in_.beta_kind == GD_BETA_LOGIT_DOUBLED) d *= beta * (1.0f - 0.5f * beta);
        store_scalar(problem_.dbeta.data, problem_.dbeta.dtype, problem_.dbeta.offset(span.batch, span.token + i, head),
                     d);
      }
    }
    if (problem_.dA_log) shared_->dA_log[n * in_.value_heads + head] += dA_log;
    if (problem_.d_dt_bias) shared_->d_dt_bias[n * in_.value_heads + head] += d_dt_bias;
  }

  // Through the l2 norm (dx = r (dy - (dy . y) y)) and out.
  void store_key_gradient(const Lane& w, const TokenRows& dst, const TokenRows& src, const ChunkSpan& span,
                          int64_t key_head, float* gradient) {
    if (!dst) return;
    const int Kp = dims_.Kp;
    if (in_.l2norm) {
      float *x = w.key_scratch.K, *r = w.key_scratch.rk;
      load_chunk(x, Kp, src, span, key_head, dims_.K, 0, Kp);
      inverse_norms(r, true, x, Kp, span.rows, Kp);
      for (int i = 0; i < span.rows; ++i) {
        float* d = gradient + i * Kp;
        const float along = r[i] * r[i] * dot(d, x + i * Kp, Kp);  // (dy . y) y = along * x
        for (int j = 0; j < Kp; j += kVector) store(d + j, r[i] * (load(d + j) - along * load(x + i * Kp + j)));
      }
    }
    store_chunk(dst, span, key_head, dims_.K, 0, Kp, gradient, Kp);
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
