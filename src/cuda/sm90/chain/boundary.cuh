// Segment boundaries: where a piece of a sequence gets its first state from and what becomes of its last one.
// A boundary in the workspace holds the transition M of the segment before it, in two bf16 or fp16 tiles (hi and lo),
// and that segment's local state S_loc, which the merge overwrites with the state itself.
#pragma once

#include "cuda/sm90/chain/chain.cuh"

namespace gatedelta::cuda::sm90 {

// This thread's floats of a boundary's state, in accumulator order: loads and stores are coalesced.
template <class Elem, Pass kPass>
GD_DEVICE float4* Chain<Elem, kPass>::boundary_state(int boundary, int half) const {
  return reinterpret_cast<float4*>(p.boundaries + int64_t{boundary} * kBoundaryBytes + (2 + half) * kStateTileBytes) +
         tid;
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::load_boundary(float (&s)[64], int boundary, int half) const {
  const float4* from = boundary_state(boundary, half);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 x = __ldcg(from + i * 128);
    s[4 * i] = x.x;
    s[4 * i + 1] = x.y;
    s[4 * i + 2] = x.z;
    s[4 * i + 3] = x.w;
  }
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::store_boundary(const float (&s)[64], int boundary, int half) const {
  float4* to = boundary_state(boundary, half);
#pragma unroll
  for (int i = 0; i < 16; ++i) to[i * 128] = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::wait_until(const int* counter, int value) const {
  while (load_acquire(counter) < value) pause();
  __syncwarp();
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::begin_state(float (&s)[64], const WorkItem& item, int half) const {
  if (item.from >= 0) {
    wait_until(p.boundary_ready + item.from, kStateReady);
    return load_boundary(s, item.from, half);
  }
  if constexpr (kPass == Pass::kStates)
    if (item.from == kFromSaved) return load_state(s, p.checkpoints, item.seq_head, item.head, half);
  const int64_t slot = kPass == Pass::kForward ? item.initial_slot : p.initial.slot(item.sequence);
  load_state(s, p.initial, item.from == kFromInitial ? slot : -1, item.head, half);
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::begin_identity(float (&s)[64], int half) const {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const Place at = accumulator_place(lane, i);
    s[i] = at.column == half * 64 + warp * 16 + at.row ? 1.0f : 0.0f;
  }
}

// final_slot() is where a final state goes.
template <class Elem, Pass kPass>
template <class Slot>
GD_DEVICE void Chain<Elem, kPass>::end_state(const float (&s)[64], int math_wg, const WorkItem& item, int half,
                                             const Slot& final_slot) const {
  if (item.to >= 0) {
    store_boundary(s, item.to, half);
    named_barrier_sync(kItemDone + math_wg, kWarpgroupThreads);
    if (tid == 0) add_release(p.boundary_ready + item.to, item.kind == kTransition ? 1 : kStateReady / 2);
    return;
  }
  if (item.to == kToFinal) {
    if (item.readers > 0) wait_until(p.initial_read + item.seq_head, item.readers);
    return store_state(p.final, final_slot(), item.head, half, s);
  }
  if (item.from != kFromInitial || !p.final) return;
  named_barrier_sync(kItemDone + math_wg, kWarpgroupThreads);
  if (tid == 0) add_release(p.initial_read + item.seq_head, 1);
}

// Stores M^T as a wgmma operand of the merge, hi tile then lo tile, through the stage that V would have used.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::store_transition(const State& state, int math_wg, int half, int stage,
                                                    int boundary) const {
#pragma unroll
  for (int lo = 0; lo < 2; ++lo) {
#pragma unroll
    for (int rows = 0; rows < 2; ++rows) {
      float x[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float y = state.s[32 * rows + i];
        x[i] = lo == 0 ? y : y - high_part(y);
      }
      stage_output(x, value_tile(stage, math_wg) + state.value_offset);
      fence_async_shared();
      named_barrier_sync(kItemDone + math_wg, kWarpgroupThreads);
      if (warp == 0 && elect_one()) {
        bulk_store(
            p.boundaries + (int64_t{boundary} * kBoundaryTiles + lo) * kStateTileBytes + (half * 2 + rows) * kTileBytes,
            value_tile(stage, math_wg), kTileBytes);
        store_commit();
        store_wait<0>();
        if (lo == 1 && rows == 1) {
          fence_async_global();
          add_release(p.boundary_ready + boundary, 1);
        }
      }
      named_barrier_sync(kItemDone + math_wg, kWarpgroupThreads);
    }
  }
}

// S <- M S + S_loc for one segment after the other and half of the value columns. M and S are split into hi and lo, and
// only lo x lo is left out: nearly fp32's accuracy. Math warpgroup 0 computes, math warpgroup 1 publishes.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::merge(State& state, int math_wg, const WorkItem& item, LoadStage& load,
                                         int& storing_stage) const {
  if (math_wg != 0) return publish_merged(state, item, load, storing_stage);
  const int half = item.key_head;
  wait_until(p.boundary_ready + item.from, kStateReady);
  load_boundary(state.s, item.from, half);
  int boundary = item.to;
#pragma unroll 1
  for (int left = item.tokens; left > 0; left -= kMergeTiles * kChunkTokens, ++boundary) {
    uint32_t lo[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float a = state.s[2 * i], b = state.s[2 * i + 1];
      state.packed[i] = pack<Elem>(a, b);
      const float2 hi = unpack<Elem>(state.packed[i]);
      lo[i] = pack<Elem>(a - hi.x, b - hi.y);
    }
    // M_hi S_hi + M_hi S_lo
    load_pipe.wait_full(load);
    mma_fence();
    multiply_state<128>(state.s, state, query_tile(load.stage, 0));
    add_products(state.s, lo, query_tile(load.stage, 0));
    mma_wait<0>();
    release_merge_tile(load, storing_stage);
    // + M_lo S_hi
    load_pipe.wait_full(load);
    mma_fence();
    add_products(state.s, state.packed, query_tile(load.stage, 0));
    mma_wait<0>();
    release_merge_tile(load, storing_stage);
    // + S_loc
    load_pipe.wait_full(load);
    add_boundary(state.s, query_tile(load.stage, 0));
    release_merge_tile(load, storing_stage);
    store_boundary(state.s, boundary, half);
    warp_arrive(merge_pipe.full(state.merge_steps % kMergeStages));
    ++state.merge_steps;
  }
}

// Publishes each merged state, so that the release fence, which takes as long as a step, overlaps the next step. Warps
// 0 and 1 alternate; warp 2 frees the load stages for the whole warpgroup and stays at most one step ahead of them.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::publish_merged(State& state, const WorkItem& item, LoadStage& load,
                                                  int& storing_stage) const {
  release_value_stage(storing_stage);
  storing_stage = -1;
  int boundary = item.to;
#pragma unroll 1
  for (int left = item.tokens; left > 0; left -= kMergeTiles * kChunkTokens, ++boundary, ++state.merge_steps) {
    const int stage = state.merge_steps % kMergeStages;
    if (warp == kMergeStages && state.merge_steps > 0)
      barrier_wait(merge_pipe.empty(stage ^ 1), (state.merge_steps - 1) / kMergeStages & 1);
#pragma unroll 1
    for (int tile = 0; tile < kMergeTiles; ++tile, load.advance())
      if (warp == kMergeStages) release_merge_tile_for_all(load);
    if (warp != stage) continue;
    barrier_wait(merge_pipe.full(stage), state.merge_steps / kMergeStages & 1);
    if (!elect_one()) continue;
    barrier_arrive(merge_pipe.empty(stage));
    add_release(p.boundary_ready + boundary, 2);
  }
  named_barrier_sync(kItemDone + 1, kWarpgroupThreads);  // all tiles have been consumed before the next item
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::release_merge_tile_for_all(const LoadStage& load) const {
  load_pipe.wait_full(load);
  barrier_wait(value_pipe.full(load.stage), load.phase);
  if (!elect_one()) return;
  barrier_arrive(value_pipe.empty(load.stage), 4 * kArrivals);
  barrier_arrive(load_pipe.empty(load.stage), 4 * kArrivals);
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::release_merge_tile(LoadStage& load, int& storing_stage) const {
  skip_values(load, storing_stage);
  warp_arrive(load_pipe.empty(load.stage));
  load.advance();
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::add_boundary(float (&s)[64], uint32_t from) const {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 x = load_shared4(from + (i * 128 + tid) * 16);
    s[4 * i] += x.x;
    s[4 * i + 1] += x.y;
    s[4 * i + 2] += x.z;
    s[4 * i + 3] += x.w;
  }
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::add_products(float (&to)[64], const uint32_t (&a)[32], uint32_t tile) {
#pragma unroll
  for (int step = 0; step < 8; ++step)
    Wgmma<Elem, 128>::template rs<false>(
        to, a + 4 * step, tile_descriptor(tile, step / 4 * 2 * kStepTile + step % 4 * kStepContiguous), true);
  mma_commit();
}

template <class Elem, Pass kPass>
template <int kBegin, int kEnd>
GD_DEVICE void Chain<Elem, kPass>::store_packed(const uint32_t (&packed)[32], uint8_t* snapshots, int prepared,
                                                int half) const {
  auto* to =
      reinterpret_cast<uint32_t*>(snapshots + int64_t{prepared} * kStateTileBytes) + (half * 4 + warp) * 1024 + lane;
#pragma unroll
  for (int i = kBegin; i < kEnd; ++i) to[i * 32] = packed[i];
}

}  // namespace gatedelta::cuda::sm90
