// The parts of one chunk that do not see the state, shared by forward and backward (docs/math.md, form C):
//   T = (I + stril(beta K K^T))^-1       X = (delta beta) o (T^T K)       R = s Gamma o (tril(Q K^T) T) o beta_j
// A chunk has 64 rows; rows past the end of the sequence hold k = q = v = 0, beta = 0, g = 0.
#pragma once

#include <cmath>

#include "core/plan.hpp"
#include "cpu/engine_f32.hpp"

namespace gatedelta::cpu::GD_ISA {

constexpr int C = kChunk;
constexpr int kHalf = C / 2;  // triangular products skip their zero quarter

// Where a chunk's tokens are: `rows` valid ones.
struct ChunkSpan {
  int64_t batch, token;
  int rows;
};

inline ChunkSpan chunk_span(const SequenceSpan& sequence, int64_t chunk) {
  const int64_t left = sequence.length - chunk * C;
  return {sequence.batch, sequence.begin + chunk * C, static_cast<int>(left < C ? left : C)};
}

// dst [64][ld] = columns [first, first + width) of the chunk's rows; columns past `columns` and rows past the end are 0.
inline void load_chunk(float* dst, int ld, const TokenRows& src, const ChunkSpan& span, int64_t head, int columns,
                       int first, int width) {
  const int valid = columns - first < width ? columns - first : width;
  for (int i = 0; i < C; ++i, dst += ld) {
    if (i < span.rows) {
      load_row(dst, src.data, src.dtype, src.offset(span.batch, span.token + i, head) + first, valid);
      if (valid < width) std::memset(dst + valid, 0, sizeof(float) * (width - valid));
    } else {
      std::memset(dst, 0, sizeof(float) * width);
    }
  }
}

inline void store_chunk(const TokenRows& dst, const ChunkSpan& span, int64_t head, int columns, int first, int width,
                        const float* src, int ld) {
  const int valid = columns - first < width ? columns - first : width;
  for (int i = 0; i < span.rows; ++i)
    store_row(dst.data, dst.dtype, dst.offset(span.batch, span.token + i, head) + first, src + i * ld, valid);
}

inline float dot(const float* GD_RESTRICT x, const float* GD_RESTRICT y, int n) {
  Vec acc = {};
  for (int i = 0; i < n; i += kVector) acc += load(x + i) * load(y + i);
  return sum(acc);
}

// y = x r, r = (sum x^2 + 1e-6)^-1/2, row by row; r is kept for the backward if asked for.
inline void l2_normalise(float* x, int ld, int rows, int width, float* inverse_norms) {
  for (int i = 0; i < rows; ++i, x += ld) {
    const float r = 1.0f / std::sqrt(dot(x, x, width) + 1e-6f);
    for (int j = 0; j < width; j += kVector) store(x + j, load(x + j) * r);
    if (inverse_norms) inverse_norms[i] = r;
  }
}

// --- gates -----------------------------------------------------------------------------------------------------------

struct Gates {
  float g[C];      // the natural-log decay used
  float beta[C];   // the write strength used
  float gamma[C];  // e^{b_i}, b = cumsum(g)
  float delta[C];  // e^{b_L - b_i}
  float gamma_L;
  float Gamma[C * C];  // e^{b_i - b_j}, j <= i; 0 above the diagonal
};

// Below this e^g is 0 in fp32 anyway, and -inf would make differences of cumulated gates NaN.
constexpr float kLowestGate = -128.0f;

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float head_value(const HeadVector& v, int64_t head) {
  return v ? load_scalar(v.data, v.dtype, head * v.stride) : 0.0f;
}

// The decay and write strength of one token, whatever form they came in.
inline float token_gate(const Layer& in, int64_t batch, int64_t token, int64_t head) {
  float g = load_scalar(in.g.data, in.g.dtype, in.g.offset(batch, token, head));
  if (in.gate == GD_GATE_RAW) g = -std::exp(head_value(in.A_log, head)) * softplus(g + head_value(in.dt_bias, head));
  return g < kLowestGate ? kLowestGate : g;
}
inline float token_beta(const Layer& in, int64_t batch, int64_t token, int64_t head) {
  const float x = load_scalar(in.beta.data, in.beta.dtype, in.beta.offset(batch, token, head));
  if (in.beta_kind == GD_BETA_VALUE) return x;
  return in.beta_kind == GD_BETA_LOGIT ? sigmoid(x) : 2.0f * sigmoid(x);
}

inline void prepare_gates(Gates& gates, const Layer& in, const ChunkSpan& span, int64_t head) {
  // The cumulated gate is kept in double and split in two floats, so that e^{b_i - b_j} stays good to fp32 rounding
  // after resets that drive b to the thousands.
  float high[C], low[C];
  double b = 0;
  for (int i = 0; i < C; ++i) {
    const bool valid = i < span.rows;
    gates.g[i] = valid ? token_gate(in, span.batch, span.token + i, head) : 0.0f;
    gates.beta[i] = valid ? token_beta(in, span.batch, span.token + i, head) : 0.0f;
    b += gates.g[i];
    high[i] = static_cast<float>(b);
    low[i] = static_cast<float>(b - high[i]);
  }
  const float high_L = high[C - 1], low_L = low[C - 1];
  for (int i = 0; i < C; i += kVector) {
    store(gates.gamma + i, exp(load(high + i) + load(low + i)));
    store(gates.delta + i, exp((high_L - load(high + i)) + (low_L - load(low + i))));
  }
  gates.gamma_L = gates.gamma[C - 1];
  for (int i = 0; i < C; ++i) {
    float* row = gates.Gamma + i * C;
    int j = 0;
    // Above the diagonal the exponent grows without bound: those entries are never formed, only overwritten with 0.
    for (; j <= i; j += kVector) store(row + j, exp((high[i] - load(high + j)) + (low[i] - load(low + j))));
    for (j = i + 1; j < C; ++j) row[j] = 0.0f;
  }
}

// T = (I + stril(beta_i KK_ij))^-1 by rows: T_i = e_i - sum_{j<i} l_ij T_j. Two sums per row, for independent chains.
inline void invert_unit_lower(float* GD_RESTRICT T, const float* GD_RESTRICT KK, const float* beta) {
  constexpr int kVectors = C / kVector;
  for (int i = 0; i < C; ++i) {
    Vec even[kVectors] = {}, odd[kVectors] = {};
    const int used = i / kVector + 1;  // vectors of row i that can be nonzero
    const float* row = KK + i * C;
    int j = 0;
    for (; j + 1 < i; j += 2) {
      const Vec a = splat(row[j] * beta[i]), b = splat(row[j + 1] * beta[i]);
      for (int n = 0; n < used; ++n) {
        even[n] -= a * load(T + j * C + n * kVector);
        odd[n] -= b * load(T + (j + 1) * C + n * kVector);
      }
    }
    if (j < i) {
      const Vec a = splat(row[j] * beta[i]);
      for (int n = 0; n < used; ++n) even[n] -= a * load(T + j * C + n * kVector);
    }
    for (int n = 0; n < kVectors; ++n) store(T + i * C + n * kVector, n < used ? even[n] + odd[n] : Vec{});
    T[i * C + i] = 1.0f;
  }
}

// --- operands that depend on the key head alone ----------------------------------------------------------------------

template <class E>
struct KeyOperands {
  using Elem = typename E::Elem;
  Elem *Ka, *Qa;  // A [64 x Kp]

