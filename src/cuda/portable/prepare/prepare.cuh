// Prepare: everything of a chunk that does not depend on the state. One CTA of four warps per (chunk, key head). Per
// step of 32 tokens and value head, with K K^T and Q K^T shared by the heads of a group:
//   T = (I + stril(beta K K^T))^-1      N = stril(Gamma o T)      P = s Gamma o tril(Q K^T)
// N and P are rounded to 16 bits, T is not rounded before it meets Gamma. The T of 32 tokens is a block on the diagonal
// of the T of 64. With l2norm K and Q are normalised here, in the products; the tensors stay as they are, and the
// vectors of config.hpp have r^k and r^q in them.
//
// The inverse, by one warp: four 8 x 8 substitutions in fp32 (a lane has a block and a column), joined to 16 x 16 and
// then to 32 x 32 by products of fp16 operands.
#pragma once

#include <type_traits>

#include "cuda/portable/prepare/gates.cuh"
#include "cuda/portable/prepare/lengths.cuh"

namespace gatedelta::cuda::portable {

// K K^T as an operand is scaled by 1/8: keys that are not normalised may be long, and so may D beta.
constexpr float kProductScale = 1.0f / 8;

GD_DEVICE uint32_t pack_half(float first, float second) { return pack<Fp16>(first, second); }
GD_DEVICE void load_four(float* to, uint32_t from) {
  const float4 x = load_shared4(from);
  to[0] = x.x;
  to[1] = x.y;
  to[2] = x.z;
  to[3] = x.w;
}

template <class Config>
struct Prepare {
  using Elem = typename Config::Elem;
  using Smem = typename Config::Smem;
  static constexpr int kThreads = Config::kThreads;
  static_assert(kThreads == kRanksPerCta && kThreads / 32 == 2 * kStepsPerChunk);

  GD_DEVICE static void run(const Params& p, int cta, int tid) {
    if (cta < p.prepare_helpers) return look_at_lengths(p, cta, tid);
    const uint32_t smem = shared_base();
    const int lane = tid & 31, warp = shuffle(tid >> 5, 0);
    const int block = cta - p.prepare_helpers, chunk_index = block / p.key_heads,
              key_head = block - chunk_index * p.key_heads;
    const auto [n, batch, token, rows] = locate_chunk(p.sequences, chunk_index, lane);
    if (rows <= 0) return;
    if (p.is_padding(n)) {
      if (p.o) zero_rows(p, batch, token, rows, key_head, tid);
      return;
    }
    if (p.is_prepared) return;

    const int first_head = key_head * p.group;
    load_rows(p.k, p.k_stride, p.key_dim, batch, token, rows, key_head, smem + Smem::kK, tid);
    load_rows(p.q, p.q_stride, p.key_dim, batch, token, rows, key_head, smem + Smem::kQ, tid);
    copy_commit();
    load_gates(p, batch, token, rows, first_head, Smem::heads(p.group), smem + Smem::kGates, tid, kThreads);
    copy_wait<0>();
    sync_cta();
    find_norms(p, chunk_index, key_head, smem, tid);
    // Two warps have a step, one of them K K^T and the other one Q K^T; then each has every other value head.
    const int step = warp >> 1, turn = warp & 1;
    float c[2][4][4];
    multiply(c, smem, step, turn == 1, lane);
    if (turn == 0) compare_keys(c, rows - step * kStep, smem + Smem::kCarry + step * 4, lane);
    sync_cta();  // K and Q are not read any more, and the norms are there
    if (p.l2norm) normalise(c, smem, step, turn == 1, lane);
    if (turn == 1) {
      store_scores(c, smem + Smem::kScores + step * Smem::kScoreBytes, lane);
    } else {
      store_products(c, smem, step, lane);
    }
    sync_cta();
    Operands operands;
    load_operands(operands, smem, step, lane);
#pragma unroll 1
    for (int first = 0; first < p.group; first += Config::kHeadsAtOnce) {
      const int heads = min(p.group - first, Config::kHeadsAtOnce);
      if (first > 0) {
        sync_cta();  // the gates are not read any more
        load_gates(p, batch, token, rows, first_head + first, heads, smem + Smem::kGates, tid, kThreads);
        sync_cta();
      }
      if (step * kStep >= rows) continue;
      const uint32_t gates = smem + Smem::kGates + step * kStep * 4;
      if (p.decays)
#pragma unroll 1
        for (int v = turn; v < heads; v += 2)
          store_decay(p.step_decays(chunk_index, first_head + first + v) + step, gates + v * kChunkTokens * 4,
                      heads * kChunkTokens * 4, smem, step, lane);
#pragma unroll 1
      for (int v = turn; v < heads; v += 2)
        solve(p, operands, chunk_index, first_head + first + v,
              smem + Smem::kGates + (v * kChunkTokens + step * kStep) * 4, heads * kChunkTokens * 4, smem, step, warp,
              lane);
    }
  }

