// Prepare's results for a step and value head: vectors, decay, N and P; and zeroed rows of padding.
#pragma once

#include "cuda/portable/prepare/prepare.cuh"

namespace gatedelta::cuda::portable {

// Zeros for tokens of no sequence, and of padding.
template <class Config>
GD_DEVICE void Prepare<Config>::zero_rows(const Params& p, int batch, int token, int rows, int key_head, int tid) {
  const int packets = p.value_dim / kPacketColumns, per_token = p.group * packets;
  for (int i = tid; i < rows * per_token; i += kThreads) {
    const int row = i / per_token, packet = i - row * per_token, v = packet / packets;
    auto* const to = static_cast<uint16_t*>(p.o.data) + p.o.offset(batch, token + row, key_head * p.group + v);
    reinterpret_cast<uint4*>(to)[packet - v * packets] = make_uint4(0, 0, 0, 0);
  }
}

// A lane has a token.
template <class Config>
GD_DEVICE void Prepare<Config>::store_vectors(const Params& p, uint8_t* out, float gate, float beta, uint32_t logs,
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
  if (lane == 1)
    *reinterpret_cast<float*>(out + Prepared::kErrorFeedback) = load_shared(smem + Smem::kErrorFeedback + step * 4);
}

// The step's effect on older states, for the lengths of warm-ups. A lane has a token. NOTE(ptxas): not a part of
// solve(), which has no register to spare.
template <class Config>
GD_DEVICE void Prepare<Config>::store_decay(ChunkDecay* to, uint32_t gates, int to_betas, uint32_t smem, int step,
                                            int lane) {
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

// Multiplies T and Q K^T by Gamma and stores them. Above the diagonal e^{b_i - b_j} may be infinite: zeros by
// selection.
template <class Config>
GD_DEVICE void Prepare<Config>::store_triangles(const Params& p, const Operands& in, uint8_t* out,
                                                const float (&T)[2][4], const uint32_t (&rows)[4],
                                                const uint32_t (&corner)[2], uint32_t logs, int lane) {
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

// Error feedback of N: every eighth row adds the rounding errors of the seven rows before it, each decayed to that row;
// the rest goes to the next such row. A row adds at most a share of its beta, because dbeta is divided by beta.
template <class Config>
GD_DEVICE void Prepare<Config>::gather_errors(uint8_t* out, const float (&T)[2][4], const uint32_t (&rows)[4],
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

}  // namespace gatedelta::cuda::portable
