// <G, S>, by two warps; dg and dbeta, by one warp, two tokens per lane.
#pragma once

#include "cuda/sm90/backward/gradients/gradients.cuh"
#include "cuda/sm90/prepare/gates.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem>
GD_DEVICE void Gradients<Elem>::run_inner_products(int half) const {
  Cursor cursor;
#pragma unroll 1
  while (begin_unit(cursor)) {
#pragma unroll 1
    for (int v = 0; v < p.group; ++v) {
      float sum[4] = {0, 0, 0, 0};
      grad_pipe.wait_full(cursor.head);
      state_pipe.wait_full(cursor.head);
      const uint32_t from = smem + half * (kStateTileBytes / 2) + lane * 16;
#pragma unroll 4
      for (int i = 0; i < kStateTileBytes / 2; i += 512) {
        const uint4 a = load_shared_words(from + Smem::kGradients + i), b = load_shared_words(from + Smem::kStates + i);
        const auto add = [](float& to, uint32_t g, uint32_t s) {
          const float2 x = unpack<Elem>(g), y = unpack<Elem>(s);
          to += x.x * y.x;
          to += x.y * y.y;
        };
        add(sum[0], a.x, b.x);
        add(sum[1], a.y, b.y);
        add(sum[2], a.z, b.z);
        add(sum[3], a.w, b.w);
      }
      warp_arrive(grad_pipe.empty(0));
      warp_arrive(state_pipe.empty(0));
      float all = sum[0] + sum[1] + (sum[2] + sum[3]);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(~0u, all, step);
      sum_pipe.wait_empty(cursor.row);
      if (lane == 0) store_shared(product_at(cursor, half), all);
      warp_arrive(sum_pipe.full(cursor.row.stage));
      cursor.next_head();
    }
    end_unit(cursor);
  }
}

template <class Elem>
GD_DEVICE uint32_t Gradients<Elem>::product_at(const Cursor& cursor, int half) const {
  return smem + Smem::kProducts + (cursor.row.stage * 2 + half) * 4;
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::run_gates() const {
  Cursor cursor;
#pragma unroll 1
  while (begin_unit(cursor)) {
    const Unit unit = this->unit(cursor);
#pragma unroll 1
    for (int v = 0; v < p.group; ++v) {
      row_pipe.wait_full(cursor.row);
      sum_pipe.wait_full(cursor.row);
      store_gate_gradients(unit, unit.key_head * p.group + v, cursor);
      warp_arrive(sum_pipe.empty(cursor.row.stage));
      warp_arrive(row_pipe.empty(cursor.row.stage));
      cursor.next_head();
    }
    end_unit(cursor);
  }
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::store_gate_gradients(const Unit& unit, int head, const Cursor& cursor) const {
  const auto two = [&](typename Smem::Sum s) { return load_shared2(sum(cursor, s) + lane * 8); };
  const float2 beta = load_shared2(vector(cursor, kBeta) + lane * 8);
  const float2 q = two(Smem::kQueryDot), r = two(Smem::kReadDot), w = two(Smem::kWriteDot), kappa = two(Smem::kKappa);
  const float2 rho = make_float2(q.x + pending_beta(beta.x) * r.x - (w.x - kappa.x),
                                 q.y + pending_beta(beta.y) * r.y - (w.y - kappa.y));
  const float kappa_sum = kappa.x + kappa.y;
  const float before = warp_inclusive_sum(kappa_sum, lane) - kappa_sum;  // of the lanes below this one
  const float after = warp_inclusive_sum_from_end(rho.x + rho.y, lane);  // from this lane on
  const float product = (load_shared(product_at(cursor, 0)) + load_shared(product_at(cursor, 1))) *
                        exp2_approx(load_shared(vector(cursor, kLogGamma) + (kChunkTokens - 1) * 4));
  const float2 u = two(Smem::kUpdateDot);
  const float dg[2] = {product + before + after, product + before + kappa.x + after - rho.x};
  float dbeta[2] = {u.x / (beta.x * beta.x), u.y / (beta.y * beta.y)};
  const float betas[2] = {beta.x, beta.y};
  const float2 values = finish_unscaled_rows(unit, head, beta, cursor);
  if (stores_unscaled(beta.x)) dbeta[0] = values.x + r.x;
  if (stores_unscaled(beta.y)) dbeta[1] = values.y + r.y;
  const bool raw = p.gate == GD_GATE_RAW;
  const float decay = raw ? -expf(load_number(p.A_log.data, p.A_log.dtype, head * p.A_log.stride)) : 0.0f;
  const float bias = raw && p.dt_bias ? load_number(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride) : 0.0f;
  float dA_log = 0, d_dt_bias = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    if (t >= unit.tokens) continue;
    float gradient = dg[i];
    if (raw) {
      const float x = load_number(p.g.data, p.g.dtype, p.g.offset(unit.batch, unit.token + t, head)) + bias;
      dA_log += gradient * clamp_gate(decay * softplus_of(x));
      gradient *= decay * softplus_slope(x);
      d_dt_bias += gradient;
    }
    float d = dbeta[i];
    if (p.beta_kind == GD_BETA_LOGIT) d *= betas[i] * (1.0f - betas[i]);
    if (p.beta_kind == GD_BETA_LOGIT_DOUBLED) d *= betas[i] * (1.0f - 0.5f * betas[i]);
    if (p.dg) store_number(p.dg.data, p.dg.dtype, p.dg.offset(unit.batch, unit.token + t, head), gradient);
    if (p.dbeta) store_number(p.dbeta.data, p.dbeta.dtype, p.dbeta.offset(unit.batch, unit.token + t, head), d);
  }
  if (!p.head_sums) return;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    dA_log += __shfl_xor_sync(~0u, dA_log, step);
    d_dt_bias += __shfl_xor_sync(~0u, d_dt_bias, step);
  }
  if (lane == 0) p.head_sums[int64_t{unit.chunk_index} * p.value_heads + head] = make_float2(dA_log, d_dt_bias);
}

