// The parts of one chunk that do not depend on the state, shared by forward and backward (docs/math.md):
//   T = (I + stril(beta K K^T))^-1       T_g = Gamma o T       P = s Gamma o tril(Q K^T)
// A chunk has 64 rows; rows past the end of the sequence hold k = q = v = 0, beta = 0, g = 0.
#pragma once

#include <cmath>

#include "cpu/hi_lo.hpp"
#include "cpu/plan.hpp"

namespace gatedelta::cpu::GD_ISA {

// Row scales of 1.
struct Ones {
  float value[kMaxPanels * kPanelColumns];
  constexpr Ones() : value() {
    for (float& x : value) x = 1.0f;
  }
};
inline constexpr Ones kOnes;

// Where a chunk's tokens are: `rows` valid ones.
struct ChunkSpan {
  int64_t batch, token;
  int rows;
};

inline ChunkSpan chunk_span(const SequenceSpan& sequence, int64_t chunk) {
  const int64_t left = sequence.length - chunk * C;
  return {sequence.batch, sequence.begin + chunk * C, static_cast<int>(left < C ? left : C)};
}

// dst [64][ld] = columns [first, first + width) of the chunk's rows; columns past `columns` and rows past the end are
// 0.
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

// Prefetches columns [first, first + width) of the chunk's rows [begin, end). Rows of one head lie a whole
// token apart, often in other pages, where no hardware prefetcher follows.
template <bool kWrite = false>
GD_ALWAYS_INLINE void prefetch_rows(const TokenRows& rows, const ChunkSpan& span, int begin, int end, int64_t head,
                                    int first, int width) {
  constexpr int kLine = 64;
  const int64_t bytes = dtype_bytes(rows.dtype), step = rows.token_stride * bytes;
  const char* row =
      static_cast<const char*>(rows.data) + (rows.offset(span.batch, span.token + begin, head) + first) * bytes;
  for (int i = begin; i < end; ++i, row += step)
    for (int at = 0; at < width * bytes; at += kLine) __builtin_prefetch(row + at, kWrite ? 1 : 0, 3);
  asm volatile("" : : "r"(row));  // an effect: GCC drops calls of functions that do nothing but prefetch
}

inline float dot(const float* GD_RESTRICT x, const float* GD_RESTRICT y, int n) {
  Vec acc = {};
  for (int i = 0; i < n; i += kVector) acc += load(x + i) * load(y + i);
  return sum(acc);
}

// r = (sum x^2 + 1e-6)^-1/2 of each row; 1 without l2norm. The norm is never applied to the rows themselves: the
// factors join the fp32 row scales that every product with q or k has anyway, so bf16 rows take part unrounded.
inline void inverse_norms(float* r, bool l2norm, const float* x, int ld, int rows, int width) {
  for (int i = 0; i < C; ++i) {
    const float* row = x + int64_t{i} * ld;
    r[i] = l2norm && i < rows ? 1.0f / std::sqrt(dot(row, row, width) + 1e-6f) : 1.0f;
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

// Below this e^g is 0 in fp32. A gate of -inf would make differences of cumulative gates NaN.
constexpr float kLowestGate = -128.0f;

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float head_value(const HeadVector& v, int64_t head) {
  return v ? load_scalar(v.data, v.dtype, head * v.stride) : 0.0f;
}

// The decay and write strength of one token, from any gate and beta kind.
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
  // The cumulative gate is a double, split into two floats, so that e^{b_i - b_j} keeps fp32 accuracy after resets that
  // drive b to the thousands.
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
  // Left of a diagonal block Gamma is an outer product: with m the last token before the block,
  // e^{b_i - b_j} = e^{b_i - b_m} e^{b_m - b_j}, where gates <= 0 leave both factors <= 1.
  constexpr int kBlock = 16;
  for (int top = 0; top < C; top += kBlock) {
    float row_factor[kBlock], column_factor[C];
    const float high_m = top ? high[top - 1] : 0.0f, low_m = top ? low[top - 1] : 0.0f;
    for (int i = 0; i < kBlock; i += kVector)
      store(row_factor + i, exp((load(high + top + i) - high_m) + (load(low + top + i) - low_m)));
    for (int j = 0; j < top; j += kVector)
      store(column_factor + j, exp((high_m - load(high + j)) + (low_m - load(low + j))));
    for (int i = top; i < top + kBlock; ++i) {
      float* row = gates.Gamma + i * C;
      for (int j = 0; j < top; j += kVector) store(row + j, row_factor[i - top] * load(column_factor + j));
      // Above the diagonal the exponent grows without bound. A select drops those entries: a product with 0 would not.
      for (int j = top; j < C; j += kVector) {
        const Vec decay = j <= i ? exp((high[i] - load(high + j)) + (low[i] - load(low + j))) : Vec{};
        store(row + j, iota() + j <= i ? decay : Vec{});
      }
    }
  }
}

// T = (I + stril(beta_i KK_ij))^-1 by rows: T_i = e_i - sum_{j<i} l_ij T_j. Four rows at a time against the finished
// ones, which gives independent sums and reuses every load; then the four among themselves.
inline void invert_unit_lower(float* GD_RESTRICT T, const float* GD_RESTRICT KK, const float* beta) {
  constexpr int kRows = 4, kVectors = kVector < 8 ? 16 / kVector : 2, kWidth = kVectors * kVector;
  for (int i = 0; i < C; i += kRows)
    for (int column = 0; column < C; column += kWidth) {
      Vec acc[kRows][kVectors] = {};
      for (int j = column; j < i; ++j)  // row j of T ends at column j
        for (int n = 0; n < kVectors; ++n) {
          const Vec t = load(T + j * C + column + n * kVector);
          for (int r = 0; r < kRows; ++r) acc[r][n] += KK[(i + r) * C + j] * t;
        }
      for (int r = 0; r < kRows; ++r) {
        float* row = T + (i + r) * C + column;
        for (int n = 0; n < kVectors; ++n) {
          for (int x = 0; x < r; ++x)
            acc[r][n] += KK[(i + r) * C + i + x] * load(T + (i + x) * C + column + n * kVector);
          store(row + n * kVector, -beta[i + r] * acc[r][n]);
        }
        if (column <= i + r && i + r < column + kWidth) T[(i + r) * C + i + r] = 1.0f;
      }
    }
}

// dst = src on and below the diagonal, 0 above it (src may hold anything there).
inline void keep_lower(float* dst, const float* src) {
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < C; j += kVector) store(dst + i * C + j, iota() + j <= i ? load(src + i * C + j) : Vec{});
}

// --- packing ---------------------------------------------------------------------------------------------------------

// A form of src [rows][k].
template <class E>
void store_a(typename E::Elem* a, int k, int rows, const float* src, int ld) {
  if constexpr (E::kTwinForms) {
    E::store_a_columns(a, k, rows, 0, k, src, ld);
  } else {
    for (int i = 0; i < rows; ++i) E::store_a_row(a, k, i, src + int64_t{i} * ld);
  }
}

// A form of src [64][k]; with `split` also its low part, what the packing rounds off.
template <class E>
void store_a_parts(const HiLo<typename E::Elem>& a, int k, const float* src, int ld, bool split) {
  store_a<E>(a.high, k, C, src, ld);
  if constexpr (!E::kExact) {
    float rest[kMaxPanels * kPanelColumns];
    for (int i = 0; split && i < C; ++i, src += ld) {
      rounding_errors(rest, src, k);
      E::store_a_row(a.low, k, i, rest);
    }
  }
}

// A form of the transpose of src [64][columns]; scratch [columns][64].
template <class E>
void store_a_transposed(typename E::Elem* a, const float* src, int ld, int columns, float* scratch) {
  if constexpr (E::kTwinForms) {
    for (int p = 0; p < columns / kPanel; ++p) E::store_b(a + E::b_size(C) * p, C, 0, C, src + p * kPanel, ld);
  } else {
    transpose(scratch, C, src, ld, C, columns);
    store_a<E>(a, C, columns, scratch, C);
  }
}

// --- keys that resemble each other -----------------------------------------------------------------------------------

// Where keys resemble each other, rows of U undo each other: with one key throughout, U_i = v_i - v_{i-1}. What sums U
// over tokens then has a result of the size of one row and the rounding errors of all. In chunks with such keys these
// products take both parts of their operands (docs/numerics.md).
constexpr float kSimilar = 1.0f / 16;  // mean squared cosine of two keys of a chunk; 1 / K if they are random
// So do chunks of few tokens: there a row that is small by chance is a large part of the result.
constexpr int kFewRows = 16;

// KK [64][64], lower triangle: the products of the keys.
inline bool needs_both_parts(const float* KK, int rows) {
  if (rows <= kFewRows) return true;
  float inverse_length[C];
  for (int i = 0; i < C; ++i) {
    const float square = KK[i * C + i];
    inverse_length[i] = square > 0 ? 1.0f / std::sqrt(square) : 0.0f;
  }
  float squares = 0;
  for (int i = 1; i < rows; ++i) {
    Vec row = {};
    for (int j = 0; j < i; j += kVector) {
      const Vec cosine = load(KK + i * C + j) * load(inverse_length + j);
      row += iota() + j < i ? cosine * cosine : Vec{};
    }
    squares += sum(row) * inverse_length[i] * inverse_length[i];
  }
  const int pairs = rows * (rows - 1) / 2;
  return squares > kSimilar * static_cast<float>(pairs);
}

// --- operands that depend on the key head alone ----------------------------------------------------------------------

template <class E>
struct KeyOperands {
  using Elem = typename E::Elem;
  Elem *Ka, *Qa;     // A [64 x Kp]
  Elem* Kta;         // A [Kp x 64] = K^T
  bool* both_parts;  // whether products that sum U take both parts of their operands; never for engines that keep fp32

