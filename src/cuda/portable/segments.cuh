// What runs between prepare and a cut forward. A segment is affine in the state it begins with, S_out = M S_in + S_loc.
// Where the state before a boundary has faded, the segment behind it begins some chunks earlier with no state;
// otherwise with the state at the boundary (its entry), which comes from transitions and folds:
//   segments       what each segment begins with, by the decays that prepare has left
//   transitions    S_loc and M of the segments before such boundaries. Where S_in is the initial state, or has faded,
//                  S_loc comes from there and is the entry
//   folds          S <- M S + S_loc for the other boundaries, one after the other, in fp32
#pragma once

#include "cuda/portable/chain.cuh"
#include "cuda/portable/lengths.cuh"

namespace gatedelta::cuda::portable {

// ---- segments ------------------------------------------------------------------------------------------------------

struct FindSegments {
  // CTAs from `slots` on copy the initial states, one each, of calls whose last segments overwrite them.
  GD_DEVICE static void run(const Params& p, int cta, int slots, int tid) {
    if (cta >= slots) return copy_initial(p, cta - slots, tid);
    const int L = p.segment_chunks, n = locate_piece(p.sequences, L * kChunkTokens, cta, tid & 31).sequence;
    const bool is_sequence = n < p.sequences.count && !p.is_padding(n);
    const int i = is_sequence ? cta - static_cast<int>(p.slots().first_slot(p.sequences, n)) : 0;
    const int chunks = is_sequence ? static_cast<int>(ChunkedSequences::chunks(p.sequences[n].length)) : 0;
    const bool is_segment = is_sequence && (i == 0 || i * L < chunks);
    for (int head = tid; head < p.value_heads; head += kSegmentThreads)
      p.segments[int64_t{cta} * p.value_heads + head] =
          is_segment ? segment_of(p, n, head, i, chunks) : Segment{-1, 0, 0, 0};
  }

  // The boundary before segment i: chunks of a warm-up that does not reach the beginning, or kFromEntry.
  GD_DEVICE static int warmup_of(const Params& p, const ChunkDecay* decays, int i) {
    const int chunk = i * p.segment_chunks;
    if (chunk == 0) return 0;
    const int warmup = warmup_length(chunk, warmup_limit(p.segment_chunks), [&](int c) {
      const ChunkDecay* const steps = decays + c * kStepsPerChunk;
      return joined(steps[0], steps[1]);
    });
    return warmup > 0 && warmup < chunk ? warmup : Segment::kFromEntry;
  }
  GD_DEVICE static Segment segment_of(const Params& p, int n, int head, int i, int chunks) {
    const int L = p.segment_chunks;
    const ChunkDecay* const decays = p.step_decays(p.sequences.first_chunk_index(n), head);
    return {n, i * L, min((i + 1) * L, chunks) - i * L, warmup_of(p, decays, i)};
  }

  GD_DEVICE static void copy_initial(const Params& p, int item, int tid) {
    const int n = item / p.value_heads, head = item - n * p.value_heads;
    const int64_t slot = p.initial.slot(n);
    if (slot < 0) return;
    with_stored(p.initial.dtype, [&](auto stored) {
      using Word = typename decltype(stored)::Word;
      const auto* const from = static_cast<const Word*>(p.initial.data) + p.initial.offset(slot, head);
      auto* const to = static_cast<Word*>(p.initial_copy) + item * p.state_numbers();
      const int numbers = static_cast<int>(p.state_numbers());
#pragma unroll 8
      for (int i = tid; i < numbers; i += kSegmentThreads) to[i] = from[i];
    });
  }
};

// ---- transitions ---------------------------------------------------------------------------------------------------

// The forward kernel without Q and O. Columns from map_column on stand for those of M: a state that begins with the
// identity and has no values.
template <class Config>
struct Transitions : Chain<Config> {
  using Base = Chain<Config>;
  using Base::p;
  using typename Base::Place;

  GD_DEVICE Transitions(const Params& params, int cta, int tid) : Base(params, cta, tid) {}

  GD_DEVICE void run() {
    const Segment& segment = this->segment();
    if (segment.sequence < 0) return;
    const Place at = this->place_in(segment);
    const int64_t end = Base::end_of(segment, at);
    if (end >= at.span.length || (&segment)[p.value_heads].warmup != Segment::kFromEntry) return;
    const bool is_map = at.column >= p.map_column, is_entered = segment.warmup == Segment::kFromEntry;
    const int first_column = at.column - this->warp * Config::kRows;
    if (is_map ? !is_entered || first_column - p.map_column >= p.key_dim : first_column >= p.value_dim) return;
    const int first = segment.chunk - (is_entered ? 0 : segment.warmup);
    this->set_rows(at, first * kStepsPerChunk);
    int rows = static_cast<int>(end) - first * kChunkTokens;
    this->load_first(rows);
    if (is_entered) {
      this->zero_state();
      if (is_map) each_of_map([&](float& x, int i) { x = i % (p.key_dim + 1) == 0 ? 1.0f : 0.0f; });
    } else {
      this->enter(segment, at);
    }
#pragma unroll 1
    for (int stage = 0; rows > 0; stage ^= 1, rows -= kStep) {
      this->begin_step(stage, rows);
      this->advance_state(stage, rows);
    }
    store();
  }

