// The backward of one chunk (docs/math.md, section on gradients). Chunks come in reverse; G = dL/dS after the chunk:
//   dU = P^T dO + delta o (K G)          P = s tril(QK) o Gamma,   T_g = Gamma o T
//   Z  = T_g^T dU,  dV = beta o Z,  Y = -gamma o dV
//   F  = s Gamma o tril(dO U^T),  E = -Gamma o stril(dV U^T)
//   dQ = s gamma o (dO S^T) + F K
//   dK = [Y S^T + E K]_read + [delta o (U G^T) + F^T Q + E^T K]_write
//   G <- gamma_L G + K^T Y + Q^T (s gamma o dO)
// dg_t sums the products that the decay of token t scales, in fp32; all of them are computed anyway:
//   dg_t = gamma_L <G, S>                            from the incoming to the outgoing state
//        + sum_{j<t} kappa_j                         from a write to the outgoing state: kappa = delta o <U, K G>
//        + sum_{i>=t} sigma_i                        from the incoming state to a read, where
//                                                    sigma = q.(s gamma o dO S^T) + k.(Y S^T)
//        + sum_{i>=t>j} (F o QK + E o KK)_ij         from a write to a read
#pragma once

#include "cpu/backward_lane.hpp"

namespace gatedelta::cpu::GD_ISA {

// For smaller |beta|, <Z, U> / beta loses all digits; then dbeta = <Z, e>, with the prediction error e itself.
constexpr float kTinyBeta = 1e-20f;

// The gradients of one chunk of one value head. Scratch memory is a lane's, where a replay has left the states before
// its chunks (replay_states) and the chunks' T and U (replay_T, replay_U).
template <class E>
class ChunkGradients {
 public:
  using Lane = BackwardLane<E>;

  // dA_log, d_dt_bias: sums over one sequence, [N][Hv]; used if the problem has these outputs.
  ChunkGradients(const BackwardProblem& problem, const Dims& dims, double* dA_log, double* d_dt_bias)
      : problem_(problem), in_(problem.in), dims_(dims), dA_log_(dA_log), d_dt_bias_(d_dt_bias) {}

  // Chunk c of the replay; `next` is the one after it, whose rows are prefetched. G [panels][Kp][32] enters as the
  // gradient of the state after the chunk and leaves as that of the state before it. dq and dk are added to dq_sums and
  // dk_sums [kSaveInterval][64][Kp], or start them.
  void run(const Lane& w, int64_t n, const ChunkSpan& span, const ChunkSpan& next, int c, int64_t head, float* G,
           float* dq_sums, float* dk_sums, bool first_of_group) const {
    prepare<true>(w, span, c, head);
    GateSums sums;
    for (int p = 0; p < dims_.value_panels(); ++p) {
      const int begin = next.rows * p / dims_.value_panels(), end = next.rows * (p + 1) / dims_.value_panels();
      for (const TokenRows* rows : {&in_.q, &in_.k})
        prefetch_rows(*rows, next, begin, end, in_.key_head(head), 0, dims_.K);
      prefetch_rows(problem_.d_o, next, begin, end, head, 0, dims_.V);
      if (problem_.dv) prefetch_rows<true>(problem_.dv, span, 0, span.rows, head, p * kPanel, kPanel);
      value_panel<true>(w, span, c, head, p, state_panel(G, dims_, p), sums);
    }
    if (problem_.dv) store_chunk(problem_.dv, span, head, dims_.V, 0, dims_.Vp, w.dV, dims_.Vp);
    pair_products(w, c, sums);
    for (int kp = 0; kp < dims_.key_panels(); ++kp)
      key_panel(w, kp, dq_sums + int64_t{c} * C * dims_.Kp, dk_sums + int64_t{c} * C * dims_.Kp, first_of_group, sums);
    store_gate_gradients(n, span, head, *w.value_scratch.gates, sums);
  }

  // G alone, which needs neither states nor what the chunk wrote.
  void advance(const Lane& w, const ChunkSpan& span, int64_t head, float* G) const {
    prepare<false>(w, span, 0, head);
    GateSums unused;
    for (int p = 0; p < dims_.value_panels(); ++p)
      value_panel<false>(w, span, 0, head, p, state_panel(G, dims_, p), unused);
  }

