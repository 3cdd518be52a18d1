// Base of the kernels that carry the state through a sequence, in registers.
//
// A warp owns kWarpColumns value columns of a head and all K key dimensions: S^T [kWarpColumns x K] in registers, as
// accumulators of mma.m16n8k16. The warps of a CTA share K, Q and prepare's results, and nothing else: no number goes
// from one warp to another. Everything is computed transposed, with value columns as rows: the left operand of a
// product is an accumulator packed in place, the right one comes from shared memory.
//
// NOTE(ptxas): 128 of 255 registers hold the state. Values derived from threadIdx and blockIdx are recomputed in each
// step (`opaque`), and strides are read from the parameters: keeping one more value live spills another.
#pragma once

#include "cuda/device/numbers.cuh"
#include "cuda/portable/params.hpp"

namespace gatedelta::cuda::portable {

template <class Config>
struct Chain {
  using Elem = typename Config::Elem;
  using Smem = typename Config::Smem;
  using Pass = typename Config::Pass;
  static constexpr int kWarpColumns = Config::kWarpColumns, kThreads = Config::kThreads;
  static constexpr int kI = kWarpColumns / 16;  // 16-row tiles of S^T
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
  uint32_t prepared;          // likewise, in packets from p.prepared on, because 32 bits take one register
  uint16_t* o;                // where this thread stores outputs of this step
  float S[kI][kJ][4];

  struct Place {
    int sequence, head, column;  // column: the warp's first one
    SequenceSpan span;
  };
  // Index of (segment, head).
  GD_DEVICE int work_item() const { return opaque(cta) >> p.log2_ctas_per_head; }
  // This CTA's segment. Where no sequence is cut it is a whole sequence, the longest first.
  GD_DEVICE Segment segment() const {
    if (p.segments) return p.segments[work_item()];
    const int item = work_item() / p.value_heads, n = p.longest_first ? p.longest_first[item] : item;
    const bool is_cut = p.segment_ranges && p.segment_ranges[n].count > 0;
    return {is_cut ? -1 : n, 0, static_cast<int>(ChunkedSequences::chunks(p.sequences[n].length)), 0};
  }
  GD_DEVICE Place place_in(const Segment& segment) const {
    const int n = segment.sequence;
    return {n, work_item() % p.value_heads, column(), p.sequences[n]};
  }
  // Tokens of the sequence up to the segment's end.
  GD_DEVICE static int64_t end_of(const Segment& segment, const Place& at) {
    const int64_t end = int64_t{segment.chunk + segment.chunks} * kChunkTokens;
    return end < at.span.length ? end : at.span.length;
  }
  GD_DEVICE int column() const {
    return (opaque(cta) & ((1 << p.log2_ctas_per_head) - 1)) * Config::kColumns + warp * kWarpColumns;
  }
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
  // In a transition: the column of M that is the warp's first one, or < 0 if the warp computes S_loc.
  GD_DEVICE int transition_column() const { return is_transition() ? column() - p.first_transition_column : -1; }
  GD_DEVICE bool is_transition() const { return Config::kHasTransitions && p.first_transition_column > 0; }

  // ---- loads (loads.cuh) --------------------------------------------------------------------------------------------

  // A thread copies one packet of every tile's row, of rows kRowStep apart, in kSharedParts parts: the copies of the
  // next step lie between products of this one.
  static constexpr int kRowStep = kThreads / 8;
  static constexpr int kSharedParts = kStep / kRowStep * Config::kTiles;
  GD_DEVICE void set_rows(const Place& at, int step, int output_step);
  GD_DEVICE void load_first(int rows);
  GD_DEVICE void load_next(int stage, int rows, int step, int kk);
  GD_DEVICE void load_shared_rows(int stage, int rows, int step);
  GD_DEVICE void load_shared_part(int stage, int rows, int part);
  GD_DEVICE void next_shared_rows(int step);
  GD_DEVICE void next_prepared(int step);
  // Elements from a step's rows to those of the next one.
  GD_DEVICE static int step_stride(uint32_t token_stride) {
    return Pass::kDirection * static_cast<int>(kStep * token_stride);
  }
  // The warp's own columns of V.
  static constexpr int kValuePackets = kWarpColumns / kPacketColumns, kValueRowStep = 32 / kValuePackets,
                       kValueParts = kStep / kValueRowStep;
  GD_DEVICE uint32_t own_values() const { return smem + Smem::kValues + warp * Smem::kValueBytes; }
  GD_DEVICE void load_own_values(int rows);
  GD_DEVICE void load_own_part(int rows, int part);

