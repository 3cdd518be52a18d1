// The forward kernel without Q and O, for two purposes. As the first pass of a backward it stores the state before
// every chunk and U, what tokens write, for the gradients. As transitions (cut/segments.cuh) it stores the state that a
// segment ends with, or its M: columns from first_transition_column on are columns of M, which begins with the identity
// and has no values. A summary is a transition of a whole sequence (summary/summary.cuh).
#pragma once

#include "cuda/portable/chain/advance.cuh"
#include "cuda/portable/chain/loads.cuh"
#include "cuda/portable/chain/products.cuh"
#include "cuda/portable/chain/rounding.cuh"
#include "cuda/portable/chain/state.cuh"

namespace gatedelta::cuda::portable {

template <class Config>
struct States : Chain<Config> {
  using Base = Chain<Config>;
  using Base::kI, Base::p;
  using typename Base::Place, typename Base::Tokens;

  uint32_t* snapshot;

  GD_DEVICE States(const Params& params, int cta, int tid) : Base(params, cta, tid) {}

  GD_DEVICE void run() {
    const Segment segment = this->segment();
    if (segment.sequence < 0) return;
    const Place at = this->place_in(segment);
    const bool is_transition_column = this->transition_column() >= 0;
    if (this->is_transition() && !p.summaries &&
        !(is_transition_column ? needs_transition(segment, at) : this->stores_boundary_state(segment, at)))
      return;
    const int first_column =
        (is_transition_column ? this->transition_column() : at.column) - this->warp * Config::kWarpColumns;
    if (first_column >= (is_transition_column ? p.key_dim : p.value_dim))
      return;  // CTAs of a head are a power of two: these are surplus
    const int warmup = is_transition_column ? 0 : segment.warmup_chunks(), first = segment.chunk - warmup;
    int rows = static_cast<int>(Base::end_of(segment, at)) - first * kChunkTokens;
    if (rows <= 0 && !p.summaries) return;
    const int outputs = this->is_transition() ? 0 : rows - warmup * kChunkTokens;
    this->set_rows(at, first * kStepsPerChunk, segment.chunk * kStepsPerChunk);
    snapshot = this->snapshot_at(at, segment.chunk);
    this->load_first(rows);
    if (this->is_transition() && (is_transition_column || segment.begins_at_boundary())) {
      this->zero_state();
      if (is_transition_column && segment.chunks > 0)
        this->each_number(this->transition_column(), p.key_dim, 1, p.key_dim,
                          [&](float& x, int i) { x = i % (p.key_dim + 1) == 0 ? 1.0f : 0.0f; });
    } else {
      this->load_boundary_state(segment, at);
    }
    int stage = 0;
#pragma unroll 1
    for (; rows > outputs && rows > 0; stage ^= 1, rows -= kStep) {
      this->begin_step();
      this->advance_state(stage, rows, [](const Tokens&) {});
    }
#pragma unroll 1
    for (; rows > 0; stage ^= 1, rows -= kStep) {
      this->begin_step();
      if (stage == 0) this->store_snapshot(snapshot);  // before the first step of a chunk
      this->advance_state(stage, rows, [&](const Tokens& U) { this->store_outputs(U, rows); });
    }
    if (this->is_transition()) p.summaries ? store_summary() : store();
  }

  // ---- transitions --------------------------------------------------------------------------------------------------

  // Whether a merge of states or of gradients uses the segment's M.
  GD_DEVICE bool needs_transition(const Segment& segment, const Place& at) const {
    if (segment.begins_at_boundary() && this->stores_boundary_state(segment, at)) return true;
    if (!p.gradient_segments || segment.chunk == 0) return false;
    const Segment* const gradients = p.gradient_segments + this->work_item();
    return gradients->begins_at_boundary() && gradients[-p.value_heads].begins_at_boundary();
  }
  // One loop for both layouts of M, because the code that stores is long: M^T by rows for merges of states, M by rows
  // for those of gradients.
  GD_DEVICE void store() {
    const int64_t matrix = int64_t{this->work_item()} * p.key_dim * p.key_dim;
    const bool is_transition_column = this->transition_column() >= 0;
#pragma unroll 1
    for (int i = 0; i < (is_transition_column && p.gradient_transitions ? 2 : 1); ++i) {
      float* to = p.boundary_states + this->next_work_item() * p.state_numbers();
      int key_stride = p.key_state_stride, value_stride = p.value_state_stride;
      if (is_transition_column) {
        to = (i == 0 ? p.transitions : p.gradient_transitions) + matrix;
        key_stride = i == 0 ? 1 : p.key_dim;
        value_stride = i == 0 ? p.key_dim : 1;
      }
      this->each_number(is_transition_column ? this->transition_column() : this->column(),
                        is_transition_column ? p.key_dim : p.value_dim, key_stride, value_stride,
                        [&](const float& x, int at) { to[at] = x; });
    }
  }
  GD_DEVICE void store_summary() {
    const Place at = this->place_in(this->segment());
    const bool is_transition_column = this->transition_column() >= 0;
    const StateRows& to = is_transition_column ? p.transition : p.final;
    this->store_state(
        to.data, to.dtype, to.offset(at.sequence, at.head),
        is_transition_column ? this->transition_column() : at.column, is_transition_column ? p.key_dim : p.value_dim,
        is_transition_column ? p.key_dim : p.key_state_stride, is_transition_column ? 1 : p.value_state_stride);
  }
};

}  // namespace gatedelta::cuda::portable
