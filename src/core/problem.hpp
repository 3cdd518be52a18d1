// A validated call as backends see it: each size once, every tensor as base pointer + strides in elements.
// src/api/validate builds it; nothing checks it again. Presence is a bool or a dtype, never a pointer: a workspace
// query knows what will be there before it is there, so its data pointers are null.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gatedelta/gatedelta.h"

// The CPU backend also compiles these headers with the flags of every instruction set. A function that is not inlined
// there could be linked into code for lesser machines, so every function here must be.
#define GD_ALWAYS_INLINE inline __attribute__((always_inline))

namespace gatedelta {

constexpr int kChunk = GD_CHUNK;  // tokens per chunk, C in docs/math.md

GD_ALWAYS_INLINE int64_t dtype_bytes(gd_dtype dtype) {
  switch (dtype) {
    case GD_F32:
    case GD_I32: return 4;
    case GD_BF16:
    case GD_F16: return 2;
    case GD_I64: return 8;
    case GD_DTYPE_NONE: break;
  }
  return 0;
}

// [B, T, H, D] with contiguous D, or [B, T, H].
struct TokenRows {
  void* data = nullptr;
  gd_dtype dtype = GD_DTYPE_NONE;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  GD_ALWAYS_INLINE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
  GD_ALWAYS_INLINE int64_t offset(int64_t batch, int64_t token, int64_t head) const {
    return batch * batch_stride + token * token_stride + head * head_stride;
  }
};

// [H].
struct HeadVector {
  void* data = nullptr;
  gd_dtype dtype = GD_DTYPE_NONE;
  int64_t stride = 0;

  GD_ALWAYS_INLINE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
};

// Contiguous int32 or int64 indices.
struct IndexVector {
  const void* data = nullptr;
  bool is_int64 = false;
  bool present = false;

  GD_ALWAYS_INLINE explicit operator bool() const { return present; }
  GD_ALWAYS_INLINE int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// [slots, H, K, V] or [slots, H, V, K]; each matrix is contiguous.
struct StateRows {
  void* data = nullptr;
  gd_dtype dtype = GD_DTYPE_NONE;
  int64_t slots = 0, slot_stride = 0, head_stride = 0;

  GD_ALWAYS_INLINE explicit operator bool() const { return dtype != GD_DTYPE_NONE; }
  GD_ALWAYS_INLINE int64_t offset(int64_t slot, int64_t head) const { return slot * slot_stride + head * head_stride; }
};

// What a forward saves for its backward.
struct SavedBuffer {
  void* data = nullptr;
  size_t bytes = 0;
  bool present = false;

  GD_ALWAYS_INLINE explicit operator bool() const { return present; }
};

// Where one sequence's tokens are.
struct SequenceSpan {
  int64_t batch, begin, length;
};

struct Sequences {
  int64_t count = 0;
  int64_t batch = 0, tokens = 0;  // B, T
  IndexVector offsets;            // cu_seqlens; absent = one sequence per batch entry

  GD_ALWAYS_INLINE SequenceSpan operator[](int64_t n) const {
    if (!offsets) return {n, 0, tokens};
    return {0, offsets[n], offsets[n + 1] - offsets[n]};
  }
  // Tokens of batch entry 0 from here on belong to no sequence.
  GD_ALWAYS_INLINE int64_t used_tokens() const { return offsets ? offsets[count] : tokens; }
};

// Slot of sequence n's state; negative = none.
GD_ALWAYS_INLINE int64_t state_slot(const StateRows& states, const IndexVector& indices, int64_t n) {
  return !states ? -1 : indices ? indices[n] : n;
}

struct Layer {
  int64_t key_heads = 0, value_heads = 0, group = 0;  // group = value_heads / key_heads
  int key_dim = 0, value_dim = 0;                     // K, V
  Sequences sequences;
  TokenRows q, k, v, g, beta;
  HeadVector A_log, dt_bias;
  StateRows initial;
  IndexVector initial_indices;
  gd_gate gate = GD_GATE_LOG;
  gd_beta beta_kind = GD_BETA_VALUE;
  gd_state_layout layout = GD_STATE_KV;
  bool l2norm = false;
  float scale = 0;

  // Negative: the sequence starts from zero.
  GD_ALWAYS_INLINE int64_t initial_slot(int64_t n) const { return state_slot(initial, initial_indices, n); }
};

// What the forward and the recurrent step have in common.
struct OutputProblem {
  Layer in;
  TokenRows o;  // optional in a recurrent step, and in a forward that only saves states
  StateRows final;
  IndexVector final_indices;
  bool pads_by_read_index = false;  // a negative read index alone makes a padded row

  // Negative: the final state is not stored.
  GD_ALWAYS_INLINE int64_t final_slot(int64_t n) const { return state_slot(final, final_indices, n); }
  // A padded row is skipped: its rows of o are zero, nothing of it is read or stored.
  GD_ALWAYS_INLINE bool is_padding(int64_t n) const {
    if (!in.initial_indices || in.initial_indices[n] >= 0) return false;
    return final_indices ? final_indices[n] < 0 : pads_by_read_index;
  }
};

struct ForwardProblem : OutputProblem {
  StateRows checkpoints;
  IndexVector checkpoint_indices;
  int64_t checkpoint_room = 0;   // entries of checkpoint_indices, or of checkpoints
  int64_t checkpoint_every = 0;  // 0 = none
  SavedBuffer saved;
  bool context_parallel = true;  // sequences may be cut
  bool batch_invariant = false;
  int64_t segment_chunks = 0;  // chunks per segment; 0 = automatic
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

struct RecurrentProblem : OutputProblem {
  IndexVector accept_lengths;
  StateRows step_states;     // a pool with step_indices; otherwise addressed by step_batch_stride / step_token_stride
  IndexVector step_indices;  // [B, T]
  int64_t step_batch_stride = 0, step_token_stride = 0;
};

}  // namespace gatedelta