  // ---- state and outputs (state.cuh) --------------------------------------------------------------------------------

  template <class F>
  GD_DEVICE void each_number(int column, int columns, int key_stride, int value_stride, const F& f);
  template <class F>
  GD_DEVICE void each_number(int column, const F& f) {
    each_number(column, p.value_dim, p.key_state_stride, p.value_state_stride, f);
  }
  GD_DEVICE void zero_state();
  GD_DEVICE void load_matrix(const void* data, gd_dtype dtype, int64_t matrix, int column);
  GD_DEVICE void load_boundary_state(const Segment& segment, const Place& at);
  GD_DEVICE void store_state(void* data, gd_dtype dtype, int64_t matrix, int column, int columns, int key_stride,
                             int value_stride);
  GD_DEVICE void store_state(void* data, gd_dtype dtype, int64_t matrix, int column) {
    store_state(data, dtype, matrix, column, p.value_dim, p.key_state_stride, p.value_state_stride);
  }
  GD_DEVICE uint32_t* snapshot_at(const Place& at, int64_t chunk) const;
  GD_DEVICE void store_snapshot(uint32_t*& to);
  GD_DEVICE void pack_state(uint32_t (&s)[kI][4], int kk) const;
  GD_DEVICE void scale_state(int kk, float by);
  GD_DEVICE void store_outputs(const Tokens& c, int rows);

  // ---- products (products.cuh) --------------------------------------------------------------------------------------

  GD_DEVICE float2 vector2(uint32_t prep, StepVector vector, int n) const {
    return load_shared2(prep + Prepared::kVector + vector * Prepared::kVectorBytes + (8 * n + 2 * t) * 4);
  }
  GD_DEVICE void multiply_rows(Tokens& c, const uint32_t (&s)[kI][4], uint32_t X, int kk) const;
  template <class Between>
  GD_DEVICE void add_to_state(const Operand& a, uint32_t X, const Between& between);
  GD_DEVICE void compute_w(Tokens& W, uint32_t prep) const;
  GD_DEVICE void multiply_transposed_triangle(Tokens& c, const Operand& a, uint32_t M) const;
  GD_DEVICE void multiply_transposed_rows(Tokens& c, const uint32_t (&a)[kI][4], uint32_t M, int I) const;
  GD_DEVICE void multiply_triangle(Tokens& c, const Operand& a, uint32_t M) const;
  GD_DEVICE void scale(Tokens& c, uint32_t prep, StepVector vector) const;

  // ---- rounding (rounding.cuh) --------------------------------------------------------------------------------------

  GD_DEVICE static void pack_tokens(Operand& to, const Tokens& c);
  GD_DEVICE void pack_with_error_feedback(Operand& to, const Tokens& c, bool needs_feedback) const;
  GD_DEVICE static void pack_with_error_feedback_within_lane(Operand& to, const Tokens& c);
  GD_DEVICE void pack_with_error_feedback_across_lanes(Operand& to, const Tokens& c) const;
  GD_DEVICE static float pack_pair(uint32_t& to, float first, float second);

  // ---- a step of the state alone (advance.cuh) ----------------------------------------------------------------------

  GD_DEVICE void begin_step();
  template <class Store>
  GD_DEVICE void advance_state(int stage, int rows, const Store& store);
  GD_DEVICE void add_to_state_and_load(const Operand& a, uint32_t X, int rows);

  // ---- boundaries of segments ---------------------------------------------------------------------------------------

  // Whether the next segment of the chain begins with the state that this one ends with. The next one of the gradient
  // chain is the one before it in time.
  GD_DEVICE bool stores_boundary_state(const Segment& segment, const Place& at) const {
    const bool is_last = Pass::kDirection > 0 ? end_of(segment, at) >= at.span.length : segment.chunk == 0;
    return !is_last && p.segments[next_work_item()].begins_at_boundary();
  }
  GD_DEVICE int next_work_item() const { return work_item() + Pass::kDirection * p.value_heads; }
};

}  // namespace gatedelta::cuda::portable
