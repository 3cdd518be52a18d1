// Kernels after the loops of the backward: sums over the CTAs of a head and the heads of a group, the gradient of
// l2norm, and gradients of gates and betas.
//
// The gradient of log gamma_t is D_t, the inner product of the state before token t and its gradient. With G as in
// backward.cuh
//   D_t = D_(t+1) - (G^T k).u + gamma s q^T S_(t-1) do - (gamma S_(t-1)^T k).dv
// where gates bound every term: D_(t+1) + q.dq - v.dv is the same, but with strong gates the difference of two large
// numbers. D is known at both ends of a span, as the loops' inner products, and where gamma_t is 0 it is 0. Between two
// such tokens D is summed from differences, whose error all tokens would share. The error is known at the earlier end;
// it is subtracted from the sums in proportion to the squares of the terms added so far.
#pragma once

#include "cuda/fp32/prepare.cuh"

namespace gatedelta::cuda::fp32 {

GD_DEVICE void store_number(void* data, gd_dtype dtype, int64_t at, float x) {
  with_stored(dtype, [&](auto stored) {
    using Stored = decltype(stored);
    static_cast<typename Stored::Word*>(data)[at] = Stored::narrow(x);
  });
}

// A sum in two numbers, so that terms that cancel leave no rounding error. Products are rounded explicitly, by fmaf
// with 0, because the errors of products fused with the sums would count twice.
struct LongSum {
  float high = 0, low = 0;

  GD_DEVICE void add(float x) {
    const float sum = high + x, back = sum - high;
    low += (high - (sum - back)) + (x - back);
    high = sum;
  }
  GD_DEVICE void add_product(float x, float y) {
    const float product = fmaf(x, y, 0.0f);
    low += fmaf(x, y, -product);
    add(product);
  }
  GD_DEVICE void scale(float by) {
    const float product = fmaf(high, by, 0.0f);
    low = fmaf(low, by, fmaf(high, by, -product));
    high = product;
  }
  GD_DEVICE float of_warp() {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = shuffle_xor(high, step);
      low += shuffle_xor(low, step);
      add(other);
    }
    return high + low;
  }
};

// dq, dk and the sums of tokens. One CTA per (chunk, key head); a warp has every fourth token.
struct Finish {
  static constexpr int kMost = 256 / 32;  // numbers of a row in a lane, at most
  using Row = float[kMost];

  GD_DEVICE static void run(const Params& p, int cta, int tid) {
    const int lane = tid & 31, warp = shuffle(tid >> 5, 0);
    const int chunk_index = cta / p.key_heads, key_head = cta - chunk_index * p.key_heads;
    const auto [n, batch, first, rows] = locate_chunk(p.sequences, chunk_index, lane);
#pragma unroll 1
    for (int row = warp; row < rows; row += kWarps) {
      if (n == p.sequences.count) {
        zero_token(p, batch, first + row, key_head, lane);
      } else {
        finish_token(p, batch, first + row, key_head, lane);
      }
    }
  }

  GD_DEVICE static void zero_token(const Params& p, int batch, int token, int key_head, int lane) {
    const Row zeros = {};
    store(p.dq, zeros, batch, token, key_head, p.key_dim, lane);
    store(p.dk, zeros, batch, token, key_head, p.key_dim, lane);
    for (int v = 0; v < p.group; ++v) store(p.dv, zeros, batch, token, key_head * p.group + v, p.value_dim, lane);
  }

