// The gradients of a chunk, once the states before it, what it writes to them and the gradients of the states after it
// are known. A unit of work is a chunk and a key head: the value heads of the group come one after the other, so that
// dQ and dK add up in registers, in a fixed order. Per value head, S the state before the chunk, U what the chunk
// writes and G the gradient of the state after it (docs/math.md); r^q, r^k are 1 unless keys are normalised, and all
// rows of dQ and dK come scaled by them, which is half of the way back through the norm:
//   F = s Gamma o stril(dO U^T)                      E = -Gamma o stril(dV U^T)        f_i = s <dO_i, U_i>
//   dQ = s gamma o (dO S^T) + F K + f o K            dK^read = -gamma o (dV S^T) + E K
//   dK^written = delta o (U G^T) + F^T Q + E^T K + f o Q
//   dg_t = gamma_L <G, S> + sum_{j<t} kappa_j + sum_{i>=t} rho_i
//   kappa_i = k_i . delta_i (U G^T)_i
//   rho_i = q_i . (dQ - f o K)_i + k_i . dK^read_i - (k_i . (dK^written - f o Q)_i - kappa_i)
//   dbeta_i = <dV_i, U_i> / beta_i^2, or <Z_i, v_i> + k_i . dK^read_i / beta_i where beta is small
// What a token has with itself, f, has no part in dg: it would cancel, but only up to rounding, and under strong gates
// dg is smaller than that.
// The chain leaves dV = beta o Z, but Z itself in rows whose beta is small (stores_plain): with beta = 0 there still is
// a gradient of beta. Warpgroups and their roles:
//   queries   F, dQ
//   reads     E, dK^read
//   writes    dK^written; at the end both parts of dK: these three have one code
//   rest      one warp asks the copy engine for what comes next, two form <G, S>, one dg and dbeta
#pragma once

#include "cuda/backward/params.hpp"
#include "cuda/barriers.cuh"
#include "cuda/forward/prepare.cuh"

namespace gatedelta::cuda {

constexpr int kGradientThreads = 512;

struct GradientRegisters {
  static constexpr int kLaunch = 128, kProducts = 152, kAux = 56;
  static_assert(3 * kProducts + kAux <= 4 * kLaunch);
};

struct GradientSmem {
  // Tiles [64 tokens][64], two side by side, unless it says otherwise.
  static constexpr int kQueries = 0;
  static constexpr int kKeys = kQueries + 2 * kTileBytes;
  enum Row { kUpdates, kOutputs, kValues, kRowCount };  // U, dO, dV
  static constexpr int kRowStages = 2;
  static constexpr int kRows = kKeys + 2 * kTileBytes;
  static constexpr int kStates = kRows + kRowStages * kRowCount * 2 * kTileBytes;  // S^T, see tiles.hpp
  static constexpr int kGradients = kStates + kStateTileBytes;                     // G^T likewise
  static constexpr int kF = kGradients + kStateTileBytes;                          // one tile
  static constexpr int kE = kF + kTileBytes;                                       // one tile
  static constexpr int kUnscaledE = kE + kTileBytes;                               // likewise, of rows as they come
  static constexpr int kVectors = kUnscaledE + kTileBytes;                         // [kRowSlots]
  enum Sum { kQueryDot, kReadDot, kWriteDot, kKappa, kUpdateDot, kOutputDot, kSumCount };
  static constexpr int kSums = kVectors + kRowStages * kVectorsBytes;              // [kRowSlots], by row
  static constexpr int kProducts = kSums + kRowStages * kSumCount * kVectorBytes;  // [kRowSlots] of <G, S> by warp
  static constexpr int kUnitStages = 2;
  static constexpr int kUnits = kProducts + kRowStages * 2 * 4;
  static constexpr int kUnitBytes = 32;
  static constexpr int kBarriers = kUnits + kUnitStages * kUnitBytes;
  static constexpr int kBytes = kBarriers + 2 * 8 * (kUnitStages + 2 * kRowStages + 5);
  static constexpr int kAllocated = kBytes + kTileAlign;
};
static_assert(GradientSmem::kAllocated <= kMaxSharedBytes);

GD_DEVICE void store_number(void* data, int dtype, int64_t i, float x) {
  if (dtype == GD_F32) {
    static_cast<float*>(data)[i] = x;
  } else if (dtype == GD_BF16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
  } else {
    static_cast<__half*>(data)[i] = __float2half_rn(x);
  }
}

template <class Elem>
struct Gradients {
  using Smem = GradientSmem;

