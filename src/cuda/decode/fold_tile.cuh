// Several tokens at once on the tensor cores, for states [V, K] with K = V = 128 and 16-bit q, k, v. With
// P_tj = alpha_(j+1) ... alpha_t and D_t = P_t,-1 all tokens of a window follow from its first state S:
//   e_t = v_t - D_t S^T k_t - sum_(j<t) P_tj (k_t.k_j) beta_j e_j        (a triangular solve per value column)
//   o_t = s D_t S^T q_t + s sum_(j<=t) P_tj (q_t.k_j) beta_j e_j
//   S_m = D_m S + sum_(j<=m) P_mj k_j (beta_j e_j)^T
//
// A warp has 16 rows of the stored state, lane (g, t) of eight by four rows 2 g and 2 g + 1. The order of K is free as
// long as states, keys and queries agree, so what a lane loads in 16 bytes is a fragment of operand A and, in fp32, of
// the accumulator: of every row it has vectors t, t + 4, ... and of the token in column g of operand B the same part.
//
// Products with an fp32 state are exact up to 2^-22: it goes as two tf32 numbers, and 16-bit k and q are tf32 numbers.
// NOTE: a token never reaches the results of an earlier one, not even as 0 times NaN.
#pragma once

#include "cuda/decode/fold_table.cuh"
#include "cuda/decode/slots.cuh"
#include "cuda/decode/step.cuh"
#include "cuda/decode/token.cuh"

namespace gatedelta::cuda {

template <class Config>
struct Fold {
  using State = typename Config::State;
  using Input = typename Config::Input;
  static constexpr int kTokens = Config::kTokens, kTiles = kTokens / 4;  // tiles of eight columns: k and q
  static constexpr int kVector = 16 / sizeof(State), kVectors = 32 / kVector;
  static constexpr bool kIsFloat = std::is_same_v<State, float>;
  static constexpr bool kIsShared = Config::kKind == FoldKind::any;  // the state is in shared memory, as fp32
  static constexpr bool kPacked = !kIsShared && !kIsFloat;           // products are with the state in 16 bits
  static_assert(kTokens == 4 || kTokens == 8);

  const FoldParams& p;
  FoldShared<Config>& shared;
  FoldTable<kTokens>& table;
  const StepPlace place;
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int row =
      (static_cast<int>(place.part) * Config::kWarps + static_cast<int>(threadIdx.x / 32)) * Config::kRows + 2 * g;
  // This lane gets the products of tokens `mine` and mine + 1 with the state: S^T k in lanes that solve, S^T q in those
  // that have outputs.
  const int mine = kTokens == 4 ? t % 2 * 2 : t * 2;
  const bool solves = kTokens == 8 || t < 2, puts = kTokens == 8 || t >= 2;
  uint32_t batch, begin, length;  // of the sequence

  uint32_t pairs[kTiles][16];  // tokens as operand B: k_g, q_g, or with four tokens k_0..3, q_0..3
  // The state, words of vectors as they lie in memory: of 16-bit numbers two share a word.
  uint32_t words[kIsShared ? 1 : 2][kIsShared ? 1 : 4 * kVectors];
  float v[2][2];  // [row][token - mine]
  float e[2][kTokens];
  RawGates gates;  // of token `lane`, in the first warp

  GD_DEVICE Fold(const FoldParams& params, FoldShared<Config>& shared_of, const StepPlace& at)
      : p(params), shared(shared_of), table(shared_of.table), place(at) {}

  // ---- loads ----

