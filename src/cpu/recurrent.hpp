// Token-by-token steps over states in memory: decode and draft verification. An item is one (sequence, value head):
//   [x_k x_q] = S^T [k q],  e = v - alpha x_k,  o = s (alpha x_q + beta (k.q) e),  S <- alpha S + beta k e^T
// A step reads fp32 states in place and writes them to their destination without a copy; other types pass through one
// fp32 copy per lane. Value columns are independent, so blocks of columns go through a group of tokens one after the
// other; each block fits in the L1 cache.
#pragma once

#include <algorithm>

#include "cpu/chunk.hpp"
#include "cpu/parallel.hpp"

namespace gatedelta::cpu::GD_ISA {

class Recurrent {
 public:
  Recurrent(const RecurrentProblem& problem, const Context& context)
      : problem_(problem), context_(context), in_(problem.in), K_(problem.in.key_dim), V_(problem.in.value_dim) {}

  size_t workspace() const { return lane_bytes() * static_cast<size_t>(useful_lanes()); }

  void run() {
    const size_t lane_bytes = this->lane_bytes();
    const Sequences& sequences = in_.sequences;
    if (problem_.o && sequences.offsets)
      for (int64_t t = sequences.used_tokens(); t < sequences.tokens; ++t)
        for (int64_t h = 0; h < in_.value_heads; ++h) zero_row(0, t, h);
    Context context = context_;
    context.lanes = useful_lanes();
    const auto body = [&](int lane, int64_t item) {
      Carver carve(context_.workspace + lane_bytes * lane);
      run_item(Lane(carve, *this), item / in_.value_heads, item % in_.value_heads);
    };
    const int64_t items = sequences.count * in_.value_heads;
    if (sequences.offsets) {
      struct Session {};
      for_each_item<Session>(context, items, body);
    } else {
      for_each_share(context, items, body);
    }
  }

 private:
  static constexpr int kTokens = 16;  // the most tokens that pass a block together

  struct Lane {
    float *k, *q;              // [tokens][K], with as many tokens as pass a block together
    float *v, *o;              // [tokens][V]
    float *alpha, *beta, *kq;  // [tokens]
    float* state;              // [K][V] or [V][K]

    Lane(Carver& carve, const Recurrent& r) {
      const int64_t tokens = std::min<int64_t>(kTokens, r.in_.sequences.tokens);
      k = carve.take<float>(tokens * r.K_);
      q = carve.take<float>(tokens * r.K_);
      v = carve.take<float>(tokens * r.V_);
      o = carve.take<float>(tokens * r.V_);
      alpha = carve.take<float>(tokens);
      beta = carve.take<float>(tokens);
      kq = carve.take<float>(tokens);
      state = carve.take<float>(int64_t{r.K_} * r.V_);
    }
  };

  size_t lane_bytes() const {
    Carver measure;
    Lane(measure, *this);
    return measure.used();
  }
  // A lane with less state than this takes longer to start than it saves.
  int useful_lanes() const {
    constexpr int64_t kLaneStates = 128 * 1024 / sizeof(float);
    const Sequences& sequences = in_.sequences;
    const int64_t useful = sequences.tokens * sequences.batch * in_.value_heads * K_ * V_ / kLaneStates;
    return static_cast<int>(std::min<int64_t>(context_.lanes, std::max<int64_t>(useful, 1)));
  }

  // One token's part of a lane.
  struct Token {
    const float *k, *q;
    float *v, *o;
    float alpha, beta, kq;
  };
  Token token(const Lane& w, int t) const {
    return {w.k + t * K_, w.q + t * K_, w.v + t * V_, w.o + t * V_, w.alpha[t], w.beta[t], w.kq[t]};
  }

  void zero_row(int64_t batch, int64_t token, int64_t head) {
    const TokenRows& o = problem_.o;
    std::memset(static_cast<char*>(o.data) + o.offset(batch, token, head) * dtype_bytes(o.dtype), 0,
                V_ * dtype_bytes(o.dtype));
  }

  // Address of a state that a step can use in place (fp32), else null.
  static float* direct(const StateRows& rows, int64_t slot, int64_t head) {
    return rows.dtype == GD_F32 && slot >= 0 ? static_cast<float*>(rows.data) + rows.offset(slot, head) : nullptr;
  }
  // Value columns [first, first + count) of a stored state, as floats. A negative slot is the zero state.
  void load_columns(float* S, const StateRows& rows, int64_t slot, int64_t head, int first, int count) const {
    const bool stored = rows && slot >= 0, kv = in_.layout == GD_STATE_KV;
    const int64_t base = stored ? rows.offset(slot, head) : 0, step = kv ? V_ : K_;
    const int begin = kv ? 0 : first, end = kv ? K_ : first + count, width = kv ? count : K_;
    for (int i = begin; i < end; ++i) {
      const int64_t at = i * step + (kv ? first : 0);
      if (stored) {
        load_row(S + at, rows.data, rows.dtype, base + at, width);
      } else {
        for (int j = 0; j < width; j += kVector) store(S + at + j, Vec{});
      }
    }
  }
  // Value columns [first, first + count) of a state to where they are stored.
  void store_columns(const StateRows& rows, int64_t slot, int64_t head, const float* S, int first, int count) const {
    if (!rows || slot < 0) return;
    const int64_t base = rows.offset(slot, head);
    if (in_.layout == GD_STATE_KV) {
      for (int i = 0; i < K_; ++i) {
        const int64_t at = int64_t{i} * V_ + first;
        store_row(rows.data, rows.dtype, base + at, S + at, count);
      }
    } else {
      store_row(rows.data, rows.dtype, base + int64_t{first} * K_, S + int64_t{first} * K_, count * K_);
    }
  }

