// A validated call, as backends take it: each size once, every tensor as core/tensors.hpp has it. src/api/validate
// builds it; nothing checks it again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/tensors.hpp"

namespace gatedelta {

// What a forward saves for its backward.
struct SavedBuffer {
  void* data = nullptr;
  size_t bytes = 0;
  bool present = false;

  GD_ALWAYS_INLINE explicit operator bool() const { return present; }
};

struct Layer {
  int64_t key_heads = 0, value_heads = 0, group = 0;  // group = value_heads / key_heads
  bool tiled = false;                                 // key heads are tiled, where that differs from grouped
  int key_dim = 0, value_dim = 0;                     // K, V
  Sequences sequences;
  TokenRows q, k, v, g, beta;
  HeadVector A_log, dt_bias;
  StateRows initial;       // a sequence without a slot starts from zero
  int64_t first_slot = 0;  // of all index tensors, see StateRows
  gd_gate gate = GD_GATE_LOG;
  gd_beta beta_kind = GD_BETA_VALUE;
  gd_state_layout layout = GD_STATE_KV;
  bool l2norm = false;
  float scale = 0;

  GD_ALWAYS_INLINE int64_t key_head(int64_t head) const { return tiled ? head % key_heads : head / group; }
  // Value heads in the order of their key heads: those of a group follow one another.
  GD_ALWAYS_INLINE int64_t value_head(int64_t i) const { return tiled ? i % group * key_heads + i / group : i; }
};

// The outputs that the forward and the recurrent step have in common.
struct OutputProblem {
  Layer in;
  TokenRows o;                      // optional in a recurrent step, and in a forward that only saves states
  StateRows final;                  // of a sequence without a slot it is not stored
  bool pads_by_read_index = false;  // a null read slot alone makes a padded row

  GD_ALWAYS_INLINE int64_t read_slot(int64_t n) const { return in.initial.slot(n); }
  // A padded row is skipped: its rows of o are zero, nothing of it is read or stored.
  GD_ALWAYS_INLINE bool is_padding(int64_t n) const { return is_padding(n, read_slot(n)); }
  GD_ALWAYS_INLINE bool is_padding(int64_t n, int64_t read_slot) const {
    if (!in.initial.indices || read_slot >= 0) return false;
    return final.indices ? final.slot(n) < 0 : pads_by_read_index;
  }
};

struct ForwardProblem : OutputProblem {
  StateRows checkpoints;
  int64_t checkpoint_room = 0;   // entries of checkpoints.indices, or of checkpoints
  int64_t checkpoint_every = 0;  // tokens from one to the next; 0 = none
  IndexRows checkpoint_offsets;  // or one per sequence, after so many tokens; 0 or less = none
  SavedBuffer saved;
  bool prepared = false;         // a summary has prepared `saved`
  bool context_parallel = true;  // sequences may be cut
  bool batch_invariant = false;
  int64_t segment_chunks = 0;             // chunks per segment; 0 = automatic
  int64_t persistent_segment_chunks = 0;  // in heads whose states persist; 0 = segment_chunks
  bool segment_halves = false;            // two CTAs share a head
  // In a summary on the CPU: M of each sequence, and the chunk that each head's chain begins with, [N][Hv]; M is 0
  // where the head has faded.
  StateRows transition;
  struct ChainStart {
    int64_t first_chunk;
    bool faded;
  };
  const ChainStart* starts = nullptr;  // null: all chains begin with their first chunk
};

struct BackwardProblem {
  Layer in;
  TokenRows d_o;
  StateRows d_final;
  SavedBuffer saved;
  TokenRows dq, dk, dv, dg, dbeta;
  HeadVector dA_log, d_dt_bias;
  StateRows d_initial;
  bool context_parallel = true;  // as in the forward
  bool batch_invariant = false;
  int64_t segment_chunks = 0;
  bool small_workspace = false;
};

// Summaries of sequences: S_out = M S_in + S_loc for the state S_in that a sequence begins with. `in` has all sequences
// of the call; its q is k.
struct SummaryProblem {
  Layer in;
  int64_t first = 0, count = 0;  // the sequences that are summarised
  StateRows local;               // S_loc
  StateRows transition;          // M [n, Hv, K, K], fp32; optional
  TokenRows fade;                // [n, Hv] (no tokens), fp32; optional
  bool skip_faded = false;
  SavedBuffer saved;  // memory for the prepared inputs of a forward; then q is the forward's
  bool prepared = false;
};

// Gradients of the states sequences begin with. `in` has all sequences of the call; its v has no data.
struct BackwardSummaryProblem {
  Layer in;
  TokenRows d_o;
  StateRows d_local;
  SavedBuffer saved;
  int64_t first = 0, count = 0;  // the sequences that are summarised
  bool skip_faded = false;
};

// State r: the state after segments first[r] ... first[r] + count[r] - 1, from zero.
struct MergeProblem {
  int64_t segments = 0, results = 0, heads = 0;
  int key_dim = 0, value_dim = 0;
  StateRows values, transitions, state;
  IndexRows first, count;
  bool transposed = false;
  gd_state_layout layout = GD_STATE_KV;
};

struct RecurrentProblem : OutputProblem {
  IndexRows accept_lengths;
  IndexRows previous_accept_lengths;  // picks a sequence's read index from its row
  StateRows step_states;              // a pool with indices; otherwise addressed by the two strides below
  bool steps_by_token = false;        // columns of the indices are tokens of the pack, not of a sequence
  int64_t step_batch_stride = 0, step_token_stride = 0;
  bool batch_invariant = false;

  GD_ALWAYS_INLINE int64_t read_column(int64_t n) const {
    if (!previous_accept_lengths) return 0;
    const int64_t accepted = previous_accept_lengths[n], columns = in.initial.indices.columns;
    return accepted < 1 ? 0 : (accepted < columns ? accepted : columns) - 1;
  }
  GD_ALWAYS_INLINE int64_t read_slot(int64_t n) const {
    if (!previous_accept_lengths) return in.initial.slot(n);
    return in.initial.resolve(in.initial.indices(n, read_column(n)));
  }
  using OutputProblem::is_padding;
  GD_ALWAYS_INLINE bool is_padding(int64_t n) const { return is_padding(n, read_slot(n)); }
  // Slot for the state after token t of sequence n, which begins at `begin`; negative = none.
  GD_ALWAYS_INLINE int64_t step_slot(int64_t n, int64_t begin, int64_t t) const {
    const int64_t column = steps_by_token ? begin + t : t;
    return column < step_states.indices.columns ? step_states.resolve(step_states.indices(n, column)) : -1;
  }
};

// Inputs of the gated RMSNorm, common to its forward and backward.
struct GatedNorm {
  int64_t batch = 0, tokens = 0, heads = 0;  // B, T, H
  int dim = 0;                               // D
  TokenRows x, z;                            // z is optional
  HeadVector weight;                         // [D], contiguous; optional
  gd_norm_activation activation = GD_NORM_SILU;
  bool round_before_gate = false;
  float eps = 0;

  GD_ALWAYS_INLINE int64_t rows() const { return batch * tokens * heads; }
  // The type that the product with the weight is rounded to before the gate; fp32 = not rounded.
  GD_ALWAYS_INLINE gd_dtype product_dtype() const {
    return round_before_gate && weight && weight.dtype == x.dtype ? x.dtype : GD_F32;
  }
};

struct GatedNormProblem {
  GatedNorm in;
  TokenRows y;
};

struct GatedNormBackwardProblem {
  GatedNorm in;
  TokenRows d_y, dx, dz;
  HeadVector dweight;
};

}  // namespace gatedelta
