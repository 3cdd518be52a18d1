// Merges the segments of a sequence: S <- M S + S_loc from boundary to boundary, in fp32 (segments.cuh).
#pragma once

#include "cuda/device/numbers.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/portable/instances.hpp"
#include "cuda/portable/params.hpp"

namespace gatedelta::cuda::portable {

// A CTA has eight value columns of a head of a sequence: S in shared memory, rows of M^T in stages. A quarter of the
// threads multiplies a quarter of a stage's rows; a thread has 4 x 4 numbers of the product, so that it uses each
// number it loads four times. The quarters' sums are added through shared memory.
template <class Config>
struct Merge {
  using Smem = typename Config::Smem;
  static constexpr int kKeys = Config::kKeys, kBlocks = kKeys / Config::kDepth;

  const Params& p;
  const uint32_t smem = shared_base();
  const int tid, row = tid / Config::kColumns * 4, column = tid % Config::kColumns;  // of the new state: four rows
  int n, head, first_column, first_segment, segments;
  bool is_mirrored;  // merges gradients: the second half of the CTAs
  const Segment* records;
  float* boundary_states;
  const float* transitions;

  GD_DEVICE Merge(const Params& params, int cta, int thread) : p(params), tid(thread) {
    const int parts = p.value_dim / Config::kColumns, items = p.sequences.count * p.value_heads;
    is_mirrored = cta >= items * parts;
    records = is_mirrored ? p.gradient_segments : p.segments;
    boundary_states = is_mirrored ? p.gradient_boundary_states : p.boundary_states;
    transitions = is_mirrored ? p.gradient_transitions : p.transitions;
    const int item = cta / parts % items;
    n = item / p.value_heads;
    head = item - n * p.value_heads;
    first_column = cta % parts * Config::kColumns;
    first_segment = p.segment_ranges[n].first;
    segments = p.segment_ranges[n].count;
  }
  // Index of (segment, head), with segments in the order of their chain.
  GD_DEVICE int64_t work_item_of(int segment) const {
    return int64_t{first_segment + (is_mirrored ? segments - 1 - segment : segment)} * p.value_heads + head;
  }
  GD_DEVICE float* boundary_state(int segment, int k, int c) const {
    return boundary_states + work_item_of(segment) * p.state_numbers() + k * p.key_state_stride +
           (first_column + c) * p.value_state_stride;
  }
  GD_DEVICE uint32_t state_at(int k, int c) const { return smem + Smem::kState + (k * Config::kColumns + c) * 4; }

  GD_DEVICE void run() {
    if (segments < 3 || !any_at_boundary()) return;
    // Records are prefetched two steps ahead.
    int here = begins_with(1), next = begins_with(2), after = begins_with(3);
    bool is_loaded = false;  // S is in shared memory, and loads of M's first blocks are in flight
    int block = 0;           // of all steps
#pragma unroll 1
    for (int i = 1; i + 1 < segments; ++i) {
      const int later = begins_with(i + 3);
      const bool merges = here == Segment::kFromBoundary && next == Segment::kFromBoundary;
      const bool goes_on = after == Segment::kFromBoundary;
      if (merges) {
        if (!is_loaded) load_state(i);
        if (!is_loaded) load_blocks(i, block);
        multiply(i, block, goes_on);
        block += kBlocks;
      }
      is_loaded = merges && goes_on;
      here = next;
      next = after;
      after = later;
    }
  }
  // The segment's warm-up; 0 past the last segment.
  GD_DEVICE int begins_with(int segment) const {
    return segment < segments ? records[work_item_of(segment)].warmup : 0;
  }

  // Most heads fade: one pass over all records instead of one after the other.
  GD_DEVICE bool any_at_boundary() const {
    int count = 0;
#pragma unroll 1
    for (int i = 1 + (tid & 31); i - (tid & 31) < segments; i += 32)
      count += count_lanes(begins_with(i) == Segment::kFromBoundary);
    return count > 0;
  }

