// The chunked forward in form C, one persistent block per SM. Per chunk and value head (docs/math.md):
//   W  = V - gamma o (K S)                S <- gamma_L S + X^T W            O = s gamma o (Q S) + R W
//   X  = delta beta o (T^T K)             R = s Gamma o (tril(Q K^T) T) o beta_j
// S^T stays in the registers of the math warpgroups (64 value rows each) as accumulators, and is repacked in place as
// the register operand of the next products. Warpgroups and their roles:
//   keys    asks the copy engine for K, Q, V, T and the vectors of the chunks ahead (a ragged last chunk it loads
//           itself, zero-filled), and builds X
//   scores  builds R
//   math    the state chain and the output; one or two of them
// They meet only at rings of shared-memory slots with full and empty barriers.
#pragma once

#include "cuda/forward/prepare.cuh"

namespace gatedelta::cuda {

// kMath warpgroups hold 64 value columns each.
template <int kMath>
struct ForwardSmem {
  static constexpr int kKeysQueries = 0;                                      // [slot][K0 K1 Q0 Q1]
  static constexpr int kValues = kKeysQueries + kLoadSlots * 4 * kTileBytes;  // V; once that is read, O on its way out
  static constexpr int kInverses = kValues + kValueSlots * kMath * kTileBytes;
  static constexpr int kX = kInverses + kInverseSlots * kInverseBytes;  // X^T [128][64]
  static_assert(kX % kTileAlign == 0);
  static constexpr int kR = kX + kOperandSlots * 2 * kTileBytes;
  static constexpr int kVectorsAt = kR + kOperandSlots * kTileBytes;
  static constexpr int kBarriers = kVectorsAt + kLoadSlots * kVectorsBytes;
  static constexpr int kBytes = kBarriers + 2 * 8 * (kLoadSlots + kValueSlots + kInverseSlots + kOperandSlots);
  static constexpr int kAllocated = kBytes + kTileAlign;
};
static_assert(ForwardSmem<2>::kAllocated <= kMaxSharedBytes);

// Registers a thread of each role gets; the sum over warpgroups is what the launch allocates.
template <int kMath>
struct ForwardRegisters;
template <>
struct ForwardRegisters<2> {
  static constexpr int kLaunch = 128, kKeys = 80, kScores = 80, kMath = 176;
  static_assert(kKeys + kScores + 2 * kMath <= 4 * kLaunch);
};
template <>
struct ForwardRegisters<1> {
  static constexpr int kLaunch = 168, kKeys = 120, kScores = 120, kMath = 232;
  static_assert(kKeys + kScores + kMath <= 3 * kLaunch);
};

template <int kMath>
constexpr int kForwardThreads = 128 * (2 + kMath);

enum NamedBarrier { kKeysMeet = 1, kMathMeet = 2 };  // and kMathMeet + 1

template <int kSlots>
struct Barriers {
  uint32_t at;
  GD_DEVICE uint32_t full(int slot) const { return at + 8 * slot; }
  GD_DEVICE uint32_t empty(int slot) const { return at + 8 * (kSlots + slot); }
  GD_DEVICE void init(int producers, int consumers) const {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(full(i), producers);
      barrier_init(empty(i), consumers);
    }
  }
  GD_DEVICE void wait_full(const Ring<kSlots>& ring) const { barrier_wait(full(ring.slot), ring.parity); }
  GD_DEVICE void wait_empty(const Ring<kSlots>& ring) const { barrier_wait(empty(ring.slot), ring.parity ^ 1); }
};

struct Item {
  int sequence, head, half;
  int batch, begin, length, chunks;
};

template <class Elem, int kMath>
struct Forward {
  using Smem = ForwardSmem<kMath>;
  using Mma64 = Wgmma<Elem, 64>;

  const ForwardParams& p;
  const uint32_t smem;
  const int tid, warp, lane;  // within the warpgroup

