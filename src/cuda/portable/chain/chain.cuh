// What the kernels that follow a state through its steps share: places, loads, states, products, outputs.
//
// A warp owns kRows value columns of a head and all K key dimensions: S^T [kRows x K] in registers, as accumulators of
// mma.m16n8k16. The warps of a CTA share K, Q and what prepare made, and nothing else: no number goes from one warp to
// another. Everything is computed transposed, rows being v: the left operand of a product is an accumulator packed in
// place, the right one comes from shared memory.
//
// NOTE(ptxas): 128 of 255 registers hold the state. What follows from the numbers of thread and CTA is computed anew in
// each step (`opaque`), strides come from the parameters: one more value that stays in a register spills another one.
#pragma once

#include <type_traits>

#include "cuda/device/numbers.cuh"
#include "cuda/portable/config.hpp"

namespace gatedelta::cuda::portable {

template <class Config>
struct Chain {
  using Elem = typename Config::Elem;
  using Smem = typename Config::Smem;
  using Pass = typename Config::Pass;
  static constexpr int kRows = Config::kRows, kThreads = Config::kThreads;
  static constexpr int kI = kRows / 16;         // 16-row tiles of S^T
  static constexpr int kJ = Config::kKeys / 8;  // 8-column tiles of S^T
  static constexpr int kT = kStep / 8;          // 8-column tiles of a step's tokens
  static constexpr int kKeyBlocks = Config::kKeys / 16;

  // A 16-row tile's products with the tokens of a step, as accumulators and as the left operand of the next product.
  using Tokens = float[kI][kT][4];
  using Operand = uint32_t[kI][kT / 2][4];

  const Params& p;
  const uint32_t smem;
  const int cta, warp;
  int tid, lane, g, t;
  const uint16_t *k, *q, *v;  // what this thread copies for the next step
  uint32_t prepared;          // likewise, in packets from the first step's on: no 64 bits
  uint16_t* o;                // where this thread stores outputs of this step
  float S[kI][kJ][4];

  struct Place {
    int sequence, head, column;  // column: the warp's first
    SequenceSpan span;
  };
  // Of segments and heads.
  GD_DEVICE int block() const { return opaque(cta) >> p.log_parts; }
  // This CTA's segment. Where no sequence is cut it is a whole one, and the longest come first.
  GD_DEVICE Segment segment() const {
    if (p.segments) return p.segments[block()];
    const int item = block() / p.value_heads, n = p.order ? p.order[item] : item;
    const bool is_cut = p.ranges && p.ranges[n].count > 0;
    return {is_cut ? -1 : n, 0, static_cast<int>(ChunkedSequences::chunks(p.sequences[n].length)), 0};
  }
  GD_DEVICE Place place_in(const Segment& segment) const {
    const int n = segment.sequence;
    return {n, block() % p.value_heads, column(), p.sequences[n]};
  }
  // Tokens of the sequence up to the segment's end.
  GD_DEVICE static int64_t end_of(const Segment& segment, const Place& at) {
    const int64_t end = int64_t{segment.chunk + segment.chunks} * kChunkTokens;
    return end < at.span.length ? end : at.span.length;
  }
  GD_DEVICE int column() const { return (opaque(cta) & ((1 << p.log_parts) - 1)) * Config::kColumns + warp * kRows; }
  // Value columns from the warp's first one on. A warp with none (0 or less) computes with zeros: a branch around a
  // step would cost registers.
  GD_DEVICE int columns() const { return p.value_dim - column(); }
  GD_DEVICE void set_thread(int number) {
    tid = number;
    lane = tid & 31;
    g = lane >> 2;
    t = lane & 3;
  }

