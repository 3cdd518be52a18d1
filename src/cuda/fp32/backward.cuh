// The two loops of the backward after that of reads (forward.cuh). S_t is the state after token t, G_t its gradient, G
// the share of later tokens in it, u = beta e with e = v - gamma S_(t-1)^T k:
// from the last token to the first:
//   du = G^T k + s (q.k) do    G_t = G + s q do^T    dk = G_t u    G <- gamma (G_t - k (beta du)^T)
// from the first to the last:
//   dq = gamma s S_(t-1) do    dk += -gamma S_(t-1) (beta du)    S_t as in the forward
// finish.cuh adds s k (u.do) to dq. Only the first loop depends on its own results. dq and dk are those of normalised q
// and k. Everything read from S_(t-1) or G is computed before the token's own share is added: the gradients of gates
// are sums of it, and with strong gates it is small against that share.
#pragma once

#include "cuda/fp32/loop.cuh"

namespace gatedelta::cuda::fp32 {

template <class Config>
struct GradientLoop : Loop<typename Config::Shape, typename Config::Stage> {
  using Base = Loop<typename Config::Shape, typename Config::Stage>;
  using Base::p, Base::S, Base::span, Base::head, Base::smem, Base::kColumns, Base::kPerLane;
  using typename Base::Shape, typename Base::Stage;
  static constexpr int kRowBytes = Shape::kKeys * 4, kColumnBytes = Shape::kCtaColumns * 4;

  GD_DEVICE GradientLoop(const Params& params, int cta, int tid) : Base(params, cta, tid) {}

  GD_DEVICE void run() {
    const int stages = this->stages();
    if (stages > 0) load_stage(stages - 1);
    copy_commit();
    this->load_state(p.d_final);
#pragma unroll 1
    for (int stage = stages - 1; stage >= 0; --stage) {
      copy_wait<0>();  // this stage
      sync_cta();      // of every thread; and the stage before, whose memory is overwritten now, is over
      if (stage > 0) load_stage(stage - 1);
      copy_commit();
      if (this->ends_span(stage)) {
        float* const to = this->gradient_of(stage);
        this->each_number(p.value_dim, 1, [&](float& x, int i) { to[i] = x; });
      }
      advance_stage(stage);
    }
    if (const int64_t slot = p.d_initial.slot(this->sequence()); slot >= 0) this->store_state(p.d_initial, slot);
    multiply_initial();
  }

  GD_DEVICE void load_stage(int stage) const {
    const uint32_t to = this->stage_at(stage % kStages);
    const int count = this->rows_of_stage(stage);
    this->load_keys(to, p.k, stage, count);
    this->load_keys(to + Stage::kKeyBytes, p.q, stage, count);
    this->load_tensor(to + Stage::kValues, p.d_o, stage, count);
    this->load_tensor(to + Stage::kValues + Stage::kValueBytes, p.v, stage, count);
    this->load_entries(to + Stage::kValues + 2 * Stage::kValueBytes, p.reads, stage, count);
    this->load_factors(to + Stage::kFactors, stage, count);
  }

  GD_DEVICE void advance_stage(int stage) {
    const int rows = this->rows_of_stage(stage);
    const uint32_t sums = smem + Config::kSums;
#pragma unroll 1
    for (int end = rows; end > 0;) {
      const int first = (end - 1) / kSumTokens * kSumTokens;
      if (this->warp < this->busy_warps())
#pragma unroll 1
        for (int row = end - 1; row >= first; --row) advance_token(stage, row, this->sums_of(sums, row));
      sync_cta();  // the sums of all warps are there
      this->template store_sums<false>(sums, p.dk_sums, stage, first, end - first);
      end = first;
      if (end > 0) sync_cta();  // they are not read any more; after the last ones, the next stage's barrier says so
    }
  }

  GD_DEVICE void advance_token(int stage, int row, uint32_t sums) {
    const uint32_t from = this->stage_at(stage % kStages), values = from + Stage::kValues + row * kColumnBytes;
    const Factors f = Base::factors_of(from, row);
    float x[kPerLane], y[kColumns], z[kColumns];
    this->read_keys(x, from + row * kRowBytes);  // k
    this->read_state(y, x);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) y[c] *= f.r_k;
    this->store_columns(p.later + this->entry_of(stage, row) * p.value_dim, y);
    this->read_columns(z, values);  // do
    const float scale = p.scale * f.r_q;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      y[c] = f.beta * fmaf(f.qk, z[c], y[c]);
      z[c] *= scale;
    }
    if (p.dv)
      this->store_columns(static_cast<float*>(p.dv.data) + p.dv.offset(span.batch, this->token_of(stage, row), head),
                          y);
    this->read_keys(x, from + Stage::kKeyBytes + row * kRowBytes);  // q
    this->advance(1.0f, x, z);
    read_writes(z, values, f.beta);
    this->sum_columns(z, sums);  // G u
    const float write = -f.gamma * f.r_k;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) y[c] *= write;
    this->read_keys(x, from + row * kRowBytes);
    this->advance(f.gamma, x, y);
  }
  // <G, S> before the first token.
  GD_DEVICE void multiply_initial() {
    const int n = this->sequence();
    Product product = {0, 0};
    if (const int64_t slot = p.initial.slot(n); slot >= 0)
      with_stored(p.initial.dtype, [&](auto stored) {
        using Stored = decltype(stored);
        const auto* const from =
            static_cast<const typename Stored::Word*>(p.initial.data) + p.initial.offset(slot, head);
        this->each_number(p.key_state_stride, p.value_state_stride,
                          [&](float& x, int i) { add_term(product, x, Stored::widen(from[i])); });
      });
    this->store_product(p.first_products + (int64_t{n} * p.value_heads + head) * p.parts * kWarps, product);
  }
  // beta (v - reads).
  GD_DEVICE void read_writes(float (&u)[kColumns], uint32_t values, float beta) const {
    float reads[kColumns];
    this->read_columns(u, values + Stage::kValueBytes);
    this->read_columns(reads, values + 2 * Stage::kValueBytes);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) u[c] = beta * (u[c] - reads[c]);
  }
};