  GD_DEVICE static void finish_token(const Params& p, int batch, int token, int key_head, int lane) {
    Row q, k, dq = {}, dk = {};
    load(q, row_of(p.q, batch, token, key_head), p.key_dim, lane);
    load(k, row_of(p.k, batch, token, key_head), p.key_dim, lane);
    const Factors norms = p.factors[p.entry(batch, token, key_head * p.group)];
#pragma unroll
    for (int i = 0; i < kMost; ++i) q[i] *= norms.r_q, k[i] *= norms.r_k;
#pragma unroll 1
    for (int v = 0; v < p.group; ++v) {
      const int head = key_head * p.group + v;
      const int64_t entry = p.entry(batch, token, head);
      const Factors f = p.factors[entry];
      Row x, d_o, later, reads, e;
      load(d_o, row_of(p.d_o, batch, token, head), p.value_dim, lane);
      load(later, p.later + entry * p.value_dim, p.value_dim, lane);
      load(reads, p.reads + entry * p.value_dim, p.value_dim, lane);
      load(e, row_of(p.v, batch, token, head), p.value_dim, lane);
      LongSum difference;
      float squares = 0, e_du = 0, u_do = 0;
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        e[i] -= reads[i];
        const float du = fmaf(f.qk, d_o[i], later[i]);
        difference.add_product(later[i], e[i]);
        difference.add_product(reads[i], du);
        squares = add_square(add_square(squares, later[i] * e[i]), reads[i] * du);
        e_du = fmaf(e[i], du, e_du);
        u_do = fmaf(e[i], d_o[i], u_do);
      }
      u_do = f.beta * sum_warp(u_do);
      difference.scale(-f.beta);
      squares *= f.beta * f.beta;
      e_du = sum_warp(e_du);
      sum_parts(p, x, p.dq_sums, entry, lane);
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        difference.add_product(q[i], x[i]);
        squares = add_square(squares, q[i] * x[i]);
        dq[i] += fmaf(p.scale * u_do, k[i], x[i]);
      }
      sum_parts(p, x, p.dk_sums, entry, lane);
      add(dk, x);
      const Product sums = {difference.of_warp(), sum_warp(squares)};
      if (lane == 0) p.token_sums[entry] = {sums, e_du};
    }
    if (p.l2norm) {
      remove_length(dq, q, norms.r_q);
      remove_length(dk, k, norms.r_k);
    }
    store(p.dq, dq, batch, token, key_head, p.key_dim, lane);
    store(p.dk, dk, batch, token, key_head, p.key_dim, lane);
  }

  // From the gradient of x / |x| to that of x; `unit` is x / |x|.
  GD_DEVICE static void remove_length(Row& d, const Row& unit, float r) {
    const float along = dot(d, unit);
#pragma unroll
    for (int i = 0; i < kMost; ++i) d[i] = r * (d[i] - along * unit[i]);
  }
  GD_DEVICE static void sum_parts(const Params& p, Row& to, const float* sums, int64_t entry, int lane) {
    const float* from = sums + entry * p.parts * p.key_dim;
    load(to, from, p.key_dim, lane);
    for (int part = 1; part < p.parts; ++part) {
      Row x;
      from += p.key_dim;
      load(x, from, p.key_dim, lane);
      add(to, x);
    }
  }
  GD_DEVICE static void load(Row& to, const float* from, int count, int lane) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) to[i] = lane + 32 * i < count ? from[lane + 32 * i] : 0.0f;
  }
  GD_DEVICE static void add(Row& to, const Row& x) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) to[i] += x[i];
  }
  GD_DEVICE static float dot(const Row& a, const Row& b) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) sum = fmaf(a[i], b[i], sum);
    return sum_warp(sum);
  }
  GD_DEVICE static void store(const TokenRows& rows, const Row& x, int batch, int token, int head, int count,
                              int lane) {
    if (!rows) return;
    auto* const to = static_cast<float*>(rows.data) + rows.offset(batch, token, head);
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (lane + 32 * i < count) to[lane + 32 * i] = x[i];
  }
};

// dg and dbeta. One CTA per chunk; a thread has every 128th value head.
struct GateGradients {
  GD_DEVICE static void run(const Params& p, int chunk_index, int tid) {
    const auto [n, batch, first, rows] = locate_chunk(p.sequences, chunk_index, tid & 31);
#pragma unroll 1
    for (int head = tid; head < p.value_heads; head += kThreads) {
      const int64_t chunk_entry = int64_t{chunk_index} * p.value_heads + head;
      double dA_log = 0, d_dt_bias = 0;
      if (n == p.sequences.count) {
        for (int row = 0; row < rows; ++row) store(p, batch, first + row, head, 0, 0);
      } else if (rows > 0) {
        sum_chunk(p, n, batch, first, rows, head, chunk_index, dA_log, d_dt_bias);
      }
      if (!p.head_sums) continue;
      p.head_sums[2 * chunk_entry] = static_cast<float>(dA_log);
      p.head_sums[2 * chunk_entry + 1] = static_cast<float>(d_dt_bias);
    }
  }

  // D of a token, and the sum of squares of the terms added up to it.
  struct Known {
    double D, squares;
  };
  GD_DEVICE static Known sum_products(const Params& p, const Product* products) {
    Known sum = {0, 0};
    for (int i = 0; i < p.parts * kWarps; ++i) sum.D += products[i].sum, sum.squares += products[i].squares;
    return sum;
  }
  GD_DEVICE static Known step(const Params& p, const Known& x, int64_t entry) {
    const Product difference = p.token_sums[entry].difference;
    return {x.D + difference.sum, x.squares + difference.squares};
  }

