// Convolution and rule of one token per sequence. The convolution overlaps with the loads of the state.
#pragma once

#include "cuda/conv1d/window.cuh"
#include "cuda/decode/one_token.cuh"
#include "cuda/device/pdl.cuh"
#include "cuda/layer/config.hpp"

namespace gatedelta::cuda {

// One channel of a token: the window of its inputs and its filter, as loaded.
template <class Input>
struct LayerChannel {
  uint2 weights;
  uint16_t x, window[kLayerTaps - 1];
  Scalar bias;

  GD_DEVICE void load_token(const LayerRuleParams& p, uint32_t n, uint32_t channel) {
    x = *reinterpret_cast<const uint16_t*>(p.x.at(n, 0, 0) + channel * sizeof(Input));
    weights = static_cast<const uint2*>(p.weight)[channel];
    if (p.bias) bias.load(p.bias.at(0, 0, channel), p.bias.dtype);
  }
  GD_DEVICE void load_window(const ConvStates& states, int64_t slot, uint32_t channel) {
    const auto* const from =
        static_cast<const uint16_t*>(states.data) + states.offset(slot, channel, states.columns - (kLayerTaps - 1));
#pragma unroll
    for (int i = 0; i + 1 < kLayerTaps; ++i) window[i] = from[i * states.column_stride];
  }
  GD_DEVICE void clear_window() {
#pragma unroll
    for (int i = 0; i + 1 < kLayerTaps; ++i) window[i] = 0;
  }
  GD_DEVICE uint16_t output(const LayerRuleParams& p) const {
    const auto wide = [](uint32_t bits) {
      if (kDtype<Input> == GD_BF16) return __uint_as_float(bits << 16);
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    };
    Filter filter;
    filter.weight[0] = wide(weights.x & 0xffff);
    filter.weight[1] = wide(weights.x >> 16);
    filter.weight[2] = wide(weights.y & 0xffff);
    filter.weight[3] = wide(weights.y >> 16);
    filter.bias = p.bias ? bias.value(p.bias.dtype) : 0.0f;
    const float y = conv_activate(filter.sum(wide(window[0]), wide(window[1]), wide(window[2]), wide(x)), p.silu);
    return static_cast<uint16_t>(narrow_bits(y, kDtype<Input>));
  }
};

// The convolved channels a CTA needs.
struct alignas(16) LayerChannels {
  uint16_t q[kDecodeDim], k[kDecodeDim], v[kLayerColumns];
};

template <class State, class Input>
__global__ void __launch_bounds__(LayerTile<State>::kThreads)
    layer_rule_kernel(const __grid_constant__ LayerRuleParams p) {
  using Config = LayerTile<State>;
  constexpr gd_dtype kState = kDtype<State>, kInput = kDtype<Input>;
  constexpr int kVector = Config::kVector, kPerLane = Config::kPerLane, kColumns = Config::kColumns;
  __shared__ LayerChannels convolved;
  allow_next_kernel();
  const uint32_t n = grid_sequence(), head = blockIdx.x / Config::kParts, thread = threadIdx.x;
  const IndexRequest read = request_first(p.rule, n);
  if (n >= p.rule.sequences) return;
  const GridPlace place = grid_place<Config::kParts>(p.rule);
  Tile<Config> tile(thread, place.part);

  const uint32_t q_channel = place.key_head * kDecodeDim + thread, k_channel = p.key_channels + q_channel;
  const uint32_t v_channel = 2 * p.key_channels + head * kDecodeDim + place.part * kLayerColumns + thread;
  const bool has_v = thread < kLayerColumns;
  LayerChannel<Input> q_in, k_in, v_in;
  q_in.load_token(p, n, q_channel);
  k_in.load_token(p, n, k_channel);
  if (has_v) v_in.load_token(p, n, v_channel);

  if (const int32_t slot = read.slot(p.rule.initial); slot >= 0) {
    tile.load(p.rule.initial.at(slot, head), kState, kDecodeDim, kDecodeDim, true);
    q_in.load_window(p.states, slot, q_channel);
    k_in.load_window(p.states, slot, k_channel);
    if (has_v) v_in.load_window(p.states, slot, v_channel);
  } else {
    if (is_padding(p.rule, n)) {
      const float zeros[kColumns] = {};
      if (tile.share == 0) store_token_output(p.rule.o, place, tile.column, zeros);
      return;
    }
    tile.clear();
    q_in.clear_window();
    k_in.clear_window();
    v_in.clear_window();
  }
  RawGates gates;
  request_gates(gates, p.rule, n, 0, head);
  const IndexRequest write = request_slot(p.rule.final, n);

  convolved.q[thread] = q_in.output(p);
  convolved.k[thread] = k_in.output(p);
  if (has_v) convolved.v[thread] = v_in.output(p);
  __syncthreads();

  float k[kPerLane], q[kPerLane], v[kColumns];
#pragma unroll
  for (int i = 0; i < kPerLane / kVector; ++i) {
    const int first = (i * kLanesPerColumn + tile.share) * kVector;
    Raw<kVector> raw;
    raw.load(reinterpret_cast<const char*>(convolved.k + first), kInput, true);
    raw.widen(k + i * kVector, kInput);
    raw.load(reinterpret_cast<const char*>(convolved.q + first), kInput, true);
    raw.widen(q + i * kVector, kInput);
  }
  Raw<kColumns> raw_v;
  raw_v.load(reinterpret_cast<const char*>(convolved.v + tile.column % kLayerColumns), kInput, true);
  raw_v.widen(v, kInput);

  KeySums sums(k, q, p.rule.l2norm);
  sums.sum_lanes<GD_STATE_VK>(p.rule.l2norm);
  const TokenFactors factors(gates.alpha(p.rule), gates.strength(p.rule), sums, p.rule.l2norm, p.rule.scale);
  tile.widen(kState);
  advance<GD_STATE_VK>(tile.s, k, q, factors, v);
  if (tile.share == 0) store_token_output(p.rule.o, place, tile.column, v);
  const int32_t slot = write.slot(p.rule.final);
  if (slot >= 0) tile.template store<true>(p.rule.final.at(slot, head), kState, kDecodeDim, kDecodeDim, true);
}

}  // namespace gatedelta::cuda