  GD_DEVICE void request_tokens(uint32_t first, int count) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const bool is_key = kTokens == 4 ? g < 4 : tile == 0;
      const int token = kTokens == 4 ? g % 4 : g;
      const Rows32& rows = is_key ? p.k : p.q;
#pragma unroll
      for (int i = 0; i < 16; ++i) pairs[tile][i] = 0;
      if (token < count) {
        const char* const from = rows.at(batch, begin + first + token, place.key_head) + t * kVector * 2;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          const auto packet = *reinterpret_cast<const Packet<2 * kVector>*>(from + j * 8 * kVector);
#pragma unroll
          for (int i = 0; i < kVector / 2; ++i) pairs[tile][j * kVector / 2 + i] = packet.words[i];
        }
      }
    }
    uint32_t two[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (solves && mine + i < count)
        two[i] = *reinterpret_cast<const uint32_t*>(p.v.at(batch, begin + first + mine + i, place.head) + row * 2);
    if (threadIdx.x < count) request_gates(gates, p, batch, begin + first + lane, place.head);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) v[r][i] = widen_half<Input>(two[i], r);
  }

  // This lane's first number of a state.
  GD_DEVICE char* row_of(char* state) const { return state + (row * kStepDim + t * kVector) * int{sizeof(State)}; }
  GD_DEVICE float4* held(int r, int four) const {
    return &shared.held[((threadIdx.x / 32 * 2 + r) * 8 + four) * 32 + lane];
  }

  GD_DEVICE void request_state(int32_t slot) {
    const char* const from = row_of(p.initial.at(slot, place.head));
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const char* const vector = from + r * kStepDim * sizeof(State) + j * 64;
        if constexpr (kIsShared) {
          copy_async(held(r, j * kVector / 4), vector);
        } else {
          const auto packet = *reinterpret_cast<const Packet<16>*>(vector);
#pragma unroll
          for (int i = 0; i < 4; ++i) words[r][4 * j + i] = packet.words[i];
        }
      }
  }
  GD_DEVICE void clear_state() {
    if constexpr (kIsShared) {
#pragma unroll
      for (int i = 0; i < 16; ++i) *held(i / 8, i % 8) = {};
    } else {
#pragma unroll
      for (int i = 0; i < 8 * kVectors; ++i) words[i / (4 * kVectors)][i % (4 * kVectors)] = 0;
    }
  }
  // What is in shared memory becomes fp32.
  GD_DEVICE void widen_state() {
    if constexpr (kIsShared) wait_for_copies();
    if constexpr (kIsShared && !kIsFloat) widen_held();
  }
  GD_DEVICE void widen_held() {
#pragma unroll
    for (int j = 0; j < 2 * kVectors; ++j) {
      const int r = j / kVectors, vector = j % kVectors;
      const float4 from = *held(r, 2 * vector);
      const uint32_t four[4] = {__float_as_uint(from.x), __float_as_uint(from.y), __float_as_uint(from.z),
                                __float_as_uint(from.w)};
      float x[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] = widen_half<State>(four[i / 2], i % 2);
#pragma unroll
      for (int i = 0; i < kVector; i += 4)
        *held(r, (vector * kVector + i) / 4) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }

  // Vector j of both rows.
  GD_DEVICE void read_vector(int j, float (&x)[2][kVector]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kIsShared) {
#pragma unroll
        for (int i = 0; i < kVector; i += 4) {
          const float4 four = *held(r, (j * kVector + i) / 4);
          x[r][i] = four.x, x[r][i + 1] = four.y, x[r][i + 2] = four.z, x[r][i + 3] = four.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if constexpr (kIsFloat) x[r][i] = __uint_as_float(words[r][j * kVector + i]);
          if constexpr (!kIsFloat) x[r][i] = widen_half<State>(words[r][(j * kVector + i) / 2], i % 2);
        }
      }
    }
  }
  GD_DEVICE void keep_vector(int j, const float (&x)[2][kVector]) {
    static_assert(kIsShared);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kVector; i += 4)
        *held(r, (j * kVector + i) / 4) = make_float4(x[r][i], x[r][i + 1], x[r][i + 2], x[r][i + 3]);
  }
  GD_DEVICE static void store_vector(char* to, int j, const float (&x)[2][kVector]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      store_numbers<kVector, Config::kStreaming>(to + r * kStepDim * sizeof(State) + j * 64, kDtype<State>, x[r], true);
  }

  // ---- the table, by the first warp ----

  // What is column g of operand B is row g of operand A, so all inner products cost eight or sixteen instructions.
  GD_DEVICE void fill_table(int count) {
    float alpha = 1, beta = 0;  // tokens past the last one change nothing
    if (lane < count) alpha = gates.alpha(p), beta = gates.strength(p);
    float c[4] = {}, d[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const uint32_t k0 = pairs[0][i], k1 = pairs[0][i + 1];
      if constexpr (kTokens == 4) {
        mma_halves<Input>(i % 4 ? d : c, k0, 0, k1, 0, k0, k1);
      } else {
        const uint32_t q0 = pairs[1][i], q1 = pairs[1][i + 1];
        mma_halves<Input>(c, k0, q0, k1, q1, k0, k1);
        mma_halves<Input>(d, q0, 0, q1, 0, q0, q1);
      }
    }
    if constexpr (kTokens == 4)
#pragma unroll
      for (int i = 0; i < 2; ++i) c[i] += d[i];
    // c: rows k_g and q_g (with four tokens row g alone), columns k_2t, k_2t+1. Norms stand on the diagonals.
    if (lane < kTokens) table.beta[lane] = beta;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (2 * t + i == g) {
        const auto norm = [&](float sum) { return p.l2norm ? rsqrtf(sum + 1e-6f) : 1.0f; };
        if constexpr (kTokens == 4) {
          (g < 4 ? table.r_k[g % 4] : table.r_q[g % 4]) = norm(c[i]) * (g < 4 ? 1.0f : p.scale);
        } else {
          table.r_k[g] = norm(c[i]), table.r_q[g] = norm(d[i]) * p.scale;
        }
      }
    __syncwarp();
    const int token = g % kTokens;
    float reach[2] = {1, 1}, decay = 1;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float factor = __shfl_sync(~0u, alpha, i);
      if (i <= token) {
        decay *= factor;
        if (i > 2 * t) reach[0] *= factor;
        if (i > 2 * t + 1) reach[1] *= factor;
      }
    }
    const float r_k = table.r_k[token], r_q = table.r_q[token];
    if (t == 0 && g < kTokens) {
      table.decay[token] = decay;
      table.x[token] = decay * r_k, table.y[token] = decay * r_q;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 2 * t + i;
      if (j >= kTokens) continue;
      const float weight = j <= token ? reach[i] * (table.beta[j] * table.r_k[j]) : 0.0f;
      const auto times = [&](float factor, float product) { return j <= token ? weight * factor * product : 0.0f; };
      if constexpr (kTokens == 4) {
        if (g < 4) {
          table.reach[token][j] = weight, table.kk[token][j] = times(r_k, c[i]);
        } else {
          table.qk[token][j] = times(r_q, c[i]);
        }
      } else {
        table.reach[token][j] = weight, table.kk[token][j] = times(r_k, c[i]),
        table.qk[token][j] = times(r_q, c[2 + i]);
      }
    }
  }
  GD_DEVICE void meet() const {
    if constexpr (Config::kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // ---- products, solve, outputs ----

  // products[tile][2 r + i]: row r with the token in column 2 t + i of the tile.
  GD_DEVICE void multiply(float (&products)[kTiles][4]) const {
    float part[2][kTiles][4] = {};  // two sums, shorter chains
    if constexpr (kPacked && std::is_same_v<State, Input>) {
#pragma unroll
      for (int i = 0; i < 16; i += 2)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          mma_halves<Input>(part[i / 2 % 2][tile], words[0][i], words[1][i], words[0][i + 1], words[1][i + 1],
                            pairs[tile][i], pairs[tile][i + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float x[2][kVector];
        read_vector(j, x);
#pragma unroll
        for (int w = 0; w < kVector; w += 2)
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const uint32_t pair = pairs[tile][(j * kVector + w) / 2];
            const float b0 = widen_half<Input>(pair, 0), b1 = widen_half<Input>(pair, 1);
            const float a0 = x[0][w], a1 = x[1][w], a2 = x[0][w + 1], a3 = x[1][w + 1];
            if constexpr (kPacked) {  // both operands are tf32 numbers as they are
              mma_tf32(part[w / 2 % 2][tile], a0, a1, a2, a3, b0, b1);
            } else {
              mma_tf32(part[0][tile], tf32_high(a0), tf32_high(a1), tf32_high(a2), tf32_high(a3), b0, b1);
              mma_tf32(part[1][tile], tf32_low(a0), tf32_low(a1), tf32_low(a2), tf32_low(a3), b0, b1);
            }
          }
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) products[i / 4][i % 4] = part[0][i / 4][i % 4] + part[1][i / 4][i % 4];
  }

  // e of both rows, by every lane of four.
  GD_DEVICE void solve(const float (&products)[kTiles][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float first[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) first[i] = v[r][i] - table.x[mine + i] * products[0][2 * r + i];
#pragma unroll
      for (int token = 0; token < kTokens; ++token)
        e[r][token] = __shfl_sync(~0u, first[token % 2], lane - t + token / 2);
    }
#pragma unroll
    for (int token = 1; token < kTokens; ++token)
#pragma unroll
      for (int j0 = 0; j0 < token; j0 += 4) {
        const float4 factors = *reinterpret_cast<const float4*>(&table.kk[token][j0]);
        const float factor[4] = {factors.x, factors.y, factors.z, factors.w};
#pragma unroll
        for (int j = j0; j < j0 + 4 && j < token; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r) e[r][token] -= factor[j - j0] * e[r][j];
      }
  }

  GD_DEVICE void put_outputs(const float (&products)[kTiles][4], uint32_t first, int count) const {
    if (!p.o) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = mine + i;
      float o[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) o[r] = table.y[token] * products[kTiles - 1][2 * r + i];
#pragma unroll
      for (int j0 = 0; j0 < kTokens; j0 += 4) {
        const float4 factors = *reinterpret_cast<const float4*>(&table.qk[token][j0]);
        const float factor[4] = {factors.x, factors.y, factors.z, factors.w};
#pragma unroll
        for (int j = j0; j < j0 + 4; ++j)
          if (j <= token) {
#pragma unroll
            for (int r = 0; r < 2; ++r) o[r] += factor[j - j0] * e[r][j];
          }
      }
      if (puts && token < count) store_rows(first + token, o);
    }
  }
  GD_DEVICE void store_rows(uint32_t token, const float (&o)[2]) const {
    char* const to = p.o.at(batch, begin + token, place.head);
    with_dtype(p.o.dtype,
               [&](gd_dtype type) { store_numbers<2>(const_cast<char*>(element(to, type, row)), type, o, true); });
  }
  GD_DEVICE void clear_outputs() const {
    if (!p.o) return;
    const float zeros[2] = {};
#pragma unroll 1
    for (uint32_t token = t; token < length; token += 4) store_rows(token, zeros);
  }

  // ---- new states ----

  // Operand B of an update: key of token 4 set + t, at column g of tile i. That is half g % 2 of pair i of the lane
  // that has lane g / 2's part of this key. Tokens from `end` on are zero.
  GD_DEVICE void gather_keys(uint32_t (&keys)[kTiles][16], int end) const {
#pragma unroll
    for (int set = 0; set < kTiles; ++set) {
      const int token = 4 * set + t;
      const uint32_t upper_half = token < end ? (g % 2 ? 0x3244 : 0x1044) : 0x4444;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        keys[set][i] = __byte_perm(__shfl_sync(~0u, pairs[0][i], token * 4 + g / 2), 0, upper_half);
    }
  }
  // e of token 4 set + t, by constant indices.
  GD_DEVICE float own(int r, int set) const {
    const float* const x = e[r] + 4 * set;
    return t == 0 ? x[0] : t == 1 ? x[1] : t == 2 ? x[2] : x[3];
  }
  // Vector j of the state decays and takes what tokens write. Operand A is `amount`, its high and low parts side by
  // side in the contracted index: exact up to 2^-22.
  GD_DEVICE static void update_vector(float (&x)[2][kVector], int j, float decay, const uint32_t (&keys)[kTiles][16],
                                      const float (&amount)[kTiles][2]) {
#pragma unroll
    for (int w = 0; w < kVector; w += 2) {
      float c[4] = {decay * x[0][w], decay * x[0][w + 1], decay * x[1][w], decay * x[1][w + 1]};
#pragma unroll
      for (int set = 0; set < kTiles; ++set) {
        const float key = widen_half<Input>(keys[set][(j * kVector + w) / 2], 1);
        mma_tf32(c, tf32_high(amount[set][0]), tf32_high(amount[set][1]), tf32_low(amount[set][0]),
                 tf32_low(amount[set][1]), key, key);
      }
      x[0][w] = c[0], x[0][w + 1] = c[1], x[1][w] = c[2], x[1][w + 1] = c[3];
    }
  }
  // S_m of this window, m >= 1: kept, or stored at `to`.
  template <bool kKeep>
  GD_DEVICE void advance_to(int m, char* to) {
    uint32_t keys[kTiles][16];
    gather_keys(keys, m);
    float amount[kTiles][2];
#pragma unroll
    for (int set = 0; set < kTiles; ++set)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        amount[set][r] = 4 * set + t < m ? table.reach[m - 1][4 * set + t] * own(r, set) : 0.0f;
    const float decay = table.decay[m - 1];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float x[2][kVector];
      read_vector(j, x);
      update_vector(x, j, decay, keys, amount);
      if constexpr (kKeep) keep_vector(j, x);
      if constexpr (!kKeep) store_vector(to, j, x);
    }
  }
  GD_DEVICE void store_state(char* to) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float x[2][kVector];
      read_vector(j, x);
      store_vector(to, j, x);
    }
  }
};

}  // namespace gatedelta::cuda
