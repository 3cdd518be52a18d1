// Kernels after the gradients kernel: dg and dbeta, by a warp for a chunk of a value head, two tokens a lane; dA_log
// and d_dt_bias, by a warp for a value head; and where K is in two parts, the projection of l2norm.
//   dg_t = gamma_L <G, S> + sum_{j<t} kappa_j + sum_{i>=t} rho_i
//   rho_i = q_i . dQ_i + k_i . dK^read_i - (k_i . dK^written_i - kappa_i)
//   dbeta_i = <dV_i, U_i> / beta_i^2, or <Z_i, v_i> + k_i . dK^read_i / beta_i where beta is small
#pragma once

#include "cuda/portable/backward/config.hpp"
#include "cuda/portable/prepare/gates.cuh"
#include "cuda/portable/prepare/lengths.cuh"

namespace gatedelta::cuda::portable {

template <class Elem>
struct GateGradients {
  GD_DEVICE static void run(const BackwardParams& p, int cta, int tid) {
    const int lane = tid & 31, item = cta * (kGateThreads / 32) + shuffle(tid >> 5, 0);
    if (item >= static_cast<int>(p.sequences.workspace_chunks()) * p.value_heads) return;
    const int chunk_index = item / p.value_heads, head = item - chunk_index * p.value_heads;
    const ChunkPlace at = locate_chunk(p.sequences, chunk_index, lane);
    float dA_log = 0, d_dt_bias = 0;
    if (at.rows > 0 && at.sequence == p.sequences.count) {
      for (int i = lane; i < at.rows; i += 32) store(p, at, head, i, 0, 0);
    } else if (at.rows > 0) {
      find(p, at, chunk_index, head, lane, dA_log, d_dt_bias);
    }
    if (!p.head_sums) return;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
      dA_log += shuffle_xor(dA_log, by);
      d_dt_bias += shuffle_xor(d_dt_bias, by);
    }
    if (lane == 0) {
      p.head_sums[2 * item] = dA_log;
      p.head_sums[2 * item + 1] = d_dt_bias;
    }
  }

  GD_DEVICE static void store(const BackwardParams& p, const ChunkPlace& at, int head, int i, float dg, float dbeta) {
    if (p.dg) store_number(p.dg.data, p.dg.dtype, p.dg.offset(at.batch, at.token + i, head), dg);
    if (p.dbeta) store_number(p.dbeta.data, p.dbeta.dtype, p.dbeta.offset(at.batch, at.token + i, head), dbeta);
  }

