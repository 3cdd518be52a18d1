// One generator for every test and tool: a Problem owns the buffers of a case.
//
// Numbers come from a counter-based generator: value i of tensor s is a pure function of (seed, s, i).
// Everything that must not be read is NaN: rows past the last offset, gaps of strided tensors, unused pool slots, guard
// zones around each buffer, outputs before they are written. damage() lists what was written and must not be.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gatedelta/gatedelta.h"
#include "testing/case.hpp"

namespace gatedelta::testing {

double uniform(uint64_t seed, uint64_t stream, uint64_t index);  // [0, 1)
double normal(uint64_t seed, uint64_t stream, uint64_t index);   // mean 0, variance 1, |x| < 6

// 64-byte aligned bytes between two guard zones, all of it NaN bytes (0xff) at first.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, size_t misalign = 0);
  char* data() const { return const_cast<char*>(storage_.data()) + begin_; }
  size_t size() const { return size_; }
  void poison();  // the payload; guards are left as they are
  bool guards_intact() const;

 private:
  std::vector<char> storage_;
  size_t begin_ = 0, size_ = 0;
};

class Problem {
 public:
  explicit Problem(const Case& c);  // throws what check_case throws
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const Case spec;
  gd_tuning tuning = GD_TUNING_INIT;  // of forward and backward
  // Filled but for exec (isa, kernels, threads, workspace) and saved.
  gd_forward_args forward{};
  gd_backward_args backward{};
  gd_recurrent_args recurrent{};

  // Outputs become NaN again, states updated in place get their first values back.
  void reset();
  // Lists writes to places that must not be written: guard zones, inputs, gaps between rows, slots no index names.
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
  // [values], or with columns > 0 rows of so many.
  gd_tensor make_indices(const std::string& name, const std::vector<int64_t>& values, int64_t columns = 0);
  Entry& entry(const gd_tensor& t);
  struct Slots {  // of the states of a call
    int64_t count = 0;
    std::vector<int64_t> scrambled;    // all but the null slots
    std::vector<int64_t> read, write;  // of each sequence
  };
  Slots choose_slots() const;
  std::vector<int64_t> matrices(std::vector<int64_t> outer) const;        // outer by the shape of states
  std::vector<int64_t> named(const std::vector<int64_t>& indices) const;  // without null slots
  gd_inputs make_inputs();                                                // but for states
  void make_checkpoints(const Slots& slots);
  void make_gradients();
  void make_steps(const Slots& slots);
  void fill_inputs(const gd_inputs& in);
  void fill_states(const gd_tensor& t, uint64_t stream, const std::vector<int64_t>& slots);
  void poison_tail(const gd_tensor& t, int64_t first);
  void seal();

  std::vector<Entry> entries_;
};

}  // namespace gatedelta::testing
