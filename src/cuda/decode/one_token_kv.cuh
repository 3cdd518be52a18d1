// `one_token_kv`: one token per sequence, many states [K, V]. A row of K is contiguous in memory, so the lanes of a
// warp lie along V: 16 of them read neighbouring columns, whole lines, and the four warps of a CTA share the rows of K.
// The CTA adds their partial sums in shared memory, in the order in which `generic` adds the eight shares of a column.
#pragma once

#include "cuda/decode/one_token.cuh"

namespace gatedelta::cuda {

template <class Config>
struct PartialSums {
  alignas(16) float x_k[Config::kWarps][Config::kCtaColumns], x_q[Config::kWarps][Config::kCtaColumns];
  KeySums keys[Config::kWarps];
};

template <class Config, class State, class Input>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    one_token_kv_kernel(const __grid_constant__ OneTokenParams p) {
  constexpr gd_dtype kState = kDtype<State>;
  constexpr int kPerLane = Config::kPerLane, kColumns = Config::kColumns, kVector = Config::kVector;
  static_assert(Config::kWarps == 4 && Config::kLanesAlong == 16);
  __shared__ PartialSums<Config> shared;
  const uint32_t n = grid_sequence(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const IndexRequest read = request_first(p, n);
  if (n >= p.sequences) return;
  const GridPlace place = grid_place<Config::kParts>(p);
  const uint32_t share = warp * 2 + lane / 16, at = lane % 16 * kColumns,
                 column = place.part * Config::kCtaColumns + at;
  // Number i of K in a lane is row (i / 4 * 8 + share) * 4 + i % 4.
  const auto offset = [](int i) { return (i / kVector * kLanesPerColumn * kVector + i % kVector) * kDecodeDim; };
  const uint32_t first = share * kVector * kDecodeDim + column;

  Raw<kColumns> raw[kPerLane];
  if (const int32_t slot = read.slot(p.initial); slot >= 0) {
    const char* const from = element(p.initial.at(slot, place.head), kState, first);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) raw[i].load(element(from, kState, offset(i)), kState, true);
  } else {
    if (is_padding(p, n)) {
      const float zeros[kColumns] = {};
      if (share == 0) store_token_output(p.o, place, column, zeros);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) raw[i].clear();
  }
  RawToken<Config, Input> token;
  token.load(p, place, share, column);
  const IndexRequest write = request_slot(p.final, n);

  float k[kPerLane], q[kPerLane], v[kColumns], s[kColumns][kPerLane], x_k[kColumns], x_q[kColumns];
  token.widen(k, q, v);
  KeySums keys(k, q, p.l2norm);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    float x[kColumns];
    raw[i].widen(x, kState);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) s[c][i] = x[c];
  }
  sum_states(s, k, q, x_k, x_q);
  const auto sum_pair = [](float x) { return __fadd_rn(x, __shfl_xor_sync(~0u, x, 16)); };
  keys.kk = sum_pair(keys.kk), keys.qq = sum_pair(keys.qq), keys.kq = sum_pair(keys.kq);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    x_k[c] = sum_pair(x_k[c]), x_q[c] = sum_pair(x_q[c]);
    if (lane < 16) shared.x_k[warp][at + c] = x_k[c], shared.x_q[warp][at + c] = x_q[c];
  }
  if (lane == 0) shared.keys[warp] = keys;
  const float alpha = token.gates.alpha(p), beta = token.gates.strength(p);
  __syncthreads();
  const auto sum_warps = [](const auto& of) { return __fadd_rn(__fadd_rn(of(0), of(1)), __fadd_rn(of(2), of(3))); };
  keys.kk = sum_warps([&](int w) { return shared.keys[w].kk; });
  keys.qq = sum_warps([&](int w) { return shared.keys[w].qq; });
  keys.kq = sum_warps([&](int w) { return shared.keys[w].kq; });
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    x_k[c] = sum_warps([&](int w) { return shared.x_k[w][at + c]; });
    x_q[c] = sum_warps([&](int w) { return shared.x_q[w][at + c]; });
  }
  update_states(s, k, TokenFactors(alpha, beta, keys, p.l2norm, p.scale), x_k, x_q, v);
  if (share == 0) store_token_output(p.o, place, column, v);
  const int32_t slot = write.slot(p.final);
  if (slot < 0) return;
  const char* const to = element(p.final.at(slot, place.head), kState, first);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    float x[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) x[c] = s[c][i];
    store_numbers<kColumns>(const_cast<char*>(element(to, kState, offset(i))), kState, x, true);
  }
}

}  // namespace gatedelta::cuda
