// The gradients of a chunk, given the state S before it, U (what it writes) and the gradient G of the state after it. A
// unit of work is a chunk of a key head: the value heads of the group follow one another, so that dQ and dK add up in
// registers, in a fixed order. Per value head (docs/math.md), with row norms r^q, r^k that are 1 without l2norm and
// scale all rows of dQ and dK:
//   F = s Gamma o stril(dO U^T)                      E = -Gamma o stril(dV U^T)        f_i = s <dO_i, U_i>
//   dQ = s gamma o (dO S^T) + F K + f o K            dK^read = -gamma o (dV S^T) + E K
//   dK^written = delta o (U G^T) + F^T Q + E^T K + f o Q
//   dg_t = gamma_L <G, S> + sum_{j<t} kappa_j + sum_{i>=t} rho_i
//   kappa_i = k_i . delta_i (U G^T)_i
//   rho_i = q_i . (dQ - f o K)_i + k_i . dK^read_i - (k_i . (dK^written - f o Q)_i - kappa_i)
//   dbeta_i = <dV_i, U_i> / beta_i^2, or <Z_i, v_i> + k_i . dK^read_i / beta_i where beta is small
// The diagonal terms f are excluded from dg: they cancel only up to rounding, and under strong gates dg is smaller than
// that. The gradient chain stores dV = beta o Z, but Z itself in rows with a small beta (stores_unscaled): the gradient
// of beta needs it where beta = 0. Roles:
//   queries   F, dQ
//   reads     E, dK^read
//   writes    dK^written, and at the end the sum of both parts of dK
//   aux       loads (one warp), <G, S> (two warps), dg and dbeta (one warp)
// The first three share one code (rows.cuh): three copies would not fit the instruction cache. Members are defined by
// role: loads, products, rows, gates, store (.cuh); kernel.cuh runs them.
#pragma once

#include "cuda/sm90/backward/gradients/config.hpp"
#include "cuda/sm90/device.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem>
struct Gradients {
  using Smem = GradientSmem;

  // A chunk of a key head; a negative chunk index ends the loop.
  struct Unit {
    int chunk_index, key_head, batch, token, tokens;
  };
  // Position of a role. Rows and sums have two stages; everything else has one.
  struct Cursor {
    PipelineState<Smem::kRowStages> row;
    PipelineState<1> head, unit_part;
    PipelineState<Smem::kUnitStages> unit;
    GD_DEVICE void next_head() {
      row.advance();
      head.advance();
    }
    GD_DEVICE void next_unit() {
      unit.advance();
      unit_part.advance();
    }
  };
  using UnitPipe = Pipeline<Smem::kUnitStages, Smem::kBarriers>;
  using RowPipe = Pipeline<Smem::kRowStages, UnitPipe::kEnd>;
  using SumPipe = Pipeline<Smem::kRowStages, RowPipe::kEnd>;
  using StatePipe = Pipeline<1, SumPipe::kEnd>;
  using GradPipe = Pipeline<1, StatePipe::kEnd>;
  using KeyPipe = Pipeline<1, GradPipe::kEnd>;
  using FTilePipe = Pipeline<1, KeyPipe::kEnd>;
  using ETilePipe = Pipeline<1, FTilePipe::kEnd>;
  static_assert(ETilePipe::kEnd == Smem::kBytes);

  const BackwardParams& p;
  const uint32_t smem;
  const int tid, warp, lane;  // within the warpgroup
  const UnitPipe unit_pipe;
  const RowPipe row_pipe;
  const SumPipe sum_pipe;
  const StatePipe state_pipe;
  const GradPipe grad_pipe;
  const KeyPipe key_pipe;  // and queries
  const FTilePipe f_tile_pipe;
  const ETilePipe e_tile_pipe;

