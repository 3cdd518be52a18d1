// The gradients of a chunk, given the state S before it, U (what its tokens write) and the gradient G of the state
// after it. A CTA has a chunk of a key head and all of K, or half of it where K is above 128. The value heads of the
// group follow one another, so that dQ and dK add up in registers, in a fixed order. Per value head, with row norms
// r^q, r^k that are 1 without l2norm and scale all rows of dQ and dK:
//   F = s Gamma o stril(dO U^T)             E = -Gamma o stril(dV U^T)           f_i = s <dO_i, U_i>
//   dQ = s gamma o (dO S^T) + F K + f o K   dK^read = -gamma o (dV S^T) + E K
//   dK^written = delta o (U G^T) + F^T Q + E^T K + f o Q
// Rows of dV with a small beta arrive as Z: what reads them as a row gets its beta at the end (kPending), and E^T K has
// an E of its own with beta in it. What dg and dbeta are made of leaves as sums over key columns (Dots): the diagonal
// terms f are excluded from them, because they cancel only up to rounding, and under strong gates dg is smaller than
// that. gate_gradients.cuh does the rest.
//
// Products of two norms are in F and E, and those of two short rows are larger than fp16's largest number. So in fp16
// with l2norm rows of K and Q come times the power of two that brings their lengths near 1, which loses nothing; the
// norms are then those of the rows as they lie in shared memory, and the powers are factors of dQ and dK at the end.
//
// V comes in stages of 32 columns: rows of U, dO, dV and snapshots of S and G. Warp w has rows 32 (w % 2) and the
// (w / 2)th quarter of the key columns; of the pairs dO U^T and dV U^T it has one 16-row tile of one of them.
#pragma once

#include <type_traits>

#include "cuda/portable/backward/config.hpp"
#include "cuda/portable/prepare/lengths.cuh"
#include "cuda/device/numbers.cuh"

namespace gatedelta::cuda::portable {

template <class Config>
struct Gradients {
  using Elem = typename Config::Elem;
  using Smem = typename Config::Smem;
  static constexpr int kThreads = Config::kThreads, kPart = Config::kPart;
  static constexpr int kN = Config::kWarpColumns / 8;  // 8-column tiles of a warp
  static constexpr int kKeyBlocks = kPart / 8;
  static constexpr bool kScalesKeys = std::is_same_v<Elem, Fp16>;

  using Rows = float[2][kN][4];  // 32 rows of the warp's key columns

  const BackwardParams& p;
  const uint32_t smem;
  int tid, lane, warp, g, t;
  int half, column;  // the warp's half of the rows, and its first key column in the part
  bool is_update;    // the warp's pairs are dV U^T, otherwise dO U^T
  int pair_tile;     // their 16-row tile
  int chunk_index, key_head, part, batch, token, rows;
  Rows dq, dk;                  // summed over value heads
  Rows queries, reads, writes;  // of one value head
  float pairs[4][2][4];         // its row tile's 16 x 16 blocks
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
  // NOTE(ptxas): 192 of 255 registers hold sums. What follows from the thread's number is computed anew where it is
  // needed, and where the chunk is lies in shared memory.
  GD_DEVICE void forget() { set_thread(opaque(tid), opaque(warp)); }
  GD_DEVICE void keep_place() const {
    const int place[] = {chunk_index, key_head, part, batch, token, rows};
#pragma unroll
    for (int i = 0; i < 6; ++i) store_shared_word(smem + Smem::kPlace + 4 * i, static_cast<uint32_t>(place[i]));
  }
  GD_DEVICE void recall_place() {
    const auto word = [&](int i) { return static_cast<int>(load_shared_word(smem + Smem::kPlace + 4 * i)); };
    chunk_index = word(0), key_head = word(1), part = word(2), batch = word(3), token = word(4), rows = word(5);
  }