// The loop from the first token to the last.
template <class Config>
struct KeyLoop : Loop<typename Config::Shape, typename Config::Stage> {
  using Base = Loop<typename Config::Shape, typename Config::Stage>;
  using Base::p, Base::S, Base::span, Base::head, Base::smem, Base::kColumns, Base::kPerLane;
  using typename Base::Shape, typename Base::Stage;
  static constexpr int kRowBytes = Shape::kKeys * 4, kColumnBytes = Shape::kCtaColumns * 4;

  GD_DEVICE KeyLoop(const Params& params, int cta, int tid) : Base(params, cta, tid) {}

  GD_DEVICE void run() {
    const int stages = this->stages();
    if (stages > 0) load_stage(0);
    copy_commit();
    this->load_state(p.initial);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      copy_wait<0>();  // this stage
      sync_cta();      // of every thread; and the stage before, whose memory is overwritten now, is over
      if (stage + 1 < stages) load_stage(stage + 1);
      copy_commit();
      advance_stage(stage);
      if (this->ends_span(stage)) multiply_gradient(stage);
    }
  }

  GD_DEVICE void load_stage(int stage) const {
    const uint32_t to = this->stage_at(stage % kStages), values = to + Stage::kValues;
    const int count = this->rows_of_stage(stage);
    this->load_keys(to, p.k, stage, count);
    this->load_tensor(values, p.d_o, stage, count);
    this->load_tensor(values + Stage::kValueBytes, p.v, stage, count);
    this->load_entries(values + 2 * Stage::kValueBytes, p.reads, stage, count);
    this->load_entries(values + 3 * Stage::kValueBytes, p.later, stage, count);
    this->load_factors(to + Stage::kFactors, stage, count);
  }

  GD_DEVICE void advance_stage(int stage) {
    const int rows = this->rows_of_stage(stage);
    const uint32_t query_sums = smem + Config::kQuerySums, key_sums = smem + Config::kKeySums;
#pragma unroll 1
    for (int first = 0; first < rows; first += kSumTokens) {
      const int end = smaller(first + kSumTokens, rows);
      if (first > 0) sync_cta();  // the sums are not read any more; before the first ones, the stage's barrier says so
      if (this->warp < this->busy_warps())
#pragma unroll 1
        for (int row = first; row < end; ++row)
          advance_token(stage, row, this->sums_of(query_sums, row), this->sums_of(key_sums, row));
      sync_cta();  // the sums of all warps are there
      this->template store_sums<false>(query_sums, p.dq_sums, stage, first, end - first);
      this->template store_sums<true>(key_sums, p.dk_sums, stage, first, end - first);
    }
  }

  GD_DEVICE void advance_token(int stage, int row, uint32_t query_sums, uint32_t key_sums) {
    const uint32_t from = this->stage_at(stage % kStages), values = from + Stage::kValues + row * kColumnBytes;
    const Factors f = Base::factors_of(from, row);
    float k[kPerLane], x[kColumns], y[kColumns];
    this->read_columns(x, values);                           // do
    this->read_columns(y, values + 3 * Stage::kValueBytes);  // later
    const float of_query = f.gamma * p.scale, of_key = -f.gamma * f.beta;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      y[c] = of_key * fmaf(f.qk, x[c], y[c]);
      x[c] *= of_query;
    }
    this->sum_columns(x, query_sums);
    this->sum_columns(y, key_sums);
    this->read_keys(k, from + row * kRowBytes);
    this->read_columns(x, values + Stage::kValueBytes);      // v
    this->read_columns(y, values + 2 * Stage::kValueBytes);  // reads
    const float write = f.beta * f.r_k;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) x[c] = write * (x[c] - y[c]);
    this->advance(f.gamma, k, x);
  }

  // <G, S> after the stage.
  GD_DEVICE void multiply_gradient(int stage) {
    const float* const G = this->gradient_of(stage);
    Product product = {0, 0};
    this->each_number(p.value_dim, 1, [&](float& x, int i) { add_term(product, x, G[i]); });
    this->store_product(p.products + this->span_entry(stage) * p.parts * kWarps, product);
  }
};

}  // namespace gatedelta::cuda::fp32