// Rows that arrive as Z (small beta): <Z, v> for the lane that owns the row, and dV = beta Z to memory. Four rows at a
// time, so that their loads overlap.
template <class Elem>
GD_DEVICE float2 Gradients<Elem>::finish_unscaled_rows(const Unit& unit, int head, float2 beta,
                                                       const Cursor& cursor) const {
  constexpr int kAtOnce = 4;
  float2 mine = make_float2(0, 0);
  uint64_t plain = __ballot_sync(~0u, stores_unscaled(beta.x) && 2 * lane < unit.tokens) |
                   uint64_t{__ballot_sync(~0u, stores_unscaled(beta.y) && 2 * lane + 1 < unit.tokens)} << 32;
#pragma unroll 1
  while (plain != 0) {
    int r[kAtOnce];
    uint2 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int bit = __ffsll(static_cast<long long>(plain)) - 1;
      r[i] = bit < 0 ? -1 : bit % 32 * 2 + bit / 32;
      plain &= plain - 1;
      if (r[i] >= 0)
        v[i] = reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.v.data) +
                                              p.v.offset(unit.batch, unit.token + r[i], head))[lane];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (r[i] < 0) break;
      const float factor = load_shared(vector(cursor, kBeta) + r[i] * 4);
      const uint32_t z_at = row_tile(cursor, Smem::kValues) + lane / 16 * kTileBytes + tile_offset(r[i], lane % 16 * 4);
      const float2 z0 = unpack<Elem>(load_shared_word(z_at)), z1 = unpack<Elem>(load_shared_word(z_at + 4));
      const float2 v0 = unpack<Elem>(v[i].x), v1 = unpack<Elem>(v[i].y);
      reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.dv.data) +
                               p.dv.offset(unit.batch, unit.token + r[i], head))[lane] =
          make_uint2(pack<Elem>(factor * z0.x, factor * z0.y), pack<Elem>(factor * z1.x, factor * z1.y));
      float dot = z0.x * v0.x + z0.y * v0.y + z1.x * v1.x + z1.y * v1.y;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
      if (lane == r[i] / 2) (r[i] % 2 ? mine.y : mine.x) = dot;
    }
  }
  return mine;
}

}  // namespace gatedelta::cuda::sm90