  GD_DEVICE Chain(const Params& params, int cta_, int tid_)
      : p(params), smem(shared_base()), cta(cta_), warp(shuffle(tid_ >> 5, 0)) {
    set_thread(tid_);
  }
  // The column of M that the warp's first column stands for, in a transition; negative: it stands for itself.
  GD_DEVICE int map_column() const { return is_transition() ? column() - p.map_column : -1; }
  GD_DEVICE bool is_transition() const { return Config::kHasTransitions && p.map_column > 0; }
  // Of the first step the kernel takes, and of the first one with outputs.
  GD_DEVICE void set_rows(const Place& at, int step, int output_step) {
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

  // ---- loads -------------------------------------------------------------------------------------------------------

  // A thread copies one packet of every tile's row, of rows kRowStep apart, in parts, so that the copies of the next
  // step lie between products of this one. Rows past the end and columns past K are zero.
  static constexpr int kRowStep = kThreads / 8;
  static constexpr int kSharedParts = kStep / kRowStep * Config::kTiles;
  GD_DEVICE void load_shared_rows(int stage, int rows, int step) {
#pragma unroll
    for (int part = 0; part < kSharedParts; ++part) load_shared_part(stage, rows, part);
    next_shared_rows(step);
  }
  GD_DEVICE void load_shared_part(int stage, int rows, int part) {
    static_assert(kRowStep % 8 == 0 && kStep % kRowStep == 0);  // all of them are swizzled alike
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
  // From a step, 0 or 1 of its chunk.
  GD_DEVICE void next_shared_rows(int step) {
    k += step_stride(p.k_stride);
    q += step_stride(p.q_stride);
    next_prepared(step);
  }
  // From a step's rows to those of the next one.
  GD_DEVICE static int step_stride(uint32_t token_stride) {
    return Pass::kDirection * static_cast<int>(kStep * token_stride);
  }
  // The steps of a chunk follow each other, the chunks of a head do not.
  GD_DEVICE void next_prepared(int step) {
    constexpr int kLast = Pass::kDirection > 0 ? kStepsPerChunk - 1 : 0, kPackets = Prepared::kBytes / kPacketBytes;
    prepared += Pass::kDirection *
                (step != kLast ? kPackets : (p.prepared_heads * kStepsPerChunk - (kStepsPerChunk - 1)) * kPackets);
  }
  // A warp's own columns of V.
  static constexpr int kValuePackets = kRows / kPacketColumns, kValueRowStep = 32 / kValuePackets,
                       kValueParts = kStep / kValueRowStep;
  GD_DEVICE uint32_t own_values() const { return smem + Smem::kValues + warp * Smem::kValueBytes; }
  GD_DEVICE void load_own_values(int rows) {
#pragma unroll
    for (int part = 0; part < kValueParts; ++part) load_own_part(rows, part);
    v += step_stride(p.v_stride);
  }
  GD_DEVICE void load_own_part(int rows, int part) {
    static_assert(kValueRowStep % 8 == 0);
    const int first = lane / kValuePackets, packet = lane % kValuePackets;
    const uint32_t to = own_values() + values_offset<kRows>(first, packet) + part * kValueRowStep * kRows * 2;
    const bool is_column = packet * kPacketColumns < columns();  // first: what is opaque would be a branch behind &&
    const bool valid = first + part * kValueRowStep < rows && is_column;
    copy_async(to, v + part * kValueRowStep * p.v_stride, valid);
  }

  // ---- states ------------------------------------------------------------------------------------------------------

  // Calls f with every number of S and its distance from the matrix' first; f is not called for padded ones.
  template <class F>
  GD_DEVICE void each_number(int column, const F& f) {
    each_number(column, p.value_dim, p.key_state_stride, p.value_state_stride, f);
  }
  template <class F>
  GD_DEVICE void each_number(int column, int columns, int key_stride, int value_stride, const F& f) {
    const int thread = opaque(lane);
    const int first = thread % 4 * 2 * key_stride + (column + thread / 4) * value_stride;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j) {
        if (column + 16 * i >= columns || 8 * j >= p.key_dim) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c)
          f(S[i][j][c], first + (8 * j + c % 2) * key_stride + (16 * i + c / 2 * 8) * value_stride);
      }
  }
  GD_DEVICE void zero_state() {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int j = 0; j < kJ; ++j)
#pragma unroll
        for (float& x : S[i][j]) x = 0;
  }
  GD_DEVICE void load_matrix(const void* data, gd_dtype dtype, int64_t matrix, int column) {
    with_stored(dtype, [&](auto stored) {
      using Stored = decltype(stored);
      const auto* const from = static_cast<const typename Stored::Word*>(data) + matrix;
      each_number(column, [&](float& x, int i) { x = Stored::widen(from[i]); });
    });
  }
  // The state a segment begins with, or its warm-up.
  GD_DEVICE void enter(const Segment& segment, const Place& at) {
    zero_state();
    if (segment.is_entered()) {
      load_matrix(p.entries, GD_F32, block() * p.state_numbers(), at.column);
    } else if (segment.warmup == 0) {
      const int64_t slot = p.initial.slot(at.sequence);
      if (slot < 0) return;
      const bool is_copied = p.initial_copy;
      load_matrix(is_copied ? p.initial_copy : p.initial.data, p.initial.dtype,
                  is_copied ? (int64_t{at.sequence} * p.value_heads + at.head) * p.state_numbers()
                            : p.initial.offset(slot, at.head),
                  at.column);
    }
  }
  GD_DEVICE void store_state(void* data, gd_dtype dtype, int64_t matrix, int column) {
    store_state(data, dtype, matrix, column, p.value_dim, p.key_state_stride, p.value_state_stride);
  }
  GD_DEVICE void store_state(void* data, gd_dtype dtype, int64_t matrix, int column, int columns, int key_stride,
                             int value_stride) {
    with_stored(dtype, [&](auto stored) {
      using Stored = decltype(stored);
      auto* const to = static_cast<typename Stored::Word*>(data) + matrix;
      each_number(column, columns, key_stride, value_stride, [&](float& x, int i) { to[i] = Stored::narrow(x); });
    });
  }

