// The second pass of a backward: the gradient G of the state, from the last step of a sequence to the first. The
// forward kernel with another body: G^T where S^T was, dO where V was, dV where O was, the gradient of the final state
// where the initial state was. Per step:
//   dU = P^T dO + delta o (K G)    Z = dU + N^T dU    dV = beta o Z
//   G <- gamma_L G + K^T (-beta gamma o Z) + Q^T (s gamma o dO)
// Rows with a small beta are stored as Z (stores_unscaled). G after every chunk is stored for the gradients. A segment
// may begin with warm-up steps. These store nothing, nor do the steps of a transition (cut/segments.cuh).
#pragma once

#include "cuda/portable/chain/advance.cuh"
#include "cuda/portable/chain/loads.cuh"
#include "cuda/portable/chain/products.cuh"
#include "cuda/portable/chain/rounding.cuh"
#include "cuda/portable/chain/state.cuh"

namespace gatedelta::cuda::portable {

template <class Config>
struct GradChain : Chain<Config> {
  using Base = Chain<Config>;
  using Base::kI, Base::kT, Base::lane, Base::p, Base::smem;
  using typename Base::Operand, typename Base::Place, typename Base::Smem, typename Base::Tokens;
  using Elem = typename Config::Elem;
  static constexpr int kWarpColumns = Config::kWarpColumns;

  uint32_t* snapshot;

  GD_DEVICE GradChain(const Params& params, int cta, int tid) : Base(params, cta, tid) {}

  GD_DEVICE void run() {
    const Segment segment = this->segment();
    if (segment.sequence < 0) return;
    const Place at = this->place_in(segment);
    if (at.column - this->warp * kWarpColumns >= p.value_dim)
      return;  // CTAs of a head are a power of two: these are surplus
    if (this->is_transition() && !this->stores_boundary_state(segment, at)) return;
    const int begin = segment.chunk * kChunkTokens, end = static_cast<int>(Base::end_of(segment, at)) - begin;
    const int length = min(end + segment.warmup_chunks() * kChunkTokens, static_cast<int>(at.span.length) - begin);
    int step = steps_of(length) - 1;   // the next one; -1 in an empty sequence
    int rows = length - step * kStep;  // only the sequence's last step may have fewer tokens
    const int outputs = this->is_transition() ? 0 : steps_of(end);
    if (step >= 0) {
      const int first = segment.chunk * kStepsPerChunk;
      this->set_rows(at, first + step, first + steps_of(end) - 1);
      snapshot = this->snapshot_at(at, segment.chunk + segment.chunks - 1);
      this->load_shared_rows(step & 1, rows, step % kStepsPerChunk);
      copy_commit();
      this->load_own_values(rows);
      copy_commit();
    }
    if (this->is_transition() && segment.begins_at_boundary()) {
      this->zero_state();
    } else {
      this->load_boundary_state(segment, at);
    }
#pragma unroll 1
    for (; step >= outputs && step >= 0; --step, rows = kStep) advance<false>(rows, step);
    bool ends_chunk = true;
#pragma unroll 1
    for (; step >= 0; --step, rows = kStep) {
      if (ends_chunk) this->store_snapshot(snapshot);
      ends_chunk = step % kStepsPerChunk == 0;  // the next one does
      advance<true>(rows, step);
    }
    store();
  }
  GD_DEVICE static int steps_of(int tokens) { return (tokens + kStep - 1) / kStep; }

  GD_DEVICE void store() {
    const Segment segment = this->segment();
    const Place at = this->place_in(segment);
    const bool is_boundary = this->is_transition();
    if (!is_boundary && segment.chunk > 0) return;
    const int64_t slot = is_boundary ? 0 : p.final.slot(at.sequence);
    if (slot >= 0)
      this->store_state(is_boundary ? p.boundary_states : p.final.data, is_boundary ? GD_F32 : p.final.dtype,
                        is_boundary ? this->next_work_item() * p.state_numbers() : p.final.offset(slot, at.head),
                        at.column);
  }

