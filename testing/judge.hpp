// Runs the library on a case and judges every output against the truth. The truth of a case is computed once and serves
// every instruction set, thread count and variant it is run with.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "testing/compare.hpp"
#include "testing/generator.hpp"
#include "testing/reference.hpp"
#include "testing/tolerance.hpp"

namespace gatedelta::testing {

// Where a call runs.
struct Exec {
  gd_isa isa = GD_ISA_AUTO;
  gd_thread_pool* pool = nullptr;  // null = the calling thread alone
  int threads = 0;                 // 0 = all of the pool
};

// What a forward keeps for its backward.
struct Saved {
  Buffer memory;
  gd_saved_call call{};
};

// Calls the library with a workspace of exactly the size it asks for, full of NaN. The forward fills `saved`, if given.
// Returns "" or what went wrong.
std::string run_forward(gd_forward_args args, const Exec& exec, Saved* saved = nullptr);
std::string run_backward(gd_backward_args args, const Exec& exec, const Saved* saved = nullptr);
std::string run_recurrent(gd_recurrent_args args, const Exec& exec);
std::string run_summary(gd_summary_args args, const Exec& exec);
std::string run_backward_summary(gd_backward_summary_args args, const Exec& exec);
std::string run_merge(gd_merge_args args, const Exec& exec);

struct Verdict {
  std::string quantity;
  Tolerance bound;
  Comparison comparison;
};

struct Judgement {
  std::vector<Verdict> verdicts;
  std::vector<std::string> problems;  // a refused call, damaged buffers

  bool ok() const;
  std::string text() const;  // one line per failure; with none, one line of the worst verdict
  const Verdict* worst() const;
};

class Judge {
 public:
  explicit Judge(const Case& c, ReferenceOptions options = {}) : problem_(c), options_(options) {
    if (c.tiled) options_.key_heads = 0;  // the value heads of the first key heads are not the first ones
  }

  Judgement forward(const Exec& exec);
  // The same for a call made elsewhere: `run` fills the outputs of these arguments and returns "" or what went
  // wrong.
  Judgement forward(Compute compute, const std::function<std::string(const gd_forward_args&)>& run);
  Judgement backward(const Exec& exec, bool from_saved);
  Judgement backward(Compute compute, const std::function<std::string(const gd_backward_args&)>& run);
  Judgement recurrent(const Exec& exec);
  Judgement recurrent(const std::function<std::string(const gd_recurrent_args&)>& run);  // its products are fp32

  Problem& problem() { return problem_; }
  const ForwardTruth& forward_truth();
  const BackwardTruth& backward_truth();
  const RecurrentTruth& recurrent_truth();

 private:
  void judge(Judgement& result, Quantity quantity, Compute compute, const gd_tensor& got,
             const std::vector<double>& truth, int head_axis, const std::vector<double>* size = nullptr);
  void judge_entries(Judgement& result, Quantity quantity, Compute compute, const gd_tensor& got,
                     const std::vector<double>& truth, const std::vector<int64_t>& slots);
  int64_t head_limit(int64_t heads) const;
  std::vector<int64_t> final_slots(const gd_tensor& final_state_indices) const;

  Problem problem_;
  ReferenceOptions options_;
  std::optional<ForwardTruth> forward_truth_;
  std::optional<BackwardTruth> backward_truth_;
  std::optional<RecurrentTruth> recurrent_truth_;
};

// The instruction sets this build has and this machine can run, worst first.
std::vector<gd_isa> usable_isas();

}  // namespace gatedelta::testing
