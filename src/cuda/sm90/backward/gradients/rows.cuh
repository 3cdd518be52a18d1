// queries, reads and writes: F and E, then dQ and both parts of dK.
#pragma once

#include "cuda/sm90/backward/gradients/gradients.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem>
GD_DEVICE void Gradients<Elem>::run_rows(GradientWarpgroup role) const {
  const bool queries = role == GradientWarpgroup::kQueries, reads = role == GradientWarpgroup::kReads,
             writes = role == GradientWarpgroup::kWrites;
  const uint32_t dotted = smem + (queries ? Smem::kQueries : Smem::kKeys);
  const uint32_t snapshot = smem + (writes ? Smem::kGradients : Smem::kStates);
  const uint32_t snapshot_full = writes ? grad_pipe.full(0) : state_pipe.full(0),
                 snapshot_empty = writes ? grad_pipe.empty(0) : state_pipe.empty(0);
  const uint32_t tile = smem + (queries ? Smem::kF : Smem::kUnscaledE);
  const uint32_t tile_full = queries ? f_tile_pipe.full(0) : e_tile_pipe.full(0),
                 tile_empty = queries ? f_tile_pipe.empty(0) : e_tile_pipe.empty(0);
  const auto rows_of_role = queries ? Smem::kOutputs : reads ? Smem::kValues : Smem::kUpdates;
  const auto sum_of_role = queries ? Smem::kQueryDot : reads ? Smem::kReadDot : Smem::kWriteDot;
  Cursor cursor;
  float total[64];
#pragma unroll 1
  while (begin_unit(cursor)) {
    float2 norm = make_float2(1, 1), own = make_float2(0, 0);
    clear(total);
#pragma unroll 1
    for (int v = 0; v < p.group; ++v) {
      row_pipe.wait_full(cursor.row);
      if (!writes) build_tile(reads, tile, tile_full, tile_empty, cursor);
      float x[64];
      barrier_wait(snapshot_full, cursor.head.phase);
      mma_fence();
      multiply_state(x, row_tile(cursor, rows_of_role), snapshot);
      const float2 factor = row_factors(role, cursor);
      const float2 pending = reads ? pending_betas(cursor) : make_float2(1, 1);
      norm = make_float2(of_row(cursor, queries ? kScoreScale : kKeyNorm, 0),
                         of_row(cursor, queries ? kScoreScale : kKeyNorm, 1));
      sum_pipe.wait_empty(cursor.row);
      mma_wait<0>();
      warp_arrive(snapshot_empty);
      scale_rows(x, factor.x, factor.y);
      key_pipe.wait_full(cursor.unit_part);
      // writes takes two dot products: of delta o (U G^T) alone (kappa), and of all of dK^written.
#pragma unroll 1
      for (int stage = writes ? 0 : 1; stage < 2; ++stage) {
        if (stage == 1) {
          barrier_wait(tile_full, cursor.head.phase);
          if (writes) {
            f_tile_pipe.wait_full(cursor.head);
            mma_fence();
            add_products<true>(x, smem + Smem::kF, smem + Smem::kQueries);
            add_products<true>(x, smem + Smem::kE, smem + Smem::kKeys);
            mma_wait<0>();
          } else {
            mma_fence();
            add_products<false>(x, tile, smem + Smem::kKeys);
            mma_wait<0>();
          }
          if (!writes) {
            warp_arrive(tile_empty);
          } else if (v < p.group - 1) {
            release_tiles();
          }
        }
        store_sums(sum(cursor, stage == 0 ? Smem::kKappa : sum_of_role), dots(x, dotted));
      }
      if (!reads) add_diagonal(own, cursor);
      publish_head(cursor);
      add(total, x, pending);
    }
    if (!reads) add_rows(total, own, smem + (queries ? Smem::kKeys : Smem::kQueries));
    named_barrier_sync_divergent(kUnitDone, 3 * 128);
    if (reads) {
      hand_over(total);
    } else {
      if (writes) {
        take_over(total);
        release_tiles();
      }
      // kScoreScale is s r^q; divide by s to get r^q. With s = 0 dQ is 0 anyway.
      if (queries) norm = p.scale == 0 ? make_float2(0, 0) : make_float2(norm.x / p.scale, norm.y / p.scale);
      store_rows(total, dotted, norm, queries ? &p.dq_map : &p.dk_map, queries ? p.dq : p.dk,
                 queries ? kQueriesStaged : kKeysStaged, cursor);
    }
    end_unit(cursor);
  }
}