  GD_DEVICE void run(int cta) {
    const int block = cta / p.parts;
    part = cta - block * p.parts;
    chunk_index = block / p.key_heads;
    key_head = block - chunk_index * p.key_heads;
    const ChunkPlace at = locate_chunk(p.sequences, chunk_index, lane);
    batch = at.batch, token = at.token, rows = at.rows;
    if (rows <= 0) return;
    if (at.sequence == p.sequences.count) return zero_rows();
    const float* const norms = p.chunk_norms(chunk_index, key_head);
    if (kScalesKeys && p.l2norm) {
      load_scaled_keys(p.k, p.k_stride, norms, smem + Smem::kK);
      load_scaled_keys(p.q, p.q_stride, norms + kChunkTokens, smem + Smem::kQ);
    } else {
      load_keys(p.k, p.k_stride, smem + Smem::kK);
      load_keys(p.q, p.q_stride, smem + Smem::kQ);
    }
    if (tid < 2 * kChunkTokens) {
      const float norm = norms[tid];
      const float power = kScalesKeys ? power_of_two_below(norm) : 1.0f;
      const bool is_key = tid < kChunkTokens;
      store_shared(vector(is_key ? Smem::kKeyNorm : Smem::kQueryNorm) + tid % kChunkTokens * 4, norm / power);
      if (kScalesKeys)
        store_shared(vector(is_key ? Smem::kKeyPower : Smem::kQueryPower) + tid % kChunkTokens * 4, power);
    } else if (tid < 3 * kChunkTokens) {
      store_shared(vector(Smem::kDiagonal) + tid % kChunkTokens * 4, 0);
    }
    if (tid == 0) keep_place();
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
        forget();
        copy_wait<0>();
        sync_cta();  // the stage is there, and the other one is not read any more
        recall_place();
        const bool is_last = from + Config::kValueColumns >= p.value_dim;
        if (!is_last) {
          load_stage(stage ^ 1, v, from + Config::kValueColumns);
        } else if (v + 1 < p.group) {
          load_stage(stage ^ 1, v + 1, 0);
        }
        copy_commit();
        if (from == 0) set_vectors(v);
        forget();
        multiply_stage(smem + stage * Smem::kStageBytes);
      }
      sync_cta();  // the last stage is not read any more, and the vectors are there
      const uint32_t matrices = smem + (stage ^ 1) * Smem::kStageBytes;
      forget();
      store_pairs(matrices);
      sync_cta();
      forget();
      finish_head(matrices);
      sync_cta();  // the sums are there
      recall_place();
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

  // ---- loads -------------------------------------------------------------------------------------------------------