  template <bool kHasOutputs>
  GD_DEVICE void advance(int rows, int step) {
    this->begin_step();
    const int stage = step & 1;
    const uint32_t K = smem + Smem::kK + stage * Config::kTiles * Config::kTileBytes, Q = K + (Smem::kQ - Smem::kK);
    const uint32_t prep = smem + Smem::kPrepared + stage * Prepared::kBytes;
    const float end = load_shared(prep + Prepared::kEnd);
    this->set_thread(opaque(this->tid));
    const int more = step > 0 ? kStep : 0;  // rows of the next step
    Tokens Z;
    Operand outputs, packed;
#pragma unroll
    for (int kk = 0; kk < Base::kKeyBlocks; ++kk) {
      uint32_t s[kI][4];
      this->pack_state(s, kk);
      this->scale_state(kk, end);
      this->multiply_rows(Z, s, K, kk);  // (K G)^T
      this->load_next(stage, more, stage ^ 1, kk);
    }
    copy_wait<1>();  // dO of this step; the rows of the next one may still be on their way
    sync_warp();
    load_outputs(outputs);
    sync_warp();  // all lanes have read dO
    this->scale(Z, prep, kTail);
    this->multiply_transposed_triangle(Z, outputs, prep + Prepared::kP);  // dU
    solve(Z, packed, prep);
    scale_operands(packed, outputs, Z, prep);
    if constexpr (kHasOutputs) {
      scale_values(Z, prep);
      this->store_outputs(Z, rows);
    }
    this->add_to_state_and_load(packed, K, more);
    this->add_to_state(outputs, Q, [](int) {});
  }

  // Z = dU + N^T dU, with dU in Z. Where keys resemble each other, rows of dU are alike and rows of Z, their
  // differences, are far smaller: in bf16 N^T multiplies dU as hi and lo.
  GD_DEVICE void solve(Tokens& Z, Operand& packed, uint32_t prep) const {
    Base::pack_tokens(packed, Z);
    if (std::is_same_v<Elem, Bf16> && load_shared(prep + Prepared::kErrorFeedback) > 0) {
#pragma unroll
      for (int I = 0; I < kT / 2; ++I) {
        uint32_t error[kI][4];
#pragma unroll
        for (int i = 0; i < kI; ++i)
#pragma unroll
          for (int part = 0; part < 4; ++part) {
            const float(&z)[4] = Z[i][2 * I + part / 2];
            const float2 two = unpack<Elem>(packed[i][I][part]);
            error[i][part] = pack<Elem>(z[part % 2 * 2] - two.x, z[part % 2 * 2 + 1] - two.y);
          }
        this->multiply_transposed_rows(Z, error, prep + Prepared::kN, I);  // rows of dU before I alone
      }
    }
    this->multiply_transposed_triangle(Z, packed, prep + Prepared::kN);
  }
  // Loads dO^T as a left operand.
  GD_DEVICE void load_outputs(Operand& to) const {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int J = 0; J < kT / 2; ++J)
        load_matrices_transposed(
            to[i][J], this->own_values() +
                          values_offset<kWarpColumns>(16 * J + (lane & 7) + (lane >> 4) * 8, 2 * i + (lane >> 3 & 1)));
  }
  // The operands of G's update: -beta gamma o Z and s gamma o dO.
  GD_DEVICE void scale_operands(Operand& packed, Operand& outputs, const Tokens& Z, uint32_t prep) const {
#pragma unroll
    for (int n = 0; n < kT; ++n) {
      const float2 read = this->vector2(prep, kReadKey, n), query = this->vector2(prep, kReadQuery, n);
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int part = n % 2 * 2 + h;
          packed[i][n / 2][part] = pack<Elem>(-read.x * Z[i][n][2 * h], -read.y * Z[i][n][2 * h + 1]);
          const float2 two = unpack<Elem>(outputs[i][n / 2][part]);
          outputs[i][n / 2][part] = pack<Elem>(query.x * two.x, query.y * two.y);
        }
    }
  }
  GD_DEVICE void scale_values(Tokens& Z, uint32_t prep) const {
#pragma unroll
    for (int n = 0; n < kT; ++n) {
      float2 beta = this->vector2(prep, kBeta, n);
      if (stores_unscaled(beta.x)) beta.x = 1;
      if (stores_unscaled(beta.y)) beta.y = 1;
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Z[i][n][2 * h] *= beta.x;
          Z[i][n][2 * h + 1] *= beta.y;
        }
    }
  }
};

}  // namespace gatedelta::cuda::portable