  KeyOperands(Carver& carve, const Dims& dims) {
    Ka = carve.take<Elem>(E::a_size(C, dims.Kp));
    Qa = carve.take<Elem>(E::a_size(C, dims.Kp));
  }
};

template <class E>
struct KeyScratch {
  using Elem = typename E::Elem;
  float *K, *Q;     // [64][Kp], normalised if asked for
  float *K_inverse_norm, *Q_inverse_norm;
  float* Kt;        // [Kp][64]
  Elem* Kta;        // A [Kp x 64]
  Elem* Ktb[2];     // B [Kp x 32] of K^T
  float *KK, *QK;   // [64][64], lower triangle

  KeyScratch(Carver& carve, const Dims& dims) {
    K = carve.take<float>(C * dims.Kp);
    Q = carve.take<float>(C * dims.Kp);
    K_inverse_norm = carve.take<float>(C);
    Q_inverse_norm = carve.take<float>(C);
    Kt = carve.take<float>(C * dims.Kp);
    Kta = carve.take<Elem>(E::a_size(dims.Kp, C));
    for (Elem*& panel : Ktb) panel = carve.take<Elem>(E::b_size(dims.Kp));
    KK = carve.take<float>(C * C);
    QK = carve.take<float>(C * C);
  }
};

// The lower triangle of a [64 x 64] product with right-hand panels b0, b1.
template <class E>
void multiply_to_lower(const typename E::Elem* a, const typename E::Elem* b0, const typename E::Elem* b1, int k,
                       float* c) {
  E::multiply(a, b0, k, 0, C, 0, k, c, C);
  E::multiply(a, b1, k, kHalf, C, 0, k, c + kHalf, C);
}

template <class E>
void prepare_key(const KeyOperands<E>& out, const KeyScratch<E>& w, const Dims& dims, const Layer& in,
                 const ChunkSpan& span, int64_t key_head, bool want_q) {
  load_chunk(w.K, dims.Kp, in.k, span, key_head, dims.K, 0, dims.Kp);
  if (in.l2norm) l2_normalise(w.K, dims.Kp, span.rows, dims.Kp, w.K_inverse_norm);
  for (int i = 0; i < C; ++i) E::store_a_row(out.Ka, dims.Kp, i, w.K + i * dims.Kp);
  transpose(w.Kt, C, w.K, dims.Kp, C, dims.Kp);
  for (int i = 0; i < dims.Kp; ++i) E::store_a_row(w.Kta, C, i, w.Kt + i * C);
  for (int p = 0; p < 2; ++p) E::store_b(w.Ktb[p], dims.Kp, 0, dims.Kp, w.Kt + p * kPanel, C);
  multiply_to_lower<E>(out.Ka, w.Ktb[0], w.Ktb[1], dims.Kp, w.KK);
  if (!want_q) return;
  load_chunk(w.Q, dims.Kp, in.q, span, key_head, dims.K, 0, dims.Kp);
  if (in.l2norm) l2_normalise(w.Q, dims.Kp, span.rows, dims.Kp, w.Q_inverse_norm);
  for (int i = 0; i < C; ++i) E::store_a_row(out.Qa, dims.Kp, i, w.Q + i * dims.Kp);
  multiply_to_lower<E>(out.Qa, w.Ktb[0], w.Ktb[1], dims.Kp, w.QK);
}

// --- operands of one value head --------------------------------------------------------------------------------------

template <class E>
struct ValueOperands {
  using Elem = typename E::Elem;
  Elem* Xta;       // A [Kp x 64] = X^T
  Elem* Ra;        // A [64 x 64], lower
  float* gamma;    // [64]
  float* gamma_L;  // [1]

