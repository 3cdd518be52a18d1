// `one_token`: one token per sequence, K = V = 128. The state goes from memory to registers and back, once. Types are
// compile-time constants, and all loads are issued before the first number is used. Loads and stores of the state are
// streaming: no kernel reads it again soon.
//
// Grid: x = value head and part of its columns, y and z = sequence.
#pragma once

#include "cuda/decode/slots.cuh"
#include "cuda/decode/tile.cuh"
#include "cuda/decode/token.cuh"
#include "cuda/device/pdl.cuh"

namespace gatedelta::cuda {

GD_DEVICE uint32_t grid_sequence() { return blockIdx.z * gridDim.y + blockIdx.y; }

struct GridPlace {
  uint32_t sequence, head, key_head, part;
};
template <int kParts>
GD_DEVICE GridPlace grid_place(const OneTokenParams& p) {
  const uint32_t head = blockIdx.x / kParts;
  return {grid_sequence(), head, p.key_heads.of(head), blockIdx.x % kParts};
}

// A token as loaded, before conversion to fp32: this lane's share of k and q, and its columns of v.
template <class Config, class Input>
struct RawToken {
  static constexpr int kVector = Config::kVector, kVectors = Config::kPerLane / kVector, kColumns = Config::kColumns;
  Raw<kVector> k[kVectors], q[kVectors];
  Raw<kColumns> v;
  RawGates gates;

  GD_DEVICE void load(const OneTokenParams& p, const GridPlace& place, int share, int column) {
    const uint32_t first = share * kVector * sizeof(Input);
    const char* const k_row = p.k.at(place.sequence, 0, place.key_head) + first;
    const char* const q_row = p.q.at(place.sequence, 0, place.key_head) + first;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      constexpr uint32_t kStride = kLanesPerColumn * kVector * sizeof(Input);
      k[i].load(k_row + i * kStride, kDtype<Input>, true);
      q[i].load(q_row + i * kStride, kDtype<Input>, true);
    }
    v.load(p.v.at(place.sequence, 0, place.head) + static_cast<uint32_t>(column) * sizeof(Input), kDtype<Input>, true);
    request_gates(gates, p, place.sequence, 0, place.head);
  }
  GD_DEVICE void widen(float (&k_out)[Config::kPerLane], float (&q_out)[Config::kPerLane],
                       float (&v_out)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      k[i].widen(k_out + i * kVector, kDtype<Input>);
      q[i].widen(q_out + i * kVector, kDtype<Input>);
    }
    v.widen(v_out, kDtype<Input>);
  }
};

template <int kColumns>
GD_DEVICE void store_token_output(const Rows32& rows, const GridPlace& place, int column, const float (&o)[kColumns]) {
  if (!rows) return;
  char* const to = rows.at(place.sequence, 0, place.head);
  with_dtype(rows.dtype, [&](gd_dtype type) {
    store_numbers<kColumns>(const_cast<char*>(element(to, type, column)), type, o, true);
  });
}

// kTokenFirst: the token is requested before the slot is known.
template <class Config, class State, class Input, bool kTokenFirst>
__global__ void __launch_bounds__(Config::kThreads) one_token_kernel(const __grid_constant__ OneTokenParams p) {
  constexpr gd_dtype kState = kDtype<State>;
  constexpr int kPerLane = Config::kPerLane, kColumns = Config::kColumns;
  constexpr gd_state_layout kLayout = Config::kLayout;
  allow_next_kernel();
  if (p.pdl != Pdl::kOff) begin_with_pdl(p);
  const uint32_t n = grid_sequence();
  const IndexRequest read = request_first(p, n);
  if (n >= p.sequences) return;
  const GridPlace place = grid_place<Config::kParts>(p);
  Tile<Config> tile(threadIdx.x, place.part);
  RawToken<Config, Input> raw;
  if constexpr (kTokenFirst) raw.load(p, place, tile.share, tile.column);

  if (const int32_t slot = read.slot(p.initial); slot >= 0) {
    tile.template load<true>(p.initial.at(slot, place.head), kState, kDecodeDim, kDecodeDim, true);
  } else {
    if (is_padding(p, n)) {
      const float zeros[kColumns] = {};
      if (tile.share == 0) store_token_output(p.o, place, tile.column, zeros);
      return;
    }
    tile.clear();
  }
  if constexpr (!kTokenFirst) raw.load(p, place, tile.share, tile.column);
  const IndexRequest write = request_slot(p.final, n);

  float k[kPerLane], q[kPerLane], v[kColumns];
  raw.widen(k, q, v);
  KeySums sums(k, q, p.l2norm);
  sums.sum_lanes<kLayout>(p.l2norm);
  const TokenFactors factors(raw.gates.alpha(p), raw.gates.strength(p), sums, p.l2norm, p.scale);
  tile.widen(kState);
  advance<kLayout>(tile.s, k, q, factors, v);
  if (tile.share == 0) store_token_output(p.o, place, tile.column, v);
  const int32_t slot = write.slot(p.final);
  if (slot >= 0) tile.template store<true>(p.final.at(slot, place.head), kState, kDecodeDim, kDecodeDim, true);
}

}  // namespace gatedelta::cuda