  // A chunk of a key head; slot < 0: there are no more.
  struct Unit {
    int chunk_index, key_head, batch, token, tokens;
  };
  // Where a role is: heads go through the slots of rows, everything else has one.
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
  enum NamedBarrier { kUnitDone = 1, kHandOver, kQueriesStaged, kKeysStaged };

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
    // Rows are reported by every lane that loads them; of those who wait or read every warp reports.
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

  GD_DEVICE uint32_t unit_at(const Cursor& cursor) const {
    return smem + Smem::kUnits + cursor.unit.stage * Smem::kUnitBytes;
  }
  GD_DEVICE Unit unit(const Cursor& cursor) const {
    const uint4 x = load_shared_words(unit_at(cursor));
    return {static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z), static_cast<int>(x.w),
            static_cast<int>(load_shared_word(unit_at(cursor) + 16))};
  }
  // Whether there is one more. Its slot stays as it is until end_unit.
  GD_DEVICE bool begin_unit(const Cursor& cursor) const {
    unit_pipe.wait_full(cursor.unit);
    return __shfl_sync(~0u, static_cast<int>(load_shared_word(unit_at(cursor))), 0) >= 0;
  }
  GD_DEVICE void end_unit(Cursor& cursor) const {
    warp_arrive(unit_pipe.empty(cursor.unit.stage));
    cursor.next_unit();
  }

  // ---- loads, by one warp ------------------------------------------------------------------------------------------

