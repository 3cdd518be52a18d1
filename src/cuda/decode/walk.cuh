// Any number of tokens, one after the other, with the state in registers from the first to the last. Any head size,
// layout and type. No shared memory, no barrier.
#pragma once

#include "cuda/decode/tile.cuh"
#include "cuda/decode/token.cuh"

namespace gatedelta::cuda {

// Lanes with the same columns have the same outputs: one of eight stores them.
template <class Config>
GD_DEVICE void store_output(const TokenRows& o, int64_t batch, int64_t token, int head, const Tile<Config>& tile,
                            const float* x, bool aligned) {
  if (tile.share != 0) return;
  const char* const to = element(o.data, o.dtype, o.offset(batch, token, head) + tile.column);
  store_numbers<Config::kColumns>(const_cast<char*>(to), o.dtype, x, aligned);
}

// What a padded row has of outputs, and what tokens past the last offset have.
template <class Config>
GD_DEVICE void clear_outputs(const DecodeParams& p, const SequenceSpan& span, int head, const Tile<Config>& tile) {
  const float zeros[Config::kColumns] = {};
  if (!p.problem.o) return;
#pragma unroll 1
  for (int64_t t = 0; t < span.length; ++t)
    store_output(p.problem.o, span.batch, span.begin + t, head, tile, zeros, p.rows_aligned);
}

template <class Config>
GD_DEVICE void store_state(const DecodeParams& p, const StateRows& rows, int64_t at, Tile<Config>& tile) {
  const Layer& in = p.problem.in;
  tile.store(const_cast<char*>(element(rows.data, rows.dtype, at)), rows.dtype, in.key_dim, in.value_dim,
             p.states_aligned);
}

// The state after token t, to its buffer or slot. The sequence is located again: its number would otherwise stay in a
// register while tokens go by.
template <class Config>
GD_DEVICE void store_step(const DecodeParams& p, const SequenceSpan& span, int64_t t, int head, Tile<Config>& tile) {
  const StateRows& rows = p.problem.step_states;
  int64_t at = span.batch * p.problem.step_batch_stride + (span.begin + t) * p.problem.step_token_stride +
               head * rows.head_stride;
  if (rows.indices) {
    const int n = locate(p, opaque(static_cast<int>(blockIdx.x))).sequence;
    const int64_t slot = p.problem.step_slot(n, span.begin, t);
    if (slot < 0) return;
    at = rows.offset(slot, head);
  }
  store_state(p, rows, at, tile);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    walk_kernel(const __grid_constant__ DecodeParams p) {
  const RecurrentProblem& problem = p.problem;
  const Layer& in = problem.in;
  const CtaPlace place = locate(p, blockIdx.x);
  const int n = place.sequence, head = place.head;
  Tile<Config> tile(static_cast<int>(threadIdx.x), place.part);
  if (tile.column >= in.value_dim) return;  // V is a multiple of a warp's columns, so whole warps leave

  if (n == in.sequences.count) {
    const int64_t used = in.sequences.used_tokens();
    return clear_outputs(p, {0, used, in.sequences.tokens - used}, head, tile);
  }
  const SequenceSpan span = in.sequences[n];
  const int64_t read_slot = problem.read_slot(n), write_slot = problem.final.slot(n);
  if (problem.is_padding(n, read_slot)) return clear_outputs(p, span, head, tile);

  int64_t accepted = span.length;
  if (problem.accept_lengths) {  // not validated on the device: the state of a length that is none is the nearest one
    const int64_t length = problem.accept_lengths[n];
    accepted = length < 0 ? 0 : length < accepted ? length : accepted;
  }
  const bool in_place = problem.final.data == in.initial.data && write_slot == read_slot;
  if (read_slot < 0) {
    tile.clear();
  } else {
    tile.load(element(in.initial.data, in.initial.dtype, in.initial.offset(read_slot, head)), in.initial.dtype,
              in.key_dim, in.value_dim, p.states_aligned);
  }
  HeadGate gate;
  gate.load(in, head);
  RawToken<Config> raw;
  const auto load_token = [&](int64_t t) {
    raw.load(in, in.q.dtype, span.batch, span.begin + t, head, place.key_head, tile.share, tile.column, in.key_dim,
             p.rows_aligned);
  };
  if (span.length > 0) load_token(0);
  tile.widen(in.initial.dtype);

#pragma unroll 1
  for (int64_t done = 0;; ++done) {
    if (done > 0 && problem.step_states) store_step(p, span, done - 1, head, tile);
    if (done == accepted && write_slot >= 0 && !(done == 0 && in_place))
      store_state(p, problem.final, problem.final.offset(write_slot, head), tile);
    if (done == span.length) break;
    const Token<Config> token(raw, in, in.q.dtype, gate);
    const bool is_last = done + 1 == span.length;
    if (Config::kPrefetch && !is_last) load_token(done + 1);
    float o[Config::kColumns];
    token.advance(tile.s, in.scale, o);
    if (problem.o) store_output(problem.o, span.batch, span.begin + done, head, tile, o, p.rows_aligned);
    if (!Config::kPrefetch && !is_last) load_token(done + 1);
  }
}

}  // namespace gatedelta::cuda
