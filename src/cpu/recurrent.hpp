// Token-by-token steps over states in memory: decode and draft verification. An item is one (sequence, value head):
//   [x_k x_q] = S^T [k q],  e = v - alpha x_k,  o = s (alpha x_q + beta (k.q) e),  S <- alpha S + beta k e^T
// A step reads the state from where it is and writes it to where it goes: fp32 states are never copied, others pass
// through one fp32 copy per lane.
#pragma once

#include "cpu/chunk.hpp"
#include "cpu/parallel.hpp"

namespace gatedelta::cpu::GD_ISA {

class Recurrent {
 public:
  Recurrent(const RecurrentProblem& problem, const Context& context)
      : problem_(problem), context_(context), in_(problem.in), K_(problem.in.key_dim), V_(problem.in.value_dim) {}

  size_t workspace() const {
    Carver carve;
    for (int lane = 0; lane < context_.lanes; ++lane) Lane(carve, *this);
    return carve.used();
  }

  void run() {
    Carver measure;
    Lane(measure, *this);
    const size_t lane_bytes = measure.used();
    const Sequences& sequences = in_.sequences;
    if (problem_.o && sequences.offsets)
      for (int64_t t = sequences.used_tokens(); t < sequences.tokens; ++t)
        for (int64_t h = 0; h < in_.value_heads; ++h) zero_row(0, t, h);
    struct Session {};
    for_each_item<Session>(context_, sequences.count * in_.value_heads, [&](int lane, int64_t item) {
      Carver carve(context_.workspace + lane_bytes * lane);
      run_item(Lane(carve, *this), item / in_.value_heads, item % in_.value_heads);
    });
  }

 private:
  struct Lane {
    float *k, *q, *v, *o;  // one token
    float* state;          // [K][V] or [V][K]

    Lane(Carver& carve, const Recurrent& r) {
      k = carve.take<float>(r.K_);
      q = carve.take<float>(r.K_);
      v = carve.take<float>(r.V_);
      o = carve.take<float>(r.V_);
      state = carve.take<float>(int64_t{r.K_} * r.V_);
    }
  };

  struct Token {
    float alpha, beta, kq;
  };

  void zero_row(int64_t batch, int64_t token, int64_t head) {
    const TokenRows& o = problem_.o;
    std::memset(static_cast<char*>(o.data) + o.offset(batch, token, head) * dtype_bytes(o.dtype), 0,
                V_ * dtype_bytes(o.dtype));
  }

  // Where a state lies if a step can use it as it is, else null.
  static float* direct(const StateRows& rows, int64_t slot, int64_t head) {
    return rows.dtype == GD_F32 && slot >= 0 ? static_cast<float*>(rows.data) + rows.offset(slot, head) : nullptr;
  }
  void load_state(float* dst, const StateRows& rows, int64_t slot, int64_t head) const {
    if (rows && slot >= 0) {
      load_row(dst, rows.data, rows.dtype, rows.offset(slot, head), K_ * V_);
    } else {
      for (int i = 0; i < K_ * V_; i += kVector) store(dst + i, Vec{});
    }
  }
  void store_state(const StateRows& rows, int64_t slot, int64_t head, const float* src) const {
    if (rows && slot >= 0) store_row(rows.data, rows.dtype, rows.offset(slot, head), src, K_ * V_);
  }

  void run_item(const Lane& w, int64_t n, int64_t head) {
    const SequenceSpan span = in_.sequences[n];
    if (problem_.is_nobody(n)) {
      if (problem_.o)
        for (int64_t t = 0; t < span.length; ++t) zero_row(span.batch, span.begin + t, head);
      return;
    }
    const int64_t final_slot = problem_.final_slot(n);
    const int64_t accepted = problem_.accept_lengths ? problem_.accept_lengths[n] : span.length;
    const float* S = direct(in_.initial, in_.initial_slot(n), head);
    if (!S) {
      load_state(w.state, in_.initial, in_.initial_slot(n), head);
      S = w.state;
    }
    if (accepted == 0 && S != direct(problem_.final, final_slot, head)) store_state(problem_.final, final_slot, head, S);

    for (int64_t t = 0; t < span.length; ++t) {
      const int64_t token = span.begin + t;
      const Token x = load_token(w, span.batch, token, head);
      const bool is_final = t + 1 == accepted, is_last = t + 1 == span.length;
      // The state after the last token may go straight to its place; earlier ones are still needed here.
      float* next = is_final && is_last ? direct(problem_.final, final_slot, head) : nullptr;
      if (!next) next = w.state;
      const bool wanted = !is_last || is_final || problem_.step_states;
      if (in_.layout == GD_STATE_KV) {
        step_kv(S, wanted ? next : nullptr, w, x);
      } else {
        step_vk(S, wanted ? next : nullptr, w, x);
      }
      if (problem_.o)
        store_row(problem_.o.data, problem_.o.dtype, problem_.o.offset(span.batch, token, head), w.o, V_);
      if (problem_.step_states) store_step(span.batch, token, head, next);
      if (is_final && next == w.state) store_state(problem_.final, final_slot, head, next);
      S = next;
    }
  }

