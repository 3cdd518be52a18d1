// The layer's step in tests: a case, its buffers, and the three calls it must equal.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "gatedelta/gatedelta.h"
#include "testing/generator.hpp"

namespace gatedelta::testing {

struct LayerCase {
  int64_t B = 3, T = 1;
  std::vector<int64_t> lengths = {};  // not empty: packed sequences; then B is 1 and T their sum
  int64_t Hk = 2, Hv = 4, K = 32, V = 16, W = 4;
  gd_dtype x = GD_F32, y = GD_F32, conv_state = GD_F32, state = GD_F32;
  bool value_first = false;   // states [V, K]
  bool conv_states = true;    // otherwise every window begins with zeros
  bool pool = true;           // states by slots, with a padded row; otherwise one per sequence
  bool tokens_first = false;  // conv states lie as [slots, S, D], and rows of x have gaps
  bool moves = false;         // final_state_indices name other slots
  bool drafts = false;        // rows of slots, lengths accepted of the windows before, states of all tokens
  bool null_slot = false;     // slot 0 is null
  bool tiled = false;         // key heads are
  bool i64 = false, bias = true, transformers = false;  // the last: the norm rounds before its gate
  uint64_t seed = 1;

  int64_t sequences() const { return lengths.empty() ? B : static_cast<int64_t>(lengths.size()); }
  int64_t longest() const;
  std::string text() const;
};

// The same as three calls. `convolved` has room for x, `o` for y in x's dtype. exec is that of `step`.
struct ThreeCalls {
  ThreeCalls(const gd_layer_step_args& step, void* convolved, void* o);
  gd_conv1d_args conv;
  gd_recurrent_args rule;
  gd_gated_norm_args norm;
};

// Everything that must not be read is NaN: tokens of padded rows, unused slots, rejected drafts, gaps.
class LayerProblem {
 public:
  using Bytes = std::vector<std::vector<char>>;  // of every tensor, gaps included

  explicit LayerProblem(const LayerCase& c);
  LayerProblem(const LayerProblem&) = delete;
  LayerProblem& operator=(const LayerProblem&) = delete;

  const LayerCase spec;
  gd_layer_step_args args{};

  void reset();  // everything as at first
  Bytes bytes() const;
  bool guards_intact() const;
  // "" or what differs: in y and the states by more than x's dtype and theirs allow, elsewhere at all.
  std::string difference(const Bytes& got, const Bytes& expected) const;

  int64_t channels() const { return 2 * spec.Hk * spec.K + spec.Hv * spec.V; }

 private:
  struct Entry {
    std::string name;
    gd_tensor tensor;
    Buffer buffer;
    std::vector<char> pristine;
    bool computed = false;  // by the call, in floating point
  };
  gd_tensor make(const char* name, gd_dtype dtype, const std::vector<int64_t>& shape, int64_t gap = 0);
  gd_tensor make_indices(const char* name, const std::vector<int64_t>& values, int64_t columns = 0);
  void fill(const gd_tensor& t, double scale, double mean = 0);
  void make_states(const std::vector<int64_t>& read);
  void make_slots();

  std::list<Entry> entries_;
  uint64_t stream_ = 0;
};

// On the CPU, with workspaces of exactly the sizes asked for, full of NaN. Return "" or the refusal.
std::string run_layer_step(const gd_layer_step_args& args, gd_thread_pool* pool = nullptr);
std::string run_three_calls(const gd_layer_step_args& args, gd_thread_pool* pool = nullptr);

// Cases for every backend. K = V = 128 is what fused kernels are for.
std::vector<LayerCase> layer_cases();

}  // namespace gatedelta::testing
