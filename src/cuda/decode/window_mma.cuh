// The kernel of `window_mma`: several tokens at once, for states [V, K] with K = V = 128 and 16-bit q, k, v.
//
// Grid: as that of `one_token`, with the tokens past the last offset as one more sequence.
#pragma once

#include "cuda/decode/window_mma_loads.cuh"
#include "cuda/decode/window_mma_solve.cuh"
#include "cuda/decode/window_mma_update.cuh"

namespace gatedelta::cuda {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) window_mma_kernel(const __grid_constant__ ManyTokenParams p) {
  constexpr int kTokens = Config::kTokens;
  __shared__ WindowShared<Config> shared;
  const uint32_t n = grid_sequence();
  const IndexRequest read = request_first(p, n);
  if (n >= p.sequences + (p.offsets ? 1 : 0)) return;
  const bool is_rest = n == p.sequences;  // tokens past the last offset: one more sequence, without results
  const GridPlace place = grid_place<Config::kParts>(p);
  WindowMma<Config> window(p, shared, place);
  window.batch = p.offsets ? 0 : n;
  window.begin = p.offsets ? static_cast<uint32_t>(p.offsets[n]) : 0;
  window.length = p.tokens;
  if (p.offsets) window.length = (is_rest ? p.tokens : static_cast<uint32_t>(p.offsets[n + 1])) - window.begin;
  if (is_rest) return window.clear_outputs();
  const auto in_window = [&](uint32_t first) {
    return static_cast<int>(window.length - first < kTokens ? window.length - first : kTokens);
  };
  if constexpr (Config::kKind != WindowKind::any) window.request_tokens(0, in_window(0));
  const int32_t read_slot = read.slot(p.initial);
  if (read_slot >= 0) {
    window.request_state(read_slot);
  } else {
    if (is_padding(p, n)) return window.clear_outputs();
    window.clear_state();
  }
  const IndexRequest write = request_slot(p.final, n);
  const IndexRequest accept(p.accept_lengths, uint64_t{n} * p.accept_lengths.stride, window.length);

  uint32_t accepted = 0;
  char* final = nullptr;
  const auto find_target = [&] {            // late: these indices are not needed earlier
    const int64_t length = accept.value();  // not validated on the device
    const int32_t slot = write.slot(p.final);
    accepted = length < 0 ? 0 : length < window.length ? static_cast<uint32_t>(length) : window.length;
    const bool unchanged = accepted == 0 && slot == read_slot && p.final.data == p.initial.data;
    final = slot < 0 || unchanged ? nullptr : window.row_of(p.final.at(slot, place.head));
  };
  float products[WindowMma<Config>::kTiles][4];
  if constexpr (Config::kKind != WindowKind::any) {
    const int count = static_cast<int>(window.length);
    if (threadIdx.x < 32) window.fill_table(count);
    window.sync_cta();
    window.multiply(products);
    window.solve(products);
    window.store_outputs(products, 0, count);
    find_target();
    window.widen_state();
    if (accepted == 0 && final) window.store_state(final);
    if (accepted > 0 && final) window.template advance_to<false>(static_cast<int>(accepted), final);
  } else {
    bool is_first = true;
#pragma unroll 1
    for (uint32_t first = 0;; first += kTokens) {
      const int count = in_window(first);
      window.request_tokens(first, count);
      if (is_first) {
        find_target();
        window.widen_state();
        if (accepted == 0 && final) window.store_state(final);
        is_first = false;
      }
      if (count == 0) return;
      if (threadIdx.x < 32) window.fill_table(count);
      window.sync_cta();
      window.multiply(products);
      window.solve(products);
      window.store_outputs(products, first, count);
      const int m = accepted > first && accepted <= first + count ? static_cast<int>(accepted - first) : 0;
      const bool is_last = first + count == window.length;
      if (final && m > 0) window.template advance_to<false>(m, final);
      if (!is_last) window.template advance_to<true>(count, nullptr);
      if (is_last) return;
      window.sync_cta();  // the table is no longer read
    }
  }
}

}  // namespace gatedelta::cuda
