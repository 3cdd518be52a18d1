// `window_mma`: several tokens at once on the tensor cores, for states [V, K] with K = V = 128 and 16-bit q, k, v. With
// P_tj = alpha_(j+1) ... alpha_t and D_t = P_t,-1 all tokens of a window follow from its first state S:
//   e_t = v_t - D_t S^T k_t - sum_(j<t) P_tj (k_t.k_j) beta_j e_j        (a triangular solve per value column)
//   o_t = s D_t S^T q_t + s sum_(j<=t) P_tj (q_t.k_j) beta_j e_j
//   S_m = D_m S + sum_(j<=m) P_mj k_j (beta_j e_j)^T
//
// A warp has 16 rows of the stored state; lane (g, t) of eight by four has rows 2 g and 2 g + 1. The order of K is free
// as long as states, keys and queries agree, so the 16 bytes that a lane loads are a fragment of operand A and, in
// fp32, of the accumulator: a lane has vectors t, t + 4, ... of each row, and the same part of the token in column g of
// operand B.
//
// Products with an fp32 state are exact up to 2^-22: the state is split into two tf32 numbers, and 16-bit k and q are
// tf32 numbers.
// NOTE: a token never changes the results of an earlier one, not even as 0 times NaN.
#pragma once

#include "cuda/decode/one_token.cuh"
#include "cuda/decode/slots.cuh"
#include "cuda/decode/token.cuh"
#include "cuda/decode/window_mma_table.cuh"

namespace gatedelta::cuda {

template <class Config>
struct WindowMma {
  using State = typename Config::State;
  using Input = typename Config::Input;
  static constexpr int kTokens = Config::kTokens, kTiles = kTokens / 4;  // tiles of eight columns: k and q
  static constexpr int kVector = 16 / sizeof(State), kVectors = 32 / kVector;
  static constexpr bool kIsFloat = std::is_same_v<State, float>;
  static constexpr bool kIsShared = Config::kKind == WindowKind::any;  // the state is in shared memory, as fp32
  static constexpr bool kPacked = !kIsShared && !kIsFloat;             // products use the state in 16 bits
  static_assert(kTokens == 4 || kTokens == 8);

  const ManyTokenParams& p;
  WindowShared<Config>& shared;
  WindowTable<kTokens>& table;
  const GridPlace place;
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int row =
      (static_cast<int>(place.part) * Config::kWarps + static_cast<int>(threadIdx.x / 32)) * Config::kWarpRows + 2 * g;
  // This lane gets the products of tokens `own_token` and own_token + 1 with the state: S^T k in lanes that solve, S^T
  // q in lanes that store outputs.
  const int own_token = kTokens == 4 ? t % 2 * 2 : t * 2;
  const bool solves = kTokens == 8 || t < 2, stores_outputs = kTokens == 8 || t >= 2;
  uint32_t batch, begin, length;  // of the sequence

  uint32_t pairs[kTiles][16];  // tokens as operand B: k_g, q_g, or with four tokens k_0..3, q_0..3
  // The state, words of vectors as in memory, with two 16-bit numbers per word.
  uint32_t words[kIsShared ? 1 : 2][kIsShared ? 1 : 4 * kVectors];
  float v[2][2];  // [row][token - own_token]
  float e[2][kTokens];
  RawGates gates;  // of token `lane`, in the first warp

  GD_DEVICE WindowMma(const ManyTokenParams& params, WindowShared<Config>& shared_of, const GridPlace& at)
      : p(params), shared(shared_of), table(shared_of.table), place(at) {}

  GD_DEVICE void sync_cta() const {
    if constexpr (Config::kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  // This lane's first number of a state.
  GD_DEVICE char* row_of(char* state) const { return state + (row * kDecodeDim + t * kVector) * int{sizeof(State)}; }
  GD_DEVICE float4* held(int r, int four) const {
    return &shared.held[((threadIdx.x / 32 * 2 + r) * 8 + four) * 32 + lane];
  }
  // e of token 4 set + t, by constant indices.
  GD_DEVICE float error_of(int r, int set) const {
    const float* const x = e[r] + 4 * set;
    return t == 0 ? x[0] : t == 1 ? x[1] : t == 2 ? x[2] : x[3];
  }

  // Loads, in window_mma_loads.cuh.
  GD_DEVICE void request_tokens(uint32_t first, int count);
  GD_DEVICE void request_state(int32_t slot);
  GD_DEVICE void clear_state();
  GD_DEVICE void widen_state();
  GD_DEVICE void widen_held();
  GD_DEVICE void read_vector(int j, float (&x)[2][kVector]) const;
  GD_DEVICE void write_vector(int j, const float (&x)[2][kVector]);

  // Inner products of tokens, errors and outputs, in window_mma_solve.cuh.
  GD_DEVICE void fill_table(int count);
  GD_DEVICE void multiply(float (&products)[kTiles][4]) const;
  GD_DEVICE void solve(const float (&products)[kTiles][4]);
  GD_DEVICE void store_outputs(const float (&products)[kTiles][4], uint32_t first, int count) const;
  GD_DEVICE void store_rows(uint32_t token, const float (&o)[2]) const;
  GD_DEVICE void clear_outputs() const;

  // New states, in window_mma_update.cuh.
  GD_DEVICE void gather_keys(uint32_t (&keys)[kTiles][16], int end) const;
  GD_DEVICE static void update_vector(float (&x)[2][kVector], int j, float decay, const uint32_t (&keys)[kTiles][16],
                                      const float (&amount)[kTiles][2]);
  template <bool kInShared>
  GD_DEVICE void advance_to(int m, char* to);
  GD_DEVICE void store_state(char* to) const;
  GD_DEVICE static void store_vector(char* to, int j, const float (&x)[2][kVector]);
};

}  // namespace gatedelta::cuda
