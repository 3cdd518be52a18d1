// `generic`: any number of tokens, one after the other, with the state in registers from the first to the last. Any
// head size, layout and type. The warps of a CTA prepare tokens together, a few at a time, in shared memory.
#pragma once

#include "cuda/decode/shares.cuh"
#include "cuda/decode/tile.cuh"
#include "cuda/decode/token.cuh"

namespace gatedelta::cuda {

// The eight lanes of a column have the same outputs; one of them stores.
template <class Config>
GD_DEVICE void store_output(const TokenRows& o, int64_t batch, int64_t token, int head, const Tile<Config>& tile,
                            const float* x, bool aligned) {
  if (tile.share != 0) return;
  const char* const to = element(o.data, o.dtype, o.offset(batch, token, head) + tile.column);
  store_numbers<Config::kColumns>(const_cast<char*>(to), o.dtype, x, aligned);
}

// Stores zeros: the outputs of a padded row, and of tokens past the last offset.
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

// Stores the state after token t in its buffer or slot. It locates the sequence again, because keeping its number would
// take a register from token to token.
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

// ---- tokens in shared memory ----------------------------------------------------------------------------------------

// Tokens as the lanes of all warps read them: a lane's share of k and q in pieces of four numbers, eight lanes' pieces
// side by side.
template <class Config>
struct GenericTokens {
  static constexpr int kCount = kColumnGroups * Config::kWarps;  // tokens at a time: a group of lanes prepares one
  float4 k[kCount][Config::kPerLane / 4][kLanesPerColumn], q[kCount][Config::kPerLane / 4][kLanesPerColumn];
  float v[kCount][Config::kCtaColumns];
  TokenFactors factors[kCount];
};

// Prepares tokens first .. first + count - 1 of a sequence, by all warps of the CTA.
template <class Config>
GD_DEVICE void prepare_tokens(GenericTokens<Config>& tokens, const DecodeParams& p, const CtaPlace& place,
                              const SequenceSpan& span, int64_t first, int count) {
  constexpr int kVector = Config::kVector, kPerLane = Config::kPerLane, kVectors = kPerLane / kVector;
  const Layer& in = p.problem.in;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  constexpr bool kRowsOfK = Config::kLayout == GD_STATE_VK;
  const int share = kRowsOfK ? lane % kLanesPerColumn : lane / kColumnGroups;
  const int token = warp * kColumnGroups + (kRowsOfK ? lane / kLanesPerColumn : lane % kColumnGroups);
  const gd_dtype dtype = in.q.dtype;  // and that of k and v

  Raw<kVector> raw_k[kVectors], raw_q[kVectors];
  RawGates gates;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) raw_k[i].clear(), raw_q[i].clear();
  if (token < count) {
    const int64_t row = span.begin + first + token;
    const char* const k_row = element(in.k.data, dtype, in.k.offset(span.batch, row, place.key_head));
    const char* const q_row = element(in.q.data, dtype, in.q.offset(span.batch, row, place.key_head));
    with_load(dtype, p.rows_aligned, [&](gd_dtype type, bool whole) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int begin = (i * kLanesPerColumn + share) * kVector;
        if (begin < in.key_dim) {
          raw_k[i].load(element(k_row, type, begin), type, whole);
          raw_q[i].load(element(q_row, type, begin), type, whole);
        }
      }
    });
    request_gates(gates, in, span.batch, row, place.head);
  }
  with_dtype(dtype, [&](gd_dtype type) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count * Config::kCtaColumns; i += Config::kThreads) {
      const int t = i / Config::kCtaColumns, c = i % Config::kCtaColumns, column = place.part * Config::kCtaColumns + c;
      if (column >= in.value_dim) continue;
      Raw<1> v;
      v.load(element(in.v.data, type, in.v.offset(span.batch, span.begin + first + t, place.head) + column), type,
             true);
      v.widen(&tokens.v[t][c], type);
    }
  });
  float k[kPerLane], q[kPerLane];
  with_dtype(dtype, [&](gd_dtype type) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      raw_k[i].widen(k + i * kVector, type);
      raw_q[i].widen(q + i * kVector, type);
    }
  });
  KeySums sums(k, q, in.l2norm);
  sums.sum_lanes<Config::kLayout>(in.l2norm);
  if (token >= count) return;
  write_share(tokens.k[token], k, share);
  write_share(tokens.q[token], q, share);
  if (share == 0) tokens.factors[token] = TokenFactors(gates.alpha(in), gates.strength(in), sums, in.l2norm, in.scale);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    generic_kernel(const __grid_constant__ DecodeParams p) {
  __shared__ GenericTokens<Config> tokens;
  const RecurrentProblem& problem = p.problem;
  const Layer& in = problem.in;
  const CtaPlace place = locate(p, blockIdx.x);
  const int n = place.sequence, head = place.head;
  Tile<Config> tile(threadIdx.x, place.part);
  const bool has_columns = tile.column < in.value_dim;  // of a warp all lanes or none: V is a multiple of its columns

  if (n == in.sequences.count) {
    const int64_t used = in.sequences.used_tokens();
    if (has_columns) clear_outputs(p, {0, used, in.sequences.tokens - used}, head, tile);
    return;
  }
  const SequenceSpan span = in.sequences[n];
  const int64_t read_slot = problem.read_slot(n), write_slot = problem.final.slot(n);
  if (problem.is_padding(n, read_slot)) {
    if (has_columns) clear_outputs(p, span, head, tile);
    return;
  }

  int64_t accepted = span.length;
  if (problem.accept_lengths) {  // not validated on the device: an invalid length is clamped
    const int64_t length = problem.accept_lengths[n];
    accepted = length < 0 ? 0 : length < accepted ? length : accepted;
  }
  const bool in_place = problem.final.data == in.initial.data && write_slot == read_slot;
  if (read_slot < 0 || !has_columns) {
    tile.clear();
  } else {
    tile.load(element(in.initial.data, in.initial.dtype, in.initial.offset(read_slot, head)), in.initial.dtype,
              in.key_dim, in.value_dim, p.states_aligned);
  }
  bool is_first = true;
#pragma unroll 1
  for (int64_t done = 0;;) {
    constexpr int kMost = GenericTokens<Config>::kCount;
    const int count = span.length - done < kMost ? static_cast<int>(span.length - done) : kMost;
    prepare_tokens(tokens, p, place, span, done, count);
    if (is_first) tile.widen(in.initial.dtype);
    is_first = false;
    __syncthreads();
#pragma unroll 1
    for (int t = 0; has_columns; ++t, ++done) {
      if (done == accepted && write_slot >= 0 && (done == 0 ? !in_place : t > 0))
        store_state(p, problem.final, problem.final.offset(write_slot, head), tile);
      if (t == count) break;
      float k[Config::kPerLane], q[Config::kPerLane], v[Config::kColumns];
      read_share(k, tokens.k[t], tile.share);
      read_share(q, tokens.q[t], tile.share);
      const int column = tile.column - place.part * Config::kCtaColumns;
#pragma unroll
      for (int c = 0; c < Config::kColumns; ++c) v[c] = tokens.v[t][column + c];
      advance<Config::kLayout>(tile.s, k, q, tokens.factors[t], v);
      if (problem.o) store_output(problem.o, span.batch, span.begin + done, head, tile, v, p.rows_aligned);
      if (problem.step_states) store_step(p, span, done, head, tile);
    }
    if (!has_columns) done += count;
    if (done == span.length) break;
    __syncthreads();  // the tokens are no longer read
  }
}

}  // namespace gatedelta::cuda