  GD_DEVICE static void find(const BackwardParams& p, const ChunkPlace& at, int chunk_index, int head, int lane,
                             float& dA_log, float& d_dt_bias) {
    const float* const vectors = p.chunk_vectors(chunk_index, head);
    const bool both = at.rows > kStep, is_there = lane < kStep / 2 || both;
    const float2 beta = is_there ? two(vectors + kChunkBeta * kChunkTokens, lane) : make_float2(0, 0);
    float2 pairs = make_float2(0, 0), reads = pairs, kappa = pairs;
    float product = 0;
    for (int part = 0; part < p.parts; ++part) {
      const float* const dots = p.dots_of(chunk_index, head, part);
      add(pairs, two(dots + Dots::kPairs, lane));
      add(reads, two(dots + Dots::kReads, lane));
      add(kappa, two(dots + Dots::kKappa, lane));
      product += dots[Dots::kProduct];
    }
    const float2 updates = two(p.dots_of(chunk_index, head, 0) + Dots::kUpdates, lane);
    const float end = vectors[kStep - 1] + (both ? vectors[kChunkTokens - 1] : 0.0f);
    const float2 rho = make_float2(pairs.x + pending(beta.x) * reads.x, pairs.y + pending(beta.y) * reads.y);
    const float passing = exp2_approx(end) * product + sum_below(kappa.x + kappa.y, lane),
                second = rho.y + sum_above(rho.x + rho.y, lane);
    const float dg[2] = {passing + (rho.x + second), passing + kappa.x + second};
    const float2 values = finish_unscaled_rows(p, at, head, beta, lane);
    const float betas[2] = {beta.x, beta.y};
    const float dbeta[2] = {stores_unscaled(beta.x) ? values.x + reads.x : updates.x / (beta.x * beta.x),
                            stores_unscaled(beta.y) ? values.y + reads.y : updates.y / (beta.y * beta.y)};
    const bool raw = p.gate == GD_GATE_RAW;
    const float decay = raw ? -expf(load_number(p.A_log.data, p.A_log.dtype, head * p.A_log.stride)) : 0.0f;
    const float bias = raw && p.dt_bias ? load_number(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride) : 0.0f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane + e;
      if (i >= at.rows) continue;
      float gradient = dg[e];
      if (raw) {
        const float x = load_number(p.g.data, p.g.dtype, p.g.offset(at.batch, at.token + i, head)) + bias;
        dA_log += gradient * clamp_gate(decay * softplus_of(x));
        gradient *= decay * softplus_slope(x);
        d_dt_bias += gradient;
      }
      // beta_gradient, written out: called here, it compiles to other code for sm_100 and sm_120.
      float d = dbeta[e];
      if (p.beta_kind == GD_BETA_LOGIT) d *= betas[e] * (1.0f - betas[e]);
      if (p.beta_kind == GD_BETA_LOGIT_DOUBLED) d *= betas[e] * (1.0f - 0.5f * betas[e]);
      store(p, at, head, i, gradient, d);
    }
  }
  GD_DEVICE static float2 two(const float* from, int lane) { return reinterpret_cast<const float2*>(from)[lane]; }
  GD_DEVICE static void add(float2& to, float2 x) {
    to.x += x.x;
    to.y += x.y;
  }
  GD_DEVICE static float pending(float beta) { return stores_unscaled(beta) ? beta : 1.0f; }

  // Sums over the lanes below this one, and above it. Not differences from the sum of all lanes: under strong gates one
  // side is far smaller than the other.
  GD_DEVICE static float sum_below(float x, int lane) {
    float sum = shuffle_up(x, 1);
    if (lane == 0) sum = 0;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float more = shuffle_up(sum, by);
      if (lane >= by) sum += more;
    }
    return sum;
  }
  GD_DEVICE static float sum_above(float x, int lane) {
    float sum = shuffle(x, (lane + 1) & 31);
    if (lane == 31) sum = 0;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float more = shuffle(sum, (lane + by) & 31);
      if (lane + by < 32) sum += more;
    }
    return sum;
  }

  // For rows stored as Z (small beta): returns <Z, v> to the lane that has the row, and stores dV = beta Z.
  GD_DEVICE static float2 finish_unscaled_rows(const BackwardParams& p, const ChunkPlace& at, int head, float2 beta,
                                               int lane) {
    float2 mine = make_float2(0, 0);
    const bool is_mine = lane < p.value_dim / kPacketColumns;
    auto* const z = static_cast<uint16_t*>(p.dv.data) + p.dv.offset(at.batch, at.token, head) + lane * kPacketColumns;
    const auto* const v =
        static_cast<const uint16_t*>(p.v.data) + p.v.offset(at.batch, at.token, head) + lane * kPacketColumns;
#pragma unroll 1
    for (int r = 0; r < at.rows; ++r) {
      const float factor = shuffle(r % 2 ? beta.y : beta.x, r / 2);
      if (!stores_unscaled(factor)) continue;
      float sum = 0;
      if (is_mine) {
        auto* const row = reinterpret_cast<uint4*>(z + r * p.dv.token_stride);
        const uint4 a = *row, b = *reinterpret_cast<const uint4*>(v + r * p.v.token_stride);
        sum = dot(a.x, b.x) + dot(a.y, b.y) + (dot(a.z, b.z) + dot(a.w, b.w));
        *row = make_uint4(scaled(a.x, factor), scaled(a.y, factor), scaled(a.z, factor), scaled(a.w, factor));
      }
#pragma unroll
      for (int by = 16; by > 0; by /= 2) sum += shuffle_xor(sum, by);
      if (lane == r / 2) (r % 2 ? mine.y : mine.x) = sum;
    }
    return mine;
  }
  GD_DEVICE static float dot(uint32_t a, uint32_t b) {
    const float2 x = unpack<Elem>(a), y = unpack<Elem>(b);
    return x.x * y.x + x.y * y.y;
  }
  GD_DEVICE static uint32_t scaled(uint32_t x, float by) {
    const float2 y = unpack<Elem>(x);
    return pack<Elem>(by * y.x, by * y.y);
  }
};

