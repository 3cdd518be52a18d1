// Loads (cp.async) of a step's rows, prepare's results and V to shared memory, one step ahead.
#pragma once

#include "cuda/portable/chain/chain.cuh"

namespace gatedelta::cuda::portable {

// Sets this thread's pointers to the rows of `step`, the kernel's first one, and of the first one with outputs.
template <class Config>
GD_DEVICE void Chain<Config>::set_rows(const Place& at, int step, int output_step) {
  const int64_t batch = at.span.batch, begin = at.span.begin + step * kStep;
  const int key_head = at.head / p.group, row = tid >> 3, column = (tid & 7) * kPacketColumns;
  k = static_cast<const uint16_t*>(p.k.data) + p.k.offset(batch, begin, key_head) + row * p.k_stride + column;
  q = static_cast<const uint16_t*>(p.q.data) + p.q.offset(batch, begin, key_head) + row * p.q_stride + column;
  v = static_cast<const uint16_t*>(p.v.data) + p.v.offset(batch, begin, at.head) + at.column +
      lane / kValuePackets * p.v_stride + lane % kValuePackets * kPacketColumns;
  o = static_cast<uint16_t*>(p.o.data) + p.o.offset(batch, at.span.begin + output_step * kStep, at.head) + at.column +
      g * p.o_stride + (t & 1) * 8 + (t >> 1) * 4;
  const uint8_t* const first = p.prepared_step(p.sequences.first_chunk_index(at.sequence) + step / kStepsPerChunk,
                                               at.head, step % kStepsPerChunk);
  prepared = static_cast<uint32_t>((first - p.prepared) / kPacketBytes) + tid;
}

template <class Config>
GD_DEVICE void Chain<Config>::load_shared_rows(int stage, int rows, int step) {
#pragma unroll
  for (int part = 0; part < kSharedParts; ++part) load_shared_part(stage, rows, part);
  next_shared_rows(step);
}

// Rows past the end and columns past K are zero.
template <class Config>
GD_DEVICE void Chain<Config>::load_shared_part(int stage, int rows, int part) {
  static_assert(kRowStep % 8 == 0 && kStep % kRowStep == 0);  // one swizzle for all rows of a thread
  const int first = tid >> 3, i = part / Config::kTiles, tile = part % Config::kTiles;
  const uint32_t to = smem + stage * Config::kTiles * Config::kTileBytes + tile_offset(first, tid & 7) +
                      tile * Config::kTileBytes + i * kRowStep * kTileRowBytes;
  const bool valid = first + i * kRowStep < rows && tile * kTileColumns + (tid & 7) * kPacketColumns < p.key_dim;
  copy_async(to + Smem::kK, k + i * kRowStep * p.k_stride + tile * kTileColumns, valid);
  if constexpr (Pass::kReadsQueries)
    copy_async(to + Smem::kQ, q + i * kRowStep * p.q_stride + tile * kTileColumns, valid);
  constexpr int kPackets = Prepared::kBytes / kPacketBytes;
#pragma unroll
  for (int j = part * kThreads; j < kPackets; j += kSharedParts * kThreads)
    if (tid + j < kPackets)
      copy_async(smem + Smem::kPrepared + stage * Prepared::kBytes + (tid + j) * kPacketBytes,
                 p.prepared + int64_t{prepared + j} * kPacketBytes, rows > 0);
}

// Advances from the rows of a step, 0 or 1 of its chunk, to those of the next one.
template <class Config>
GD_DEVICE void Chain<Config>::next_shared_rows(int step) {
  k += step_stride(p.k_stride);
  q += step_stride(p.q_stride);
  next_prepared(step);
}

// Prepared steps are in the order (chunk, head, step), so there are two distances to the next one of a head.
template <class Config>
GD_DEVICE void Chain<Config>::next_prepared(int step) {
  constexpr int kLast = Pass::kDirection > 0 ? kStepsPerChunk - 1 : 0, kPackets = Prepared::kBytes / kPacketBytes;
  prepared += Pass::kDirection *
              (step != kLast ? kPackets : (p.prepared_heads * kStepsPerChunk - (kStepsPerChunk - 1)) * kPackets);
}

template <class Config>
GD_DEVICE void Chain<Config>::load_own_values(int rows) {
#pragma unroll
  for (int part = 0; part < kValueParts; ++part) load_own_part(rows, part);
  v += step_stride(p.v_stride);
}

template <class Config>
GD_DEVICE void Chain<Config>::load_own_part(int rows, int part) {
  static_assert(kValueRowStep % 8 == 0);
  const int first = lane / kValuePackets, packet = lane % kValuePackets;
  const uint32_t to =
      own_values() + values_offset<kWarpColumns>(first, packet) + part * kValueRowStep * kWarpColumns * 2;
  const bool is_column = packet * kPacketColumns < columns();  // here: behind && an opaque value becomes a branch
  const bool valid = first + part * kValueRowStep < rows && is_column;
  copy_async(to, v + part * kValueRowStep * p.v_stride, valid);
}

// Loads the first step. `rows`: rows of the sequence from there on.
template <class Config>
GD_DEVICE void Chain<Config>::load_first(int rows) {
  if (rows > 0) load_shared_rows(0, rows, 0);
  copy_commit();
  if (rows > 0) load_own_values(rows);
  copy_commit();
}

// Loads the rows of the next step, `step` of its chunk, in parts: called after the products of each sixteen key
// dimensions kk. `rows`: rows of the sequence from there on, perhaps none. Nothing is loaded at kk = 0, so that the
// first products wait for shared memory alone.
template <class Config>
GD_DEVICE void Chain<Config>::load_next(int stage, int rows, int step, int kk) {
  constexpr int kAtOnce = (kSharedParts + kKeyBlocks - 2) / (kKeyBlocks - 1);
#pragma unroll
  for (int part = (kk - 1) * kAtOnce; part < kk * kAtOnce; ++part) {
    if (part < 0 || part >= kSharedParts) continue;
    load_shared_part(stage ^ 1, rows, part);
    if (part < kSharedParts - 1) continue;
    next_shared_rows(step);
    copy_commit();
  }
}

}  // namespace gatedelta::cuda::portable
