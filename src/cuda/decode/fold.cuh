// `fold`: several tokens at once, for states [V, K] with K = V = 128 and 16-bit q, k, v.
//
// Grid: as that of `step`, with the tokens past the last offset as one more sequence.
#pragma once

#include "cuda/decode/fold_tile.cuh"

namespace gatedelta::cuda {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) fold_kernel(const __grid_constant__ FoldParams p) {
  constexpr int kTokens = Config::kTokens;
  __shared__ FoldShared<Config> shared;
  const uint32_t n = near_sequence();
  const IndexRequest read = request_first(p, n);
  if (n >= p.sequences + (p.offsets ? 1 : 0)) return;
  const bool is_rest = n == p.sequences;  // tokens past the last offset: one more sequence, without results
  const StepPlace place = step_place<Config::kParts>(p);
  Fold<Config> fold(p, shared, place);
  fold.batch = p.offsets ? 0 : n;
  fold.begin = p.offsets ? static_cast<uint32_t>(p.offsets[n]) : 0;
  fold.length = p.tokens;
  if (p.offsets) fold.length = (is_rest ? p.tokens : static_cast<uint32_t>(p.offsets[n + 1])) - fold.begin;
  if (is_rest) return fold.clear_outputs();
  const auto in_window = [&](uint32_t first) {
    return static_cast<int>(fold.length - first < kTokens ? fold.length - first : kTokens);
  };
  if constexpr (Config::kKind != FoldKind::any) fold.request_tokens(0, in_window(0));
  const int32_t read_slot = read.slot(p.initial);
  if (read_slot >= 0) {
    fold.request_state(read_slot);
  } else {
    if (is_padding(p, n)) return fold.clear_outputs();
    fold.clear_state();
  }
  const IndexRequest write = request_slot(p.final, n);
  const IndexRequest accept(p.accept_lengths, uint64_t{n} * p.accept_lengths.stride, fold.length);

  uint32_t accepted = 0;
  char* final = nullptr;
  const auto find_target = [&] {            // late: nothing waits for these indices earlier than it must
    const int64_t length = accept.value();  // not validated on the device
    const int32_t slot = write.slot(p.final);
    accepted = length < 0 ? 0 : length < fold.length ? static_cast<uint32_t>(length) : fold.length;
    const bool unchanged = accepted == 0 && slot == read_slot && p.final.data == p.initial.data;
    final = slot < 0 || unchanged ? nullptr : fold.row_of(p.final.at(slot, place.head));
  };
  float products[Fold<Config>::kTiles][4];
  if constexpr (Config::kKind != FoldKind::any) {
    const int count = static_cast<int>(fold.length);
    if (threadIdx.x < 32) fold.fill_table(count);
    fold.meet();
    fold.multiply(products);
    fold.solve(products);
    fold.put_outputs(products, 0, count);
    find_target();
    fold.widen_state();
    if (accepted == 0 && final) fold.store_state(final);
    if (accepted > 0 && final) fold.template advance_to<false>(static_cast<int>(accepted), final);
  } else {
    bool has_words = true;
#pragma unroll 1
    for (uint32_t first = 0;; first += kTokens) {
      const int count = in_window(first);
      fold.request_tokens(first, count);
      if (has_words) {
        find_target();
        fold.widen_state();
        if (accepted == 0 && final) fold.store_state(final);
        has_words = false;
      }
      if (count == 0) return;
      if (threadIdx.x < 32) fold.fill_table(count);
      fold.meet();
      fold.multiply(products);
      fold.solve(products);
      fold.put_outputs(products, first, count);
      const int m = accepted > first && accepted <= first + count ? static_cast<int>(accepted - first) : 0;
      const bool is_last = first + count == fold.length;
      if (final && m > 0) fold.template advance_to<false>(m, final);
      if (!is_last) fold.template advance_to<true>(count, nullptr);
      if (is_last) return;
      fold.meet();  // the table is no longer read
    }
  }
}

}  // namespace gatedelta::cuda