  ValueOperands(Carver& carve, const Dims& dims) {
    Xta = carve.take<Elem>(E::a_size(dims.Kp, C));
    Ra = carve.take<Elem>(E::a_size(C, C));
    gamma = carve.take<float>(C);
    gamma_L = carve.take<float>(1);
  }
};

template <class E>
struct ValueScratch {
  using Elem = typename E::Elem;
  Gates* gates;
  float* T;        // [64][64]
  Elem* Tb[2];     // B [64 x 32]
  Elem* QKa;       // A [64 x 64], lower
  float* product;  // [max(Kp, 64)][64]

  ValueScratch(Carver& carve, const Dims& dims) {
    gates = carve.take<Gates>(1);
    T = carve.take<float>(C * C);
    for (Elem*& panel : Tb) panel = carve.take<Elem>(E::b_size(C));
    QKa = carve.take<Elem>(E::a_size(C, C));
    product = carve.take<float>((dims.Kp > C ? dims.Kp : C) * C);
  }
};

// X from w.T and w.gates.
template <class E>
void prepare_x(const ValueOperands<E>& out, const ValueScratch<E>& w, const KeyScratch<E>& key, const Dims& dims) {
  const Gates& gates = *w.gates;
  for (int p = 0; p < 2; ++p) E::store_b(w.Tb[p], C, 0, C, w.T + p * kPanel, C);
  // X^T = K^T T, columns scaled by delta beta; T is lower triangular.
  E::multiply(key.Kta, w.Tb[0], C, 0, dims.Kp, 0, C, w.product, C);
  E::multiply(key.Kta, w.Tb[1], C, 0, dims.Kp, kHalf, C, w.product + kHalf, C);
  for (int i = 0; i < dims.Kp; ++i) {
    float* row = w.product + i * C;
    for (int j = 0; j < C; j += kVector)
      store(row + j, load(row + j) * (load(gates.delta + j) * load(gates.beta + j)));
    E::store_a_row(out.Xta, C, i, row);
  }
  std::memcpy(out.gamma, gates.gamma, sizeof gates.gamma);
  *out.gamma_L = gates.gamma_L;
}

// R from w.Tb (prepare_x) and w.gates.
template <class E>
void prepare_r(const ValueOperands<E>& out, const ValueScratch<E>& w, const KeyScratch<E>& key, float scale) {
  const Gates& gates = *w.gates;
  for (int i = 0; i < C; ++i) {
    float row[C];
    for (int j = 0; j < C; ++j) row[j] = j <= i ? key.QK[i * C + j] : 0.0f;
    E::store_a_row(w.QKa, C, i, row);
  }
  // R = s Gamma o (tril(QK) T) o beta_j; both factors are lower triangular.
  E::multiply(w.QKa, w.Tb[0], C, 0, kHalf, 0, kHalf, w.product, C);
  E::multiply(w.QKa, w.Tb[0], C, kHalf, C, 0, C, w.product, C);
  E::multiply(w.QKa, w.Tb[1], C, kHalf, C, kHalf, C, w.product + kHalf, C);
  for (int i = 0; i < C; ++i) {
    float row[C];
    const int used = i < kHalf ? kHalf : C;
    for (int j = 0; j < used; j += kVector)
      store(row + j, load(w.product + i * C + j) * (load(gates.Gamma + i * C + j) * load(gates.beta + j)) * scale);
    for (int j = used; j < C; ++j) row[j] = 0.0f;
    E::store_a_row(out.Ra, C, i, row);
  }
}

template <class E>
void prepare_value(const ValueOperands<E>& out, const ValueScratch<E>& w, const KeyScratch<E>& key, const Dims& dims,
                   const Layer& in, const ChunkSpan& span, int64_t head, bool want_r) {
  prepare_gates(*w.gates, in, span, head);
  invert_unit_lower(w.T, key.KK, w.gates->beta);
  prepare_x<E>(out, w, key, dims);
  if (want_r) prepare_r<E>(out, w, key, in.scale);
}

// --- states ----------------------------------------------------------------------------------------------------------

// One panel of a state: [Kp][32] floats. A whole state is Vp / 32 of them, one after the other.
inline float* state_panel(float* state, const Dims& dims, int panel) { return state + int64_t{panel} * dims.Kp * kPanel; }

// Columns [32 panel, ...) of the stored state matrix, padded with zeros. A negative slot is the zero state.
inline void load_state_panel(float* dst, const StateRows& src, int64_t slot, int64_t head, gd_state_layout layout,
                             const Dims& dims, int panel) {
  std::memset(dst, 0, sizeof(float) * dims.Kp * kPanel);
  if (!src || slot < 0) return;
  const int first = panel * kPanel, valid = dims.V - first < kPanel ? dims.V - first : kPanel;
  const int64_t base = src.offset(slot, head);
  if (layout == GD_STATE_KV) {
    for (int i = 0; i < dims.K; ++i)
      load_row(dst + i * kPanel, src.data, src.dtype, base + int64_t{i} * dims.V + first, valid);
  } else {
    for (int j = 0; j < valid; j += 16)
      for (int i = 0; i < dims.K; i += 16) {
        float block[16 * 16], turned[16 * 16];
        for (int r = 0; r < 16; ++r)
          load_row(block + r * 16, src.data, src.dtype, base + int64_t{first + j + r} * dims.K + i, 16);
        transpose(turned, 16, block, 16, 16, 16);
        for (int r = 0; r < 16; ++r) std::memcpy(dst + (i + r) * kPanel + j, turned + r * 16, sizeof(float) * 16);
      }
  }
}

inline void store_state_panel(const StateRows& dst, int64_t slot, int64_t head, gd_state_layout layout,
                              const Dims& dims, int panel, const float* src) {
  if (!dst || slot < 0) return;
  const int first = panel * kPanel, valid = dims.V - first < kPanel ? dims.V - first : kPanel;
  const int64_t base = dst.offset(slot, head);
  if (layout == GD_STATE_KV) {
    for (int i = 0; i < dims.K; ++i)
      store_row(dst.data, dst.dtype, base + int64_t{i} * dims.V + first, src + i * kPanel, valid);
  } else {
    for (int j = 0; j < valid; j += 16)
      for (int i = 0; i < dims.K; i += 16) {
        float block[16 * 16];
        transpose(block, 16, src + i * kPanel + j, kPanel, 16, 16);
        for (int r = 0; r < 16; ++r)
          store_row(dst.data, dst.dtype, base + int64_t{first + j + r} * dims.K + i, block + r * 16, 16);
      }
  }
}

}  // namespace gatedelta::cpu::GD_ISA