  Barriers<kLoadSlots> loads;
  Barriers<kValueSlots> values;
  Barriers<kInverseSlots> inverses;
  Barriers<kOperandSlots> operands;

  GD_DEVICE Forward(const ForwardParams& params, uint32_t base)
      : p(params),
        smem(base),
        tid(threadIdx.x & 127),
        warp(__shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0)),
        lane(threadIdx.x & 31),
        loads{base + Smem::kBarriers},
        values{loads.at + 16 * kLoadSlots},
        inverses{values.at + 16 * kValueSlots},
        operands{inverses.at + 16 * kInverseSlots} {}

  GD_DEVICE void init_barriers() const {
    // Every thread that may fill a slot counts: one of them for all in the copy engine's case, each for itself in a
    // ragged chunk's. Of the consumers every warp reports.
    loads.init(128, 8 + 4 * kMath);
    values.init(128, kMath);
    inverses.init(1, 8);
    operands.init(8, 4 * kMath);
    barrier_init_fence();
  }

  GD_DEVICE uint32_t key_tile(int slot, int half) const {
    return smem + Smem::kKeysQueries + (slot * 4 + half) * kTileBytes;
  }
  GD_DEVICE uint32_t query_tile(int slot, int half) const { return key_tile(slot, half) + 2 * kTileBytes; }
  GD_DEVICE uint32_t value_tile(int slot, int m) const {
    return smem + Smem::kValues + (slot * kMath + m) * kTileBytes;
  }
  GD_DEVICE uint32_t inverse_at(int slot) const { return smem + Smem::kInverses + slot * kInverseBytes; }
  GD_DEVICE uint32_t x_tile(int slot) const { return smem + Smem::kX + slot * 2 * kTileBytes; }
  GD_DEVICE uint32_t r_tile(int slot) const { return smem + Smem::kR + slot * kTileBytes; }
  GD_DEVICE uint32_t vector(int slot, ChunkVector v) const {
    return smem + Smem::kVectorsAt + slot * kVectorsBytes + v * kVectorBytes;
  }

  // ---- items -------------------------------------------------------------------------------------------------------

  static constexpr int kHalves = 2 / kMath;  // blocks that share a value head
  GD_DEVICE int items() const { return p.sequences.count * p.value_heads * kHalves; }
  GD_DEVICE Item item(int i) const {
    Item result;
    result.half = i % kHalves;
    result.head = i / kHalves % p.value_heads;
    result.sequence = p.order[i / kHalves / p.value_heads];
    const Span span = p.sequences[result.sequence];
    result.batch = span.batch;
    result.begin = static_cast<int>(span.begin);
    result.length = static_cast<int>(span.length);
    result.chunks = p.is_nobody(result.sequence) ? 0 : (result.length + kChunkTokens - 1) / kChunkTokens;
    return result;
  }

  // Where the next chunk to ask for is.
  struct Cursor {
    int i, chunk;
    Item it;
  };
  GD_DEVICE Cursor first_chunk() const {
    Cursor at{static_cast<int>(blockIdx.x), 0, {}};
    find_item(at);
    return at;
  }
  // The first item from at.i on that has a chunk.
  GD_DEVICE void find_item(Cursor& at) const {
    for (; at.i < items(); at.i += gridDim.x) {
      at.it = item(at.i);
      if (at.it.chunks > 0) return;
    }
  }
  GD_DEVICE bool is_past_the_last(const Cursor& at) const { return at.i >= items(); }
  GD_DEVICE void next_chunk(Cursor& at) const {
    if (++at.chunk < at.it.chunks) return;
    at.chunk = 0;
    at.i += gridDim.x;
    find_item(at);
  }

  // ---- keys: loads, and X^T = K^T T with scaled columns ------------------------------------------------------------

  GD_DEVICE void run_keys() const {
    Ring<kLoadSlots> load, asked;
    Ring<kInverseSlots> inverse, asked_inverse;
    Ring<kOperandSlots> operand;
    static_assert(int{kValueSlots} == int{kLoadSlots});  // one ring for both
    Cursor cursor = first_chunk();
    int ahead = 0;
    const auto ask = [&] {
      if (is_past_the_last(cursor)) return;
      load_chunk(cursor, asked, asked_inverse);
      next_chunk(cursor);
      asked.next();
      asked_inverse.next();
      ++ahead;
    };
#pragma unroll 1
    for (int i = 0; i < kChunksAhead; ++i) ask();
#pragma unroll 1
    while (ahead > 0) {
      loads.wait_full(load);
      inverses.wait_full(inverse);
      build_x(load.slot, inverse.slot, operand);
      load.next();
      inverse.next();
      operand.next();
      --ahead;
      ask();
    }
  }

  GD_DEVICE void load_chunk(const Cursor& at, const Ring<kLoadSlots>& load, const Ring<kInverseSlots>& inverse) const {
    const Item& it = at.it;
    const int rows = it.length - at.chunk * kChunkTokens, token = it.begin + at.chunk * kChunkTokens;
    const uint8_t* prepared = p.prepared_chunk(p.sequences.first_slot(it.sequence) + at.chunk, it.head);
    if (tid == 0) {
      inverses.wait_empty(inverse);
      barrier_arrive_expect(inverses.full(inverse.slot), kInverseBytes);
      load_bulk(inverse_at(inverse.slot), prepared, kInverseBytes, inverses.full(inverse.slot));
      loads.wait_empty(load);
      if (rows >= kChunkTokens) load_keys_queries(it, token, load.slot, prepared);
      barrier_wait(values.empty(load.slot), load.parity ^ 1);
      if (rows >= kChunkTokens) load_values(it, token, load.slot);
    }
    if (rows < kChunkTokens) load_ragged(it, token, rows, load.slot, prepared);
  }

  GD_DEVICE void load_keys_queries(const Item& it, int token, int slot, const uint8_t* prepared) const {
    const uint32_t full = loads.full(slot);
    barrier_arrive_expect(full, 4 * kTileBytes + kVectorsBytes);
    barrier_arrive(full, 127);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_box(key_tile(slot, half), &p.k_map, full, half * 64, it.head / p.group, token, it.batch);
      load_box(query_tile(slot, half), &p.q_map, full, half * 64, it.head / p.group, token, it.batch);
    }
    load_bulk(vector(slot, kLogGamma), prepared + kInverseBytes, kVectorsBytes, full);
  }
  GD_DEVICE void load_values(const Item& it, int token, int slot) const {
    barrier_arrive_expect(values.full(slot), kMath * kTileBytes);
    barrier_arrive(values.full(slot), 127);
#pragma unroll
    for (int m = 0; m < kMath; ++m)
      load_box(value_tile(slot, m), &p.v_map, values.full(slot), (it.half + m) * 64, it.head, token, it.batch);
  }

  // The sequence's last rows. The copy engine would fetch what lies behind them, and 0 times a stranger's NaN is NaN.
  GD_DEVICE void load_ragged(const Item& it, int token, int rows, int slot, const uint8_t* prepared) const {
    meet(kKeysMeet, 128);
    copy_rows(key_tile(slot, 0), 2, p.k, it.batch, token, rows, it.head / p.group, 0);
    copy_rows(query_tile(slot, 0), 2, p.q, it.batch, token, rows, it.head / p.group, 0);
    copy_rows(value_tile(slot, 0), kMath, p.v, it.batch, token, rows, it.head, it.half * 64);
    fence_async_reads();
    barrier_arrive(values.full(slot));
    if (tid != 0) return barrier_arrive(loads.full(slot));
    barrier_arrive_expect(loads.full(slot), kVectorsBytes);
    load_bulk(vector(slot, kLogGamma), prepared + kInverseBytes, kVectorsBytes, loads.full(slot));
  }
  GD_DEVICE void copy_rows(uint32_t tiles, int count, const Rows& src, int batch, int token, int rows, int head,
                           int column) const {
    const auto* from = static_cast<const uint16_t*>(src.data) + src.offset(batch, token, head) + column;
#pragma unroll 1
    for (int i = tid; i < kChunkTokens * count * 8; i += 128) {
      const int piece = i % 8, tile = i / 8 % count, row = i / 8 / count;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (row < rows) v = *reinterpret_cast<const uint4*>(from + row * src.token_stride + tile * 64 + piece * 8);
      store_shared_words(tiles + tile * kTileBytes + tile_offset(row, piece * 8), v);
    }
  }

  GD_DEVICE void build_x(int load, int inverse, const Ring<kOperandSlots>& operand) const {
    const uint32_t T = inverse_at(inverse);
    float x[32];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mma_fence();
      multiply_keys(x, load, half, T);
      mma_wait<0>();
      if (half == 0) operands.wait_empty(operand);
      store_x(x, half, operand.slot, load);
    }
    report_operand(load, inverse, operand.slot);
  }
  // This warp's part of an operand is in place, and it needs K, Q and T no more.
  GD_DEVICE void report_operand(int load, int inverse, int operand) const {
    fence_async_reads();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(operands.full(operand));
      barrier_arrive(inverses.empty(inverse));
      barrier_arrive(loads.empty(load));
    }
  }

  // Rows [64 half, ...) of K^T T. T is lower triangular: of its block row I only the first I + 1 blocks are there. The
  // full one comes first because it sets the accumulators.
  GD_DEVICE void multiply_keys(float (&x)[32], int load, int half, uint32_t T) const {
    const uint32_t K = key_tile(load, half);
    Mma64::template ss<true, true>(x, tile_descriptor(K, 3 * kStepRows), triangle_descriptor(T, 3), false);
    Wgmma<Elem, 48>::template ss<true, true>(x, tile_descriptor(K, 2 * kStepRows), triangle_descriptor(T, 2), true);
    Wgmma<Elem, 32>::template ss<true, true>(x, tile_descriptor(K, kStepRows), triangle_descriptor(T, 1), true);
    Wgmma<Elem, 16>::template ss<true, true>(x, tile_descriptor(K, 0), triangle_descriptor(T, 0), true);
    mma_commit();
  }

  GD_DEVICE void store_x(const float (&x)[32], int half, int operand, int load) const {
    const int t = lane & 3;
    const uint32_t at =
        x_tile(operand) + half * kTileBytes + tile_offset(16 * warp + block_row(lane), block_column(lane));
    const uint32_t scale = vector(load, kWriteKey) + 8 * t;
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      const float* c = x + 8 * J;
      const float2 a = load_shared2(scale + J * 64), b = load_shared2(scale + J * 64 + 32);
      store_matrices(at ^ (J * 32), pack<Elem>(a.x * c[0], a.y * c[1]), pack<Elem>(a.x * c[2], a.y * c[3]),
                     pack<Elem>(b.x * c[4], b.y * c[5]), pack<Elem>(b.x * c[6], b.y * c[7]));
    }
  }

  // ---- scores: R = gates o (tril(Q K^T) T) -------------------------------------------------------------------------

  GD_DEVICE void run_scores() const {
    Ring<kLoadSlots> load;
    Ring<kInverseSlots> inverse;
    Ring<kOperandSlots> operand;
    for (int i = blockIdx.x; i < items(); i += gridDim.x) {
      const int chunks = item(i).chunks;
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
        loads.wait_full(load);
        build_r(load.slot, inverse, operand);
        load.next();
        inverse.next();
        operand.next();
      }
    }
  }

  GD_DEVICE void build_r(int load, const Ring<kInverseSlots>& inverse, const Ring<kOperandSlots>& operand) const {
    uint32_t scores[16];  // tril(Q K^T) as the register operand
    {
      float qk[32];
      mma_fence();
#pragma unroll
      for (int step = 0; step < 8; ++step)
        Mma64::template ss<false, false>(qk, tile_descriptor(query_tile(load, step / 4), step % 4 * kStepContiguous),
                                         tile_descriptor(key_tile(load, step / 4), step % 4 * kStepContiguous),
                                         step > 0);
      mma_commit();
      mma_wait<0>();
      with_warp(warp, [&](auto w) { pack_scores<decltype(w)::value>(scores, qk); });
    }
    inverses.wait_full(inverse);
    const uint32_t T = inverse_at(inverse.slot);
    float r[32];
    mma_fence();
    Mma64::template rs<true>(r, scores + 12, triangle_descriptor(T, 3), false);
    Wgmma<Elem, 48>::template rs<true>(r, scores + 8, triangle_descriptor(T, 2), true);
    Wgmma<Elem, 32>::template rs<true>(r, scores + 4, triangle_descriptor(T, 1), true);
    Wgmma<Elem, 16>::template rs<true>(r, scores, triangle_descriptor(T, 0), true);
    mma_commit();
    operands.wait_empty(operand);
    mma_wait<0>();
    with_warp(warp, [&](auto w) { store_r<decltype(w)::value>(r, operand.slot, load); });
    report_operand(load, inverse.slot, operand.slot);
  }

  template <int I>
  GD_DEVICE void pack_scores(uint32_t (&a)[16], const float (&qk)[32]) const {
    const int g = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
    for (int J = 0; J < 4; ++J) {
      const float* c = qk + 8 * J;
      uint32_t* to = a + 4 * J;
      if (J < I) {
        to[0] = pack<Elem>(c[0], c[1]);
        to[1] = pack<Elem>(c[2], c[3]);
        to[2] = pack<Elem>(c[4], c[5]);
        to[3] = pack<Elem>(c[6], c[7]);
      } else if (J == I) {
        to[0] = pack<Elem>(column <= g ? c[0] : 0.0f, column < g ? c[1] : 0.0f);
        to[1] = pack<Elem>(c[2], c[3]);
        to[2] = 0;
        to[3] = pack<Elem>(column <= g ? c[6] : 0.0f, column < g ? c[7] : 0.0f);
      } else {
        to[0] = to[1] = to[2] = to[3] = 0;
      }
    }
  }

  // Block row I of R. Left of the diagonal block, e^{b_i - b_j} is split at the block row's first token: both factors
  // are at most 1, and there are fewer of them. On the diagonal what lies above is left out by selection, never by a
  // product.
  template <int I>
  GD_DEVICE void store_r(float (&r)[32], int operand, int load) const {
    const int g = lane >> 2, t = lane & 3, column = 2 * t;
    const uint32_t log_gamma = vector(load, kLogGamma), beta = vector(load, kBeta), scale = vector(load, kScoreScale);
    const uint32_t at = r_tile(operand) + tile_offset(16 * I + block_row(lane), block_column(lane));
    const float b0 = load_shared(log_gamma + (16 * I + g) * 4), b1 = load_shared(log_gamma + (16 * I + g + 8) * 4);
    const float s0 = load_shared(scale + (16 * I + g) * 4), s1 = load_shared(scale + (16 * I + g + 8) * 4);
    if constexpr (I > 0) {
      const float reference = load_shared(log_gamma + 16 * I * 4);
      const float h0 = s0 * exp2_approx(b0 - reference), h1 = s1 * exp2_approx(b1 - reference);
#pragma unroll
      for (int n = 0; n < 2 * I; ++n) {
        float* c = r + 4 * n;
        const float2 b = load_shared2(log_gamma + (8 * n + column) * 4), w = load_shared2(beta + (8 * n + column) * 4);
        const float fx = w.x * exp2_approx(reference - b.x), fy = w.y * exp2_approx(reference - b.y);
        c[0] *= h0 * fx;
        c[1] *= h0 * fy;
        c[2] *= h1 * fx;
        c[3] *= h1 * fy;
      }
#pragma unroll
      for (int J = 0; J < I; ++J) {
        const float* c = r + 8 * J;
        store_matrices(at ^ (J * 32), pack<Elem>(c[0], c[1]), pack<Elem>(c[2], c[3]), pack<Elem>(c[4], c[5]),
                       pack<Elem>(c[6], c[7]));
      }
    }
    const float* c = r + 8 * I;
    const int here = 16 * I + column;
    const float2 b = load_shared2(log_gamma + here * 4), d = load_shared2(log_gamma + (here + 8) * 4);
    const float2 w = load_shared2(beta + here * 4), x = load_shared2(beta + (here + 8) * 4);
    const float e0 = column <= g ? c[0] * s0 * w.x * exp2_approx(b0 - b.x) : 0.0f;
    const float e1 = column < g ? c[1] * s0 * w.y * exp2_approx(b0 - b.y) : 0.0f;
    const float e6 = column <= g ? c[6] * s1 * x.x * exp2_approx(b1 - d.x) : 0.0f;
    const float e7 = column < g ? c[7] * s1 * x.y * exp2_approx(b1 - d.y) : 0.0f;
    store_matrices(at ^ (I * 32), pack<Elem>(e0, e1),
                   pack<Elem>(c[2] * s1 * w.x * exp2_approx(b1 - b.x), c[3] * s1 * w.y * exp2_approx(b1 - b.y)), 0,
                   pack<Elem>(e6, e7));
  }

  // ---- math --------------------------------------------------------------------------------------------------------

  // S^T: rows are value columns, columns are key dimensions.
  struct State {
    float s[64];
    uint32_t packed[32];
  };

  GD_DEVICE void run_math(int m) const {
    Ring<kLoadSlots> load;  // values too
    Ring<kOperandSlots> operand;
    State state;
    uint32_t out[16];
    bool leaving = false;  // the slot before this one still holds rows of o on their way out
    for (int i = blockIdx.x; i < items(); i += gridDim.x) {
      const Item it = item(i);
      const int row = (it.half + m) * 64 + warp * 16;  // of the state, in value columns
      if (p.is_nobody(it.sequence)) continue;
      load_state(state.s, it, row);
      pack_state(state);
#pragma unroll 1
      for (int c = 0; c < it.chunks; ++c) {
        advance(state, out, m, load, operand, it, c, leaving);
        load.next();
        operand.next();
        leaving = true;
        if (p.checkpoint_every) store_checkpoint(state.s, it, c, row);
      }
      if (it.chunks > 0)
        store_out(out, m, it, it.chunks - 1, it.length - (it.chunks - 1) * kChunkTokens, load.previous());
      if (const int64_t slot = p.final.slot(it.sequence); slot >= 0) store_state(p.final, slot, it.head, state.s, row);
    }
    if (tid == 0) store_wait_read<0>();
  }

  GD_DEVICE static void pack_state(State& state) {
#pragma unroll
    for (int i = 0; i < 32; ++i) state.packed[i] = pack<Elem>(state.s[2 * i], state.s[2 * i + 1]);
  }

  GD_DEVICE void advance(State& state, uint32_t (&out)[16], int m, const Ring<kLoadSlots>& load,
                         const Ring<kOperandSlots>& operand, const Item& it, int c, bool leaving) const {
    const int t = lane & 3;
    float u[32], o[32];
    uint32_t w[16];
    // (K S)^T.
    loads.wait_full(load);
    mma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Mma64::template rs<false>(u, state.packed + 4 * step,
                                tile_descriptor(key_tile(load.slot, step / 4), step % 4 * kStepContiguous), step > 0);
    mma_commit();
    if (c > 0) store_out(out, m, it, c - 1, kChunkTokens, load.previous());
    const float gamma_L = exp2_approx(load_shared(vector(load.slot, kLogGamma) + 63 * 4));
    barrier_wait(values.full(load.slot), load.parity);
    // W = V - gamma o (K S), transposed. What it needs is fetched while K S still runs.
    uint32_t v[16];
    float2 scale_k[8];
    {
      const uint32_t at = value_tile(load.slot, m) + tile_offset(turned_row(lane), 16 * warp + turned_column(lane));
      const uint32_t scale = vector(load.slot, kReadKey) + 8 * t;
#pragma unroll
      for (int n = 0; n < 4; ++n) load_matrices_turned(v + 4 * n, at + n * 2048);
#pragma unroll
      for (int n = 0; n < 8; ++n) scale_k[n] = load_shared2(scale + n * 32);
    }
    mma_wait<0>();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float* c0 = u + 4 * n;
      const float2 v0 = unpack<Elem>(v[2 * n]), v1 = unpack<Elem>(v[2 * n + 1]), a = scale_k[n];
      w[2 * n] = pack<Elem>(v0.x - a.x * c0[0], v0.y - a.y * c0[1]);
      w[2 * n + 1] = pack<Elem>(v1.x - a.x * c0[2], v1.y - a.y * c0[3]);
    }
    // By now the copy engine has read the rows that went out at the start of this chunk.
    if (leaving && tid == 0) {
      store_wait_read<0>();
      barrier_arrive(values.empty(load.previous()));
    }
    // (Q S)^T; while it runs, S *= gamma_L (earlier it would only be moved down to here), then S += X^T W.
    mma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step)
      Mma64::template rs<false>(o, state.packed + 4 * step,
                                tile_descriptor(query_tile(load.slot, step / 4), step % 4 * kStepContiguous), step > 0);
    mma_commit();
    mma_wait<1>();