  void store_step(int64_t batch, int64_t token, int64_t head, const float* S) const {
    StateRows rows = problem_.step_states;
    if (problem_.step_indices) {
      store_state(rows, problem_.step_indices[batch * in_.sequences.tokens + token], head, S);
    } else {
      rows.slot_stride = 1;  // the slot is the element offset of the token's state
      store_state(rows, batch * problem_.step_batch_stride + token * problem_.step_token_stride, head, S);
    }
  }

  Token load_token(const Lane& w, int64_t batch, int64_t token, int64_t head) const {
    const int64_t key_head = head / in_.group;
    load_row(w.k, in_.k.data, in_.k.dtype, in_.k.offset(batch, token, key_head), K_);
    load_row(w.q, in_.q.data, in_.q.dtype, in_.q.offset(batch, token, key_head), K_);
    load_row(w.v, in_.v.data, in_.v.dtype, in_.v.offset(batch, token, head), V_);
    if (in_.l2norm) {
      l2_normalise(w.k);
      l2_normalise(w.q);
    }
    return {std::exp(token_gate(in_, batch, token, head)), token_beta(in_, batch, token, head), dot(w.k, w.q, K_)};
  }

  void l2_normalise(float* x) const {
    const float r = 1.0f / std::sqrt(dot(x, x, K_) + 1e-6f);
    for (int i = 0; i < K_; i += kVector) store(x + i, load(x + i) * r);
  }

  // From the products with the old state to the output, and to what is written in place of v: beta e.
  GD_ALWAYS_INLINE void finish(Vec x_k, Vec x_q, const Lane& w, int j, const Token& x) const {
    const Vec e = load(w.v + j) - x.alpha * x_k;
    store(w.o + j, in_.scale * (x.alpha * x_q + (x.beta * x.kq) * e));
    store(w.v + j, x.beta * e);
  }

  void step_kv(const float* S, float* next, const Lane& w, const Token& x) const {
    // As many columns at once as the registers hold sums for: whole rows of 128 with 512-bit vectors.
    constexpr int kVectors = GD_VECTOR_BYTES == 64 ? 8 : 4;
    int j = 0;
    for (; j + kVectors * kVector <= V_; j += kVectors * kVector) step_columns<kVectors>(S, next, w, x, j);
    for (; j < V_; j += kVector) step_columns<1>(S, next, w, x, j);
  }

  template <int kVectors>
  GD_ALWAYS_INLINE void step_columns(const float* S, float* next, const Lane& w, const Token& x, int column) const {
    Vec x_k[kVectors] = {}, x_q[kVectors] = {};
    for (int i = 0; i < K_; ++i)
      for (int n = 0; n < kVectors; ++n) {
        const Vec s = load(S + int64_t{i} * V_ + column + n * kVector);
        x_k[n] += w.k[i] * s;
        x_q[n] += w.q[i] * s;
      }
    Vec write[kVectors];
    for (int n = 0; n < kVectors; ++n) {
      finish(x_k[n], x_q[n], w, column + n * kVector, x);
      write[n] = load(w.v + column + n * kVector);
    }
    if (!next) return;
    // Backwards: the rows read last are the ones still in the first-level cache.
    for (int i = K_ - 1; i >= 0; --i)
      for (int n = 0; n < kVectors; ++n) {
        const int64_t at = int64_t{i} * V_ + column + n * kVector;
        store(next + at, x.alpha * load(S + at) + w.k[i] * write[n]);
      }
  }

  void step_vk(const float* S, float* next, const Lane& w, const Token& x) const {
    constexpr int kRows = 4;  // rows that share a load of k and q
    for (int j = 0; j < V_; j += kVector) {
      Vec x_k[kVector], x_q[kVector];
      for (int r = 0; r < kVector; r += kRows) {
        Vec a[kRows] = {}, b[kRows] = {};
        for (int i = 0; i < K_; i += kVector) {
          const Vec k = load(w.k + i), q = load(w.q + i);
          for (int n = 0; n < kRows; ++n) {
            const Vec s = load(S + int64_t{j + r + n} * K_ + i);
            a[n] += k * s;
            b[n] += q * s;
          }
        }
        for (int n = 0; n < kRows; ++n) {
          x_k[r + n] = a[n];
          x_q[r + n] = b[n];
        }
      }
      finish(sum_rows(x_k), sum_rows(x_q), w, j, x);
      if (!next) continue;
      for (int r = 0; r < kVector; r += kRows)
        for (int i = 0; i < K_; i += kVector) {
          const Vec k = load(w.k + i);
          for (int n = 0; n < kRows; ++n) {
            const int64_t at = int64_t{j + r + n} * K_ + i;
            store(next + at, x.alpha * load(S + at) + w.v[j + r + n] * k);
          }
        }
    }
  }

  // Lane r of the result is the sum of rows[r].
  static GD_ALWAYS_INLINE Vec sum_rows(Vec* rows) {
    exchange_halves<kVector / 2>(rows, std::make_integer_sequence<int, kVector>{});
    for (int width = kVector / 2; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) rows[i] += rows[i + width];
    return rows[0];
  }

  const RecurrentProblem& problem_;
  const Context& context_;
  const Layer& in_;
  const int K_, V_;
};

}  // namespace gatedelta::cpu::GD_ISA
