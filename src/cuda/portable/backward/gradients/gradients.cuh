// The gradients of a chunk, given the state S before it, U (what its tokens write) and the gradient G of the state
// after it. A CTA has a chunk of a key head and all of K, or half of it where K is above 128. The value heads of the
// group follow one another, so that dQ and dK add up in registers, in a fixed order. Per value head, with row norms
// r^q, r^k that are 1 without l2norm and scale all rows of dQ and dK:
//   F = s Gamma o stril(dO U^T)             E = -Gamma o stril(dV U^T)           f_i = s <dO_i, U_i>
//   dQ = s gamma o (dO S^T) + F K + f o K   dK^read = -gamma o (dV S^T) + E K
//   dK^written = delta o (U G^T) + F^T Q + E^T K + f o Q
// Rows with a small beta hold Z = dV / beta: their products are scaled by beta at the end (kPending), and E^T K has an
// E of its own with beta in it. The terms of dg and dbeta are written as sums over key columns (Dots), for
// backward/gates. The diagonal terms f are left out of them: they cancel only up to rounding, and under strong gates dg
// is smaller than that.
//
// In fp16 a product of the norms of two short rows, as in F and E, exceeds the largest number. So with l2norm rows of K
// and Q are scaled by an exact power of two to length ~1. The norms are then those of the rows in shared memory, and
// the powers are factors of dQ and dK at the end.
//
// Value columns are loaded in stages of 32: rows of U, dO, dV and snapshots of S and G. Warp w has rows 32 (w % 2) and
// quarter w / 2 of the key columns; of the pairs dO U^T and dV U^T it has one 16-row tile of one of them.
#pragma once

#include <type_traits>

#include "cuda/device/numbers.cuh"
#include "cuda/portable/backward/config.hpp"
#include "cuda/portable/prepare/lengths.cuh"

namespace gatedelta::cuda::portable {

template <class Config>
struct Gradients {
  using Elem = typename Config::Elem;
  using Smem = typename Config::Smem;
  static constexpr int kThreads = Config::kThreads, kPart = Config::kPart;
  static constexpr int kN = Config::kWarpColumns / 8;  // 8-column tiles of a warp
  static constexpr int kKeyBlocks = kPart / 8;
  static constexpr bool kScalesKeys = std::is_same_v<Elem, Fp16>;
  static_assert(kThreads == Dots::kProduct && Dots::kUpdates == Dots::kSums * kChunkTokens);

  using Rows = float[2][kN][4];  // 32 rows of the warp's key columns

  const BackwardParams& p;
  const uint32_t smem;
  int tid, lane, warp, g, t;
  int half, column;  // the warp's half of the rows, and its first key column in the part
  bool is_update;    // the warp's pairs are dV U^T, otherwise dO U^T
  int pair_tile;     // 16-row tile of these pairs
  int chunk_index, key_head, part, batch, token, rows;
  Rows dq, dk;                  // sums over value heads
  Rows queries, reads, writes;  // of one value head
  float pairs[4][2][4];         // 16 x 16 blocks of the tile
  float product;                // this thread's share of <G, S>

  GD_DEVICE Gradients(const BackwardParams& params, int tid_) : p(params), smem(shared_base()) {
    set_thread(tid_, shuffle(tid_ >> 5, 0));
  }
  GD_DEVICE void set_thread(int thread, int of_warp) {
    tid = thread;
    lane = tid & 31;
    g = lane >> 2;
    t = lane & 3;
    warp = of_warp;
    half = warp & 1;
    column = (warp >> 1) * Config::kWarpColumns;
    is_update = warp & 1;
    pair_tile = warp < 4 ? warp >> 1 : 3 - ((warp - 4) >> 1);  // two warps of a scheduler have five blocks
  }
  // NOTE(ptxas): 192 of 255 registers hold sums. Values derived from threadIdx are recomputed in each phase, and the
  // chunk's position is in shared memory.
  GD_DEVICE void rematerialize_thread_ids() { set_thread(opaque(tid), opaque(warp)); }
  GD_DEVICE void spill_position() const {
    const int position[] = {chunk_index, key_head, part, batch, token, rows};
#pragma unroll
    for (int i = 0; i < 6; ++i) store_shared_word(smem + Smem::kPosition + 4 * i, static_cast<uint32_t>(position[i]));
  }
  GD_DEVICE void reload_position() {
    const auto word = [&](int i) { return static_cast<int>(load_shared_word(smem + Smem::kPosition + 4 * i)); };
    chunk_index = word(0), key_head = word(1), part = word(2), batch = word(3), token = word(4), rows = word(5);
  }

  GD_DEVICE void run(int cta) {
    const int item = cta / p.parts;
    part = cta - item * p.parts;
    chunk_index = item / p.key_heads;
    key_head = item - chunk_index * p.key_heads;
    const ChunkPlace at = locate_chunk(p.sequences, chunk_index, lane);
    batch = at.batch, token = at.token, rows = at.rows;
    if (rows <= 0) return;
    if (at.sequence == p.sequences.count) return zero_rows();
    load_chunk(p.chunk_norms(chunk_index, key_head));
    if (tid == 0) spill_position();
    load_stage(0, 0, 0);
    copy_commit();
    clear(dq);
    clear(dk);
    int stage = 0;
#pragma unroll 1
    for (int v = 0; v < p.group; ++v) {
      clear(queries);
      clear(reads);
      clear(writes);
#pragma unroll
      for (auto& pair : pairs)
#pragma unroll
        for (auto& tile : pair)
#pragma unroll
          for (float& x : tile) x = 0;
      product = 0;
#pragma unroll 1
      for (int from = 0; from < p.value_dim; from += Config::kValueColumns, stage ^= 1) {
        rematerialize_thread_ids();
        copy_wait<0>();
        sync_cta();  // the stage is there, and the other one is not read any more
        reload_position();
        const bool is_last = from + Config::kValueColumns >= p.value_dim;
        if (!is_last) {
          load_stage(stage ^ 1, v, from + Config::kValueColumns);
        } else if (v + 1 < p.group) {
          load_stage(stage ^ 1, v + 1, 0);
        }
        copy_commit();
        if (from == 0) set_vectors(v);
        rematerialize_thread_ids();
        multiply_stage(smem + stage * Smem::kStageBytes);
      }
      sync_cta();  // the last stage is not read any more, and the vectors are there
      const uint32_t matrices = smem + (stage ^ 1) * Smem::kStageBytes;
      rematerialize_thread_ids();
      store_pairs(matrices);
      sync_cta();
      rematerialize_thread_ids();
      finish_head(matrices);
      sync_cta();  // the sums are there
      reload_position();
      store_dots(v);
    }
    finish();
  }