  // l2norm backward, dx = r (dy - (dy . y) y), then the store.
  void store_key_gradient(const Lane& w, const TokenRows& dst, const TokenRows& src, const ChunkSpan& span,
                          int64_t key_head, float* gradient) const {
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

 private:
  using Elem = typename E::Elem;

  // The sums that give the gradients of g and beta.
  struct GateSums {
    float state_product = 0;       // <G, S>
    float zu[C] = {}, ze[C] = {};  // <Z_i, U_i>, <Z_i, e_i>
    float sigma[C] = {}, kappa[C] = {};
  };

  // A square with its columns scaled; A form of its transpose, with its rows scaled.
  static void scale_columns(float* scaled, const float* src, const float* column_scale) {
    for (int i = 0; i < C; ++i)
      for (int j = 0; j < C; j += kVector) store(scaled + i * C + j, load(src + i * C + j) * load(column_scale + j));
  }
  static void store_a_transposed_scaled(Elem* dst, const float* src, const float* row_scale, float* scaled,
                                        float* scratch) {
    for (int i = 0; i < C; ++i)
      for (int j = 0; j < C; j += kVector) store(scaled + i * C + j, load(src + i * C + j) * row_scale[i]);
    store_a_transposed<E>(dst, scaled, C, C, scratch);
  }

  // sums_i += scale_i <x_i, y_i> over the 32 columns of a panel.
  static void add_row_products(float* sums, const float* scale, const float* x, int x_ld, const float* y, int y_ld) {
    for (int i = 0; i < C; i += kVector) {
      Vec rows[kVector] = {};
      for (int r = 0; r < kVector; ++r)
        for (int j = 0; j < kPanel; j += kVector)
          rows[r] += load(x + int64_t{i + r} * x_ld + j) * load(y + int64_t{i + r} * y_ld + j);
      store(sums + i, load(sums + i) + load(scale + i) * sum_rows(rows));
    }
  }

  static void scale_rows(float* c, const float* scale, float factor) {
    for (int i = 0; i < C; ++i) {
      const float s = scale[i] * factor;
      for (int j = 0; j < kPanel; j += kVector) store(c + i * kPanel + j, load(c + i * kPanel + j) * s);
    }
  }

  // B form of the transpose of a [Kp][32] panel, as rows [32 p, ...) of every key panel's [Vp x 32].
  void pack_transposed_state(const Lane& w, Elem* dst, const float* panel, int p) const {
    if constexpr (E::kTwinForms) {
      E::store_a_columns(dst, dims_.Vp, dims_.Kp, p * kPanel, kPanel, panel, kPanel);
      return;
    }
    transpose(w.transposed, dims_.Kp, panel, kPanel, dims_.Kp, kPanel);
    for (int kp = 0; kp < dims_.key_panels(); ++kp)
      E::store_b(dst + E::b_size(dims_.Vp) * kp, dims_.Vp, p * kPanel, kPanel, w.transposed + kp * kPanel, dims_.Kp);
  }

  // Operands of the chunk that do not depend on its state. kReplayed: a replay has left T.
  template <bool kReplayed>
  void prepare(const Lane& w, const ChunkSpan& span, int c, int64_t head) const {
    const KeyScratch<E>& key = w.key_scratch;
    Gates& gates = *w.value_scratch.gates;
    const float s = in_.scale;
    const int Kp = dims_.Kp;

    prepare_key<E>(w.key, key, dims_, in_, span, in_.key_head(head), true, true);
    store_key_transposed<E>(w.Qta, w.key.Qa, key.Q, w.Qt, dims_);
    if constexpr (!E::kTwinForms && kReplayed)
      for (int kp = 0; kp < dims_.key_panels(); ++kp) {
        E::store_b(w.Kb + E::b_size(C) * kp, C, 0, C, key.K + kp * kPanel, Kp);
        E::store_b(w.Qb + E::b_size(C) * kp, C, 0, C, key.Q + kp * kPanel, Kp);
      }
    prepare_gates(gates, in_, span, head);

    float* const square = w.value_scratch.square;
    float* const T = w.replay_T + c * C * C;
    if constexpr (!kReplayed) invert_unit_lower(T, key.KK, gates.beta);
    prepare_row_scales<E>(w.value, gates, key, s);
    for (int i = 0; i < C * C; i += kVector) store(square + i, load(T + i) * load(gates.Gamma + i));
    transpose(w.transposed, C, square, C, C, C);
    for (int i = 0; i < C; ++i) store_a_hi_lo<E>(w.TgtA, C, i, w.transposed + i * C);
    score_square<E>(square, gates, key, s);
    store_a_transposed<E>(w.PtA.high, square, C, C, w.transposed);
    if (w.key.splits()) {
      rounding_errors(w.scratch, square, C * C);
      store_a_transposed<E>(w.PtA.low, w.scratch, C, C, w.transposed);
    }
  }

  const float* chunk_U(const Lane& w, int c) const { return w.replay_U + int64_t{c} * C * dims_.Vp; }

  // 32 value columns: G moves on to the state before the chunk; and kAll: dV and dO for the key side.
  template <bool kAll>
  void value_panel(const Lane& w, const ChunkSpan& span, int c, int64_t head, int p, float* Gp, GateSums& sums) const {
    const Gates& gates = *w.value_scratch.gates;
    const int Kp = dims_.Kp, Vp = dims_.Vp;
    const PanelScratch<E>& pw = w.panel;
    const float* S = state_panel(w.replay_states + c * dims_.state_size(), dims_, p);
    const float* U = chunk_U(w, c) + p * kPanel;  // [64], Vp apart
    // dU = P^T dO + delta o (K G).
    float* dO = w.Z;
    load_chunk(dO, kPanel, problem_.d_o, span, head, dims_.V, p * kPanel, kPanel);
    if constexpr (kAll)
      for (int i = 0; i < C; ++i) std::memcpy(w.dO + i * Vp + p * kPanel, dO + i * kPanel, sizeof(float) * kPanel);
    E::store_b(w.dOb, C, 0, C, dO, kPanel);
    store_b_hi_lo<E>(w.Gb, Kp, Gp, kOnes.value);
    float* dU = pw.product;
    multiply_hi_lo<E>(w.key.Ka, w.Gb, Kp, C, dU);
    scale_rows(dU, w.value.write_k, 1.0f);
    if constexpr (kAll) add_row_products(sums.kappa, kOnes.value, U, Vp, dU, kPanel);
    multiply_upper<E, true>({{w.PtA.high, w.dOb}}, dU);
    if (w.key.splits()) multiply_upper<E, true>({{w.PtA.low, w.dOb}}, dU);
    // Z, dV, Y; the update of G needs s gamma o dO.
    scale_rows(dO, w.value.read_q, 1.0f);
    E::store_b(w.dOb, C, 0, C, dO, kPanel);
    float* Z = w.Z;
    store_b_hi_lo<E>(w.dUb, C, dU, kOnes.value);
    multiply_upper<E, false>(HiLoTerms<E>(w.TgtA, w.dUb).terms, Z);
    if constexpr (kAll) add_row_products(sums.zu, kOnes.value, Z, kPanel, U, Vp);
    for (int i = 0; i < C; ++i) {
      if (kAll && i < span.rows && std::fabs(gates.beta[i]) < kTinyBeta)
        sums.ze[i] += error_product(w, span, head, p, i, Z + i * kPanel, S, U);
      float* dV = w.dV + i * Vp + p * kPanel;
      for (int j = 0; j < kPanel; j += kVector) {
        const Vec value = gates.beta[i] * load(Z + i * kPanel + j);
        if constexpr (kAll) store(dV + j, value);
        store(Z + i * kPanel + j, value * -w.value.read_k[i]);  // Y, scaled for the product with K
      }
    }
    store_b_hi_lo<E>(w.Yb, C, Z, kOnes.value);
    // S^T and G^T for the key side, then G moves on.
    if constexpr (kAll) {
      pack_transposed_state(w, w.Stb, S, p);
      pack_transposed_state(w, w.Gtb, Gp, p);
      constexpr int kSums = kPanel / kVector;  // one for each vector of a row: additions must not wait for each other
      Vec product[kSums] = {};
      for (int i = 0; i < Kp * kPanel; i += kPanel)
        for (int j = 0; j < kSums; ++j) product[j] += load(S + i + j * kVector) * load(Gp + i + j * kVector);
      for (const Vec& part : product) sums.state_product += sum(part);
    }
    for (int i = 0; i < Kp * kPanel; i += kVector) store(Gp + i, gates.gamma_L * load(Gp + i));
    multiply_hi_lo<E, true>(w.key.Kta, w.Yb, C, Kp, Gp);
    E::template multiply<true>({{w.Qta, w.dOb}}, C, 0, Kp, 0, C, Gp, kPanel);
  }

  // F and E contract over all value columns.
  void pair_products(const Lane& w, int c, GateSums& sums) const {
    const KeyScratch<E>& key = w.key_scratch;
    const Gates& gates = *w.value_scratch.gates;
    const float s = in_.scale;
    const int Vp = dims_.Vp;
    const float* U = chunk_U(w, c);
    store_a<E>(w.dOa, Vp, C, w.dO, Vp);
    const bool splits = w.key.splits();
    store_a_parts<E>(w.Ua, Vp, U, Vp, splits);
    store_a<E>(w.dVa, Vp, C, w.dV, Vp);
    const int half_size = static_cast<int>(E::a_size(kPanel, Vp));
    HiLo<Elem> Utb[2] = {w.Ua, {w.Ua.high + half_size, w.Ua.low + half_size}};
    if constexpr (!E::kTwinForms) {
      for (int p = 0; p < dims_.value_panels(); ++p) {
        transpose(w.transposed, C, U + p * kPanel, Vp, C, kPanel);
        for (int half = 0; half < 2; ++half)
          E::store_b(w.Utb[half].high, Vp, p * kPanel, kPanel, w.transposed + half * kPanel, C);
        if (!splits) continue;
        rounding_errors(w.transposed, w.transposed, C * kPanel);
        for (int half = 0; half < 2; ++half)
          E::store_b(w.Utb[half].low, Vp, p * kPanel, kPanel, w.transposed + half * kPanel, C);
      }
      for (int half = 0; half < 2; ++half) Utb[half] = w.Utb[half];
    }
    multiply_to_lower<E>(w.dOa, Utb[0].high, Utb[1].high, Vp, w.F);
    multiply_to_lower<E>(w.dVa, Utb[0].high, Utb[1].high, Vp, w.E_);
    if (splits) {
      multiply_to_lower<E, true>(w.dOa, Utb[0].low, Utb[1].low, Vp, w.F);
      multiply_to_lower<E, true>(w.dVa, Utb[0].low, Utb[1].low, Vp, w.E_);
    }
    keep_lower(w.F, w.F);
    keep_lower(w.E_, w.E_);
    for (int i = 0; i < C * C; i += kVector) {
      store(w.F + i, s * load(gates.Gamma + i) * load(w.F + i));
      store(w.E_ + i, -load(gates.Gamma + i) * load(w.E_ + i));
    }
    for (int i = 0; i < C; ++i) w.E_[i * C + i] = 0.0f;
    add_pairs(sums.sigma, w.F, key.QK);
    add_pairs(sums.sigma, w.E_, key.KK);
    // The products with Q and K need columns scaled by the inverse norms of the rows of Q or K.
    scale_columns(w.scratch, w.F, key.rk);
    store_a_parts<E>(w.FA, C, w.scratch, C, splits);
    scale_columns(w.scratch, w.E_, key.rk);
    store_a<E>(w.EA, C, C, w.scratch, C);
    store_a_transposed_scaled(w.FtA, w.F, key.rq, w.scratch, w.transposed);
    store_a_transposed_scaled(w.EtA, w.E_, key.rk, w.scratch, w.transposed);
  }

  // 32 key columns of dQ and dK.
  void key_panel(const Lane& w, int kp, float* dq_sums, float* dk_sums, bool first_of_group, GateSums& sums) const {
    const KeyScratch<E>& key = w.key_scratch;
    const Gates& gates = *w.value_scratch.gates;
    const float s = in_.scale;
    const int Kp = dims_.Kp, Vp = dims_.Vp;
    const Elem *Kb = w.Kb + E::b_size(C) * kp, *Qb = w.Qb + E::b_size(C) * kp;
    const Elem *Stb = w.Stb + E::b_size(Vp) * kp, *Gtb = w.Gtb + E::b_size(Vp) * kp;
    E::multiply({{w.dOa, Stb}}, Vp, 0, C, 0, Vp, w.dq_panel, kPanel);
    scale_rows(w.dq_panel, gates.gamma, s);
    add_row_products(sums.sigma, key.rq, key.Q + kp * kPanel, Kp, w.dq_panel, kPanel);
    multiply_lower<E, true>({{w.FA.high, Kb}}, w.dq_panel);
    if (w.key.splits()) multiply_lower<E, true>({{w.FA.low, Kb}}, w.dq_panel);

    E::multiply({{w.Ua.high, Gtb}}, Vp, 0, C, 0, Vp, w.dkw_panel, kPanel);
    scale_rows(w.dkw_panel, gates.delta, 1.0f);
    multiply_upper<E, true>({{w.FtA, Qb}, {w.EtA, Kb}}, w.dkw_panel);

    E::multiply({{w.dVa, Stb}}, Vp, 0, C, 0, Vp, w.dkr_panel, kPanel);
    scale_rows(w.dkr_panel, gates.gamma, -1.0f);
    add_row_products(sums.sigma, key.rk, key.K + kp * kPanel, Kp, w.dkr_panel, kPanel);
    multiply_lower<E, true>({{w.EA, Kb}}, w.dkr_panel);

    for (int i = 0; i < C; ++i) {
      const float *dq = w.dq_panel + i * kPanel, *dkw = w.dkw_panel + i * kPanel, *dkr = w.dkr_panel + i * kPanel;
      float* dq_sum = dq_sums + i * Kp + kp * kPanel;
      float* dk_sum = dk_sums + i * Kp + kp * kPanel;
      for (int j = 0; j < kPanel; j += kVector) {
        const Vec dk = load(dkw + j) + load(dkr + j);
        store(dq_sum + j, first_of_group ? load(dq + j) : load(dq_sum + j) + load(dq + j));
        store(dk_sum + j, first_of_group ? dk : load(dk_sum + j) + dk);
      }
    }
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

  // <Z_i, e_i> over one panel, with the prediction error e_i = v_i - gamma_i S^T k_i - sum_{j<i} Gamma_ij (k_i . k_j)
  // U_j.
  float error_product(const Lane& w, const ChunkSpan& span, int64_t head, int p, int i, const float* Z, const float* S,
                      const float* U) const {
    const KeyScratch<E>& key = w.key_scratch;
    float e[kPanel] = {};
    const int first = p * kPanel, valid = dims_.V - first < kPanel ? dims_.V - first : kPanel;
    load_row(e, in_.v.data, in_.v.dtype, in_.v.offset(span.batch, span.token + i, head) + first, valid);
    const auto subtract = [&e](float a, const float* row) {
      for (int x = 0; x < kPanel; x += kVector) store(e + x, load(e + x) - a * load(row + x));
    };
    for (int j = 0; j < dims_.Kp; ++j) subtract(w.value.read_k[i] * key.K[i * dims_.Kp + j], S + j * kPanel);
    for (int j = 0; j < i; ++j) subtract(w.value_scratch.gates->Gamma[i * C + j] * key.KK[i * C + j], U + j * dims_.Vp);
    return dot(Z, e, kPanel);
  }

  void store_gate_gradients(int64_t n, const ChunkSpan& span, int64_t head, const Gates& gates,
                            const GateSums& sums) const {
    double later = 0, earlier = 0, dg[C];
    for (int i = C - 1; i >= 0; --i) dg[i] = later += sums.sigma[i];
    for (int i = 0; i < C; ++i) {
      dg[i] += earlier + double{gates.gamma_L} * sums.state_product;
      earlier += sums.kappa[i];
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
        float d = std::fabs(beta) < kTinyBeta ? sums.ze[i] : sums.zu[i] / beta;
        if (in_.beta_kind == GD_BETA_LOGIT) d *= beta * (1.0f - beta);
        if (in_.beta_kind == GD_BETA_LOGIT_DOUBLED) d *= beta * (1.0f - 0.5f * beta);
        store_scalar(problem_.dbeta.data, problem_.dbeta.dtype, problem_.dbeta.offset(span.batch, span.token + i, head),
                     d);
      }
    }
    if (problem_.dA_log) dA_log_[n * in_.value_heads + head] += dA_log;
    if (problem_.d_dt_bias) d_dt_bias_[n * in_.value_heads + head] += d_dt_bias;
  }

  const BackwardProblem& problem_;
  const Layer& in_;
  const Dims dims_;
  double *dA_log_, *d_dt_bias_;
};

}  // namespace gatedelta::cpu::GD_ISA
