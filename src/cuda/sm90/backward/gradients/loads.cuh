// Loads of the gradients kernel, by one warp; and how units of work are published.
#pragma once

#include "cuda/sm90/backward/gradients/gradients.cuh"

namespace gatedelta::cuda::sm90 {

template <class Elem>
GD_DEVICE uint32_t Gradients<Elem>::unit_at(const Cursor& cursor) const {
  return smem + Smem::kUnits + cursor.unit.stage * Smem::kUnitBytes;
}

template <class Elem>
GD_DEVICE typename Gradients<Elem>::Unit Gradients<Elem>::unit(const Cursor& cursor) const {
  const uint4 x = load_shared_words(unit_at(cursor));
  return {static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z), static_cast<int>(x.w),
          static_cast<int>(load_shared_word(unit_at(cursor) + 16))};
}

// Waits for the next unit; false at the end. Its stage stays valid until end_unit.
template <class Elem>
GD_DEVICE bool Gradients<Elem>::begin_unit(const Cursor& cursor) const {
  unit_pipe.wait_full(cursor.unit);
  return __shfl_sync(~0u, static_cast<int>(load_shared_word(unit_at(cursor))), 0) >= 0;
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::end_unit(Cursor& cursor) const {
  warp_arrive(unit_pipe.empty(cursor.unit.stage));
  cursor.next_unit();
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::run_loads() const {
  Cursor cursor;
  const int end =
      min(p.slice.end + p.recompute_chunks - 1, static_cast<int>(p.sequences.workspace_chunks())) * p.key_heads;
#pragma unroll 1
  for (int i = p.slice.begin * p.key_heads + static_cast<int>(blockIdx.x); i < end; i += gridDim.x) {
    const Unit unit = find_unit(i);
    if (unit.tokens <= 0) continue;
    publish(unit, cursor);
#pragma unroll 1
    for (int v = 0; v < p.group; ++v) {
      load_head(unit, unit.key_head * p.group + v, cursor);
      if (v == 0) load_keys_queries(unit, cursor);
      cursor.next_head();
    }
    cursor.next_unit();
  }
  publish({-1, 0, 0, 0, 0}, cursor);
}

template <class Elem>
GD_DEVICE typename Gradients<Elem>::Unit Gradients<Elem>::find_unit(int i) const {
  const int chunk_index = static_cast<int>(static_cast<uint32_t>(i) / static_cast<uint32_t>(p.key_heads));
  const int key_head = i - chunk_index * p.key_heads;
  const ChunkPlace at = locate_chunk(p.sequences, chunk_index, lane);
  int rows = at.sequence < p.sequences.count ? at.rows : 0;
  if (rows <= 0 && p.head_sums)
    for (int v = lane; v < p.group; v += 32)
      p.head_sums[int64_t{chunk_index} * p.value_heads + key_head * p.group + v] = make_float2(0, 0);
  const int piece = chunk_index - at.chunk % p.recompute_chunks;
  if (piece < p.slice.begin || piece >= p.slice.end) rows = 0;
  return {chunk_index, key_head, at.batch, at.token, rows};
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::publish(const Unit& unit, const Cursor& cursor) const {
  unit_pipe.wait_empty(cursor.unit);
  if (elect_one()) {
    store_shared_words(unit_at(cursor), make_uint4(unit.chunk_index, unit.key_head, unit.batch, unit.token));
    store_shared(unit_at(cursor) + 16, __int_as_float(unit.tokens));
    barrier_arrive(unit_pipe.full(cursor.unit.stage));
  }
  __syncwarp();
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::load_ragged_chunk(uint32_t tiles, const TokenRows& from, const Unit& unit,
                                                  int head) const {
  const auto* data = static_cast<const uint16_t*>(from.data) + from.offset(unit.batch, unit.token, head);
  load_ragged_rows(tiles, true, kTileBytes, data, from.token_stride, unit.tokens, lane, 32);
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::load_rows(uint32_t tiles, const CUtensorMap* map, const Unit& unit, int head,
                                          uint32_t full) const {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    tma_load(tiles + half * kTileBytes, map, full, head, unit.token, unit.batch, half);
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::load_head(const Unit& unit, int head, const Cursor& cursor) const {
  const uint32_t full = row_pipe.full(cursor.row.stage);
  const bool whole = unit.tokens == kChunkTokens;
  row_pipe.wait_empty(cursor.row);
  if (!whole) {
    load_ragged_chunk(row_tile(cursor, Smem::kUpdates), p.u, unit, head);
    load_ragged_chunk(row_tile(cursor, Smem::kOutputs), p.d_o, unit, head);
    load_ragged_chunk(row_tile(cursor, Smem::kValues), p.dv, unit, head);
    arrive_after_copies(full);
  }
  const int64_t number = int64_t{unit.chunk_index} * p.value_heads + head;
  if (elect_one()) {
    barrier_arrive_expect(full, kVectorsBytes + (whole ? Smem::kRowCount * 2 * kTileBytes : 0));
    bulk_load(vector(cursor, kLogGamma), p.prepared + number * kBackwardPreparedBytes + kInverseBytes, kVectorsBytes,
              full);
    if (whole) {
      barrier_arrive(full, 31);
      load_rows(row_tile(cursor, Smem::kUpdates), &p.u_map, unit, head, full);
      load_rows(row_tile(cursor, Smem::kOutputs), &p.d_o_map, unit, head, full);
      load_rows(row_tile(cursor, Smem::kValues), &p.dv_map, unit, head, full);
    }
  }
  __syncwarp();
  load_snapshot(grad_pipe, smem + Smem::kGradients, p.gradients + number * kStateTileBytes, cursor);
  load_snapshot(state_pipe, smem + Smem::kStates, p.states + number * kStateTileBytes, cursor);
}

template <class Elem>
template <class OneSlot>
GD_DEVICE void Gradients<Elem>::load_snapshot(const OneSlot& barriers, uint32_t to, const uint8_t* from,
                                              const Cursor& cursor) const {
  barriers.wait_empty(cursor.head);
  if (elect_one()) {
    barrier_arrive_expect(barriers.full(0), kStateTileBytes);
    bulk_load(to, from, kStateTileBytes, barriers.full(0));
  }
  __syncwarp();
}

template <class Elem>
GD_DEVICE void Gradients<Elem>::load_keys_queries(const Unit& unit, const Cursor& cursor) const {
  const uint32_t full = key_pipe.full(0);
  const bool whole = unit.tokens == kChunkTokens;
  key_pipe.wait_empty(cursor.unit_part);
  if (!whole) {
    load_ragged_chunk(smem + Smem::kQueries, p.q, unit, unit.key_head);
    load_ragged_chunk(smem + Smem::kKeys, p.k, unit, unit.key_head);
    arrive_after_copies(full);
  }
  if (elect_one()) {
    barrier_arrive_expect(full, whole ? 4 * kTileBytes : 0);
    if (whole) {
      barrier_arrive(full, 31);
      load_rows(smem + Smem::kQueries, &p.q_map, unit, unit.key_head, full);
      load_rows(smem + Smem::kKeys, &p.k_map, unit, unit.key_head, full);
    }
  }
  __syncwarp();
}

}  // namespace gatedelta::cuda::sm90