  GD_DEVICE void load_state(int segment) {
    sync_cta();  // the last one is not read any more
    for (int i = tid; i < kKeys * Config::kColumns; i += Config::kThreads) {
      const int k = i / Config::kColumns, c = i % Config::kColumns;
      store_shared(state_at(k, c), k < p.key_dim ? *boundary_state(segment, k, c) : 0.0f);
    }
  }
  GD_DEVICE void load_blocks(int segment, int block) {
#pragma unroll 1
    for (int b = 0; b < Config::kStages - 1; ++b) load_block(segment, b, block + b);
  }
  // Loads rows of M^T. Rows and columns past K are zero.
  GD_DEVICE void load_block(int segment, int b, int block) const {
    constexpr int kPackets = kKeys / 4, kRows = Config::kThreads / kPackets;  // of a row; at once
    const int r = tid / kPackets, c = tid % kPackets * 4, j = b * Config::kDepth + r;
    const float* const from = transitions + work_item_of(segment) * p.key_dim * p.key_dim + j * p.key_dim + c;
    const uint32_t to = smem + Smem::kTransitions + block % Config::kStages * Smem::kStageBytes + (r * kKeys + c) * 4;
    static_assert(Config::kDepth % kRows == 0);
#pragma unroll
    for (int i = 0; i < Config::kDepth; i += kRows)
      copy_async(to + i * kKeys * 4, from + i * p.key_dim, j + i < p.key_dim && c < p.key_dim);
    copy_commit();
  }

  // From the boundary state before a segment to that after it.
  GD_DEVICE void multiply(int segment, int block, bool goes_on) {
    constexpr int kQuads = kKeys / 4, kLanes = 16;  // rows of a warp are 4 x 16, columns two times four
    const int slice = tid / (2 * kQuads), place = tid % (2 * kQuads);
    const int quad = place / (2 * kLanes) * kLanes + place % kLanes, columns = place / kLanes % 2 * 4;
    float local[4], sum[4][4] = {};  // [column][row]
#pragma unroll
    for (int r = 0; r < 4; ++r) local[r] = row < p.key_dim ? *boundary_state(segment + 1, row + r, column) : 0.0f;
#pragma unroll 1
    for (int b = 0; b < kBlocks; ++b) {
      copy_wait<Config::kStages - 2>();
      sync_cta();  // the block is there, and the one before is not read any more
      const int ahead = b + Config::kStages - 1;
      if (ahead < kBlocks) {
        load_block(segment, ahead, block + ahead);
      } else if (goes_on) {
        load_block(segment + 1, ahead - kBlocks, block + ahead);
      } else {
        copy_commit();
      }
      constexpr int kMine = Config::kDepth / Config::kSlices;
      const uint32_t transition = smem + Smem::kTransitions + (block + b) % Config::kStages * Smem::kStageBytes +
                                  (slice * kMine * kKeys + quad * 4) * 4;
      const uint32_t state = state_at(b * Config::kDepth + slice * kMine, columns);
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        const float4 m = load_shared4(transition + j * kKeys * 4), s = load_shared4(state + j * Config::kColumns * 4);
        add_product(sum[0], m, s.x);
        add_product(sum[1], m, s.y);
        add_product(sum[2], m, s.z);
        add_product(sum[3], m, s.w);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
      store_shared4(sum_at(slice, columns + c, quad * 4), sum[c][0], sum[c][1], sum[c][2], sum[c][3]);
    sync_cta();  // all sums are there, and S is not read any more
    float x[4] = {local[0], local[1], local[2], local[3]};
#pragma unroll
    for (int i = 0; i < Config::kSlices; ++i) add_product(x, load_shared4(sum_at(i, column, row)), 1);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      store_shared(state_at(row + r, column), x[r]);
      if (row < p.key_dim) *boundary_state(segment + 1, row + r, column) = x[r];
    }
  }
  GD_DEVICE static void add_product(float (&sum)[4], const float4& m, float by) {
    sum[0] = fmaf(m.x, by, sum[0]);
    sum[1] = fmaf(m.y, by, sum[1]);
    sum[2] = fmaf(m.z, by, sum[2]);
    sum[3] = fmaf(m.w, by, sum[3]);
  }
  GD_DEVICE uint32_t sum_at(int slice, int c, int k) const {
    return smem + Smem::kSums + slice * Smem::kSumBytes + c * Smem::kColumnBytes + k * 4;
  }
};

}  // namespace gatedelta::cuda::portable