  KeyOperands(Carver& carve, const Dims& dims) {
    Ka = carve.take<Elem>(E::a_size(C, dims.Kp));
    Qa = carve.take<Elem>(E::a_size(C, dims.Kp));
    Kta = carve.take<Elem>(E::a_size(dims.Kp, C));
    both_parts = carve.take<bool>(1);
  }
  bool splits() const { return !E::kExact && *both_parts; }
};

template <class E>
struct KeyScratch {
  using Elem = typename E::Elem;
  float *K, *Q;    // [64][Kp], as given
  float *rk, *rq;  // [64] inverse norms: k = rk o K, q = rq o Q
  float* Kt;       // [Kp][64], without twin forms
  Elem* Ktb[2];    // B [Kp x 32] of K^T, without twin forms
  float *KK, *QK;  // [64][64], lower triangle, of the normalised rows

  KeyScratch(Carver& carve, const Dims& dims) {
    K = carve.take<float>(C * dims.Kp);
    Q = carve.take<float>(C * dims.Kp);
    rk = carve.take<float>(C);
    rq = carve.take<float>(C);
    Kt = carve.take<float>(E::kTwinForms ? 0 : C * dims.Kp);
    for (Elem*& panel : Ktb) panel = carve.take<Elem>(E::kTwinForms ? 0 : E::b_size(dims.Kp));
    KK = carve.take<float>(C * C);
    QK = carve.take<float>(C * C);
  }
};

// The lower triangle of a [64 x 64] product with right-hand panels b0, b1.
template <class E, bool kAccumulate = false>
void multiply_to_lower(const typename E::Elem* a, const typename E::Elem* b0, const typename E::Elem* b1, int k,
                       float* c) {
  constexpr int kRows = E::kTriangleRows;
  if constexpr (kRows < kPanel) {
    for (int m = 0; m < C; m += kRows) {
      E::template multiply<kAccumulate>({{a, b0}}, k, m, m + kRows, 0, k, c, C, m < kPanel ? m + kRows : kPanel);
      if (m >= kPanel)
        E::template multiply<kAccumulate>({{a, b1}}, k, m, m + kRows, 0, k, c + kPanel, C, m + kRows - kPanel);
    }
  } else {
    E::template multiply<kAccumulate>({{a, b0}}, k, 0, C, 0, k, c, C);
    E::template multiply<kAccumulate>({{a, b1}}, k, kPanel, C, 0, k, c + kPanel, C);
  }
}

inline void scale_square(float* square, const float* row_scale, const float* column_scale) {
  for (int i = 0; i < C; ++i)
    for (int j = 0; j < C; j += kVector)
      store(square + i * C + j, load(square + i * C + j) * (row_scale[i] * load(column_scale + j)));
}

// A form of rows that are bf16 in memory already.
template <class E>
void pack_bf16_rows(typename E::Elem* a, const Dims& dims, const TokenRows& src, const ChunkSpan& span, int64_t head) {
  if constexpr (!E::kExact) {
    uint16_t padded[kMaxPanels * kPanelColumns] = {};
    for (int i = 0; i < C; ++i) {
      const uint16_t* row = padded;
      if (i < span.rows) row = static_cast<const uint16_t*>(src.data) + src.offset(span.batch, span.token + i, head);
      if (i == span.rows) std::memset(padded, 0, sizeof padded);
      if (i < span.rows && dims.K < dims.Kp) {
        std::memcpy(padded, row, sizeof(uint16_t) * dims.K);
        row = padded;
      }
      E::copy_a_row(a, dims.Kp, i, row);
    }
  }
}

// A form of X^T from the A form or the rows of X [64 x Kp].
template <class E>
void store_key_transposed(typename E::Elem* dst, const typename E::Elem* a, const float* rows, float* scratch,
                          const Dims& dims) {
  if constexpr (E::kTwinForms) {
    E::transpose_a(dst, a, C, dims.Kp);
  } else {
    store_a_transposed<E>(dst, rows, dims.Kp, dims.Kp, scratch);
  }
}

// K, Q and their products. With want_rows, w.K and w.Q hold the fp32 rows.
template <class E>
void prepare_key(const KeyOperands<E>& out, const KeyScratch<E>& w, const Dims& dims, const Layer& in,
                 const ChunkSpan& span, int64_t key_head, bool want_q, bool want_rows) {
  const bool packed_only = !E::kExact && !want_rows && !in.l2norm;
  if (E::kTwinForms && packed_only) {
    pack_bf16_rows<E>(out.Ka, dims, in.k, span, key_head);
    for (int i = 0; i < C; ++i) w.rk[i] = 1.0f;
  } else {
    load_chunk(w.K, dims.Kp, in.k, span, key_head, dims.K, 0, dims.Kp);
    inverse_norms(w.rk, in.l2norm, w.K, dims.Kp, span.rows, dims.Kp);
    store_a<E>(out.Ka, dims.Kp, C, w.K, dims.Kp);
  }
  store_key_transposed<E>(out.Kta, out.Ka, w.K, w.Kt, dims);
  const typename E::Elem* Ktb[2] = {out.Ka, out.Ka + E::a_size(kPanel, dims.Kp)};
  if constexpr (!E::kTwinForms)
    for (int p = 0; p < 2; ++p) {
      E::store_b(w.Ktb[p], dims.Kp, 0, dims.Kp, w.Kt + p * kPanel, C);
      Ktb[p] = w.Ktb[p];
    }
  multiply_to_lower<E>(out.Ka, Ktb[0], Ktb[1], dims.Kp, w.KK);
  *out.both_parts = !E::kExact && needs_both_parts(w.KK, span.rows);
  if (in.l2norm) scale_square(w.KK, w.rk, w.rk);
  if (!want_q) return;
  if (packed_only) {
    pack_bf16_rows<E>(out.Qa, dims, in.q, span, key_head);
    multiply_to_lower<E>(out.Qa, Ktb[0], Ktb[1], dims.Kp, w.QK);
    for (int i = 0; i < C; ++i) w.rq[i] = 1.0f;
    return;
  }
  load_chunk(w.Q, dims.Kp, in.q, span, key_head, dims.K, 0, dims.Kp);
  inverse_norms(w.rq, in.l2norm, w.Q, dims.Kp, span.rows, dims.Kp);
  store_a<E>(out.Qa, dims.Kp, C, w.Q, dims.Kp);
  multiply_to_lower<E>(out.Qa, Ktb[0], Ktb[1], dims.Kp, w.QK);
  if (in.l2norm) scale_square(w.QK, w.rq, w.rk);
}

// --- operands of one value head --------------------------------------------------------------------------------------

template <class E>
struct ValueOperands {
  using Elem = typename E::Elem;
  HiLo<Elem> Tg;                     // A [64 x 64] Gamma o T o beta_j, lower
  HiLo<Elem> Pa;                     // A [64 x 64] P, lower; the low part where keys are similar
  float *read_k, *write_k, *read_q;  // [64] row scales: gamma rk, delta rk, s gamma rq
  float* gamma_L;