  // The part's columns of K or Q. Rows past the end and columns past K are zero.
  GD_DEVICE void load_keys(const TokenRows& from, uint32_t stride, uint32_t to) const {
    const auto* const data = static_cast<const uint16_t*>(from.data) + from.offset(batch, token, key_head);
#pragma unroll
    for (int i = 0; i < Config::kTiles * kChunkTokens * 8 / kThreads; ++i) {
      const int packet = tid % 8, r = (tid / 8 + i * (kThreads / 8)) % kChunkTokens,
                tile = i * (kThreads / 8) / kChunkTokens;
      const int first = part * kPart + tile * kTileColumns + packet * kPacketColumns;
      const bool valid = r < rows && first < p.key_dim;
      copy_async(to + tile * Config::kTileBytes + tile_offset(r, packet), data + (valid ? r * stride + first : 0),
                 valid);
    }
  }
  // The same, each row times the power of two below its norm.
  GD_DEVICE void load_scaled_keys(const TokenRows& from, uint32_t stride, const float* norms, uint32_t to) const {
    const auto* const data = static_cast<const uint16_t*>(from.data) + from.offset(batch, token, key_head);
#pragma unroll 1
    for (int i = 0; i < Config::kTiles * kChunkTokens * 8 / kThreads; ++i) {
      const int packet = tid % 8, r = (tid / 8 + i * (kThreads / 8)) % kChunkTokens,
                tile = i * (kThreads / 8) / kChunkTokens;
      const int first = part * kPart + tile * kTileColumns + packet * kPacketColumns;
      const bool valid = r < rows && first < p.key_dim;
      const float power = power_of_two_below(norms[r]);
      const auto scaled = [&](uint32_t x) {
        const float2 two = unpack<Elem>(x);
        return pack<Elem>(power * two.x, power * two.y);
      };
      const uint4 x = valid ? *reinterpret_cast<const uint4*>(data + r * stride + first) : make_uint4(0, 0, 0, 0);
      store_shared_words(to + tile * Config::kTileBytes + tile_offset(r, packet), scaled(x.x), scaled(x.y), scaled(x.z),
                         scaled(x.w));
    }
  }
  GD_DEVICE void load_rows(const TokenRows& from, uint32_t stride, int head, int first, uint32_t to) const {
    static_assert(kThreads == kChunkTokens * Config::kValueColumns / kPacketColumns);
    const int r = tid / 4, packet = tid % 4;
    const auto* const data = static_cast<const uint16_t*>(from.data) + from.offset(batch, token, head);
    const bool valid = r < rows && first + packet * kPacketColumns < p.value_dim;
    copy_async(to + values_offset<Config::kValueColumns>(r, packet),
               data + (valid ? r * stride + first + packet * kPacketColumns : 0), valid);
  }
  GD_DEVICE void load_snapshot(const uint8_t* from, int first, uint32_t to) const {
#pragma unroll
    for (int i = 0; i < Smem::kSnapshotBytes / kPacketBytes / kThreads; ++i) {
      const int packet = tid + i * kThreads, key_block = packet / 8 % kKeyBlocks, value_block = packet / kPart;
      const int at = part * kKeyBlocks + key_block;
      const bool valid = first + 8 * value_block < p.value_dim && 8 * at < p.key_dim;
      copy_async(
          to + packet * kPacketBytes,
          from + (valid ? ((first / 8 + value_block) * (p.key_dim / 8) + at) * 128 + packet % 8 * kPacketBytes : 0),
          valid);
    }
  }
  // Value columns from `first` on, of value head v of the group.
  GD_DEVICE void load_stage(int stage, int v, int first) const {
    const uint32_t to = smem + stage * Smem::kStageBytes;
    const int head = key_head * p.group + v;
    load_rows(p.u, p.u_stride, head, first, to + Smem::kU);
    load_rows(p.d_o, p.d_o_stride, head, first, to + Smem::kOutputs);
    load_rows(p.dv, p.dv_stride, head, first, to + Smem::kValues);
    const int64_t at = (int64_t{chunk_index} * p.value_heads + head) * p.snapshot_bytes();
    load_snapshot(p.states + at, first, to + Smem::kStates);
    load_snapshot(p.gradients + at, first, to + Smem::kGradients);
  }

  // A thread has a row. Prepare has left no vectors of a step without tokens.
  GD_DEVICE void set_vectors(int v) const {
    if (tid >= kChunkTokens) return;
    const float* const from = p.chunk_vectors(chunk_index, key_head * p.group + v);
    const int step = tid / kStep;
    const bool both = rows > kStep, is_there = step == 0 || both;
    const float first_end = from[kStep - 1], second_end = both ? from[kChunkTokens - 1] : 0.0f;
    const float log = is_there ? from[kLogGamma * kChunkTokens + tid] : 0.0f,
                beta = is_there ? from[kChunkBeta * kChunkTokens + tid] : 0.0f;
    const float gamma = exp2_approx(step == 0 ? log : log + first_end),
                delta = exp2_approx(step == 0 ? first_end - log + second_end : second_end - log);
    const float key_norm = of_row(Smem::kKeyNorm, tid), query_norm = of_row(Smem::kQueryNorm, tid);
    const auto set = [&](typename Smem::Vector to, float x) { store_shared(vector(to) + tid * 4, x); };
    set(Smem::kLogs, log);
    set(Smem::kQueryRow, p.scale * gamma * query_norm);
    set(Smem::kReadRow, -gamma * key_norm);
    set(Smem::kWriteRow, delta * key_norm);
    set(Smem::kPending, stores_unscaled(beta) ? beta : 1.0f);
  }

  // ---- products over value columns ---------------------------------------------------------------------------------

