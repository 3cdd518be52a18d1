// The forward loop, token by token, with the state in registers from the first to the last:
//   e = v - gamma S^T k      S <- gamma S + k (beta e)^T      o = s S^T q
// q and k are those in memory; their norms are factors of the products. Without kOutputs the loop stores the reads
// gamma S^T k alone, for a backward.
#pragma once

#include "cuda/fp32/loop.cuh"

namespace gatedelta::cuda::fp32 {

template <class Config>
struct Forward : Loop<typename Config::Shape, typename Config::Stage> {
  using Base = Loop<typename Config::Shape, typename Config::Stage>;
  using Base::p, Base::S, Base::span, Base::head, Base::kColumns, Base::kPerLane;
  using typename Base::Shape, typename Base::Stage;
  static constexpr bool kOutputs = Config::kOutputs;
  static constexpr int kRowBytes = Shape::kKeys * 4, kColumnBytes = Shape::kCtaColumns * 4;

  GD_DEVICE Forward(const Params& params, int cta, int tid) : Base(params, cta, tid) {}

  GD_DEVICE void run() {
    if (kOutputs && p.is_padding(this->sequence())) return;  // prepare has zeroed its outputs
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
      const int rows = this->rows_of_stage(stage);
      if (this->warp < this->busy_warps())
#pragma unroll 1
        for (int row = 0; row < rows; ++row) advance_token(stage, row);
      if (kOutputs && p.checkpoints) store_checkpoint(stage, rows);
    }
    if (!kOutputs) return;
    if (const int64_t slot = p.final.slot(this->sequence()); slot >= 0) this->store_state(p.final, slot);
  }

  GD_DEVICE void load_stage(int stage) const {
    const uint32_t to = this->stage_at(stage % kStages);
    const int count = this->rows_of_stage(stage);
    this->load_keys(to, p.k, stage, count);
    if constexpr (kOutputs) this->load_keys(to + Stage::kKeyBytes, p.q, stage, count);
    this->load_tensor(to + Stage::kValues, p.v, stage, count);
    this->load_factors(to + Stage::kFactors, stage, count);
  }

  GD_DEVICE void advance_token(int stage, int row) {
    const uint32_t from = this->stage_at(stage % kStages);
    const Factors f = Base::factors_of(from, row);
    float k[kPerLane], v[kColumns], y[kColumns];
    this->read_keys(k, from + row * kRowBytes);
    this->read_columns(v, from + Stage::kValues + row * kColumnBytes);
    this->read_state(y, k);
    const float read = f.gamma * f.r_k, write = f.beta * f.r_k;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      y[c] *= read;
      v[c] = write * (v[c] - y[c]);
    }
    if (p.reads) this->store_columns(p.reads + this->entry_of(stage, row) * p.value_dim, y);
    this->advance(f.gamma, k, v);
    if constexpr (kOutputs) {
      float q[kPerLane];
      this->read_keys(q, from + Stage::kKeyBytes + row * kRowBytes);
      this->read_state(y, q);
      const float scale = p.scale * f.r_q;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) y[c] *= scale;
      if (p.o)
        this->store_columns(static_cast<float*>(p.o.data) + p.o.offset(span.batch, this->token_of(stage, row), head),
                            y);
    }
  }

  // Checkpoints are after whole chunks, so after whole stages.
  GD_DEVICE void store_checkpoint(int stage, int rows) {
    const int n = this->sequence();
    const int64_t done = stage * kStageTokens + rows;
    int64_t slot = -1;
    if (p.checkpoint_offsets) {
      if (p.checkpoint_offsets[n] == done) slot = p.checkpoints.slot(n);
    } else if (done % p.checkpoint_every == 0) {
      const int64_t first = p.first_checkpoint ? p.first_checkpoint[n] : n * (p.sequences.tokens / p.checkpoint_every);
      slot = p.checkpoints.slot(first + done / p.checkpoint_every - 1);
    }
    if (slot >= 0) this->store_state(p.checkpoints, slot);
  }
};

}  // namespace gatedelta::cuda::fp32
