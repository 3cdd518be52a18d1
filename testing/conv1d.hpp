// The convolution's part of the test library: cases as lines of text, buffers of a case, its fp64 truth, and the
// judgement of a call. A case is a line such as
//     "lengths=5+0+70 D=48 W=4 dtype=bf16 silu bias pool inplace seed=3"
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <string_view>
#include <vector>

#include "gatedelta/gatedelta.h"
#include "testing/generator.hpp"

namespace gatedelta::testing {

struct ConvCase {
  int64_t B = 1, T = 16;
  std::vector<int64_t> lengths;  // not empty: packed sequences; then B = 1 and T follows from them and pad
  int64_t pad = 0;               // tokens past the last offset
  int64_t D = 32, W = 4;
  int64_t S = 0, final_S = 0;  // columns of the states; 0 = W - 1, or as many as draft windows need
  gd_dtype dtype = GD_F32;     // x, y, their gradients
  gd_dtype odtype = GD_DTYPE_NONE, wdtype = GD_F32, state = GD_F32;  // y (none = dtype); weight and bias; states
  bool channel_major = false;                                        // tokens of x, y and gradients are contiguous
  bool state_tokens_first = false;                                   // states lie as [slots, S, D]
  bool bias = false, silu = false;
  bool h0 = true, ht = true;
  bool pool = false, inplace = false, drafts = false, steps = false;
  bool null_slot = false;  // slot 0 is null
  bool i64 = false, strided = false;
  uint64_t seed = 1;

  int64_t sequences() const { return lengths.empty() ? B : static_cast<int64_t>(lengths.size()); }
  int64_t tokens() const;
  int64_t longest() const;
};
ConvCase parse_conv_case(std::string_view spec);  // throws std::invalid_argument
std::string describe(const ConvCase& c);

// Everything that must not be read is NaN: tokens of no sequence and of padded rows, unused slots, rejected drafts,
// gaps.
class ConvProblem {
 public:
  explicit ConvProblem(const ConvCase& c);
  ConvProblem(const ConvProblem&) = delete;
  ConvProblem& operator=(const ConvProblem&) = delete;

  const ConvCase spec;
  gd_conv1d_args forward{};
  gd_conv1d_backward_args backward{};  // of a case with neither padded rows nor draft windows

  void reset();  // everything as at first
  // Runs the calls, and returns "" or what is wrong with their outputs.
  std::string judge_forward(const std::function<std::string(const gd_conv1d_args&)>& run);
  std::string judge_backward(const std::function<std::string(const gd_conv1d_backward_args&)>& run);

 private:
  struct Entry {
    std::string name;
    gd_tensor tensor;
    Buffer buffer;
    std::vector<char> pristine;
    std::vector<bool> written;  // elements a call may write
  };
  gd_tensor make(const std::string& name, gd_dtype dtype, const std::vector<int64_t>& shape,
                 const std::vector<int>& order = {});
  gd_tensor make_indices(const std::string& name, const std::vector<int64_t>& values);
  void fill(const gd_tensor& t, uint64_t stream);
  Entry& entry(const gd_tensor& t);
  std::string damage(const std::vector<const gd_tensor*>& outputs) const;

  std::list<Entry> entries_;
  std::vector<int64_t> read_slots_, write_slots_, accepted_;
};

// Calls the library on the CPU with a workspace of exactly the size it asks for, full of NaN.
std::string run_conv1d(gd_conv1d_args args, gd_isa isa, gd_thread_pool* pool = nullptr);
std::string run_conv1d_backward(gd_conv1d_backward_args args, gd_isa isa, gd_thread_pool* pool = nullptr);

}  // namespace gatedelta::testing
