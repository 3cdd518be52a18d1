// Token-by-token steps over states in memory: decode and draft verification. An item is one (sequence, value head); its
// state goes through the first-level cache in blocks of value columns, each loaded once, moved through all tokens and
// stored once:
//   [x_k x_q] = S^T [k q],  e = v - alpha x_k,  o = s (alpha x_q + beta (k.q) e),  S <- alpha S + beta k e^T
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
      zero_rows({0, sequences.used_tokens(), sequences.tokens - sequences.used_tokens()});
    struct Session {};
    for_each_item<Session>(context_, sequences.count * in_.value_heads, [&](int lane, int64_t item) {
      Carver carve(context_.workspace + lane_bytes * lane);
      run_item(Lane(carve, *this), item / in_.value_heads, item % in_.value_heads);
    });
  }

 private:
  // Tokens are taken in groups, so that scratch does not grow with T: the state returns to memory between groups only
  // for sequences longer than any draft.
  static constexpr int kTokens = 16;
  static constexpr int kBlock = 64;  // value columns per block

  struct Lane {
    float *k, *q;                        // [kTokens][K]
    float *v, *o;                        // [kTokens][kBlock]
    float *alpha, *beta, *kq;            // [kTokens]
    float* S;                            // one block: [K][kBlock] or [kBlock][K]
    float* state;                        // the whole state between groups of tokens

    Lane(Carver& carve, const Recurrent& r) {
      k = carve.take<float>(kTokens * r.K_);
      q = carve.take<float>(kTokens * r.K_);
      v = carve.take<float>(kTokens * kBlock);
      o = carve.take<float>(kTokens * kBlock);
      alpha = carve.take<float>(kTokens);
      beta = carve.take<float>(kTokens);
      kq = carve.take<float>(kTokens);
      S = carve.take<float>(r.K_ * kBlock);
      state = carve.take<float>(r.in_.sequences.tokens > kTokens ? int64_t{r.K_} * r.V_ : 0);
    }
  };

  void zero_rows(const SequenceSpan& span) {
    const TokenRows& o = problem_.o;
    for (int64_t t = 0; t < span.length; ++t)
      for (int64_t h = 0; h < in_.value_heads; ++h) zero_row(span.batch, span.begin + t, h);
    (void)o;
  }
  void zero_row(int64_t batch, int64_t token, int64_t head) {
    const TokenRows& o = problem_.o;
    std::memset(static_cast<char*>(o.data) + o.offset(batch, token, head) * dtype_bytes(o.dtype), 0,
                V_ * dtype_bytes(o.dtype));
  }

  void run_item(const Lane& w, int64_t n, int64_t head) {
    const SequenceSpan span = in_.sequences[n];
    if (problem_.is_nobody(n)) {
      if (problem_.o)
        for (int64_t t = 0; t < span.length; ++t) zero_row(span.batch, span.begin + t, head);
      return;
    }
    const int64_t accepted = problem_.accept_lengths ? problem_.accept_lengths[n] : span.length;
    int64_t begin = 0;
    do {
      const int count = static_cast<int>(span.length - begin < kTokens ? span.length - begin : kTokens);
      load_tokens(w, span, begin, count, head);
      for (int column = 0; column < V_; column += kBlock)
        run_block(w, n, span, begin, count, head, column, V_ - column < kBlock ? V_ - column : kBlock, accepted);
      begin += count;
    } while (begin < span.length);
  }

  void load_tokens(const Lane& w, const SequenceSpan& span, int64_t begin, int count, int64_t head) {
    const int64_t key_head = head / in_.group;
    for (int t = 0; t < count; ++t) {
      const int64_t token = span.begin + begin + t;
      load_row(w.k + t * K_, in_.k.data, in_.k.dtype, in_.k.offset(span.batch, token, key_head), K_);
      load_row(w.q + t * K_, in_.q.data, in_.q.dtype, in_.q.offset(span.batch, token, key_head), K_);
      w.alpha[t] = std::exp(token_gate(in_, span.batch, token, head));
      w.beta[t] = token_beta(in_, span.batch, token, head);
    }
    if (in_.l2norm) {
      l2_normalise(w.k, K_, count, K_, nullptr);
      l2_normalise(w.q, K_, count, K_, nullptr);
    }
    for (int t = 0; t < count; ++t) w.kq[t] = dot(w.k + t * K_, w.q + t * K_, K_);
  }

  // One block of value columns [column, column + width) through `count` tokens.
  void run_block(const Lane& w, int64_t n, const SequenceSpan& span, int64_t begin, int count, int64_t head, int column,
                 int width, int64_t accepted) {
    const bool kv = in_.layout == GD_STATE_KV;
    const StateRows whole = {w.state, GD_F32, 1, 0, 0};
    if (begin == 0) {
      load_block(w.S, in_.initial, in_.initial_slot(n), head, column, width);
      if (accepted == 0) store_block(problem_.final, problem_.final_slot(n), head, column, width, w.S);
    } else {
      load_block(w.S, whole, 0, 0, column, width);
    }
    for (int t = 0; t < count; ++t) {
      const int64_t token = span.begin + begin + t;
      load_row(w.v + t * kBlock, in_.v.data, in_.v.dtype, in_.v.offset(span.batch, token, head) + column, width);
    }
    for (int t = 0; t < count; ++t) {
      float *v = w.v + t * kBlock, *o = w.o + t * kBlock;
      if (kv) {
        step_kv(w.S, w.k + t * K_, w.q + t * K_, v, o, width, w.alpha[t], w.beta[t], w.kq[t]);
      } else {
        step_vk(w.S, w.k + t * K_, w.q + t * K_, v, o, width, w.alpha[t], w.beta[t], w.kq[t]);
      }
      const int64_t token = span.begin + begin + t;
      if (problem_.o)
        store_row(problem_.o.data, problem_.o.dtype, problem_.o.offset(span.batch, token, head) + column, o, width);
      if (problem_.step_states) store_step(span.batch, token, head, column, width, w.S);
      if (begin + t + 1 == accepted) store_block(problem_.final, problem_.final_slot(n), head, column, width, w.S);
    }
    if (begin + count < span.length) store_block(whole, 0, 0, column, width, w.S);
  }

  void store_step(int64_t batch, int64_t token, int64_t head, int column, int width, const float* S) {
    StateRows rows = problem_.step_states;
    if (problem_.step_indices) {
      store_block(rows, problem_.step_indices[batch * in_.sequences.tokens + token], head, column, width, S);
    } else {
      rows.slot_stride = 1;  // the slot is the element offset of the token's state
      store_block(rows, batch * problem_.step_batch_stride + token * problem_.step_token_stride, head, column, width, S);
    }
  }

  // A block is [K][width] in the KV layout and [width][K] in the VK layout: both contiguous pieces of the matrix's rows.
  void load_block(float* S, const StateRows& src, int64_t slot, int64_t head, int column, int width) const {
    if (!src || slot < 0) {
      std::memset(S, 0, sizeof(float) * K_ * width);
      return;
    }
    const int64_t base = src.offset(slot, head);
    if (in_.layout == GD_STATE_KV) {
      for (int i = 0; i < K_; ++i) load_row(S + i * width, src.data, src.dtype, base + int64_t{i} * V_ + column, width);
    } else {
      load_row(S, src.data, src.dtype, base + int64_t{column} * K_, width * K_);
    }
  }
  void store_block(const StateRows& dst, int64_t slot, int64_t head, int column, int width, const float* S) const {
    if (!dst || slot < 0) return;
    const int64_t base = dst.offset(slot, head);
    if (in_.layout == GD_STATE_KV) {
      for (int i = 0; i < K_; ++i) store_row(dst.data, dst.dtype, base + int64_t{i} * V_ + column, S + i * width, width);
    } else {
      store_row(dst.data, dst.dtype, base + int64_t{column} * K_, S, width * K_);
    }
  }

  // From the two products of the old state to the output and the error to write; v becomes beta e.
  GD_ALWAYS_INLINE void finish(Vec x_k, Vec x_q, float* v, float* o, float alpha, float beta, float kq) const {
    const Vec e = load(v) - alpha * x_k;
    store(o, in_.scale * (alpha * x_q + (beta * kq) * e));
    store(v, beta * e);
  }

  void step_kv(float* GD_RESTRICT S, const float* GD_RESTRICT k, const float* GD_RESTRICT q, float* GD_RESTRICT v,
               float* GD_RESTRICT o, int width, float alpha, float beta, float kq) const {
    constexpr int kColumns = 16;  // width is a multiple of 16
    constexpr int kVectors = kColumns / kVector;
    for (int j = 0; j < width; j += kColumns) {
      Vec x_k[2][kVectors] = {}, x_q[2][kVectors] = {};
      for (int i = 0; i < K_; i += 2)
        for (int half = 0; half < 2; ++half)
          for (int n = 0; n < kVectors; ++n) {
            const Vec s = load(S + (i + half) * width + j + n * kVector);
            x_k[half][n] += k[i + half] * s;
            x_q[half][n] += q[i + half] * s;
          }
      for (int n = 0; n < kVectors; ++n)
        finish(x_k[0][n] + x_k[1][n], x_q[0][n] + x_q[1][n], v + j + n * kVector, o + j + n * kVector, alpha, beta, kq);
      Vec write[kVectors];
      for (int n = 0; n < kVectors; ++n) write[n] = load(v + j + n * kVector);
      for (int i = 0; i < K_; ++i)
        for (int n = 0; n < kVectors; ++n) {
          float* s = S + i * width + j + n * kVector;
          store(s, alpha * load(s) + k[i] * write[n]);
        }
    }
  }

  void step_vk(float* GD_RESTRICT S, const float* GD_RESTRICT k, const float* GD_RESTRICT q, float* GD_RESTRICT v,
               float* GD_RESTRICT o, int width, float alpha, float beta, float kq) const {
    for (int j = 0; j < width; j += kVector) {
      Vec x_k[kVector], x_q[kVector];
      for (int r = 0; r < kVector; ++r) {
        const float* row = S + (j + r) * K_;
        Vec a = {}, b = {};
        for (int i = 0; i < K_; i += kVector) {
          a += load(k + i) * load(row + i);
          b += load(q + i) * load(row + i);
        }
        x_k[r] = a;
        x_q[r] = b;
      }
      finish(sum_rows(x_k), sum_rows(x_q), v + j, o + j, alpha, beta, kq);
      for (int r = 0; r < kVector; ++r) {
        float* row = S + (j + r) * K_;
        for (int i = 0; i < K_; i += kVector) store(row + i, alpha * load(row + i) + v[j + r] * load(k + i));
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
