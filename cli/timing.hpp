// Timing one operation on one case, and what the time is worth.
#pragma once

#include <istream>
#include <memory>
#include <string>
#include <vector>

#include "cli/json.hpp"
#include "cli/options.hpp"
#include "testing/generator.hpp"
#include "testing/judge.hpp"

namespace gatedelta::cli {

// Floating-point operations of the chunked forms, counting the matrix products alone (docs/math.md), 64 tokens a chunk:
//   forward   KK^T, QK^T, X = T^T K, R = tril(QK^T) T, K S, X^T W, Q S, R W
//   backward  the 17 products of the backward and 3 to rebuild the states
//   recurrent 7 K V per token: two reads, the decay and the write
double flops_of(Op op, const testing::Case& c);
// Bytes of state a recurrent call must read and write.
double state_bytes_of(const testing::Case& c);

struct Timing {
  double median = 0, best = 0;  // seconds
  int repeats = 0;
};
Timing summary(std::vector<double> times);  // at least one

// On the CPU. Repeats the call for about `seconds`, at least three times, after one call to warm up.
class Stopwatch {
 public:
  Stopwatch(testing::Problem& problem, Op op, const testing::Exec& exec);
  Timing measure(double seconds);
  size_t workspace_bytes() const { return workspace_.size(); }

 private:
  void call();

  testing::Problem& problem_;
  Op op_;
  gd_forward_args forward_;
  gd_backward_args backward_;
  gd_recurrent_args recurrent_;
  testing::Buffer workspace_, saved_;
};

// `isa` and `threads` are of the CPU only.
Json to_json(const Timing& timing, Op op, const testing::Case& c, const Device& device, gd_isa isa, int threads);
// "12.3 ms", "45 us".
std::string format_seconds(double seconds);
// The model name in /proc/cpuinfo, or on Arm, where Linux gives none, the name of the core. "unknown" without either.
std::string cpu_name(std::istream& cpuinfo);

// What the machine is, for the head of a result file, with the GPU if one is used.
Json machine_json(const Device& device = {});

// "[####      ] 3/10 name" on the error stream if it is a terminal; nothing otherwise.
class Progress {
 public:
  explicit Progress(size_t total);
  ~Progress();
  void step(const std::string& what);

 private:
  size_t total_, done_ = 0;
  bool on_;
};

}  // namespace gatedelta::cli