  GD_DEVICE static void zero_rows(const Params& p, int batch, int token, int rows, int key_head, int tid) {
    const int packets = p.value_dim / kPacketColumns, per_token = p.group * packets;
    for (int i = tid; i < rows * per_token; i += kThreads) {
      const int row = i / per_token, packet = i - row * per_token, v = packet / packets;
      auto* const to = static_cast<uint16_t*>(p.o.data) + p.o.offset(batch, token + row, key_head * p.group + v);
      reinterpret_cast<uint4*>(to)[packet - v * packets] = make_uint4(0, 0, 0, 0);
    }
  }

  // Rows past the end and columns past K are zero.
  GD_DEVICE static void load_rows(const TokenRows& rows_of, uint32_t stride, int key_dim, int batch, int token,
                                  int rows, int head, uint32_t to, int tid) {
    const int first = tid / 8, packet = tid % 8;
    const auto* const from = static_cast<const uint16_t*>(rows_of.data) + rows_of.offset(batch, token, head);
#pragma unroll
    for (int i = 0; i < kChunkTokens * 8 / kThreads; ++i) {
      const int row = first + i * (kThreads / 8);
#pragma unroll
      for (int tile = 0; tile < Config::kTiles; ++tile) {
        const int column = tile * kTileColumns + packet * kPacketColumns;
        const bool valid = row < rows && column < key_dim;
        copy_async(to + tile * Config::kTileBytes + tile_offset(row, packet),
                   from + (valid ? row * stride + column : 0), valid);
      }
    }
  }

  // r^k and r^q: a thread has a row.
  GD_DEVICE static void find_norms(const Params& p, int chunk_index, int key_head, uint32_t smem, int tid) {
    static_assert(kThreads == 2 * kChunkTokens);
    const int row = tid % kChunkTokens, is_query = tid / kChunkTokens;
    float norm = 1;
    if (p.l2norm) {
      float sum = 0;
      const uint32_t at = smem + (is_query ? Smem::kQ : Smem::kK);
#pragma unroll 1
      for (int tile = 0; tile < Config::kTiles; ++tile)
#pragma unroll
        for (int packet = 0; packet < 8; ++packet) {
          const uint4 x = load_shared_words(at + tile * Config::kTileBytes + tile_offset(row, packet));
          const float2 a = unpack<Elem>(x.x), b = unpack<Elem>(x.y), c = unpack<Elem>(x.z), d = unpack<Elem>(x.w);
          sum += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y + c.x * c.x + c.y * c.y + d.x * d.x + d.y * d.y;
        }
      norm = rsqrtf(sum + 1e-6f);
    }
    store_shared(smem + Smem::kNorms + tid * 4, norm);
    if (p.norms) p.chunk_norms(chunk_index, key_head)[tid] = norm;
  }
  GD_DEVICE static uint32_t norms_of(uint32_t smem, bool is_query, int step) {
    return smem + Smem::kNorms + ((is_query ? kChunkTokens : 0) + step * kStep) * 4;
  }

