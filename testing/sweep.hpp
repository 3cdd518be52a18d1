// Random hard cases for any backend, and the worst share of a bound that each quantity takes of them.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "testing/judge.hpp"

namespace gatedelta::testing {

// What the backend that is swept takes.
struct SweepLimits {
  bool fp32 = true;
  bool cuts = false;         // sequences of 16-bit inputs may be cut: `segment` is drawn
  int64_t size = 0;          // K = V of every case; 0 = any multiple of 16 up to 256
  int64_t work = 3'000'000;  // tokens x value heads x K x V of a case, at most
};

// Case `index` of the sweep that `seed` names. All gates, betas, keys and formats that docs/numerics.md lists, mixed
// without regard to what a model would send; only what it excludes is left out: |k|^2 beta above 2.
Case draw_case(uint64_t seed, uint64_t index, const SweepLimits& limits);

// The judgements of a sweep. Threads may add to it at once.
class SweepTally {
 public:
  void add(const std::string& call, const Case& c, const Judgement& judgement);

  struct Worst {
    double margin = -1;
    double error = 0;
    int64_t count = 0, over = 0;  // judged, and outside of the bound
    std::string spec;
  };
  // By call and format ("bwd bf16"), then by quantity.
  const std::map<std::string, std::map<std::string, Worst>>& worst() const { return worst_; }
  const std::vector<std::string>& problems() const { return problems_; }
  int64_t calls() const { return calls_; }
  double worst_share() const;
  bool ok() const;
  // A line of shares for each kind of call, and a line for each quantity outside of its bound, or for all of them.
  std::string text(bool all) const;

 private:
  std::mutex mutex_;
  std::map<std::string, std::map<std::string, Worst>> worst_;
  std::vector<std::string> problems_;
  int64_t calls_ = 0;
};

}  // namespace gatedelta::testing