  GD_DEVICE Gradients(const BackwardParams& params, uint32_t base)
      : p(params),
        smem(base),
        tid(threadIdx.x & 127),
        warp(__shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0)),
        lane(threadIdx.x & 31),
        unit_pipe{base},
        row_pipe{base},
        sum_pipe{base},
        state_pipe{base},
        grad_pipe{base},
        key_pipe{base},
        f_tile_pipe{base},
        e_tile_pipe{base} {}

  GD_DEVICE void init_barriers() const {
    // A loading warp arrives with every lane; all other warps arrive once.
    constexpr int kWarp = kArrivals, kRole = 4 * kWarp, kSummers = 2 * kWarp;
    unit_pipe.init(1, 3 * kRole + kSummers + kWarp);
    row_pipe.init(32, 3 * kRole + kWarp);
    sum_pipe.init(3 * kRole + kSummers, kWarp);
    state_pipe.init(1, 2 * kRole + kSummers);
    grad_pipe.init(1, kRole + kSummers);
    key_pipe.init(32, 2);
    f_tile_pipe.init(kRole, 2 * kRole);
    e_tile_pipe.init(kRole, 2 * kRole);
    barrier_init_fence();
  }

  GD_DEVICE uint32_t row_tile(const Cursor& cursor, typename Smem::Row row) const {
    return smem + Smem::kRows + (cursor.row.stage * Smem::kRowCount + row) * 2 * kTileBytes;
  }
  GD_DEVICE uint32_t vector(const Cursor& cursor, ChunkVector v) const {
    return smem + Smem::kVectors + cursor.row.stage * kVectorsBytes + v * kVectorBytes;
  }
  GD_DEVICE uint32_t sum(const Cursor& cursor, typename Smem::Sum s) const {
    return smem + Smem::kSums + (cursor.row.stage * Smem::kSumCount + s) * kVectorBytes;
  }
  // This thread's rows of an accumulator of 64 rows.
  GD_DEVICE int row(int i) const { return 16 * warp + (lane >> 2) + 8 * i; }
  GD_DEVICE float of_row(const Cursor& cursor, ChunkVector v, int i) const {
    return load_shared(vector(cursor, v) + row(i) * 4);
  }

  // ---- units -------------------------------------------------------------------------------------------------------

  GD_DEVICE uint32_t unit_at(const Cursor& cursor) const;
  GD_DEVICE Unit unit(const Cursor& cursor) const;
  GD_DEVICE bool begin_unit(const Cursor& cursor) const;
  GD_DEVICE void end_unit(Cursor& cursor) const;

  // ---- loads, by one warp ------------------------------------------------------------------------------------------

  GD_DEVICE void run_loads() const;
  GD_DEVICE Unit find_unit(int i) const;
  GD_DEVICE void publish(const Unit& unit, const Cursor& cursor) const;
  GD_DEVICE void load_ragged_chunk(uint32_t tiles, const TokenRows& from, const Unit& unit, int head) const;
  GD_DEVICE void load_rows(uint32_t tiles, const CUtensorMap* map, const Unit& unit, int head, uint32_t full) const;
  GD_DEVICE void load_head(const Unit& unit, int head, const Cursor& cursor) const;
  template <class OneSlot>
  GD_DEVICE void load_snapshot(const OneSlot& barriers, uint32_t to, const uint8_t* from, const Cursor& cursor) const;
  GD_DEVICE void load_keys_queries(const Unit& unit, const Cursor& cursor) const;

  // ---- products ----------------------------------------------------------------------------------------------------

  GD_DEVICE static void multiply_rows(float (&to)[32], uint32_t a, uint32_t b);
  GD_DEVICE static void multiply_state(float (&to)[64], uint32_t a, uint32_t state);
  template <bool kTransposed>
  GD_DEVICE static void add_products(float (&to)[64], uint32_t a, uint32_t b);
  GD_DEVICE static void scale_rows(float (&x)[64], float first, float second);
  template <class F>
  GD_DEVICE void for_rows(uint32_t tiles, const F& f) const;
  GD_DEVICE void add_rows(float (&x)[64], float2 factor, uint32_t tiles) const;
  GD_DEVICE float2 dots(const float (&x)[64], uint32_t tiles) const;
  GD_DEVICE void store_sums(uint32_t to, float2 x) const;
  GD_DEVICE void gate(float (&x)[32], const Cursor& cursor) const;
  GD_DEVICE void store_tile(uint32_t tile, const float (&x)[32], float first, float second) const;
  GD_DEVICE static void clear(float (&x)[64]);
  GD_DEVICE static void add(float (&x)[64], const float (&y)[64], float2 factor);
  GD_DEVICE void publish_head(Cursor& cursor) const;

  // ---- rows: F, E, dQ, dK ------------------------------------------------------------------------------------------

  // Three warpgroups run one code: three codes exceed the instruction cache.

  GD_DEVICE void run_rows(GradientWarpgroup role) const;

  GD_DEVICE void build_tile(bool reads, uint32_t tile, uint32_t full, uint32_t empty, const Cursor& cursor) const;
  GD_DEVICE float2 row_factors(GradientWarpgroup role, const Cursor& cursor) const;
  // The factor beta that unscaled rows still need; 1 for the others.
  GD_DEVICE static float pending_beta(float beta) { return stores_unscaled(beta) ? beta : 1.0f; }
  GD_DEVICE float2 pending_betas(const Cursor& cursor) const;
  GD_DEVICE void add_diagonal(float2& own, const Cursor& cursor) const;
  GD_DEVICE void store_diagonal(const float (&e)[32], uint32_t to) const;
  GD_DEVICE void hand_over(const float (&x)[64]) const;
  GD_DEVICE void take_over(float (&x)[64]) const;

  GD_DEVICE void release_tiles() const;

  // ---- dQ and dK to memory -----------------------------------------------------------------------------------------

  GD_DEVICE void store_rows(float (&x)[64], uint32_t tiles, float2 norm, const CUtensorMap* map, const TokenRows& to,
                            GradientBarrier barrier, const Cursor& cursor) const;

  // ---- <G, S>, by two warps ----------------------------------------------------------------------------------------

  GD_DEVICE void run_inner_products(int half) const;
  GD_DEVICE uint32_t product_at(const Cursor& cursor, int half) const;

  // ---- dg and dbeta, by one warp, two tokens a lane ----------------------------------------------------------------

  GD_DEVICE void run_gates() const;
  GD_DEVICE void store_gate_gradients(const Unit& unit, int head, const Cursor& cursor) const;
  GD_DEVICE float2 finish_unscaled_rows(const Unit& unit, int head, float2 beta, const Cursor& cursor) const;

  // ---- tokens of no sequence ---------------------------------------------------------------------------------------

  GD_DEVICE void zero_unused_tokens() const;
};

}  // namespace gatedelta::cuda::sm90