  // The 32 x 32 block on the diagonal of K K^T without its lower left 16 x 16, or of Q K^T without its upper right. K
  // K^T is symmetric: the block above its diagonal is, as it lies in registers, an operand of the inverse.
  GD_DEVICE static void multiply(float (&c)[2][4][4], uint32_t smem, int step, bool is_query, int lane) {
    const uint32_t rows = step * kStep * kTileRowBytes;
    const uint32_t left = smem + (is_query ? Smem::kQ : Smem::kK) + rows, right = smem + Smem::kK + rows;
    const uint32_t a_at = tile_offset(lane & 15, lane >> 4);
    const uint32_t b_at = tile_offset((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
    for (int kk = 0; kk < Config::kKeys / 16; ++kk) {
      const uint32_t tile = kk / 4 * Config::kTileBytes, packets = kk % 4 * 2 * kPacketBytes;
      uint32_t a[2][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_matrices(a[i], left + tile + (a_at ^ packets) + i * 16 * kTileRowBytes);
        load_matrices(b[i], right + tile + (b_at ^ packets) + i * 16 * kTileRowBytes);
      }
      const auto product = [&](int i, int j) {
        const uint32_t b0 = b[j / 2][j % 2 * 2], b1 = b[j / 2][j % 2 * 2 + 1];
        if (kk == 0) {
          mma_first<Elem>(c[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b0, b1);
        } else {
          mma<Elem>(c[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b0, b1);
        }
      };
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        product(0, j);
        product(1, 2 + j);
        if (is_query) {
          product(1, j);
        } else {
          product(0, 2 + j);
        }
      }
    }
  }

  // Whether rounding errors are carried on (chain.cuh), from K K^T: if some keys resemble each other, and if none is
  // more than twice as long as another. The error of a short key is none of a long one.
  GD_DEVICE static void compare_keys(const float (&c)[2][4][4], int rows, uint32_t to, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float least = 3e38f, most = 0, alike = 0;  // squares of lengths; the largest product of two keys
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 2 * i; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 16 * i + e / 2 * 8 + g, column = 8 * j + 2 * t + e % 2;
          if (row != column) {
            alike = fmaxf(alike, c[i][j][e]);
          } else if (row < rows) {
            least = fminf(least, c[i][j][e]);
            most = fmaxf(most, c[i][j][e]);
          }
        }
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      least = fminf(least, shuffle_xor(least, by));
      most = fmaxf(most, shuffle_xor(most, by));
      alike = fmaxf(alike, shuffle_xor(alike, by));
    }
    if (lane == 0) store_shared(to, most <= 4 * least && alike > 0.75f * least ? 1.0f : 0.0f);
  }

  GD_DEVICE static void normalise(float (&c)[2][4][4], uint32_t smem, int step, bool is_query, int lane) {
    const uint32_t rows = norms_of(smem, is_query, step), columns = norms_of(smem, false, step);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * i + (lane >> 2);
      const float upper = load_shared(rows + row * 4), lower = load_shared(rows + (row + 8) * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 by = load_shared2(columns + (8 * j + 2 * (lane & 3)) * 4);
        c[i][j][0] *= upper * by.x;
        c[i][j][1] *= upper * by.y;
        c[i][j][2] *= lower * by.x;
        c[i][j][3] *= lower * by.y;
      }
    }
  }