  void run_item(const Lane& w, int64_t n, int64_t head) {
    const SequenceSpan span = in_.sequences[n];
    if (problem_.is_padding(n)) {
      if (problem_.o)
        for (int64_t t = 0; t < span.length; ++t) zero_row(span.batch, span.begin + t, head);
      return;
    }
    const int64_t accepted = problem_.accept_lengths ? problem_.accept_lengths[n] : span.length;
    float* const place = direct(problem_.final, problem_.final.slot(n), head);
    const int64_t read_slot = problem_.read_slot(n);
    const float* S = direct(in_.initial, read_slot, head);
    const bool copied = !S;
    if (copied) S = w.state;
    if (accepted == 0 && S != place) {
      if (copied) load_columns(w.state, in_.initial, read_slot, head, 0, V_);
      store_columns(problem_.final, problem_.final.slot(n), head, S, 0, V_);
    }

    for (int64_t begin = 0; begin < span.length; begin += kTokens) {
      const int count = static_cast<int>(span.length - begin < kTokens ? span.length - begin : kTokens);
      const bool last = begin + count == span.length;
      for (int t = 0; t < count; ++t) load_token(w, t, span.batch, span.begin + begin + t, head);
      // Only the state after the last token may be built at its destination: steps still read the earlier ones here.
      float* const next = last && accepted == span.length && place ? place : w.state;
      const bool stores_all = !last || accepted == span.length || problem_.step_states;
      for (int first = 0, columns; first < V_; first += columns) {
        columns = block_columns(first);
        if (copied && begin == 0) load_columns(w.state, in_.initial, read_slot, head, first, columns);
        const float* from = S;
        for (int t = 0; t < count; ++t) {
          const int64_t done = begin + t + 1;
          const bool wanted = stores_all || t + 1 < count || done == accepted;
          step(from, wanted ? next : nullptr, token(w, t), first, columns);
          from = next;
          if (problem_.step_states) store_step(n, span, begin + t, head, next, first, columns);
          if (done == accepted && next != place)
            store_columns(problem_.final, problem_.final.slot(n), head, next, first, columns);
        }
      }
      S = next;
      if (problem_.o)
        for (int t = 0; t < count; ++t)
          store_row(problem_.o.data, problem_.o.dtype, problem_.o.offset(span.batch, span.begin + begin + t, head),
                    w.o + t * V_, V_);
    }
  }

  void store_step(int64_t n, const SequenceSpan& span, int64_t t, int64_t head, const float* S, int first,
                  int count) const {
    StateRows rows = problem_.step_states;
    if (rows.indices) {
      store_columns(rows, problem_.step_slot(n, span.begin, t), head, S, first, count);
    } else {
      rows.slot_stride = 1;  // the slot is the element offset of the token's state
      store_columns(rows, span.batch * problem_.step_batch_stride + (span.begin + t) * problem_.step_token_stride, head,
                    S, first, count);
    }
  }

  void load_token(const Lane& w, int t, int64_t batch, int64_t token, int64_t head) const {
    const int64_t key_head = in_.key_head(head);
    float *k = w.k + t * K_, *q = w.q + t * K_;
    load_row(k, in_.k.data, in_.k.dtype, in_.k.offset(batch, token, key_head), K_);
    load_row(q, in_.q.data, in_.q.dtype, in_.q.offset(batch, token, key_head), K_);
    load_row(w.v + t * V_, in_.v.data, in_.v.dtype, in_.v.offset(batch, token, head), V_);
    if (in_.l2norm) {
      l2_normalise(k);
      l2_normalise(q);
    }
    w.alpha[t] = std::exp(token_gate(in_, batch, token, head));
    w.beta[t] = token_beta(in_, batch, token, head);
    w.kq[t] = dot(k, q, K_);
  }

  void l2_normalise(float* x) const {
    const float r = 1.0f / std::sqrt(dot(x, x, K_) + 1e-6f);
    for (int i = 0; i < K_; i += kVector) store(x + i, load(x + i) * r);
  }

  // --- one block of value columns through one token ------------------------------------------------------------------

  // KV: as many columns as the registers hold sums for. VK: whole vectors of sums, and as many as registers hold.
  static constexpr int kVectorsKV = GD_F32_BLOCK_ROWS;
  static constexpr int kColumnsVK = kVector < GD_F32_BLOCK_ROWS ? GD_F32_BLOCK_ROWS : kVector;
  int block_columns(int first) const {
    if (in_.layout == GD_STATE_VK) return kColumnsVK;
    return first + kVectorsKV * kVector <= V_ ? kVectorsKV * kVector : kVector;
  }

