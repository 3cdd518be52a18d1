// One generator for every test and tool. A Case is a line of text such as
//     "T=130 Hk=2 Hv=4 K=64 V=32 dtype=bf16 gate=strong beta=two keys=correlated seed=3"
// so that any failing case can be printed, pasted and run again in any language. A Problem owns its buffers.
//
// Numbers come from a counter-based generator: value i of tensor s is a pure function of (seed, s, i).
// Everything that must not be read is NaN: rows past the last offset, gaps of strided tensors, unused pool slots, guard
// zones around each buffer, outputs before they are written. damage() tells what was written that must not be.
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
  raw             // raw `a`, A in [0, 16] and dt_bias as layers start; heads 5 and 7 of eight have A near 0 and exactly 0
                  // and some inputs beyond softplus' threshold
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
  repeated,    // the same unit vector in runs of 40 tokens
  loose        // not normalised: |k| about 0.2 .. 1.3 (with l2norm: any length from 1e-3 to 1e2, some rows all zero)
};
enum class StepKind { none, dense, pool };  // per-step states of a recurrent call

struct Case {
  int64_t B = 1, T = 64;
  std::vector<int64_t> lengths;  // not empty: packed sequences; then B = 1 and T follows from them and pad
  int64_t pad = 0;               // tokens past the last offset
  int64_t Hk = 1, Hv = 1, K = 64, V = 64;
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
  bool inplace = false;                   // the final state goes where the initial state came from
  bool i64 = false;                       // int64 offsets and indices instead of int32
  bool strided = false;                   // gaps in every tensor, gates stored head first
  int64_t every = 0;                      // checkpoint interval, 0 = none
  bool accept = false;                    // recurrent: accept lengths
  StepKind steps = StepKind::none;        // recurrent: per-step states
  uint64_t seed = 1;

  int64_t sequences() const { return lengths.empty() ? B : static_cast<int64_t>(lengths.size()); }
  int64_t total_tokens() const;  // T, or what lengths and pad add up to
};

// Changes `c` by "key=value ..." (a bare key means key=1). Throws std::invalid_argument with a message.
void apply_spec(Case& c, std::string_view spec);
Case parse_case(std::string_view spec);
std::string describe(const Case& c);  // the shortest spec that gives this case
// Names of the keys with their values, for usage texts.
const std::vector<std::pair<const char*, const char*>>& case_keys();

double uniform(uint64_t seed, uint64_t stream, uint64_t index);  // [0, 1)
double normal(uint64_t seed, uint64_t stream, uint64_t index);   // mean 0, variance 1, |x| < 6

// 64-byte aligned bytes between two guard zones, all of it NaN bytes (0xff) at first.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, size_t misalign = 0);
  char* data() const { return const_cast<char*>(storage_.data()) + begin_; }
  size_t size() const { return size_; }
  void poison();              // the payload; guards are left as they are
  bool guards_intact() const;

 private:
  std::vector<char> storage_;
  size_t begin_ = 0, size_ = 0;
};

class Problem {
 public:
  explicit Problem(const Case& c);  // throws std::invalid_argument for a case that makes no sense
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const Case spec;
  // Filled but for exec (isa, threads, workspace) and saved.
  gd_forward_args forward{};
  gd_backward_args backward{};
  gd_recurrent_args recurrent{};

  // Outputs become NaN again, states updated in place get their first values back.
  void reset();
  // What was written although it must not be: guard zones, inputs, gaps between rows, slots no index names.
  std::vector<std::string> damage() const;

 private:
  enum class Role { input, output, pool };
  struct Entry {
    std::string name;
    gd_tensor tensor;
    Role role;
    Buffer buffer;
    uint64_t hash = 0;                   // of an input's bytes
    std::vector<char> pristine;          // a pool's first contents
    std::vector<int64_t> written_slots;  // of a pool
  };
  gd_tensor make(const std::string& name, Role role, gd_dtype dtype, const std::vector<int64_t>& shape);
  gd_tensor make_indices(const std::string& name, const std::vector<int64_t>& values);
  Entry& entry(const gd_tensor& t);
  void fill_inputs(const gd_inputs& in);
  void fill_states(const gd_tensor& t, uint64_t stream, const std::vector<int64_t>& slots);
  void poison_tail(const gd_tensor& t, int64_t first);
  void seal();

  std::vector<Entry> entries_;
};

}  // namespace gatedelta::testing