#pragma unroll
    for (int i = 0; i < 64; ++i) state.s[i] *= gamma_L;
    operands.wait_full(operand);
    mma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma<Elem, 128>::template rs<false>(state.s, w + 4 * step,
                                           tile_descriptor(x_tile(operand.slot), step * kStepContiguous), true);
    mma_commit();
    // O = s gamma o (Q S)^T + R W.
    float2 scale_q[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) scale_q[n] = load_shared2(vector(load.slot, kReadQuery) + 8 * t + n * 32);
    mma_wait<1>();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      o[4 * n] *= scale_q[n].x;
      o[4 * n + 1] *= scale_q[n].y;
      o[4 * n + 2] *= scale_q[n].x;
      o[4 * n + 3] *= scale_q[n].y;
    }
    mma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Mma64::template rs<false>(o, w + 4 * step, tile_descriptor(r_tile(operand.slot), step * kStepContiguous), true);
    mma_commit();
    mma_wait<1>();
    pack_state(state);
    mma_wait<0>();
    if (lane == 0) {
      barrier_arrive(operands.empty(operand.slot));
      barrier_arrive(loads.empty(load.slot));
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] = pack<Elem>(o[2 * i], o[2 * i + 1]);
  }

  // O^T from registers to rows of o, through the slot V came in: a warp writes where only it has read.
  GD_DEVICE void store_out(const uint32_t (&out)[16], int m, const Item& it, int c, int rows, int slot) const {
    if (!p.o.data) return meet(kMathMeet + m, 128);  // all have read V before the slot is given back
    const uint32_t tile = value_tile(slot, m);
    const uint32_t at = tile + tile_offset(turned_row(lane), 16 * warp + turned_column(lane));
#pragma unroll
    for (int n = 0; n < 4; ++n)
      store_matrices_turned(at + n * 2048, out[4 * n], out[4 * n + 1], out[4 * n + 2], out[4 * n + 3]);
    fence_async_reads();
    meet(kMathMeet + m, 128);
    const int token = it.begin + c * kChunkTokens, column = (it.half + m) * 64;
    if (rows >= kChunkTokens) {
      if (tid == 0) {
        store_box(&p.o_map, tile, column, it.head, token, it.batch);
        store_commit();
      }
      return;
    }
    auto* to = static_cast<uint16_t*>(p.o.data) + p.o.offset(it.batch, token, it.head) + column;
#pragma unroll 1
    for (int i = tid; i < rows * 8; i += 128)
      *reinterpret_cast<uint4*>(to + i / 8 * p.o.token_stride + i % 8 * 8) =
          load_shared_words(tile + tile_offset(i / 8, i % 8 * 8));
    meet(kMathMeet + m, 128);  // before the slot is given back
  }

  // ---- states in memory --------------------------------------------------------------------------------------------

  // Offset of accumulator element i; row is the warp's first.
  GD_DEVICE int state_offset(int row, int i) const {
    const Place at = accumulator_place(lane, i);
    const int v = row + at.row, k = at.column;
    return p.state_value_first ? v * kHeadDim + k : k * kHeadDim + v;
  }
  // Calls f with the head's matrix in the slot, as a pointer to its numbers.
  template <class F>
  GD_DEVICE static void with_matrix(const States& states, int64_t slot, int head, const F& f) {
    const int64_t at = slot * states.slot_stride + head * states.head_stride;
    if (states.dtype == GD_F32) {
      f(static_cast<float*>(states.data) + at);
    } else if (states.dtype == GD_BF16) {
      f(static_cast<__nv_bfloat16*>(states.data) + at);
    } else {
      f(static_cast<__half*>(states.data) + at);
    }
  }
  GD_DEVICE void load_state(float (&s)[64], const Item& it, int row) const {
    const int64_t slot = p.initial.slot(it.sequence);
    if (slot < 0) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = 0;
      return;
    }
    with_matrix(p.initial, slot, it.head, [&](const auto* from) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = static_cast<float>(from[state_offset(row, i)]);
    });
  }
  GD_DEVICE void store_state(const States& states, int64_t slot, int head, const float (&s)[64], int row) const {
    with_matrix(states, slot, head, [&](auto* to) {
#pragma unroll
      for (int i = 0; i < 64; ++i) to[state_offset(row, i)] = s[i];
    });
  }
  GD_DEVICE void store_checkpoint(const float (&s)[64], const Item& it, int c, int row) const {
    const int64_t done = int64_t{c + 1} * kChunkTokens;
    if (done > it.length || done % p.checkpoint_every != 0) return;
    const int64_t entry = p.first_checkpoint[it.sequence] + done / p.checkpoint_every - 1;
    const int64_t slot = p.checkpoints.indices.data ? p.checkpoints.indices[entry] : entry;
    if (slot >= 0) store_state(p.checkpoints, slot, it.head, s, row);
  }
};

template <class Elem, int kMath>
__global__ void __launch_bounds__(kForwardThreads<kMath>, 1) forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ uint8_t dynamic_smem[];
  using Registers = ForwardRegisters<kMath>;
  const uint32_t smem = tile_aligned(shared_address(dynamic_smem));
  const Forward<Elem, kMath> forward(p, smem);
  // Blocks of R above the diagonal are never written.
  for (int i = threadIdx.x; i < kOperandSlots * kTileBytes / 16; i += kForwardThreads<kMath>)
    store_shared_words(forward.r_tile(0) + i * 16, make_uint4(0, 0, 0, 0));
  if (threadIdx.x == 0) forward.init_barriers();
  fence_async_reads();
  __syncthreads();
  wait_for_previous_kernel();
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role == 0) {
    shrink_registers<Registers::kKeys>();
    forward.run_keys();
  } else if (role == 1) {
    shrink_registers<Registers::kScores>();
    forward.run_scores();
  } else {
    grow_registers<Registers::kMath>();
    forward.run_math(role - 2);
  }
}

}  // namespace gatedelta::cuda