  void step(const float* S, float* next, const Token& x, int first, int columns) const {
    if (in_.layout == GD_STATE_VK) {
      step_vk(S, next, x, first);
    } else if (columns == kVector) {
      step_kv<1>(S, next, x, first);
    } else {
      step_kv<kVectorsKV>(S, next, x, first);
    }
  }

  // From the products with the old state to the output, and to what is written in place of v: beta e.
  GD_ALWAYS_INLINE void finish(Vec x_k, Vec x_q, const Token& x, int j) const {
    const Vec e = load(x.v + j) - x.alpha * x_k;
    store(x.o + j, in_.scale * (x.alpha * x_q + (x.beta * x.kq) * e));
    store(x.v + j, x.beta * e);
  }

  // Prefetches kFloats floats of the next block: it lies in the L2 cache at best, and no hardware prefetcher finds it.
  template <int kFloats>
  static GD_ALWAYS_INLINE void prefetch(const float* p) {
    constexpr int kLine = 64 / sizeof(float);
    for (int i = 0; i < kFloats; i += kLine) __builtin_prefetch(p + i);
  }

  // In both steps pointers and sizes are locals: a store of a vector may alias any member. The update prefetches the
  // next block, because it finds its own in the L1 cache.
  template <int kVectors>
  void step_kv(const float* S, float* next, const Token& x, int column) const {
    constexpr int kColumns = kVectors * kVector;
    const int K = K_;
    const int64_t V = V_;
    const float *k = x.k, *q = x.q, *from = S + column;
    Vec x_k[kVectors] = {}, x_q[kVectors] = {};
    for (int i = 0; i < K; ++i, from += V)
      for (int n = 0; n < kVectors; ++n) {
        const Vec s = load(from + n * kVector);
        x_k[n] += k[i] * s;
        x_q[n] += q[i] * s;
      }
    Vec write[kVectors];
    for (int n = 0; n < kVectors; ++n) {
      finish(x_k[n], x_q[n], x, column + n * kVector);
      write[n] = load(x.v + column + n * kVector);
    }
    if (!next) return;
    const float alpha = x.alpha;
    const bool more = column + kColumns < V;
    float* to = next + K * V + column;
    // Backwards: the rows read last are the likeliest to be in the L1 cache.
    for (int i = K - 1; i >= 0; --i) {
      from -= V;
      to -= V;
      if (more) prefetch<kColumns>(from + kColumns);
      const float k_i = k[i];
      Vec sum[kVectors];
      for (int n = 0; n < kVectors; ++n) sum[n] = alpha * load(from + n * kVector) + k_i * write[n];
      for (int n = 0; n < kVectors; ++n) store(to + n * kVector, sum[n]);
    }
  }

  void step_vk(const float* S, float* next, const Token& x, int column) const {
    constexpr int kRows = GD_F32_BLOCK_ROWS;                  // rows that share a load of k and q
    constexpr int kVectors = 8, kWidth = kVectors * kVector;  // of a row, updated at a time
    const int64_t K = K_;
    const float *k = x.k, *q = x.q, *from = S + column * K;
    Vec x_k[kColumnsVK], x_q[kColumnsVK];
    for (int r = 0; r < kColumnsVK; r += kRows, from += kRows * K) {
      Vec a[kRows] = {}, b[kRows] = {};
      for (int64_t i = 0; i < K; i += kVector) {
        const Vec k_i = load(k + i), q_i = load(q + i);
        for (int n = 0; n < kRows; ++n) {
          const Vec s = load(from + n * K + i);
          a[n] += k_i * s;
          b[n] += q_i * s;
        }
      }
      for (int n = 0; n < kRows; ++n) {
        x_k[r + n] = a[n];
        x_q[r + n] = b[n];
      }
    }
    for (int r = 0; r < kColumnsVK; r += kVector) finish(sum_rows(x_k + r), sum_rows(x_q + r), x, column + r);
    if (!next) return;
    const float alpha = x.alpha;
    const bool more = column + kColumnsVK < V_;
    const float* ahead = from;
    from = S + column * K;
    float* to = next + column * K;
    for (int r = 0; r < kColumnsVK; ++r, from += K, to += K, ahead += K) {
      const float write = x.v[column + r];
      int64_t i = 0;
      for (; i + kWidth <= K; i += kWidth) {
        if (more) prefetch<kWidth>(ahead + i);
        Vec sum[kVectors];
        for (int n = 0; n < kVectors; ++n)
          sum[n] = alpha * load(from + i + n * kVector) + write * load(k + i + n * kVector);
        for (int n = 0; n < kVectors; ++n) store(to + i + n * kVector, sum[n]);
      }
      for (; i < K; i += kVector) store(to + i, alpha * load(from + i) + write * load(k + i));
    }
  }

  const RecurrentProblem& problem_;
  const Context& context_;
  const Layer& in_;
  const int K_, V_;
};

}  // namespace gatedelta::cpu::GD_ISA