// Builds F, or both versions of E: with rows as they arrive (for reads), and with the missing beta (for writes).
template <class Elem>
GD_DEVICE void Gradients<Elem>::build_tile(bool reads, uint32_t tile, uint32_t full, uint32_t empty,
                                           const Cursor& cursor) const {
  float x[32];
  mma_fence();
  multiply_rows(x, row_tile(cursor, reads ? Smem::kValues : Smem::kOutputs), row_tile(cursor, Smem::kUpdates));
  const auto scales = reads ? kKeyNorm : kScoreScale;
  const float sign = reads ? -1.0f : 1.0f;
  const float2 scale = make_float2(sign * of_row(cursor, scales, 0), sign * of_row(cursor, scales, 1));
  sum_pipe.wait_empty(cursor.row);
  mma_wait<0>();
  store_diagonal(x, sum(cursor, reads ? Smem::kUpdateDot : Smem::kOutputDot));
  gate(x, cursor);
  barrier_wait(empty, cursor.head.phase ^ 1);
  store_tile(tile, x, scale.x, scale.y);
  if (reads) {
    const float2 pending = pending_betas(cursor);
    store_tile(smem + Smem::kE, x, scale.x * pending.x, scale.y * pending.y);
  }
  fence_async_shared();
  warp_arrive(full);
}

// Row scales of the product with a state: s gamma, -gamma or delta.
template <class Elem>
GD_DEVICE float2 Gradients<Elem>::row_factors(GradientWarpgroup role, const Cursor& cursor) const {
  if (role == GradientWarpgroup::kQueries)
    return make_float2(of_row(cursor, kReadQuery, 0), of_row(cursor, kReadQuery, 1));
  if (role == GradientWarpgroup::kReads) return make_float2(-of_row(cursor, kReadKey, 0), -of_row(cursor, kReadKey, 1));
  const float end = load_shared(vector(cursor, kLogGamma) + (kChunkTokens - 1) * 4);
  return make_float2(of_row(cursor, kKeyNorm, 0) * exp2_approx(end - of_row(cursor, kLogGamma, 0)),
                     of_row(cursor, kKeyNorm, 1) * exp2_approx(end - of_row(cursor, kLogGamma, 1)));
}

template <class Elem>
GD_DEVICE float2 Gradients<Elem>::pending_betas(const Cursor& cursor) const {
  return make_float2(pending_beta(of_row(cursor, kBeta, 0)), pending_beta(of_row(cursor, kBeta, 1)));
}

// Adds this head's diagonal terms f.
template <class Elem>
GD_DEVICE void Gradients<Elem>::add_diagonal(float2& own, const Cursor& cursor) const {
  const auto of = [&](int i) {
    return load_shared(sum(cursor, Smem::kOutputDot) + row(i) * 4) * of_row(cursor, kScoreScale, i) *
           of_row(cursor, kKeyNorm, i);
  };
  own.x += of(0);
  own.y += of(1);
}

// Stores the diagonal of the product: <dV_i, U_i> or <dO_i, U_i>.
template <class Elem>
GD_DEVICE void Gradients<Elem>::store_diagonal(const float (&e)[32], uint32_t to) const {
  const int g = lane >> 2;
  if ((lane & 3) != g / 2) return;
  with_warp(warp, [&](auto w) {
    const float* own = e + 8 * decltype(w)::value;
    store_shared(to + row(0) * 4, g % 2 ? own[1] : own[0]);
    store_shared(to + row(1) * 4, g % 2 ? own[7] : own[6]);
  });
}

// Passes the sum through the F and E tiles, 32 floats per thread at a time. The tiles are free until the next unit.
template <class Elem>
GD_DEVICE void Gradients<Elem>::hand_over(const float (&x)[64]) const {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1) named_barrier_sync_divergent(kHandOver, 2 * 128);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* y = x + 32 * half + 4 * i;
      store_shared4(smem + Smem::kF + (i * 128 + tid) * 16, y[0], y[1], y[2], y[3]);
    }
    named_barrier_sync_divergent(kHandOver, 2 * 128);
  }
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::take_over(float (&x)[64]) const {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    named_barrier_sync_divergent(kHandOver, 2 * 128);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 y = load_shared4(smem + Smem::kF + (i * 128 + tid) * 16);
      float* to = x + 32 * half + 4 * i;
      to[0] += y.x;
      to[1] += y.y;
      to[2] += y.z;
      to[3] += y.w;
    }
    if (half == 0) named_barrier_sync_divergent(kHandOver, 2 * 128);
  }
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::release_tiles() const {
  __syncwarp();
  if (is_arriving()) {
    barrier_arrive(f_tile_pipe.empty(0));
    barrier_arrive(e_tile_pipe.empty(0));
  }
}

}  // namespace gatedelta::cuda::sm90
