// `sequential_128`: any number of tokens, one after the other, for K = V = 128 and 16-bit q, k, v. Bitwise equal to
// `generic`. A warp prepares four tokens at a time, for itself alone, one per group of lanes.
//
// Grid: as that of `one_token`, with the tokens past the last offset as one more sequence.
#pragma once

#include "cuda/decode/one_token.cuh"
#include "cuda/decode/shares.cuh"

namespace gatedelta::cuda {

// Tokens as the lanes of a warp read them, see GenericTokens.
template <class Config>
struct Sequential128Tokens {
  static constexpr int kCount = kColumnGroups, kColumns = kColumnGroups * Config::kColumns;
  float4 k[kCount][Config::kPerLane / 4][kLanesPerColumn], q[kCount][Config::kPerLane / 4][kLanesPerColumn];
  float v[kCount][kColumns];
  TokenFactors factors[kCount];
  char *o[kCount], *step[kCount];  // rows of outputs; states after the tokens, null = not stored
};

template <class Config, class State, class Input>
struct Sequential128 {
  using Tokens = Sequential128Tokens<Config>;
  static constexpr gd_dtype kState = kDtype<State>;
  static constexpr int kVector = Config::kVector, kPerLane = Config::kPerLane, kVectors = kPerLane / kVector;
  static constexpr int kColumns = Config::kColumns;
  static constexpr int kOwn = Tokens::kColumns < kLanesPerColumn ? 1 : Tokens::kColumns / kLanesPerColumn;

  const ManyTokenParams& p;
  Tokens& tokens;
  const GridPlace place;
  Tile<Config> tile;
  uint32_t batch, begin, length;  // of the sequence

  // The token of this lane's group as loaded, before conversion to fp32. Of v, the columns that this lane loads.
  Raw<kVector> k[kVectors], q[kVectors];
  Raw<kOwn> v;
  RawGates gates;
  IndexRequest step_slot;
  bool has_token = false;

  GD_DEVICE Sequential128(const ManyTokenParams& params, Tokens& tokens_of, const GridPlace& at)
      : p(params), tokens(tokens_of), place(at), tile(threadIdx.x, at.part) {}

  GD_DEVICE int first_column() const { return tile.column - tile.group * kColumns; }
  GD_DEVICE bool loads_v() const { return tile.share * kOwn < Tokens::kColumns; }

  GD_DEVICE void request_tokens(uint32_t first) {
    const uint32_t token = first + static_cast<uint32_t>(tile.group);
    has_token = token < length;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) k[i].clear(), q[i].clear();
    if (!has_token) return;
    const uint32_t part = static_cast<uint32_t>(tile.share * kVector) * sizeof(Input), row = begin + token;
    const char* const k_row = p.k.at(batch, row, place.key_head) + part;
    const char* const q_row = p.q.at(batch, row, place.key_head) + part;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      constexpr uint32_t kStride = kLanesPerColumn * kVector * sizeof(Input);
      k[i].load(k_row + i * kStride, kDtype<Input>, true);
      q[i].load(q_row + i * kStride, kDtype<Input>, true);
    }
    const int column = first_column() + tile.share * kOwn;
    if (loads_v()) v.load(element(p.v.at(batch, row, place.head), kDtype<Input>, column), kDtype<Input>, true);
    request_gates(gates, p, batch, row, place.head);
    step_slot = request_step_slot(p, place.sequence, p.steps_by_token ? row : token);
  }

  // The address of the state after a token of the sequence; null: it is not stored.
  GD_DEVICE char* step_target(uint32_t token) const {
    const StateRows& rows = p.step_states;
    if (!rows) return nullptr;
    int64_t at = batch * p.step_batch_stride + (begin + token) * p.step_token_stride + place.head * rows.head_stride;
    if (rows.indices) {
      const int64_t slot = rows.resolve(step_slot.value());
      if (slot < 0) return nullptr;
      at = rows.offset(slot, place.head);
    }
    return static_cast<char*>(rows.data) + at * int64_t{sizeof(State)};
  }

  // Stores the requested tokens in shared memory.
  GD_DEVICE void prepare_tokens(uint32_t first) {
    float wide_k[kPerLane], wide_q[kPerLane], wide_v[kOwn];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      k[i].widen(wide_k + i * kVector, kDtype<Input>);
      q[i].widen(wide_q + i * kVector, kDtype<Input>);
    }
    v.widen(wide_v, kDtype<Input>);
    KeySums sums(wide_k, wide_q, p.l2norm);
    sums.sum_lanes<Config::kLayout>(p.l2norm);
    if (!has_token) return;
    const int at = tile.group;
    write_share(tokens.k[at], wide_k, tile.share);
    write_share(tokens.q[at], wide_q, tile.share);
    if (loads_v())