  GD_DEVICE static void sum_chunk(const Params& p, int n, int batch, int first, int rows, int head, int64_t chunk_index,
                                  double& dA_log, double& d_dt_bias) {
    const RawGate raw(p, head);
    const int products = p.parts * kWarps;
    const auto after_span = [&](int i) {  // span i of the chunk; -1 is the last one of the chunk before
      return sum_products(p, p.products + ((chunk_index * kSpansPerChunk + i) * p.value_heads + head) * products);
    };
    const auto at_begin = [&] {
      return sum_products(p, p.first_products + (int64_t{n} * p.value_heads + head) * products);
    };
    const bool begins = p.sequences[n].begin == first;
    int span = (rows - 1) / kSpanTokens;
    Known after = after_span(span);
#pragma unroll 1
    for (int end = rows; span >= 0; --span) {
      const Known before = span == 0 && begins ? at_begin() : after_span(span - 1);
      sum_span(p, raw, batch, first + span * kSpanTokens, first + end, head, before, after, dA_log, d_dt_bias);
      after = before;
      end = span * kSpanTokens;
    }
  }
  // Tokens `first` to `end` - 1; D is known at both ends.
  GD_DEVICE static void sum_span(const Params& p, const RawGate& raw, int batch, int first, int end, int head,
                                 const Known& before, Known after, double& dA_log, double& d_dt_bias) {
#pragma unroll 1
    while (end > first) {
      int begin = end;  // tokens back to one whose gate is closed, or to the first
      bool closed = false;
      Known x = after;
#pragma unroll 1
      while (begin > first && !closed) {
        const int64_t entry = p.entry(batch, --begin, head);
        x = step(p, x, entry);
        closed = p.factors[entry].gamma == 0;
      }
      const double error = closed ? x.D : x.D - before.D, squares = closed ? x.squares : x.squares + before.squares;
      const double share = squares > 0 && squares < 1e300 ? error / squares : 0;  // squares may have overflowed
      x = after;
#pragma unroll 1
      for (int token = end - 1; token >= begin; --token) {
        x = step(p, x, p.entry(batch, token, head));
        const bool is_zero = closed && token == begin;
        finish_token(p, raw, batch, token, head, is_zero ? 0 : x.D - share * x.squares, dA_log, d_dt_bias);
      }
      after = {0, 0};
      end = begin;
    }
  }
  GD_DEVICE static void finish_token(const Params& p, const RawGate& raw, int batch, int token, int head, double D,
                                     double& dA_log, double& d_dt_bias) {
    const int64_t entry = p.entry(batch, token, head);
    auto dg = static_cast<float>(D);
    if (p.gate == GD_GATE_RAW) {
      const float x = load_number(p.g.data, p.g.dtype, p.g.offset(batch, token, head)) + raw.bias;
      if (dg != 0) dA_log += double{dg} * raw.value(x);
      dg *= raw.slope(x);
      d_dt_bias += dg;
    }
    store(p, batch, token, head, dg, beta_gradient(p, p.factors[entry].beta, p.token_sums[entry].e_du));
  }
  GD_DEVICE static void store(const Params& p, int batch, int token, int head, float dg, float dbeta) {
    if (p.dg) store_number(p.dg.data, p.dg.dtype, p.dg.offset(batch, token, head), dg);
    if (p.dbeta) store_number(p.dbeta.data, p.dbeta.dtype, p.dbeta.offset(batch, token, head), dbeta);
  }
};

// dA_log and d_dt_bias: the sums of all chunks. A warp has a value head.
struct HeadSums {
  GD_DEVICE static void run(const Params& p, int cta, int tid) {
    const int lane = tid & 31, head = cta * kWarps + (tid >> 5);
    if (head >= p.value_heads) return;
    const int64_t chunks = p.sequences.workspace_chunks();
    double dA_log = 0, d_dt_bias = 0;
    for (int64_t i = lane; i < chunks; i += 32) {
      dA_log += p.head_sums[2 * (i * p.value_heads + head)];
      d_dt_bias += p.head_sums[2 * (i * p.value_heads + head) + 1];
    }
    const float a = sum_warp(static_cast<float>(dA_log)), b = sum_warp(static_cast<float>(d_dt_bias));
    if (lane != 0) return;
    if (p.dA_log) store_number(p.dA_log.data, p.dA_log.dtype, head * p.dA_log.stride, a);
    if (p.d_dt_bias) store_number(p.d_dt_bias.data, p.d_dt_bias.dtype, head * p.d_dt_bias.stride, b);
  }
};

}  // namespace gatedelta::cuda::fp32