  // A snapshot of a chunk is V x K 16-bit numbers: eight value columns by eight key dimensions are 128 bytes, what one
  // register of a warp stores; key dimensions follow each other, then value columns.
  GD_DEVICE uint32_t* snapshot_at(const Place& at, int64_t chunk) const {
    const int64_t matrix = (p.sequences.first_chunk_index(at.sequence) + chunk) * p.value_heads + at.head;
    return reinterpret_cast<uint32_t*>(p.snapshots + matrix * p.snapshot_bytes() + at.column * 2 * p.key_dim) + lane;
  }
  // S^T, packed as for a product. NOTE(ptxas): in the loop of the products its stores would be branches between them.
  GD_DEVICE void keep_state(uint32_t*& to) {
    const int columns = this->columns();
#pragma unroll
    for (int kk = 0; kk < kKeyBlocks; ++kk) {
      uint32_t s[kI][4];
      pack_state(s, kk);
      const bool is_key = 16 * kk < p.key_dim;
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int h = 0; h < 4; ++h)
          if (is_key & (16 * i < columns)) to[((2 * i + h % 2) * (p.key_dim / 8) + 2 * kk + h / 2) * 32] = s[i][h];
    }
    to += Pass::kDirection * p.value_heads * (p.snapshot_bytes() / 4);
  }

  // ---- products ----------------------------------------------------------------------------------------------------

  GD_DEVICE float2 vector2(uint32_t prep, StepVector vector, int n) const {
    return load_shared2(prep + Prepared::kVector + vector * Prepared::kVectorBytes + (8 * n + 2 * t) * 4);
  }
  // Sixteen key dimensions of S^T as a left operand.
  GD_DEVICE void pack_state(uint32_t (&s)[kI][4], int kk) const {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float(&c)[4] = S[i][2 * kk + h];
        s[i][2 * h] = pack<Elem>(c[0], c[1]);
        s[i][2 * h + 1] = pack<Elem>(c[2], c[3]);
      }
  }
  GD_DEVICE void scale_state(int kk, float by) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (float& x : S[i][2 * kk + h]) x *= by;
  }
  // c += s X^T, X being columns 16 kk .. of a step's rows.
  GD_DEVICE void multiply_rows(Tokens& c, const uint32_t (&s)[kI][4], uint32_t X, int kk) const {
    const uint32_t own = tile_offset((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
    for (int n = 0; n < kT / 2; ++n) {
      uint32_t x[4];
      load_matrices(x, X + (own ^ (kk % 4 * 2 * kPacketBytes)) + kk / 4 * Config::kTileBytes + n * 16 * kTileRowBytes);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < kI; ++i) {
          float(&to)[4] = c[i][2 * n + m];
          if (kk == 0) {
            mma_first<Elem>(to, s[i][0], s[i][1], s[i][2], s[i][3], x[2 * m], x[2 * m + 1]);
          } else {
            mma<Elem>(to, s[i][0], s[i][1], s[i][2], s[i][3], x[2 * m], x[2 * m + 1]);
          }
        }
    }
  }
  // S^T += a X, X a step's rows. between(i) is called after every sixteen tokens by sixteen key dimensions.
  template <class Between>
  GD_DEVICE void add_to_state(const Operand& a, uint32_t X, const Between& between) {
    const uint32_t own = tile_offset(lane & 15, lane >> 4);
#pragma unroll
    for (int J = 0; J < kT / 2; ++J)
#pragma unroll
      for (int kk = 0; kk < kKeyBlocks; ++kk) {
        uint32_t x[4];
        load_matrices_transposed(
            x, X + (own ^ (kk % 4 * 2 * kPacketBytes)) + kk / 4 * Config::kTileBytes + J * 16 * kTileRowBytes);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < kI; ++i)
            mma<Elem>(S[i][2 * kk + n], a[i][J][0], a[i][J][1], a[i][J][2], a[i][J][3], x[2 * n], x[2 * n + 1]);
        between(J * kKeyBlocks + kk);
      }
  }
  // W = beta o V - beta gamma o (K S), from (K S)^T.
  GD_DEVICE void find_values(Tokens& W, uint32_t prep) const {
    constexpr int kTogether = kRows == 32 ? 1 : 2;  // tiles of eight tokens that come with one ldmatrix
#pragma unroll
    for (int n = 0; n < kT; n += kTogether) {
      uint32_t x[4];
      load_matrices_transposed(
          x, own_values() + (kRows == 32 ? values_offset<kRows>(8 * n + (lane & 7), lane >> 3)
                                         : values_offset<kRows>(8 * n + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1)));
#pragma unroll
      for (int d = 0; d < kTogether; ++d) {
        const float2 gamma = vector2(prep, kReadKey, n + d), beta = vector2(prep, kBeta, n + d);
#pragma unroll
        for (int i = 0; i < kI; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float2 value = unpack<Elem>(x[kRows == 32 ? 2 * i + h : 2 * d + h]);
            float(&w)[4] = W[i][n + d];
            w[2 * h] = beta.x * value.x - gamma.x * w[2 * h];
            w[2 * h + 1] = beta.y * value.y - gamma.y * w[2 * h + 1];
          }
      }
    }
  }
  // c += a M, M lower triangular.
  GD_DEVICE void multiply_transposed_triangle(Tokens& c, const Operand& a, uint32_t M) const {
#pragma unroll
    for (int I = 0; I < kT / 2; ++I) {
      uint32_t rows[kI][4];
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int part = 0; part < 4; ++part) rows[i][part] = a[i][I][part];
      multiply_transposed_rows(c, rows, M, I);
    }
  }
  // The same with sixteen columns of a and rows of M alone. It adds to the tokens up to these.
  GD_DEVICE void multiply_transposed_rows(Tokens& c, const uint32_t (&a)[kI][4], uint32_t M, int I) const {
#pragma unroll
    for (int J = 0; J <= I; ++J) {
      uint32_t x[4];
      load_matrices_transposed(x, M + triangle_block(I, J) + lane * kPacketBytes);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < kI; ++i) mma<Elem>(c[i][2 * J + n], a[i][0], a[i][1], a[i][2], a[i][3], x[n], x[2 + n]);
    }
  }
  // c += a M^T, M lower triangular.
  GD_DEVICE void multiply_triangle(Tokens& c, const Operand& a, uint32_t M) const {
#pragma unroll
    for (int I = 0; I < kT / 2; ++I)
#pragma unroll
      for (int J = 0; J <= I; ++J) {
        uint32_t x[4];
        load_matrices(x, M + triangle_block(I, J) + lane * kPacketBytes);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < kI; ++i)
            mma<Elem>(c[i][2 * I + n], a[i][J][0], a[i][J][1], a[i][J][2], a[i][J][3], x[2 * n], x[2 * n + 1]);
      }
  }
  // Each token's column by its own factor.
  GD_DEVICE void scale(Tokens& c, uint32_t prep, StepVector vector) const {
#pragma unroll
    for (int n = 0; n < kT; ++n) {
      const float2 by = vector2(prep, vector, n);
#pragma unroll
      for (int i = 0; i < kI; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          c[i][n][2 * h] *= by.x;
          c[i][n][2 * h + 1] *= by.y;
        }
    }
  }
  GD_DEVICE static void pack_tokens(Operand& to, const Tokens& c) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int n = 0; n < kT; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) to[i][n / 2][n % 2 * 2 + h] = pack<Elem>(c[i][n][2 * h], c[i][n][2 * h + 1]);
  }
  // The same for an operand that is summed over tokens. Where keys resemble each other, rounding errors add up: a row
  // of U is then v_i - v_{i-1}, and 32 errors meet in a sum that is one v. In steps with such keys (`carries`) an error
  // is carried on to a later token. NOTE(ptxas): fp16 has three bits more and could do without; but without the branch
  // the forward kernel spills on sm_80, and with bf16's on sm_90.
  GD_DEVICE void pack_summed(Operand& to, const Tokens& c, bool carries) const {
    if (carries) {
      if constexpr (std::is_same_v<Elem, Bf16>) {
        pack_gathered(to, c);
      } else {
        pack_carried(to, c);
      }
    } else {
      pack_tokens(to, c);
    }
  }
  // V of the next step while the state gets this one's, `rows` being left from there on.
  GD_DEVICE void add_to_state_and_load(const Operand& a, uint32_t X, int rows) {
    add_to_state(a, X, [&](int i) {
      const int part = i - kKeyBlocks / 2;
      if (part >= 0 && part < kValueParts) load_own_part(rows, part);
    });
    v += step_stride(p.v_stride);
    copy_commit();
  }
  // Four tokens of a lane: each gets the error of the one before.
  GD_DEVICE static void pack_carried(Operand& to, const Tokens& c) {
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float error = 0;
#pragma unroll
        for (int n = 0; n < kT; ++n)
          error = pack_pair(to[i][n / 2][n % 2 * 2 + h], c[i][n][2 * h] + (n % 2 == 0 ? 0 : error), c[i][n][2 * h + 1]);
      }
  }
  // Eight tokens of four lanes: the last lane's first token gets the errors of the other lanes, and every token of that
  // lane the error of its token before. The second token would be wrong: N reads nothing of a step's last one.
  GD_DEVICE void pack_gathered(Operand& to, const Tokens& c) const {
    const bool is_last = t == 3;
#pragma unroll
    for (int i = 0; i < kI; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float error = 0;
#pragma unroll
        for (int n = 0; n < kT; ++n) {
          uint32_t& both = to[i][n / 2][n % 2 * 2 + h];
          const float first = c[i][n][2 * h], second = c[i][n][2 * h + 1];
          float others = pack_pair(both, first, second);
          others = is_last ? 0 : others;
          others += shuffle_xor(others, 1);
          others += shuffle_xor(others, 2);
          error = pack_pair(both, first + (is_last ? error + others : 0), second);
        }
      }
  }
  // Two tokens of a lane, the first one's error going to the second one, whose error is returned.
  GD_DEVICE static float pack_pair(uint32_t& to, float first, float second) {
    const float rounded = unpack<Elem>(pack<Elem>(first, 0.0f)).x;
    second += first - rounded;
    to = pack<Elem>(rounded, second);
    return second - unpack<Elem>(to).y;
  }

  // ---- steps of the state alone ------------------------------------------------------------------------------------

  // store(U) gets what the step's tokens write.
  template <class Store>
  GD_DEVICE void advance_state(int stage, int rows, const Store& store) {
    const uint32_t K = smem + Smem::kK + stage * Config::kTiles * Config::kTileBytes;
    const uint32_t prep = smem + Smem::kPrepared + stage * Prepared::kBytes;
    const float end = load_shared(prep + Prepared::kEnd);
    set_thread(opaque(tid));
    Tokens W;
    Operand packed;
#pragma unroll
    for (int kk = 0; kk < kKeyBlocks; ++kk) {
      uint32_t s[kI][4];
      pack_state(s, kk);
      scale_state(kk, end);
      multiply_rows(W, s, K, kk);  // (K S)^T
      load_next(stage, rows - kStep, stage ^ 1, kk);
    }
    copy_wait<1>();  // V of this step; the rows of the next one may still be on their way
    sync_warp();
    find_values(W, prep);
    sync_warp();  // all lanes have read V
    pack_summed(packed, W, load_shared(prep + Prepared::kCarry) > 0);
    multiply_triangle(W, packed, prep + Prepared::kN);  // U = W + N W
    store(W);
    scale(W, prep, kTail);
    pack_summed(packed, W, load_shared(prep + Prepared::kCarry) > 0);
    add_to_state_and_load(packed, K, rows - kStep);
  }

  // The rows of the first step, `rows` being left from there on.
  GD_DEVICE void load_first(int rows) {
    if (rows > 0) load_shared_rows(0, rows, 0);
    copy_commit();
    if (rows > 0) load_own_values(rows);
    copy_commit();
  }
  // Waits for the rows of a step.
  GD_DEVICE void begin_step() {
    copy_wait<1>();  // the rows of this step; its V may still be on its way
    sync_cta();      // of every thread; and the step before, whose stage is overwritten now, is over
  }
  // The rows of the next step, `step` of its chunk, `rows` being left from there on; they may be none. Called after the
  // products of each sixteen key dimensions, and begins after the second ones: the first ones wait for nothing but
  // shared memory.
  GD_DEVICE void load_next(int stage, int rows, int step, int kk) {
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

  // ---- transitions -------------------------------------------------------------------------------------------------

  // Whether the state a segment ends with is the next one's entry. In the gradient chain the next one is that before.
  GD_DEVICE bool leaves_entry(const Segment& segment, const Place& at) const {
    const bool is_last = Pass::kDirection > 0 ? end_of(segment, at) >= at.span.length : segment.chunk == 0;
    return !is_last && p.segments[next_block()].is_entered();
  }
  GD_DEVICE int next_block() const { return block() + Pass::kDirection * p.value_heads; }

  // ---- outputs -----------------------------------------------------------------------------------------------------

  // c comes with rows of v and leaves with rows of tokens. Two lanes trade a register, so that each has 8 bytes of a
  // row and four lanes have 32.
  GD_DEVICE void store_outputs(const Tokens& c, int rows) {
    const int columns = this->columns();
    const bool odd = t & 1;
#pragma unroll
    for (int n = 0; n < kT; ++n)
#pragma unroll
      for (int i = 0; i < kI; ++i) {
        const uint32_t a = transposed(pack<Elem>(c[i][n][0], c[i][n][1])),
                       b = transposed(pack<Elem>(c[i][n][2], c[i][n][3]));
        const uint32_t other = shuffle_xor(odd ? a : b, 1);
        if (8 * n + g < rows && 16 * i < columns)
          *reinterpret_cast<uint2*>(o + 8 * n * p.o_stride + 16 * i) = make_uint2(odd ? other : a, odd ? b : other);
      }
    o += step_stride(p.o_stride);
  }
};

}  // namespace gatedelta::cuda::portable