  GD_DEVICE void run_loads() const {
    Cursor cursor;
    const int end =
        min(p.slice.end + p.recompute_chunks - 1, static_cast<int>(p.sequences.workspace_chunks())) * p.key_heads;
#pragma unroll 1
    for (int i = p.slice.begin * p.key_heads + static_cast<int>(blockIdx.x); i < end; i += gridDim.x) {
      const Unit unit = find_unit(i);
      if (unit.tokens <= 0) continue;
      publish(unit, cursor);
#pragma unroll 1
      for (int v = 0; v < p.group; ++v) {
        load_head(unit, unit.key_head * p.group + v, cursor);
        if (v == 0) load_keys_queries(unit, cursor);
        cursor.next_head();
      }
      cursor.next_unit();
    }
    publish({-1, 0, 0, 0, 0}, cursor);
  }
  GD_DEVICE Unit find_unit(int i) const {
    const int chunk_index = static_cast<int>(static_cast<uint32_t>(i) / static_cast<uint32_t>(p.key_heads));
    const int key_head = i - chunk_index * p.key_heads;
    const ChunkPlace at = locate_chunk(p.sequences, chunk_index, lane);
    int rows = at.sequence < p.sequences.count ? at.rows : 0;
    if (rows <= 0 && p.head_sums)
      for (int v = lane; v < p.group; v += 32)
        p.head_sums[int64_t{chunk_index} * p.value_heads + key_head * p.group + v] = make_float2(0, 0);
    const int piece = chunk_index - at.chunk % p.recompute_chunks;
    if (piece < p.slice.begin || piece >= p.slice.end) rows = 0;
    return {chunk_index, key_head, at.batch, at.token, rows};
  }
  GD_DEVICE void publish(const Unit& unit, const Cursor& cursor) const {
    unit_pipe.wait_empty(cursor.unit);
    if (elect_one()) {
      store_shared_words(unit_at(cursor), make_uint4(unit.chunk_index, unit.key_head, unit.batch, unit.token));
      store_shared(unit_at(cursor) + 16, __int_as_float(unit.tokens));
      barrier_arrive(unit_pipe.full(cursor.unit.stage));
    }
    __syncwarp();
  }
  // The first rows of a chunk that is not whole; the copy engine would fetch what lies behind them.
  GD_DEVICE void load_ragged_rows(uint32_t tiles, const Rows& from, const Unit& unit, int head) const {
    constexpr int kPacketsPerRow = kHeadDim * 2 / 16;
    const auto* data = static_cast<const uint16_t*>(from.data) + from.offset(unit.batch, unit.token, head);
#pragma unroll 1
    for (int i = lane; i < kChunkTokens * kPacketsPerRow; i += 32) {
      const int r = i / kPacketsPerRow, piece = i % kPacketsPerRow;
      const bool valid = r < unit.tokens;
      copy_async16(tiles + piece / 8 * kTileBytes + tile_offset(r, piece % 8 * 8),
                   data + (valid ? r * from.token_stride : 0) + piece * 8, valid);
    }
  }
  GD_DEVICE void load_rows(uint32_t tiles, const CUtensorMap* map, const Unit& unit, int head, uint32_t full) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      tma_load(tiles + half * kTileBytes, map, full, head, unit.token, unit.batch, half);
  }
  // All lanes but the one that will say that the rest is on its way.
  GD_DEVICE static void arrive_after_copies(uint32_t full) {
    copy_async_wait();
    fence_async_shared();
    if (!elect_one()) barrier_arrive(full);
    __syncwarp();
  }
  GD_DEVICE void load_head(const Unit& unit, int head, const Cursor& cursor) const {
    const uint32_t full = row_pipe.full(cursor.row.stage);
    const bool whole = unit.tokens == kChunkTokens;
    row_pipe.wait_empty(cursor.row);
    if (!whole) {
      load_ragged_rows(row_tile(cursor, Smem::kUpdates), p.u, unit, head);
      load_ragged_rows(row_tile(cursor, Smem::kOutputs), p.d_o, unit, head);
      load_ragged_rows(row_tile(cursor, Smem::kValues), p.dv, unit, head);
      arrive_after_copies(full);
    }
    const int64_t number = int64_t{unit.chunk_index} * p.value_heads + head;
    if (elect_one()) {
      barrier_arrive_expect(full, kVectorsBytes + (whole ? Smem::kRowCount * 2 * kTileBytes : 0));
      bulk_load(vector(cursor, kLogGamma), p.prepared + number * kBackwardPreparedBytes + kInverseBytes, kVectorsBytes,
                full);
      if (whole) {
        barrier_arrive(full, 31);
        load_rows(row_tile(cursor, Smem::kUpdates), &p.u_map, unit, head, full);
        load_rows(row_tile(cursor, Smem::kOutputs), &p.d_o_map, unit, head, full);
        load_rows(row_tile(cursor, Smem::kValues), &p.dv_map, unit, head, full);
      }
    }
    __syncwarp();
    load_snapshot(grad_pipe, smem + Smem::kGradients, p.gradients + number * kStateTileBytes, cursor);
    load_snapshot(state_pipe, smem + Smem::kStates, p.states + number * kStateTileBytes, cursor);
  }
  template <class OneSlot>
  GD_DEVICE void load_snapshot(const OneSlot& barriers, uint32_t to, const uint8_t* from, const Cursor& cursor) const {
    barriers.wait_empty(cursor.head);
    if (elect_one()) {
      barrier_arrive_expect(barriers.full(0), kStateTileBytes);
      bulk_load(to, from, kStateTileBytes, barriers.full(0));
    }
    __syncwarp();
  }
  GD_DEVICE void load_keys_queries(const Unit& unit, const Cursor& cursor) const {
    const uint32_t full = key_pipe.full(0);
    const bool whole = unit.tokens == kChunkTokens;
    key_pipe.wait_empty(cursor.unit_part);
    if (!whole) {
      load_ragged_rows(smem + Smem::kQueries, p.q, unit, unit.key_head);
      load_ragged_rows(smem + Smem::kKeys, p.k, unit, unit.key_head);
      arrive_after_copies(full);
    }
    if (elect_one()) {
      barrier_arrive_expect(full, whole ? 4 * kTileBytes : 0);
      if (whole) {
        barrier_arrive(full, 31);
        load_rows(smem + Smem::kQueries, &p.q_map, unit, unit.key_head, full);
        load_rows(smem + Smem::kKeys, &p.k_map, unit, unit.key_head, full);
      }
    }
    __syncwarp();
  }

  // ---- products ----------------------------------------------------------------------------------------------------

  // a [64 x 128] (tiles side by side) times b^T, b alike: 64 x 64.
  GD_DEVICE static void multiply_rows(float (&to)[32], uint32_t a, uint32_t b) {
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Wgmma<Elem, 64>::template ss<false, false>(
          to, tile_descriptor(a + step / 4 * kTileBytes, step % 4 * kStepContiguous),
          tile_descriptor(b + step / 4 * kTileBytes, step % 4 * kStepContiguous), step > 0);
    mma_commit();
  }
  // a [64 tokens x 128 v] times a state's transpose.
  GD_DEVICE static void multiply_state(float (&to)[64], uint32_t a, uint32_t state) {
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Wgmma<Elem, 128>::template ss<false, true>(to,
                                                 tile_descriptor(a + step / 4 * kTileBytes, step % 4 * kStepContiguous),
                                                 state_descriptor(state + step * kStateStepBytes), step > 0);
    mma_commit();
  }
  // Adds a [64 x 64], or its transpose, times rows [64 tokens x 128].
  template <bool kTransposed>
  GD_DEVICE static void add_products(float (&to)[64], uint32_t a, uint32_t b) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma<Elem, 128>::template ss<kTransposed, true>(
          to, tile_descriptor(a, step * (kTransposed ? kStepRows : kStepContiguous)),
          wide_descriptor(b, step * kStepRows), true);
    mma_commit();
  }
  GD_DEVICE static void scale_rows(float (&x)[64], float first, float second) {
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] *= i / 2 % 2 ? second : first;
  }
  // Calls f with the place of two numbers of an accumulator and what is there in tiles.
  template <class F>
  GD_DEVICE void for_rows(uint32_t tiles, const F& f) const {
    uint32_t at = tiles + tile_offset(16 * warp + block_row(lane), block_column(lane));
    asm volatile("" : "+r"(at));  // what is made of it is not kept in registers from one call to the next
#pragma unroll
    for (int J = 0; J < 8; ++J) {
      uint32_t y[4];
      ldmatrix(y, (at + J / 4 * kTileBytes) ^ (J % 4 * 32));
#pragma unroll
      for (int i = 0; i < 4; ++i) f(8 * J + 2 * i, unpack<Elem>(y[i]));
    }
  }
  // x += factor o y, y in tiles.
  GD_DEVICE void add_rows(float (&x)[64], float2 factor, uint32_t tiles) const {
    for_rows(tiles, [&](int i, float2 y) {
      const float of_row = i / 2 % 2 ? factor.y : factor.x;
      x[i] += of_row * y.x;
      x[i + 1] += of_row * y.y;
    });
  }
  // <x_i, y_i> of this thread's rows, y in tiles; every thread of a row has it.
  GD_DEVICE float2 dots(const float (&x)[64], uint32_t tiles) const {
    float2 d = make_float2(0, 0);
    for_rows(tiles, [&](int i, float2 y) { (i / 2 % 2 ? d.y : d.x) += x[i] * y.x + x[i + 1] * y.y; });
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      d.x += __shfl_xor_sync(~0u, d.x, step);
      d.y += __shfl_xor_sync(~0u, d.y, step);
    }
    return d;
  }
  GD_DEVICE void store_sums(uint32_t to, float2 x) const {
    if ((lane & 3) != 0) return;
    store_shared(to + row(0) * 4, x.x);
    store_shared(to + row(1) * 4, x.y);
  }
  // Gamma_ij r^k_j times x, all but what is below the diagonal left out by selection.
  GD_DEVICE void gate(float (&x)[32], const Cursor& cursor) const {
    const uint32_t log_gamma = vector(cursor, kLogGamma), norms = vector(cursor, kKeyNorm);
    const float b[2] = {of_row(cursor, kLogGamma, 0), of_row(cursor, kLogGamma, 1)};
    const int rows[2] = {row(0), row(1)};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int column = 8 * n + 2 * (lane & 3);
      const float2 c = load_shared2(log_gamma + column * 4), r = load_shared2(norms + column * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* y = x + 4 * n + 2 * i;
        y[0] = column < rows[i] ? y[0] * r.x * exp2_approx(b[i] - c.x) : 0.0f;
        y[1] = column + 1 < rows[i] ? y[1] * r.y * exp2_approx(b[i] - c.y) : 0.0f;
      }
    }
  }
  GD_DEVICE void store_tile(uint32_t tile, const float (&x)[32], float first, float second) const {
    const uint32_t to = tile + tile_offset(16 * warp + block_row(lane), block_column(lane));
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      const float* c = x + 8 * J;
      stmatrix(to ^ (J * 32), pack<Elem>(first * c[0], first * c[1]), pack<Elem>(second * c[2], second * c[3]),
               pack<Elem>(first * c[4], first * c[5]), pack<Elem>(second * c[6], second * c[7]));
    }
  }
  GD_DEVICE static void clear(float (&x)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] = 0;
  }
  GD_DEVICE static void add(float (&x)[64], const float (&y)[64], float2 factor) {
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] += y[i] * (i / 2 % 2 ? factor.y : factor.x);
  }
  GD_DEVICE void publish_head(Cursor& cursor) const {
    warp_arrive(sum_pipe.full(cursor.row.stage));
    warp_arrive(row_pipe.empty(cursor.row.stage));
    cursor.next_head();
  }

  // ---- rows: F, E, dQ, dK ------------------------------------------------------------------------------------------

  // Three warpgroups, one code: three of them would not fit the cache of instructions.
  enum Role { kQueries, kReads, kWrites };

  GD_DEVICE void run_rows(int role) const {
    const bool queries = role == kQueries, reads = role == kReads, writes = role == kWrites;
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
        // Of what is written, both what the state's gradient says and all of it.
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
        // Back to r^q; of a scale of 0 nothing comes in any case.
        if (queries) norm = p.scale == 0 ? make_float2(0, 0) : make_float2(norm.x / p.scale, norm.y / p.scale);
        store_rows(total, dotted, norm, queries ? &p.dq_map : &p.dk_map, queries ? p.dq : p.dk,
                   queries ? kQueriesStaged : kKeysStaged, cursor);
      }
      end_unit(cursor);
    }
  }

  // F, or E: as its rows come, for reads, and with all of beta, for writes.
  GD_DEVICE void build_tile(bool reads, uint32_t tile, uint32_t full, uint32_t empty, const Cursor& cursor) const {
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
  // What a row of the product with a state is scaled by: s gamma, -gamma, delta.
  GD_DEVICE float2 row_factors(int role, const Cursor& cursor) const {
    if (role == kQueries) return make_float2(of_row(cursor, kReadQuery, 0), of_row(cursor, kReadQuery, 1));
    if (role == kReads) return make_float2(-of_row(cursor, kReadKey, 0), -of_row(cursor, kReadKey, 1));
    const float end = load_shared(vector(cursor, kLogGamma) + (kChunkTokens - 1) * 4);
    return make_float2(of_row(cursor, kKeyNorm, 0) * exp2_approx(end - of_row(cursor, kLogGamma, 0)),
                       of_row(cursor, kKeyNorm, 1) * exp2_approx(end - of_row(cursor, kLogGamma, 1)));
  }
  // What is missing of beta in rows that come without it.
  GD_DEVICE static float pending_beta(float beta) { return stores_unscaled(beta) ? beta : 1.0f; }
  GD_DEVICE float2 pending_betas(const Cursor& cursor) const {
    return make_float2(pending_beta(of_row(cursor, kBeta, 0)), pending_beta(of_row(cursor, kBeta, 1)));
  }
  // What tokens have with themselves: f, which adds up over heads.
  GD_DEVICE void add_diagonal(float2& own, const Cursor& cursor) const {
    const auto of = [&](int i) {
      return load_shared(sum(cursor, Smem::kOutputDot) + row(i) * 4) * of_row(cursor, kScoreScale, i) *
             of_row(cursor, kKeyNorm, i);
    };
    own.x += of(0);
    own.y += of(1);
  }
  // <dV_i, U_i> or <dO_i, U_i>, as the products have it.
  GD_DEVICE void store_diagonal(const float (&e)[32], uint32_t to) const {
    const int g = lane >> 2;
    if ((lane & 3) != g / 2) return;
    with_warp(warp, [&](auto w) {
      const float* own = e + 8 * decltype(w)::value;
      store_shared(to + row(0) * 4, g % 2 ? own[1] : own[0]);
      store_shared(to + row(1) * 4, g % 2 ? own[7] : own[6]);
    });
  }
  // One half after the other through the tiles of F and E, which are free until the next unit.
  GD_DEVICE void hand_over(const float (&x)[64]) const {
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
  GD_DEVICE void take_over(float (&x)[64]) const {
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

  GD_DEVICE void release_tiles() const {
    __syncwarp();
    if (is_arriving()) {
      barrier_arrive(f_tile_pipe.empty(0));
      barrier_arrive(e_tile_pipe.empty(0));
    }
  }

  // ---- dQ and dK to memory -----------------------------------------------------------------------------------------

  // Through the norm, if there is one: dx = r (dy - y <y, dy>), y = r x; r dy is what comes. By way of the tiles of Q
  // or K, which nobody needs any more.
  GD_DEVICE void store_rows(float (&x)[64], uint32_t tiles, float2 norm, const CUtensorMap* map, const Rows& to,
                            NamedBarrier barrier, const Cursor& cursor) const {
    int lane = this->lane;
    asm volatile("" : "+r"(lane));  // addresses are found here, and not kept in registers through all heads
    if (p.l2norm) {
      const float2 d = dots(x, tiles);
      const float a = norm.x * norm.x * d.x, b = norm.y * norm.y * d.y;
#pragma unroll
      for (int i = 0; i < 64; i += 2) {
        const Place place = accumulator_place(lane, i % 32);
        const float2 y = unpack<Elem>(
            load_shared_word(tiles + i / 32 * kTileBytes + tile_offset(16 * warp + place.row, place.column)));
        const float factor = i / 2 % 2 ? b : a;
        x[i] -= factor * y.x;
        x[i + 1] -= factor * y.y;
      }
      __syncwarp();
    }
    const uint32_t own = tiles + tile_offset(16 * warp + block_row(lane), block_column(lane));
#pragma unroll
    for (int J = 0; J < 8; ++J) {
      const float* c = x + 8 * J;
      stmatrix((own + J / 4 * kTileBytes) ^ (J % 4 * 32), pack<Elem>(c[0], c[1]), pack<Elem>(c[2], c[3]),
               pack<Elem>(c[4], c[5]), pack<Elem>(c[6], c[7]));
    }
    fence_async_shared();
    named_barrier_sync(barrier, 128);
    const Unit unit = this->unit(cursor);
    const bool whole = unit.tokens == kChunkTokens;
    if (!whole && to.data) {
      constexpr int kPacketsPerRow = kHeadDim * 2 / 16;
      auto* data = static_cast<uint16_t*>(to.data) + to.offset(unit.batch, unit.token, unit.key_head);
#pragma unroll 1
      for (int i = tid; i < unit.tokens * kPacketsPerRow; i += 128) {
        const int r = i / kPacketsPerRow, piece = i % kPacketsPerRow;
        *reinterpret_cast<uint4*>(data + r * to.token_stride + piece * 8) =
            load_shared_words(tiles + piece / 8 * kTileBytes + tile_offset(r, piece % 8 * 8));
      }
    }
    if (!whole) named_barrier_sync(barrier, 128);
    if (warp != 0 || !elect_one()) return;
    if (whole && to.data) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        tma_store(map, tiles + half * kTileBytes, unit.key_head, unit.token, unit.batch, half);
      store_commit();
      store_wait_read<0>();
    }
    barrier_arrive(key_pipe.empty(0));
  }

  // ---- <G, S>, by two warps ----------------------------------------------------------------------------------------

  GD_DEVICE void run_inner_products(int half) const {
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
          const uint4 a = load_shared_words(from + Smem::kGradients + i),
                      b = load_shared_words(from + Smem::kStates + i);
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
  GD_DEVICE uint32_t product_at(const Cursor& cursor, int half) const {
    return smem + Smem::kProducts + (cursor.row.stage * 2 + half) * 4;
  }

  // ---- dg and dbeta, by one warp, two tokens a lane ----------------------------------------------------------------

  GD_DEVICE void run_gates() const {
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
  GD_DEVICE void store_gate_gradients(const Unit& unit, int head, const Cursor& cursor) const {
    const auto two = [&](typename Smem::Sum s) { return load_shared2(sum(cursor, s) + lane * 8); };
    const float2 beta = load_shared2(vector(cursor, kBeta) + lane * 8);
    const float2 q = two(Smem::kQueryDot), r = two(Smem::kReadDot), w = two(Smem::kWriteDot), kappa = two(Smem::kKappa);
    const float2 rho = make_float2(q.x + pending_beta(beta.x) * r.x - (w.x - kappa.x),
                                   q.y + pending_beta(beta.y) * r.y - (w.y - kappa.y));
    float before = kappa.x + kappa.y, after = rho.x + rho.y;  // sums up to this lane, from this lane on
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float b = __shfl_up_sync(~0u, before, step), a = __shfl_down_sync(~0u, after, step);
      if (lane >= step) before += b;
      if (lane + step < 32) after += a;
    }
    before -= kappa.x + kappa.y;
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
    const float bias =
        raw && p.dt_bias.data ? load_number(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride) : 0.0f;
    float dA_log = 0, d_dt_bias = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * lane + i;
      if (t >= unit.tokens) continue;
      float gradient = dg[i];
      if (raw) {
        const float x = load_number(p.g.data, p.g.dtype, p.g.offset(unit.batch, unit.token + t, head)) + bias;
        const float softplus = x > 20.0f ? x : log1pf(expf(x));
        dA_log += gradient * fmaxf(decay * softplus, kLowestGate);
        gradient *= decay * (x > 20.0f ? 1.0f : 1.0f / (1.0f + expf(-x)));
        d_dt_bias += gradient;
      }
      float d = dbeta[i];
      if (p.beta_kind == GD_BETA_LOGIT) d *= betas[i] * (1.0f - betas[i]);
      if (p.beta_kind == GD_BETA_LOGIT_DOUBLED) d *= betas[i] * (1.0f - 0.5f * betas[i]);
      if (p.dg.data) store_number(p.dg.data, p.dg.dtype, p.dg.offset(unit.batch, unit.token + t, head), gradient);
      if (p.dbeta.data) store_number(p.dbeta.data, p.dbeta.dtype, p.dbeta.offset(unit.batch, unit.token + t, head), d);
    }
    if (!p.head_sums) return;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      dA_log += __shfl_xor_sync(~0u, dA_log, step);
      d_dt_bias += __shfl_xor_sync(~0u, d_dt_bias, step);
    }
    if (lane == 0) p.head_sums[int64_t{unit.chunk_index} * p.value_heads + head] = make_float2(dA_log, d_dt_bias);
  }
  // Of rows that came as Z: <Z, v>, for the lane that has the row, and dV to memory. Several at a time, so that none is
  // waited for alone.
  GD_DEVICE float2 finish_unscaled_rows(const Unit& unit, int head, float2 beta, const Cursor& cursor) const {
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
        const uint32_t z_at =
            row_tile(cursor, Smem::kValues) + lane / 16 * kTileBytes + tile_offset(r[i], lane % 16 * 4);
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

  // ---- tokens of no sequence ---------------------------------------------------------------------------------------

  // Their gradients are 0. By one warpgroup.
  GD_DEVICE void zero_unused_tokens() const {
    if (!p.sequences.offsets.data) return;
    const int64_t used = p.sequences.offsets[p.sequences.count], count = p.sequences.tokens - used;
    const int64_t thread = int64_t{blockIdx.x} * 128 + tid, stride = int64_t{gridDim.x} * 128;
    const auto zero = [&](const Rows& to, int heads, int pieces, int bytes) {
      if (!to.data) return;
      for (int64_t i = thread; i < count * heads * pieces; i += stride) {
        const int piece = static_cast<int>(i % pieces), head = static_cast<int>(i / pieces % heads);
        auto* at =
            static_cast<uint8_t*>(to.data) + (to.offset(0, used + i / pieces / heads, head) + piece * (16 / 2)) * bytes;
        if (pieces > 1) {
          *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
        } else if (bytes == 4) {
          *reinterpret_cast<uint32_t*>(at) = 0;
        } else {
          *reinterpret_cast<uint16_t*>(at) = 0;
        }
      }
    };
    constexpr int kPacketsPerRow = kHeadDim * 2 / 16;
    zero(p.dq, p.key_heads, kPacketsPerRow, 2);
    zero(p.dk, p.key_heads, kPacketsPerRow, 2);
    zero(p.dv, p.value_heads, kPacketsPerRow, 2);
    zero(p.dg, p.value_heads, 1, p.dg.dtype == GD_F32 ? 4 : 2);
    zero(p.dbeta, p.value_heads, 1, p.dbeta.dtype == GD_F32 ? 4 : 2);
  }
};

template <class Elem>
__global__ void __launch_bounds__(kGradientThreads, 1) gradients_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ uint8_t dynamic_smem[];
  using Registers = GradientRegisters;
  uint32_t smem = tile_aligned(shared_address(dynamic_smem));
  asm volatile("" : "+r"(smem));  // or the compiler would rather find the address again, wherever it is used
  const Gradients<Elem> of(p, __shfl_sync(~0u, smem, 0));
  if (threadIdx.x == 0) of.init_barriers();
  __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernel();
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role == 3) {
    shrink_registers<Registers::kAux>();
    if (of.warp == 0) {
      of.run_loads();
    } else if (of.warp == 3) {
      of.run_gates();
    } else {
      of.run_inner_products(of.warp - 1);
    }
    if (p.slice.begin == 0) of.zero_unused_tokens();
    return;
  }
  grow_registers<Registers::kProducts>();
  of.run_rows(role);
}

