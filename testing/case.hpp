// A Case defines all inputs of a call. Its text form is a line such as
//     "T=130 Hk=2 Hv=4 K=64 V=32 dtype=bf16 gate=strong beta=two keys=correlated seed=3"
// so that any failing case can be printed, pasted and run again in any language.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gatedelta/gatedelta.h"

namespace gatedelta::testing {

enum class GateKind {
  zero,           // g = 0
  weak,           // about -0.01 per token
  strong,         // -10 .. -30 per token
  spiky,          // -A softplus(x), A from 0 to 16 over the heads, x in -9 .. 3: mostly open, sudden resets
  mixed,          // the benchmark's: logsigmoid(randn) / 16, every fourth head at 0
  infinite,       // mixed, with -inf on every eleventh token, at chunk borders and on whole runs
  very_negative,  // mixed, with values down to -3e38 in the same places
  raw  // raw `a`, A in [0, 16] and dt_bias as layers start; heads 5 and 7 of eight have A near 0 and exactly 0
       // and inputs on either side of softplus' threshold
};
enum class BetaKind {
  unit,           // sigmoid(randn)
  zeros,          // the same, every third token exactly 0
  two,            // in [0, 2], every third token exactly 2
  logit,          // logits for GD_BETA_LOGIT
  logit_doubled,  // logits for GD_BETA_LOGIT_DOUBLED
  constant_one    // exactly 1: each write replaces what its key read
};
enum class KeyKind {
  random,      // random unit vectors
  correlated,  // unit vectors with a common component (cosine about 0.64 with each other)
  similar,     // one unit vector and 5 to 30 % of noise, by head (cosine 0.998 to 0.92 with each other)
  repeated,    // the same unit vector in runs of 40 tokens
  loose        // not normalised: |k| about 0.2 .. 1.3 (with l2norm: any length from 1e-3 to 1e2, some rows all zero)
};
enum class StepKind {  // per-step states of a recurrent call
  none,
  dense,
  pool,  // slots by token, [B, T]
  rows   // slots by sequence, [N, S]
};

struct Case {
  int64_t B = 1, T = 64;
  std::vector<int64_t> lengths;  // not empty: packed sequences; then B = 1 and T follows from them and pad
  int64_t pad = 0;               // tokens past the last offset
  int64_t Hk = 1, Hv = 1, K = 64, V = 64;
  bool tiled = false;                    // value head h uses key head h % Hk
  gd_dtype dtype = GD_F32;               // q, k, v, do and their gradients
  gd_dtype odtype = GD_DTYPE_NONE;       // o; none = dtype
  gd_dtype gdtype = GD_F32;              // g, beta
  gd_dtype state = GD_F32;               // every state tensor
  gd_state_layout layout = GD_STATE_KV;  // kv, vk
  GateKind gate = GateKind::mixed;
  BetaKind beta = BetaKind::unit;
  KeyKind keys = KeyKind::random;
  bool dt_bias = true;  // with gate=raw
  bool l2norm = false;
  std::optional<float> scale;
  bool h0 = true, ht = true, dht = true;  // initial state, final state, gradient of the final state
  bool pool = false;                      // states live in a pool and are found by read and write indices
  int64_t first_slot = 0;                 // with a pool: slots below are null
  bool inplace = false;                   // the final state goes where the initial state came from
  bool i64 = false;                       // int64 offsets and indices instead of int32
  bool strided = false;                   // gaps in every tensor but cu_seqlens, gates stored head first
  int64_t every = 0;                      // checkpoint interval, 0 = none
  bool offsets = false;                   // one checkpoint per sequence, at checkpoint_offsets
  int64_t segment = 0;                    // chunks of a segment, if sequences are to be cut
  bool accept = false;                    // recurrent: accept lengths
  int64_t picked = 0;                     // recurrent, with a pool: the slot read is one of so many in a row
  StepKind steps = StepKind::none;        // recurrent: per-step states
  uint64_t seed = 1;

  int64_t sequences() const { return lengths.empty() ? B : static_cast<int64_t>(lengths.size()); }
  int64_t total_tokens() const;  // T, or what lengths and pad add up to
};

// Changes `c` by "key=value ..." (a bare key means key=1). Throws std::invalid_argument with a message.
void apply_spec(Case& c, std::string_view spec);
Case parse_case(std::string_view spec);

// Cases as text, and every element of a with every element of b.
using Specs = std::vector<std::string>;
inline Specs cross(const Specs& a, const Specs& b) {
  Specs all;
  for (const std::string& x : a)
    for (const std::string& y : b) {
      std::string& both = all.emplace_back(x);
      both += ' ';
      both += y;
    }
  return all;
}
std::string describe(const Case& c);  // the shortest spec that gives this case
// Names of the keys with their values, for usage texts.
const std::vector<std::pair<const char*, const char*>>& case_keys();
// Throws std::invalid_argument for a case that makes no sense.
void check_case(const Case& c);

}  // namespace gatedelta::testing