  GD_DEVICE uint32_t vector(typename Smem::Vector v) const { return smem + Smem::kVectors + v * Smem::kVectorBytes; }
  GD_DEVICE float of_row(typename Smem::Vector v, int row) const { return load_shared(vector(v) + row * 4); }
  GD_DEVICE int row(int i, int h) const { return 32 * half + 16 * i + 8 * h + g; }
  GD_DEVICE static void clear(Rows& x) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (float& y : x[i][n]) y = 0;
  }

  // ---- loads (loads.cuh) --------------------------------------------------------------------------------------------

  GD_DEVICE void load_chunk(const float* norms) const;
  GD_DEVICE void load_keys(const TokenRows& from, uint32_t stride, uint32_t to) const;
  GD_DEVICE void load_scaled_keys(const TokenRows& from, uint32_t stride, const float* norms, uint32_t to) const;
  GD_DEVICE void load_stage(int stage, int v, int first) const;
  GD_DEVICE void load_rows(const TokenRows& from, uint32_t stride, int head, int first, uint32_t to) const;
  GD_DEVICE void load_snapshot(const uint8_t* from, int first, uint32_t to) const;
  GD_DEVICE void set_vectors(int v) const;

  // ---- products over value columns (products.cuh) -------------------------------------------------------------------

  GD_DEVICE void multiply_stage(uint32_t stage);
  GD_DEVICE static float dot(uint32_t a, uint32_t b);
  GD_DEVICE void load_snapshot_operand(uint32_t (&s)[kN / 2][4], uint32_t snapshot, int kk) const;
  GD_DEVICE void multiply_rows(Rows& c, uint32_t X, const uint32_t (&s)[kN / 2][4], int kk) const;
  GD_DEVICE void multiply_pairs(uint32_t stage, int kk);

  // ---- F and E (pairs.cuh) ------------------------------------------------------------------------------------------

  GD_DEVICE static uint32_t quadrant(int I, int J) { return static_cast<uint32_t>(I + J) * Smem::kQuadrantBytes; }
  GD_DEVICE void store_pairs(uint32_t matrices) const;
  GD_DEVICE void store_diagonal(int r, float x, float by) const;
  template <bool kDiagonal>
  GD_DEVICE void multiply_quadrant(Rows& c, uint32_t matrix, int I, int J, uint32_t X) const;
  template <bool kDiagonal>
  GD_DEVICE void multiply_transposed_quadrant(Rows& c, uint32_t matrix, int I, int J, uint32_t X) const;
  GD_DEVICE void load_key_operand(uint32_t (&x)[kN / 2][4], uint32_t X, int first_row) const;
  GD_DEVICE static void multiply(float (&c)[kN][4], const uint32_t (&a)[4], const uint32_t (&x)[kN / 2][4]);

  // ---- end of a value head (head.cuh) -------------------------------------------------------------------------------

  GD_DEVICE void finish_head(uint32_t matrices);
  GD_DEVICE void scale_rows(Rows& x, typename Smem::Vector by) const;
  GD_DEVICE void find_dots(float (&to)[4], const Rows& x, uint32_t X) const;
  GD_DEVICE void store_sums(float (&x)[4], int which) const;
  GD_DEVICE float sum_of(int which, int r) const;
  GD_DEVICE void store_dots(int v) const;
  GD_DEVICE uint32_t sums_at(int which, int quarter) const {
    return smem + Smem::kSums + (which * 4 + quarter) * Smem::kVectorBytes;
  }
  // Address of this thread's two numbers of a row of K or Q.
  GD_DEVICE uint32_t keys_at(uint32_t X, int i, int h, int n) const {
    const int first = column + 8 * n;
    return X + first / kTileColumns * Config::kTileBytes + tile_offset(row(i, h), first % kTileColumns / 8) + 4 * t;
  }

  // ---- dQ and dK to memory (output.cuh) -----------------------------------------------------------------------------

  GD_DEVICE void finish();
  GD_DEVICE void add_diagonal(Rows& c, uint32_t X) const;
  GD_DEVICE void project(Rows& c, int which, typename Smem::Vector norm, uint32_t X) const;
  GD_DEVICE void add_row(Rows& c, int i, int h, float by, uint32_t X) const;
  GD_DEVICE void store_key_sums(const Rows& c, int which) const;
  GD_DEVICE void put(const Rows& c, uint32_t X) const;
  GD_DEVICE void store_rows(const TokenRows& to, uint32_t X) const;
  GD_DEVICE void zero_rows() const;
  GD_DEVICE void zero(const TokenRows& to, int first_head, int heads, int columns) const;
};

}  // namespace gatedelta::cuda::portable