  template <class F>
  GD_DEVICE void each_of_map(const F& f) {
    this->each_number(this->column() - p.map_column, p.key_dim, 1, p.key_dim, f);
  }
  GD_DEVICE void store() {
    const int block = opaque(this->cta) >> p.log_parts, column = this->column();
    if (column < p.map_column) {
      this->store_state(p.entries, GD_F32, (int64_t{block} + p.value_heads) * p.state_numbers(), column);
    } else {
      float* const to = p.maps + int64_t{block} * p.key_dim * p.key_dim;
      each_of_map([&](float& x, int i) { to[i] = x; });
    }
  }
};

// ---- folds ---------------------------------------------------------------------------------------------------------

// A CTA has 16 value columns of a head of a sequence: S in shared memory, rows of M^T in stages. A thread has four rows
// of S by two columns.
template <class Config>
struct Fold {
  using Smem = typename Config::Smem;
  static constexpr int kKeys = Config::kKeys, kBlocks = kKeys / Config::kDepth;

  const Params& p;
  const uint32_t smem = shared_base();
  const int tid, row = tid / 8 * 4, column = tid % 8 * 2;
  int n, head, first_column;
  int64_t first_slot;

  GD_DEVICE Fold(const Params& params, int cta, int thread) : p(params), tid(thread) {
    const int parts = p.value_dim / Config::kColumns, item = cta / parts;
    n = item / p.value_heads;
    head = item - n * p.value_heads;
    first_column = (cta - item * parts) * Config::kColumns;
    first_slot = p.slots().first_slot(p.sequences, n);
  }
  GD_DEVICE int64_t block_of(int segment) const { return (first_slot + segment) * p.value_heads + head; }
  GD_DEVICE bool is_entered(int segment) const { return p.segments[block_of(segment)].warmup == Segment::kFromEntry; }
  GD_DEVICE float* entry(int segment, int k, int c) const {
    return p.entries + block_of(segment) * p.state_numbers() + k * p.key_state_stride +
           (first_column + c) * p.value_state_stride;
  }
  GD_DEVICE uint32_t state_at(int k, int c) const { return smem + Smem::kState + (k * Config::kColumns + c) * 4; }

  GD_DEVICE void run() {
    const int segments = static_cast<int>(p.slots().segments(p.sequences[n].length));
    if (p.is_padding(n) || segments < 3 || !any_entered(segments)) return;
    bool here = is_entered(1), next = is_entered(2);
    bool is_loaded = false;  // S is in shared memory, and the first blocks of M are on their way
    int block = 0;           // of all steps
#pragma unroll 1
    for (int i = 1; i + 1 < segments; ++i) {
      const bool after = i + 2 < segments && is_entered(i + 2);
      if (here && next) {
        if (!is_loaded) load_state(i);
        if (!is_loaded) load_blocks(i, block);
        multiply(i, block, after);
        block += kBlocks;
      }
      is_loaded = here && next && after;
      here = next;
      next = after;
    }
  }

  // Most heads fade: they are not to wait for one record after the other.
  GD_DEVICE bool any_entered(int segments) const {
    int count = 0;
#pragma unroll 1
    for (int i = 1 + (tid & 31); i - (tid & 31) < segments; i += 32)
      count += count_lanes(i < segments && is_entered(i));
    return count > 0;
  }

  GD_DEVICE void load_state(int segment) {
    sync_cta();  // the last one is not read any more
    for (int i = tid; i < kKeys * Config::kColumns; i += Config::kThreads) {
      const int k = i / Config::kColumns, c = i % Config::kColumns;
      store_shared(state_at(k, c), k < p.key_dim ? *entry(segment, k, c) : 0.0f);
    }
  }
  GD_DEVICE void load_blocks(int segment, int block) {
#pragma unroll 1
    for (int b = 0; b < Config::kStages - 1; ++b) load_block(segment, b, block + b);
  }
  // Rows of M^T; those past K and numbers past K are zero.
  GD_DEVICE void load_block(int segment, int b, int block) const {
    const float* const from = p.maps + block_of(segment) * p.key_dim * p.key_dim;
    const uint32_t to = smem + Smem::kMaps + block % Config::kStages * Smem::kStageBytes;
    constexpr int kPackets = kKeys / 4;
#pragma unroll 1
    for (int i = tid; i < Config::kDepth * kPackets; i += Config::kThreads) {
      const int r = i / kPackets, c = i % kPackets * 4, j = b * Config::kDepth + r;
      const bool valid = j < p.key_dim && c < p.key_dim;
      copy_async(to + (r * kKeys + c) * 4, from + (valid ? j * p.key_dim + c : 0), valid);
    }
    copy_commit();
  }

  // From the state that enters a segment to the next one's.
  GD_DEVICE void multiply(int segment, int block, bool goes_on) {
    float sum[4][2];
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[r][c] = row < p.key_dim ? *entry(segment + 1, row + r, column + c) : 0.0f;
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
      const uint32_t map = smem + Smem::kMaps + (block + b) % Config::kStages * Smem::kStageBytes + row * 4;
#pragma unroll 8
      for (int j = 0; j < Config::kDepth; ++j) {
        const float4 m = load_shared4(map + j * kKeys * 4);
        const float2 s = load_shared2(state_at(b * Config::kDepth + j, column));
        const float rows[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          sum[r][0] = fmaf(rows[r], s.x, sum[r][0]);
          sum[r][1] = fmaf(rows[r], s.y, sum[r][1]);
        }
      }
    }
    sync_cta();  // S is not read any more
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        store_shared(state_at(row + r, column + c), sum[r][c]);
        if (row < p.key_dim) *entry(segment + 1, row + r, column + c) = sum[r][c];
      }
  }
};

}  // namespace gatedelta::cuda::portable