// dA_log and d_dt_bias of one value head per block: chunks in a fixed order.
__global__ void __launch_bounds__(256, 1) head_sums_kernel(const __grid_constant__ BackwardParams p) {
  __shared__ double sums[2][256];
  wait_for_previous_kernel();
  const int head = static_cast<int>(blockIdx.x), tid = threadIdx.x;
  double a = 0, b = 0;
  for (int64_t chunk_index = tid; chunk_index < p.sequences.workspace_chunks(); chunk_index += 256) {
    const float2 x = p.head_sums[chunk_index * p.value_heads + head];
    a += x.x;
    b += x.y;
  }
  sums[0][tid] = a;
  sums[1][tid] = b;
  __syncthreads();
  for (int step = 128; step > 0; step /= 2) {
    if (tid < step) {
      sums[0][tid] += sums[0][tid + step];
      sums[1][tid] += sums[1][tid + step];
    }
    __syncthreads();
  }
  const auto store = [&](const HeadScalars& to, double x) {
    if (to.data) store_number(const_cast<void*>(to.data), to.dtype, head * to.stride, static_cast<float>(x));
  };
  if (tid == 0) {
    store(p.dA_log, sums[0][0]);
    store(p.d_dt_bias, sums[1][0]);
  }
}

}  // namespace gatedelta::cuda