  ValueOperands(Carver& carve, const Dims&) {
    Tg = take_hi_lo<E>(carve, E::a_size(C, C));
    Pa = take_hi_lo<E>(carve, E::a_size(C, C));
    read_k = carve.take<float>(C);
    write_k = carve.take<float>(C);
    read_q = carve.take<float>(C);
    gamma_L = carve.take<float>(1);
  }
};

struct ValueScratch {
  Gates* gates;
  float* T;       // [64][64]
  float* square;  // [64][64]

  ValueScratch(Carver& carve, const Dims&) {
    gates = carve.take<Gates>(1);
    T = carve.take<float>(C * C);
    square = carve.take<float>(C * C);
  }
};

template <class E>
void prepare_row_scales(const ValueOperands<E>& out, const Gates& gates, const KeyScratch<E>& key, float scale) {
  for (int i = 0; i < C; i += kVector) {
    store(out.read_k + i, load(gates.gamma + i) * load(key.rk + i));
    store(out.write_k + i, load(gates.delta + i) * load(key.rk + i));
    store(out.read_q + i, load(gates.gamma + i) * load(key.rq + i) * scale);
  }
  *out.gamma_L = gates.gamma_L;
}

// T_g beta from T and the gates, and the row scales.
template <class E>
void prepare_solve(const ValueOperands<E>& out, const Gates& gates, const KeyScratch<E>& key, const float* T,
                   float scale) {
  for (int i = 0; i < C; ++i) {
    float row[C];
    for (int j = 0; j < C; j += kVector)
      store(row + j, load(T + i * C + j) * load(gates.Gamma + i * C + j) * load(gates.beta + j));
    store_a_hi_lo<E>(out.Tg, C, i, row);
  }
  prepare_row_scales<E>(out, gates, key, scale);
}

// P = s Gamma o tril(QK) into square [64][64].
template <class E>
void score_square(float* square, const Gates& gates, const KeyScratch<E>& key, float scale) {
  keep_lower(square, key.QK);
  for (int i = 0; i < C * C; i += kVector) store(square + i, load(square + i) * load(gates.Gamma + i) * scale);
}

template <class E>
void prepare_value(const ValueOperands<E>& out, const ValueScratch& w, const KeyScratch<E>& key, const Layer& in,
                   const ChunkSpan& span, int64_t head, bool want_scores, bool similar) {
  prepare_gates(*w.gates, in, span, head);
  invert_unit_lower(w.T, key.KK, w.gates->beta);
  prepare_solve<E>(out, *w.gates, key, w.T, in.scale);
  if (!want_scores) return;
  score_square<E>(w.square, *w.gates, key, in.scale);
  store_a_parts<E>(out.Pa, C, w.square, C, similar);
}

}  // namespace gatedelta::cpu::GD_ISA