  GD_DEVICE void multiply_stage(uint32_t stage) {
#pragma unroll
    for (int kk = 0; kk < Config::kValueColumns / 16; ++kk) {
      uint32_t s[kN / 2][4];
      load_snapshot_operand(s, stage + Smem::kStates, kk);
      multiply_rows(queries, stage + Smem::kOutputs, s, kk);
      multiply_rows(reads, stage + Smem::kValues, s, kk);
      load_snapshot_operand(s, stage + Smem::kGradients, kk);
      multiply_rows(writes, stage + Smem::kU, s, kk);
      multiply_pairs(stage, kk);
    }
#pragma unroll
    for (int i = 0; i < Smem::kSnapshotBytes / kPacketBytes / kThreads; ++i) {
      const uint32_t at = stage + (tid + i * kThreads) * kPacketBytes;
      const uint4 a = load_shared_words(at + Smem::kStates), b = load_shared_words(at + Smem::kGradients);
      product += dot(a.x, b.x) + dot(a.y, b.y) + (dot(a.z, b.z) + dot(a.w, b.w));
    }
  }
  GD_DEVICE static float dot(uint32_t a, uint32_t b) {
    const float2 x = unpack<Elem>(a), y = unpack<Elem>(b);
    return x.x * y.x + x.y * y.y;
  }
  // Sixteen value columns by the warp's key columns, as a right operand.
  GD_DEVICE void load_snapshot_operand(uint32_t (&s)[kN / 2][4], uint32_t snapshot, int kk) const {
    const int value_block = 2 * kk + (lane >> 3 & 1), key_block = column / 8 + (lane >> 4);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n)
      load_matrices_transposed(
          s[n], snapshot + (value_block * kKeyBlocks + key_block + 2 * n) * 128 + (lane & 7) * kPacketBytes);
  }
  GD_DEVICE void multiply_rows(Rows& c, uint32_t X, const uint32_t (&s)[kN / 2][4], int kk) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t a[4];
      load_matrices(a,
                    X + values_offset<Config::kValueColumns>(32 * half + 16 * i + (lane & 15), 2 * kk + (lane >> 4)));
#pragma unroll
      for (int n = 0; n < kN; ++n)
        mma<Elem>(c[i][n], a[0], a[1], a[2], a[3], s[n / 2][n % 2 * 2], s[n / 2][n % 2 * 2 + 1]);
    }
  }
  GD_DEVICE void multiply_pairs(uint32_t stage, int kk) {
    uint32_t a[4];
    load_matrices(a, stage + (is_update ? Smem::kValues : Smem::kOutputs) +
                         values_offset<Config::kValueColumns>(16 * pair_tile + (lane & 15), 2 * kk + (lane >> 4)));
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      if (J > pair_tile) break;
      uint32_t u[4];
      load_matrices(
          u, stage + Smem::kU +
                 values_offset<Config::kValueColumns>(16 * J + (lane & 7) + (lane >> 4) * 8, 2 * kk + (lane >> 3 & 1)));
#pragma unroll
      for (int n = 0; n < 2; ++n) mma<Elem>(pairs[J][n], a[0], a[1], a[2], a[3], u[2 * n], u[2 * n + 1]);
    }
  }

  // ---- F and E -----------------------------------------------------------------------------------------------------

  GD_DEVICE static uint32_t quadrant(int I, int J) { return static_cast<uint32_t>(I + J) * Smem::kQuadrantBytes; }

  // Gamma and norms, and to shared memory without the diagonal. Above it e^{b_i - b_j} may be infinite: zeros there by
  // selection.
  GD_DEVICE void store_pairs(uint32_t matrices) const {
    const float first_end = of_row(Smem::kLogs, kStep - 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = 16 * pair_tile + 8 * h + g;
      const float log = of_row(Smem::kLogs, r), pending = of_row(Smem::kPending, r);
      const float by = is_update ? -of_row(Smem::kKeyNorm, r) : p.scale * of_row(Smem::kQueryNorm, r);
#pragma unroll
      for (int J = 0; J < 4; ++J) {
        if (J > pair_tile) break;
        const float shift = pair_tile >= 2 && J < 2 ? first_end : 0.0f;  // from the first step to the second
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int c = 16 * J + 8 * n + 2 * t;
          const float2 logs = load_shared2(vector(Smem::kLogs) + c * 4),
                       norms = load_shared2(vector(Smem::kKeyNorm) + c * 4);
          const float x = pairs[J][n][2 * h], y = pairs[J][n][2 * h + 1];
          if (c == r || c + 1 == r) store_diagonal(r, c == r ? x : y, by * (c == r ? norms.x : norms.y));
          const float first = c < r ? x * by * norms.x * exp2_approx(log + (shift - logs.x)) : 0.0f,
                      second = c + 1 < r ? y * by * norms.y * exp2_approx(log + (shift - logs.y)) : 0.0f;
          const uint32_t at = quadrant(pair_tile / 2, J / 2) + values_offset<kStep>(r % kStep, (2 * J + n) % 4) + 4 * t;
          if (is_update) {
            store_shared_word(matrices + Smem::kUnscaledE + at, pack<Elem>(first, second));
            store_shared_word(matrices + Smem::kE + at, pack<Elem>(pending * first, pending * second));
          } else {
            store_shared_word(matrices + Smem::kF + at, pack<Elem>(first, second));
          }
        }
      }
    }
  }
  GD_DEVICE void store_diagonal(int r, float x, float by) const {
    if (is_update) {
      store_shared(vector(Smem::kUpdate) + r * 4, x);
    } else {
      const uint32_t at = vector(Smem::kDiagonal) + r * 4;
      store_shared(at, load_shared(at) + by * x);
    }
  }

  // ---- the rest of a head ------------------------------------------------------------------------------------------

  GD_DEVICE void finish_head(uint32_t matrices) {
    scale_rows(queries, Smem::kQueryRow);
    scale_rows(reads, Smem::kReadRow);
    scale_rows(writes, Smem::kWriteRow);
    const uint32_t K = smem + Smem::kK, Q = smem + Smem::kQ;
    float kappa[4], written[4], of_pairs[4], read[4];
    find_dots(kappa, writes, K);
    // The quadrant on the diagonal, then the one below it: of the second half of the rows where they read, of the first
    // where they write.
    multiply_quadrant<true>(queries, matrices + Smem::kF, half, half, K);
    multiply_quadrant<true>(reads, matrices + Smem::kUnscaledE, half, half, K);
    multiply_transposed_quadrant<true>(writes, matrices + Smem::kF, half, half, Q);
    multiply_transposed_quadrant<true>(writes, matrices + Smem::kE, half, half, K);
    if (half == 1) {
      multiply_quadrant<false>(queries, matrices + Smem::kF, 1, 0, K);
      multiply_quadrant<false>(reads, matrices + Smem::kUnscaledE, 1, 0, K);
    } else {
      multiply_transposed_quadrant<false>(writes, matrices + Smem::kF, 1, 0, Q);
      multiply_transposed_quadrant<false>(writes, matrices + Smem::kE, 1, 0, K);
    }
    find_dots(of_pairs, queries, Q);
    find_dots(read, reads, K);
    find_dots(written, writes, K);
#pragma unroll
    for (int i = 0; i < 4; ++i) of_pairs[i] -= written[i] - kappa[i];
    store_sums(of_pairs, 0);
    store_sums(read, 1);
    store_sums(kappa, 2);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) product += shuffle_xor(product, by);
    if (lane == 0) store_shared(smem + Smem::kProducts + warp * 4, product);
    scale_rows(reads, Smem::kPending);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          dq[i][n][e] += queries[i][n][e];
          dk[i][n][e] += reads[i][n][e] + writes[i][n][e];
        }
  }
  GD_DEVICE void scale_rows(Rows& x, typename Smem::Vector by) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = of_row(by, row(i, h));
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          x[i][n][2 * h] *= factor;
          x[i][n][2 * h + 1] *= factor;
        }
      }
  }
  // This thread's two numbers of a row of K or Q.
  GD_DEVICE uint32_t keys_at(uint32_t X, int i, int h, int n) const {
    const int first = column + 8 * n;
    return X + first / kTileColumns * Config::kTileBytes + tile_offset(row(i, h), first % kTileColumns / 8) + 4 * t;
  }
  // Each row's product with the same row of K or Q, over the thread's columns; [2 i + h].
  GD_DEVICE void find_dots(float (&to)[4], const Rows& x, uint32_t X) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float2 y = unpack<Elem>(load_shared_word(keys_at(X, i, h, n)));
          sum += x[i][n][2 * h] * y.x + x[i][n][2 * h + 1] * y.y;
        }
        to[2 * i + h] = sum;
      }
  }
  GD_DEVICE uint32_t sums_at(int which, int quarter) const {
    return smem + Smem::kSums + (which * 4 + quarter) * Smem::kVectorBytes;
  }
  GD_DEVICE void store_sums(float (&x)[4], int which) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] += shuffle_xor(x[i], 1);
      x[i] += shuffle_xor(x[i], 2);
      if (t == 0) store_shared(sums_at(which, warp >> 1) + row(i / 2, i % 2) * 4, x[i]);
    }
  }
  GD_DEVICE float sum_of(int which, int r) const {
    const auto quarter = [&](int i) { return load_shared(sums_at(which, i) + r * 4); };
    return quarter(0) + quarter(1) + (quarter(2) + quarter(3));
  }
  GD_DEVICE void store_dots(int v) const {
    float* const to = p.dots_of(chunk_index, key_head * p.group + v, part);
    if (tid < Dots::kSums * kChunkTokens) {
      to[tid] = sum_of(tid / kChunkTokens, tid % kChunkTokens);
    } else {
      to[tid] = of_row(Smem::kUpdate, tid % kChunkTokens);
    }
    if (tid == 0) {
      float all = 0;
#pragma unroll
      for (int i = 0; i < kThreads / 32; ++i) all += load_shared(smem + Smem::kProducts + i * 4);
      to[Dots::kProduct] = all;
    }
  }
  static_assert(kThreads == Dots::kProduct && Dots::kUpdates == Dots::kSums * kChunkTokens);

  // c += M X for a quadrant M of 32 x 32 whose columns are 32 rows of X, K or Q.
  template <bool kDiagonal>
  GD_DEVICE void multiply_quadrant(Rows& c, uint32_t matrix, int I, int J, uint32_t X) const {
#pragma unroll
    for (int kk = 0; kk < 2; ++kk) {
      uint32_t x[kN / 2][4], a[4];
      load_key_operand(x, X, 32 * J + 16 * kk);
#pragma unroll
      for (int i = kDiagonal ? kk : 0; i < 2; ++i) {
        load_matrices(a, matrix + quadrant(I, J) + values_offset<kStep>(16 * i + (lane & 15), 2 * kk + (lane >> 4)));
        multiply(c[i], a, x);
      }
    }
  }
  // c += M^T X.
  template <bool kDiagonal>
  GD_DEVICE void multiply_transposed_quadrant(Rows& c, uint32_t matrix, int I, int J, uint32_t X) const {
#pragma unroll
    for (int kk = 0; kk < 2; ++kk) {
      uint32_t x[kN / 2][4], a[4];
      load_key_operand(x, X, 32 * I + 16 * kk);
#pragma unroll
      for (int j = 0; j < (kDiagonal ? kk + 1 : 2); ++j) {
        load_matrices_transposed(
            a, matrix + quadrant(I, J) +
                   values_offset<kStep>(16 * kk + (lane & 7) + (lane >> 4) * 8, 2 * j + (lane >> 3 & 1)));
        multiply(c[j], a, x);
      }
    }
  }
  GD_DEVICE void load_key_operand(uint32_t (&x)[kN / 2][4], uint32_t X, int first_row) const {
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      const int first = column + 16 * n;
      load_matrices_transposed(x[n], X + first / kTileColumns * Config::kTileBytes +
                                         tile_offset(first_row + (lane & 15), first % kTileColumns / 8 + (lane >> 4)));
    }
  }
  GD_DEVICE static void multiply(float (&c)[kN][4], const uint32_t (&a)[4], const uint32_t (&x)[kN / 2][4]) {
#pragma unroll
    for (int n = 0; n < kN; ++n) mma<Elem>(c[n], a[0], a[1], a[2], a[3], x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
  }

  // ---- dQ and dK to memory -----------------------------------------------------------------------------------------

  GD_DEVICE void finish() {
    const uint32_t K = smem + Smem::kK, Q = smem + Smem::kQ;
    add_diagonal(dq, K);
    add_diagonal(dk, Q);
    if (kScalesKeys && p.l2norm) {
      scale_rows(dq, Smem::kQueryPower);
      scale_rows(dk, Smem::kKeyPower);
    }
    if (p.key_sums) {
      store_key_sums(dq, 0);
      store_key_sums(dk, 1);
      return;
    }
    if (p.l2norm) {  // dx = r dy - (dy . y) r y, and the first r is in dy already
      float along[4];
      sync_cta();  // the last head's sums are not read any more
      find_dots(along, dq, Q);
      store_sums(along, 0);
      find_dots(along, dk, K);
      store_sums(along, 1);
      sync_cta();
      project(dq, 0, Smem::kQueryNorm, Q);
      project(dk, 1, Smem::kKeyNorm, K);
    }
    sync_cta();  // K and Q are not read any more
    put(dq, Q);
    put(dk, K);
    sync_cta();
    store_rows(p.dq, Q);
    store_rows(p.dk, K);
  }
  // c += f o X
  GD_DEVICE void add_diagonal(Rows& c, uint32_t X) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) add_row(c, i, h, of_row(Smem::kDiagonal, row(i, h)), X);
  }
  GD_DEVICE void project(Rows& c, int which, typename Smem::Vector norm, uint32_t X) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float r = of_row(norm, row(i, h));
        add_row(c, i, h, -r * r * sum_of(which, row(i, h)), X);
      }
  }
  GD_DEVICE void add_row(Rows& c, int i, int h, float by, uint32_t X) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 x = unpack<Elem>(load_shared_word(keys_at(X, i, h, n)));
      c[i][n][2 * h] += by * x.x;
      c[i][n][2 * h + 1] += by * x.y;
    }
  }
  GD_DEVICE void store_key_sums(const Rows& c, int which) const {
    float* const to = p.key_sums_of(chunk_index, key_head, which) + part * kPart + column + 2 * t;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < kN; ++n)
          if (part * kPart + column + 8 * n < p.key_dim)
            *reinterpret_cast<float2*>(to + row(i, h) * p.key_dim + 8 * n) =
                make_float2(c[i][n][2 * h], c[i][n][2 * h + 1]);
  }
  // Through the tiles of Q and K, so that a row leaves in packets.
  GD_DEVICE void put(const Rows& c, uint32_t X) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < kN; ++n)
          store_shared_word(keys_at(X, i, h, n), pack<Elem>(c[i][n][2 * h], c[i][n][2 * h + 1]));
  }
  GD_DEVICE void store_rows(const TokenRows& to, uint32_t X) const {
    if (!to) return;
    auto* const data = static_cast<uint16_t*>(to.data) + to.offset(batch, token, key_head);
#pragma unroll
    for (int i = 0; i < Config::kTiles * kChunkTokens * 8 / kThreads; ++i) {
      const int packet = tid % 8, r = (tid / 8 + i * (kThreads / 8)) % kChunkTokens,
                tile = i * (kThreads / 8) / kChunkTokens;
      const int first = part * kPart + tile * kTileColumns + packet * kPacketColumns;
      if (r < rows && first < p.key_dim)
        *reinterpret_cast<uint4*>(data + r * to.token_stride + first) =
            load_shared_words(X + tile * Config::kTileBytes + tile_offset(r, packet));
    }
  }

  // Tokens of no sequence.
  GD_DEVICE void zero_rows() const {
    if (part > 0) return;
    zero(p.dq, key_head, 1, p.key_dim);
    zero(p.dk, key_head, 1, p.key_dim);
    zero(p.dv, key_head * p.group, p.group, p.value_dim);
  }
  GD_DEVICE void zero(const TokenRows& to, int first_head, int heads, int columns) const {
    if (!to) return;
    const int packets = columns / kPacketColumns, per_token = heads * packets;
    for (int i = tid; i < rows * per_token; i += kThreads) {
      const int r = i / per_token, packet = i - r * per_token, head = packet / packets;
      auto* const row = static_cast<uint16_t*>(to.data) + to.offset(batch, token + r, first_head + head);
      reinterpret_cast<uint4*>(row)[packet - head * packets] = make_uint4(0, 0, 0, 0);
    }
  }
};

}  // namespace gatedelta::cuda::portable