// Adds chunks in a fixed order, in double.
struct HeadSums {
  GD_DEVICE static void run(const BackwardParams& p, int head, int lane) {
    double sums[2] = {0, 0};
    const auto chunks = static_cast<int>(p.sequences.workspace_chunks());
    for (int chunk = lane; chunk < chunks; chunk += 32)
      for (int i = 0; i < 2; ++i) sums[i] += p.head_sums[2 * (int64_t{chunk} * p.value_heads + head) + i];
    for (double& sum : sums)
      for (int by = 16; by > 0; by /= 2) {
        const auto high = static_cast<float>(sum);
        const float low = static_cast<float>(sum - high);
        sum = (double{high} + low) + (double{shuffle_xor(high, by)} + shuffle_xor(low, by));
      }
    if (lane > 0) return;
    if (p.dA_log) store_number(p.dA_log.data, p.dA_log.dtype, head * p.dA_log.stride, static_cast<float>(sums[0]));
    if (p.d_dt_bias)
      store_number(p.d_dt_bias.data, p.d_dt_bias.dtype, head * p.d_dt_bias.stride, static_cast<float>(sums[1]));
  }
};

// dx = r dy - (dy . y) r y for rows in two parts. key_sums has r dy in fp32. A CTA has a chunk of a key head, a warp 16
// rows, a lane eight columns.
template <class Elem>
struct Project {
  GD_DEVICE static void run(const BackwardParams& p, int cta, int tid) {
    const int lane = tid & 31, warp = shuffle(tid >> 5, 0);
    const int chunk_index = cta / p.key_heads, key_head = cta - chunk_index * p.key_heads;
    const ChunkPlace at = locate_chunk(p.sequences, chunk_index, lane);
    if (at.rows <= 0 || at.sequence == p.sequences.count) return;
    const float* const norms = p.chunk_norms(chunk_index, key_head);
    const int column = lane * kPacketColumns;
    constexpr int kRowsOfWarp = kChunkTokens * 32 / kProjectThreads;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const TokenRows &from = which ? p.k : p.q, &to = which ? p.dk : p.dq;
      if (!to) continue;
#pragma unroll 1
      for (int i = 0; i < kRowsOfWarp; ++i) {
        const int r = warp * kRowsOfWarp + i;
        if (r >= at.rows) break;
        const float norm = norms[(which ? 0 : kChunkTokens) + r];
        float x[8], y[8], sum = 0;
        if (column < p.key_dim) {
          const auto* const d =
              reinterpret_cast<const float4*>(p.key_sums_of(chunk_index, key_head, which) + r * p.key_dim + column);
          const float4 first = d[0], second = d[1];
          x[0] = first.x, x[1] = first.y, x[2] = first.z, x[3] = first.w;
          x[4] = second.x, x[5] = second.y, x[6] = second.z, x[7] = second.w;
          const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from.data) +
                                                              from.offset(at.batch, at.token + r, key_head) + column);
          const uint32_t packed[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 both = unpack<Elem>(packed[j]);
            y[2 * j] = both.x, y[2 * j + 1] = both.y;
            sum += x[2 * j] * both.x + x[2 * j + 1] * both.y;
          }
        }
#pragma unroll
        for (int by = 16; by > 0; by /= 2) sum += shuffle_xor(sum, by);
        if (column >= p.key_dim) continue;
        const float along = norm * norm * sum;
        const auto pair = [&](int j) { return pack<Elem>(x[j] - along * y[j], x[j + 1] - along * y[j + 1]); };
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to.data) + to.offset(at.batch, at.token + r, key_head) +
                                  column) = make_uint4(pair(0), pair(2), pair(4), pair(6));
      }
    }
  }
};

}  // namespace gatedelta::cuda::portable
