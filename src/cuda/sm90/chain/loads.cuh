// Loads, by two warps of the scores warpgroup: TMA for whole chunks, cp.async with zero fill for ragged ones.
#pragma once

#include "cuda/sm90/chain/chain.cuh"

namespace gatedelta::cuda::sm90 {

// Issues loads until `wanted` chunks are in flight, the current one included.
template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::load_ahead(Loader& loader, const LoadStage& current, int wanted) const {
#pragma unroll 1
  while (loader.loads_in_flight < wanted && loader.cursor.chunk.tokens_left > 0) {
    if (is_merge(loader.cursor.chunk) && is_first_tile(loader.cursor)) {
      // NOTE: do not block while earlier loads are in flight: other roles of this CTA may produce what is waited for.
      bool ready = are_transitions_ready(loader);
      if (!ready && loader.loads_in_flight > 0) break;
      while (!ready) ready = are_transitions_ready(loader);
    }
    LoadStage load = current;
    for (int i = 0; i < loader.loads_in_flight; ++i) load.advance();
    load_keys_queries(loader, load);
    ++loader.loads_in_flight;
  }
  --loader.loads_in_flight;
}

// Each lane polls one boundary: most become ready at about the same time, and one poll with its fence takes longer than
// a merge step.
template <class Elem, Pass kPass>
GD_DEVICE bool Chain<Elem, kPass>::are_transitions_ready(Loader& loader) const {
  const int boundary = loader.cursor.prepared / kBoundaryTiles;
  if (boundary < loader.ready_boundaries) return true;
  const int asked = boundary + lane, last = p.limits.boundaries - 1;
  const uint32_t ready = __ballot_sync(
      ~0u, load_acquire(p.boundary_ready + (asked < last ? asked : last)) >= kTransitionReady && asked <= last);
  fence_async_global();
  loader.ready_boundaries = boundary + __popc(ready & ~(ready + 1));  // up to the first that is not ready
  return boundary < loader.ready_boundaries;
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::load_keys_queries(Loader& loader, const LoadStage& load) const {
  const Cursor& cursor = loader.cursor;
  constexpr int kBytes = kPass == Pass::kForward ? kPreparedBytes : kBackwardPreparedBytes;
  const Chunk& chunk = cursor.chunk;
  const int stage = load.stage;
  const uint32_t full = load_pipe.full(stage);
  load_pipe.wait_empty(load);
  if (!chunk.is_whole()) {
    load_ragged_chunk(query_tile(stage, 0), true, 2 * kTileBytes, p.q, chunk, cursor.key_head, 0);
    load_ragged_chunk(key_tile(stage, 0), true, 2 * kTileBytes, p.k, chunk, cursor.key_head, 0);
    arrive_after_copies(full);
  }
  if (elect_one()) {
    if (is_merge(chunk)) {
      barrier_arrive_expect(full, kStateTileBytes);
      barrier_arrive(full, 31);
      bulk_load(query_tile(stage, 0), p.boundaries + int64_t{cursor.prepared} * kStateTileBytes, kStateTileBytes, full);
    } else {
      if (chunk.is_whole()) {
        barrier_arrive_expect(full, (is_state_only(chunk) ? 2 : 4) * kTileBytes + kBytes);
        barrier_arrive(full, 31);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          if (!is_state_only(chunk))
            tma_load(query_tile(stage, half), &p.q_map, full, cursor.key_head, chunk.token, chunk.batch, half);
          tma_load(key_tile(stage, half), &p.k_map, full, cursor.key_head, chunk.token, chunk.batch, half);
        }
      } else {
        barrier_arrive_expect(full, kBytes);
      }
      bulk_load(inverse_at(stage), p.prepared + int64_t{cursor.prepared} * p.prepared_bytes, kBytes, full);
    }
  }
  advance_loader(loader);
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::load_values(const Chunk& chunk, const LoadStage& load) const {
  const int stage = load.stage;
  const uint32_t full = value_pipe.full(stage);
  barrier_wait(value_pipe.empty(stage), load.phase ^ 1);
  if (!chunk.is_whole()) {
    const bool whole = chunk.half == kWhole;
    load_ragged_chunk(value_tile(stage, 0), whole, kTileBytes, p.v, chunk, chunk.head, whole ? 0 : chunk.half * 64);
    arrive_after_copies(full);
  }
  if (elect_one()) {
    if (chunk.is_whole()) {
      barrier_arrive_expect(full, chunk.half == kWhole ? 2 * kTileBytes : is_merge(chunk) ? 0 : kTileBytes);
      barrier_arrive(full, 31);
#pragma unroll
      for (int math_wg = 0; math_wg < kMathWarpgroups; ++math_wg)
        if (const int half = half_of(chunk, math_wg); half >= 0)
          tma_load(value_tile(stage, math_wg), &p.v_map, full, chunk.head, chunk.token, chunk.batch, half);
    } else {
      barrier_arrive(full);
    }
  }
}

template <class Elem, Pass kPass>
GD_DEVICE void Chain<Elem, kPass>::load_ragged_chunk(uint32_t tiles, bool two, int tile_stride, const TokenRows& src,
                                                     const Chunk& chunk, int head, int column) const {
  const auto* from = static_cast<const uint16_t*>(src.data) + src.offset(chunk.batch, chunk.token, head) + column;
  if constexpr (kPass == Pass::kForward) {
    // As load_ragged_rows, with addresses that only advance: a short sequence waits for this.
    const int thread = opaque_lane();
    const int packet = thread % 8, tile = two ? thread / 8 % 2 : 0, step = two ? 2 : 4, tokens = chunk.tokens();
    const uint32_t to = tiles + tile * tile_stride + packet * 16;
    from += tile * 64 + packet * 8;
    int row = two ? thread / 16 : thread / 8;
    const uint16_t* at = from + row * src.token_stride;
#pragma unroll 2
    for (; row < kChunkTokens; row += step, at += step * src.token_stride)
      copy_async16(swizzled(to + row * kTileRowBytes), row < tokens ? at : from, row < tokens);
  } else {
    load_ragged_rows(tiles, two, tile_stride, from, src.token_stride, chunk.tokens(), lane, 32);
  }
}

}  // namespace gatedelta::cuda::sm90