#pragma unroll
      for (int i = 0; i < kOwn; ++i) tokens.v[at][tile.share * kOwn + i] = wide_v[i];
    if (tile.share != 0) return;
    const uint32_t token = first + static_cast<uint32_t>(at);
    tokens.factors[at] = TokenFactors(gates.alpha(p), gates.strength(p), sums, p.l2norm, p.scale);
    tokens.o[at] = p.o ? p.o.at(batch, begin + token, place.head) : nullptr;
    tokens.step[at] = step_target(token);
  }

  GD_DEVICE void put_output(char* row, const float* o) const {
    if (tile.share != 0) return;
    with_dtype(p.o.dtype, [&](gd_dtype type) {
      store_numbers<kColumns>(const_cast<char*>(element(row, type, tile.column)), type, o, true);
    });
  }
  GD_DEVICE void clear_outputs() const {
    const float zeros[kColumns] = {};
    if (!p.o) return;
#pragma unroll 1
    for (uint32_t token = 0; token < length; ++token) put_output(p.o.at(batch, begin + token, place.head), zeros);
  }

  // Token `at` of those prepared.
  GD_DEVICE void advance_token(int at) {
    float wide_k[kPerLane], wide_q[kPerLane], o[kColumns];
    read_share(wide_k, tokens.k[at], tile.share);
    read_share(wide_q, tokens.q[at], tile.share);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) o[c] = tokens.v[at][tile.group * kColumns + c];
    advance<Config::kLayout>(tile.s, wide_k, wide_q, tokens.factors[at], o);
    if (char* const row = tokens.o[at]) put_output(row, o);
  }
  GD_DEVICE void store(char* state) { tile.template store<true>(state, kState, kDecodeDim, kDecodeDim, true); }
};

template <class Config, class State, class Input>
__global__ void __launch_bounds__(Config::kThreads) sequential_128_kernel(const __grid_constant__ ManyTokenParams p) {
  __shared__ Sequential128Tokens<Config> tokens[Config::kWarps];
  constexpr uint32_t kCount = Sequential128Tokens<Config>::kCount;
  const uint32_t n = grid_sequence();
  const IndexRequest read = request_first(p, n);
  if (n >= p.sequences + (p.offsets ? 1 : 0)) return;
  const bool is_rest = n == p.sequences;  // tokens past the last offset: one more sequence, without results
  Sequential128<Config, State, Input> run(p, tokens[threadIdx.x / 32], grid_place<Config::kParts>(p));
  run.batch = p.offsets ? 0 : n;
  run.begin = p.offsets ? static_cast<uint32_t>(p.offsets[n]) : 0;
  run.length = p.tokens;
  if (p.offsets) run.length = (is_rest ? p.tokens : static_cast<uint32_t>(p.offsets[n + 1])) - run.begin;
  if (is_rest) return run.clear_outputs();

  const int32_t read_slot = read.slot(p.initial);
  if (read_slot >= 0) {
    run.tile.load(p.initial.at(read_slot, run.place.head), kDtype<State>, kDecodeDim, kDecodeDim, true);
  } else {
    if (is_padding(p, n)) return run.clear_outputs();
    run.tile.clear();
  }
  run.request_tokens(0);
  const IndexRequest write = request_slot(p.final, n);
  const IndexRequest accept(p.accept_lengths, uint64_t{n} * p.accept_lengths.stride, run.length);

  uint32_t accepted = 0;
  char* final = nullptr;
#pragma unroll 1
  for (uint32_t first = 0;; first += kCount) {
    run.prepare_tokens(first);
    __syncwarp();
    if (first == 0) {
      run.tile.widen(kDtype<State>);
      const int64_t length = accept.value();  // not validated on the device
      const int32_t slot = write.slot(p.final);
      accepted = length < 0 ? 0 : length < run.length ? static_cast<uint32_t>(length) : run.length;
      const bool unchanged = accepted == 0 && slot == read_slot && p.final.data == p.initial.data;
      if (slot >= 0 && !unchanged) final = p.final.at(slot, run.place.head);
    }
    const uint32_t next = first + kCount, end = next < run.length ? next : run.length;
    if (next < run.length) run.request_tokens(next);  // their loads overlap with these tokens
#pragma unroll 1
    for (uint32_t token = first;; ++token) {
      if (token == accepted && final && (token > first || token == 0)) run.store(final);
      if (token == end) break;
      run.advance_token(static_cast<int>(token - first));
      if (char* const step = run.tokens.step[token - first]) run.store(step);
    }
    if (next >= run.length) return;
    __syncwarp();  // the tokens are no longer read
  }
}

}  // namespace gatedelta::cuda