  GD_DEVICE static void store_scores(const float (&c)[2][4][4], uint32_t to, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2 + 2 * i; ++j)
        store_shared4(to + ((2 * i + j) * 32 + lane) * kPacketBytes, c[i][j][0], c[i][j][1], c[i][j][2], c[i][j][3]);
  }
  GD_DEVICE static void store_products(const float (&c)[2][4][4], uint32_t smem, int step, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const auto two = [&](int i, int j, int h) {
      return pack_half(kProductScale * c[i][j][2 * h], kProductScale * c[i][j][2 * h + 1]);
    };
    const uint32_t operands = smem + Smem::kOperands + step * Smem::kOperandBytes + lane * kPacketBytes;
    store_shared_words(operands, two(0, 2, 0), two(0, 3, 0), two(0, 2, 1), two(0, 3, 1));
    store_shared_words(operands + 32 * kPacketBytes, two(0, 0, 1), two(1, 2, 1), 0, 0);
    // Row g of an 8 x 8 block has g numbers below the diagonal.
    const uint32_t below = smem + Smem::kTriangles + step * 4 * Smem::kBelowBytes + (g * (g - 1) / 2 + 2 * t) * 4;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float(&x)[4] = c[r / 2][r];
      if (2 * t < g) store_shared(below + r * Smem::kBelowBytes, x[r % 2 * 2]);
      if (2 * t + 1 < g) store_shared(below + r * Smem::kBelowBytes + 4, x[r % 2 * 2 + 1]);
      if (t == g / 2)
        store_shared(smem + Smem::kLengths + (step * kStep + 8 * r + g) * 4, g % 2 ? x[r % 2 * 2 + 1] : x[r % 2 * 2]);
    }
  }

  // What all heads of the group use, by lane.
  struct Operands {
    float qk[3][8];     // Q K^T: blocks (0,0), (1,0), (1,1); rows g, g + 8 of the first eight columns, then the others
    uint32_t above[4];  // K K^T: the upper right 16 x 16, the right operand of two products
    uint32_t below[2];  // the lower left 8 x 8 of either 16 x 16 block on the diagonal
  };
  GD_DEVICE static void load_operands(Operands& o, uint32_t smem, int step, int lane) {
    const uint32_t scores = smem + Smem::kScores + step * Smem::kScoreBytes + lane * kPacketBytes;
#pragma unroll
    for (int i = 0; i < 6; ++i) load_four(o.qk[i / 2] + i % 2 * 4, scores + i * 32 * kPacketBytes);
    const uint32_t operands = smem + Smem::kOperands + step * Smem::kOperandBytes + lane * kPacketBytes;
    const uint4 a = load_shared_words(operands), b = load_shared_words(operands + 32 * kPacketBytes);
    o.above[0] = a.x;
    o.above[1] = a.y;
    o.above[2] = a.z;
    o.above[3] = a.w;
    o.below[0] = b.x;
    o.below[1] = b.y;
  }

  // Of one step and value head, by one warp. `gates` are those of the step; betas are to_betas bytes further.
  GD_DEVICE static void solve(const Params& p, const Operands& in, int chunk_index, int head, uint32_t gates,
                              int to_betas, uint32_t smem, int step, int warp, int lane) {
    uint8_t* const out = p.prepared_step(chunk_index, head, step);
    const uint32_t betas = gates + to_betas, logs = smem + Smem::kLogs + warp * Prepared::kVectorBytes;
    const float beta = load_shared(betas + lane * 4);
    store_vectors(p, out, load_shared(gates + lane * 4), beta, logs, smem, step, lane);
    if (p.vectors) {
      float* const to = p.chunk_vectors(chunk_index, head) + step * kStep + lane;
      to[kLogGamma * kChunkTokens] = load_shared(logs + lane * 4);
      to[kChunkBeta * kChunkTokens] = beta;
    }
    const uint32_t inverses = smem + Smem::kInverses + warp * 2 * Smem::kInverseBytes + lane * kPacketBytes;
    substitute(smem + Smem::kTriangles + step * 4 * Smem::kBelowBytes, betas, beta, inverses, lane);
    sync_warp();
    uint32_t columns[4], rows[4], scaled[4];  // D of the four blocks: (2t.., g), (g, 2t..); D beta / scale (g, 2t..)
    load_matrices(columns, inverses);
    load_matrices_transposed(rows, inverses);
    load_matrices_transposed(scaled, inverses + Smem::kInverseBytes);

    // 16 x 16: the lower left 8 x 8 is -D22 beta K K^T_21 D11.
    float z[2][4];
    uint32_t corner[2];
#pragma unroll
    for (int I = 0; I < 2; ++I) {
      float y[4];
      mma_first<Fp16>(y, columns[2 * I], 0, 0, 0, in.below[I], 0);  // (K K^T_21 D11)^T
      mma_first<Fp16>(z[I], scaled[2 * I + 1], 0, 0, 0, pack_half(y[0], y[1]), 0);
      corner[I] = pack_half(-z[I][0], -z[I][1]);
    }
    // 32 x 32: the lower left 16 x 16 is -(D2 beta) K K^T_21 D1.
    const float2 by = load_shared2(betas + (16 + 2 * (lane & 3)) * 4);
    const uint32_t scaled_corner = pack_half(-z[1][0] * (by.x / kProductScale), -z[1][1] * (by.y / kProductScale));
    float m[2][4], T[2][4];
    mma_first<Fp16>(m[0], scaled[2], scaled_corner, 0, scaled[3], in.above[0], in.above[1]);
    mma_first<Fp16>(m[1], scaled[2], scaled_corner, 0, scaled[3], in.above[2], in.above[3]);
    const uint32_t a[4] = {pack_half(-m[0][0], -m[0][1]), pack_half(-m[0][2], -m[0][3]), pack_half(-m[1][0], -m[1][1]),
                           pack_half(-m[1][2], -m[1][3])};
    mma_first<Fp16>(T[0], a[0], a[1], a[2], a[3], columns[0], transposed(corner[0]));
    mma_first<Fp16>(T[1], a[0], a[1], a[2], a[3], 0, columns[1]);
    store_triangles(p, in, out, T, rows, corner, logs, lane);
    // fp16 has three bits more. NOTE(ptxas): unless `opaque`, what follows from the lane spills on sm_90.
    if constexpr (std::is_same_v<Elem, Bf16>)
      if (load_shared(smem + Smem::kCarry + step * 4) > 0) gather_errors(out, T, rows, corner, logs, opaque(lane));
    sync_warp();  // logs and inverses are the next head's
  }

  // A lane has a token.
  GD_DEVICE static void store_vectors(const Params& p, uint8_t* out, float gate, float beta, uint32_t logs,
                                      uint32_t smem, int step, int lane) {
    const float log = warp_inclusive_sum(gate, lane);
    const float end = shuffle(log, 31), gamma = exp2_approx(log);
    const float rk = load_shared(norms_of(smem, false, step) + lane * 4),
                rq = load_shared(norms_of(smem, true, step) + lane * 4);
    store_shared(logs + lane * 4, log);
    auto* const vectors = reinterpret_cast<float*>(out + Prepared::kVector) + lane;
    vectors[kBeta * kStep] = beta;
    vectors[kReadKey * kStep] = beta * gamma * rk;
    vectors[kReadQuery * kStep] = p.scale * gamma * rq;
    vectors[kTail * kStep] = exp2_approx(end - log) * rk;
    if (lane == 0) *reinterpret_cast<float*>(out + Prepared::kEnd) = exp2_approx(end);
    if (lane == 1) *reinterpret_cast<float*>(out + Prepared::kCarry) = load_shared(smem + Smem::kCarry + step * 4);
  }

  // What the step does to older states, for the lengths of warm-ups. A lane has a token.
  // NOTE(ptxas): not a part of solve(), which has no register to spare.
  GD_DEVICE static void store_decay(ChunkDecay* to, uint32_t gates, int to_betas, uint32_t smem, int step, int lane) {
    const float beta = load_shared(gates + to_betas + lane * 4),
                log = warp_inclusive_sum(load_shared(gates + lane * 4), lane);
    const float end = shuffle(log, 31), length = load_shared(smem + Smem::kLengths + (step * kStep + lane) * 4);
    float written = beta * exp2_approx(end - log);
    float growth = log2f(fmaxf(fabsf(1.0f - beta * length), 1.0f));
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
      written += shuffle_xor(written, by);
      growth += shuffle_xor(growth, by);
    }
    if (lane == 0) *to = decay_of(end, growth, written);
  }

  // D of the 8 x 8 blocks on the diagonal: lane 8 r + c has column c of block r. Stored by columns, then times beta of
  // the column's token, which is the lane's.
  GD_DEVICE static void substitute(uint32_t triangles, uint32_t betas, float own_beta, uint32_t to, int lane) {
    const int r = lane >> 3, column = lane & 7;
    float products[28], beta[8], x[8];
#pragma unroll
    for (int i = 0; i < 7; ++i) load_four(products + 4 * i, triangles + r * Smem::kBelowBytes + 16 * i);
    load_four(beta, betas + 32 * r);
    load_four(beta + 4, betas + 32 * r + 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < i; ++j) sum += products[i * (i - 1) / 2 + j] * x[j];
      x[i] = (i == column ? 1.0f : 0.0f) - beta[i] * sum;
    }
    store_shared_words(to, pack_half(x[0], x[1]), pack_half(x[2], x[3]), pack_half(x[4], x[5]), pack_half(x[6], x[7]));
    const float by = own_beta / kProductScale;
    store_shared_words(to + Smem::kInverseBytes, pack_half(by * x[0], by * x[1]), pack_half(by * x[2], by * x[3]),
                       pack_half(by * x[4], by * x[5]), pack_half(by * x[6], by * x[7]));
  }

  // Gamma, and out. Above the diagonal e^{b_i - b_j} may be infinite: zeros there by selection.
  GD_DEVICE static void store_triangles(const Params& p, const Operands& in, uint8_t* out, const float (&T)[2][4],
                                        const uint32_t (&rows)[4], const uint32_t (&corner)[2], uint32_t logs,
                                        int lane) {
    const int g = lane >> 2, t = lane & 3;
    const auto put = [&](int block, int part, float2 n, float2 s) {
      auto* const to = reinterpret_cast<uint32_t*>(out + block * kBlockBytes + part * kMatrixBytes) + lane;
      to[Prepared::kN / 4] = pack<Elem>(n.x, n.y);
      to[Prepared::kP / 4] = pack<Elem>(s.x, s.y);
    };
    const auto decay = [](float row, float2 columns) {
      return make_float2(exp2_approx(row - columns.x), exp2_approx(row - columns.y));
    };
    const auto times = [](float x, float y, float2 by) { return make_float2(x * by.x, y * by.y); };
    const auto where = [](bool first, bool second, float2 x) {
      return make_float2(first ? x.x : 0.0f, second ? x.y : 0.0f);
    };
#pragma unroll
    for (int I = 0; I < 2; ++I) {
      const float upper = load_shared(logs + (16 * I + g) * 4), lower = load_shared(logs + (16 * I + 8 + g) * 4);
#pragma unroll
      for (int J = 0; J <= I; ++J) {
        const float2 left = load_shared2(logs + (16 * J + 2 * t) * 4),
                     right = load_shared2(logs + (16 * J + 8 + 2 * t) * 4);
        const float(&qk)[8] = in.qk[I + J];
        const auto scores = [&](int i, float2 by) { return times(p.scale * qk[i], p.scale * qk[i + 1], by); };
        const float2 d0 = decay(upper, left), d2 = decay(lower, left), d3 = decay(lower, right);
        if (J < I) {
          const float2 d1 = decay(upper, right);
          put(1, 0, times(T[0][0], T[0][1], d0), scores(0, d0));
          put(1, 1, times(T[1][0], T[1][1], d1), scores(4, d1));
          put(1, 2, times(T[0][2], T[0][3], d2), scores(2, d2));
          put(1, 3, times(T[1][2], T[1][3], d3), scores(6, d3));
        } else {
          const float2 first = unpack<Fp16>(rows[2 * I]), last = unpack<Fp16>(rows[2 * I + 1]),
                       middle = unpack<Fp16>(corner[I]);
          const bool below = 2 * t < g, next_below = 2 * t + 1 < g, on = 2 * t <= g;
          put(2 * I, 0, where(below, next_below, times(first.x, first.y, d0)), where(on, below, scores(0, d0)));
          put(2 * I, 1, make_float2(0, 0), make_float2(0, 0));
          put(2 * I, 2, times(middle.x, middle.y, d2), scores(2, d2));
          put(2 * I, 3, where(below, next_below, times(last.x, last.y, d3)), where(on, below, scores(6, d3)));
        }
      }
    }
  }

  // For steps whose errors are carried on: every eighth row of N gets the rounding errors of the seven rows before, and
  // what is not stored there goes to the next such row; each times what is left of it by then. A row gets no more than
  // a share of its beta, because dbeta is divided by that.
  GD_DEVICE static void gather_errors(uint8_t* out, const float (&T)[2][4], const uint32_t (&rows)[4],
                                      const uint32_t (&corner)[2], uint32_t logs, int lane) {
    constexpr int kBlocks = kStep / 8;
    constexpr float kShare = 1.0f / 128;
    const int g = lane >> 2, t = lane & 3;
    const bool is_last = g == 7;
#pragma unroll
    for (int J = 0; J < kBlocks; ++J) {
      const float2 columns = load_shared2(logs + (8 * J + 2 * t) * 4);
      float2 error = make_float2(0, 0);  // of the last row
#pragma unroll
      for (int I = J; I < kBlocks; ++I) {
        const float row = load_shared(logs + (8 * I + g) * 4), last = load_shared(logs + (8 * I + 7) * 4);
        float2 n = I / 2 > J / 2 ? make_float2(T[J][I % 2 * 2], T[J][I % 2 * 2 + 1])
                                 : unpack<Fp16>(I == J ? rows[I] : corner[I / 2]);
        n.x = I > J || 2 * t < g ? n.x * exp2_approx(row - columns.x) : 0;
        n.y = I > J || 2 * t + 1 < g ? n.y * exp2_approx(row - columns.y) : 0;
        const float2 rounded = unpack<Elem>(pack<Elem>(n.x, n.y));
        const float left = exp2_approx(last - row);
        float x = is_last ? 0 : left * (n.x - rounded.x), y = is_last ? 0 : left * (n.y - rounded.y);
#pragma unroll
        for (int by = 4; by < 32; by *= 2) {
          x += shuffle_xor(x, by);
          y += shuffle_xor(y, by);
        }
        x += n.x + error.x;
        y += n.y + error.y;
        const float most = kShare * reinterpret_cast<const float*>(out + Prepared::kVector)[kBeta * kStep + 8 * I + 7];
        const uint32_t both =
            pack<Elem>(fminf(fmaxf(x, n.x - most), n.x + most), fminf(fmaxf(y, n.y - most), n.y + most));
        const int at = Prepared::kN + (I / 2 + J / 2) * kBlockBytes + (I % 2 * 2 + J % 2) * kMatrixBytes;
        if (is_last) reinterpret_cast<uint32_t*>(out + at)[lane] = both;
        if (I == kBlocks - 1) continue;
        const float on = exp2_approx(load_shared(logs + (8 * I + 15) * 4) - last);
        const float2 stored = unpack<Elem>(both);
        error = make_float2(on * (x - stored.x), on * (y - stored.y));
      }
    }
  }
};

}  // namespace gatedelta::cuda::portable
