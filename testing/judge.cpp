#include "testing/judge.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "testing/number.hpp"

namespace gatedelta::testing {

namespace {

std::string failure(const char* call, gd_status status) {
  return std::string(call) + " returned " + gd_status_name(status) + ": " + gd_last_error();
}

template <class Args>
std::string run(const char* name, Args& args, const Exec& exec, gd_status (*workspace)(const Args*, size_t*),
                gd_status (*call)(const Args*)) {
  args.exec.isa = exec.isa;
  args.exec.num_threads = exec.threads;
  if (exec.pool) {
    args.exec.parallel_for = gd_thread_pool_parallel_for;
    args.exec.parallel_for_context = exec.pool;
    if (exec.threads == 0) args.exec.num_threads = gd_thread_pool_size(exec.pool);
  }
  size_t bytes = 0;
  if (const gd_status status = workspace(&args, &bytes)) return failure(name, status) + " (workspace query)";
  const Buffer scratch(bytes);
  args.exec.workspace = scratch.data();
  args.exec.workspace_bytes = bytes;
  if (const gd_status status = call(&args)) return failure(name, status);
  return scratch.guards_intact() ? "" : std::string(name) + " wrote outside of its workspace";
}

}  // namespace

std::string run_forward(gd_forward_args args, const Exec& exec, Saved* saved) {
  if (saved) {
    args.exec.isa = exec.isa;
    size_t bytes = 0;
    if (const gd_status status = gd_forward_saved_size(&args, &bytes)) return failure("gd_forward_saved_size", status);
    if (const gd_status status = gd_forward_saved_call(&args, &saved->call))
      return failure("gd_forward_saved_call", status);
    saved->memory = Buffer(bytes);
    args.saved = saved->memory.data();
    args.saved_bytes = bytes;
  }
  std::string error = run("gd_forward", args, exec, gd_forward_workspace, gd_forward);
  if (error.empty() && saved && !saved->memory.guards_intact()) error = "gd_forward wrote outside of its saved buffer";
  return error;
}

std::string run_backward(gd_backward_args args, const Exec& exec, const Saved* saved) {
  if (saved) {
    args.saved = saved->memory.data();
    args.saved_bytes = saved->memory.size();
    args.saved_call = saved->call;
  }
  return run("gd_backward", args, exec, gd_backward_workspace, gd_backward);
}

std::string run_recurrent(gd_recurrent_args args, const Exec& exec) {
  return run("gd_recurrent", args, exec, gd_recurrent_workspace, gd_recurrent);
}

std::string run_summary(gd_summary_args args, const Exec& exec) {
  return run("gd_summary", args, exec, gd_summary_workspace, gd_summary);
}

std::string run_backward_summary(gd_backward_summary_args args, const Exec& exec) {
  return run("gd_backward_summary", args, exec, gd_backward_summary_workspace, gd_backward_summary);
}

std::string run_merge(gd_merge_args args, const Exec& exec) {
  return run("gd_merge", args, exec, gd_merge_workspace, gd_merge);
}

bool Judgement::ok() const {
  return problems.empty() &&
         std::all_of(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.comparison.ok; });
}

const Verdict* Judgement::worst() const {
  const Verdict* worst = nullptr;
  for (const Verdict& v : verdicts) {
    if (!worst || v.comparison.margin > worst->comparison.margin || v.comparison.non_finite >= 0) worst = &v;
  }
  return worst;
}

std::string Judgement::text() const {
  std::string lines;
  for (const std::string& problem : problems) lines += problem + "\n";
  for (const Verdict& v : verdicts) {
    if (!v.comparison.ok) lines += v.quantity + ": " + v.comparison.text() + "\n";
  }
  if (lines.empty() && worst()) lines = "worst: " + worst()->quantity + " " + worst()->comparison.text() + "\n";
  return lines;
}

const ForwardTruth& Judge::forward_truth() {
  if (!forward_truth_) forward_truth_ = reference_forward(problem_.forward, options_);
  return *forward_truth_;
}

const BackwardTruth& Judge::backward_truth() {
  if (!backward_truth_) backward_truth_ = reference_backward(problem_.backward, options_);
  return *backward_truth_;
}

const RecurrentTruth& Judge::recurrent_truth() {
  if (!recurrent_truth_) recurrent_truth_ = reference_recurrent(problem_.recurrent, options_);
  return *recurrent_truth_;
}

int64_t Judge::head_limit(int64_t heads) const {
  return options_.key_heads > 0 ? options_.key_heads * (heads / problem_.spec.Hk) : -1;
}

namespace {

// The truth as a tensor of this type can hold it: fp16 has no numbers beyond 65504.
std::vector<double> storable(std::vector<double> truth, int32_t dtype) {
  constexpr double kOverflow = 65520;  // rounds to infinity
  if (dtype != GD_F16) return truth;
  for (double& x : truth)
    if (std::fabs(x) >= kOverflow) x = std::copysign(HUGE_VAL, x);
  return truth;
}

}  // namespace

void Judge::judge(Judgement& result, Quantity quantity, Compute compute, const gd_tensor& got,
                  const std::vector<double>& truth, int head_axis, const std::vector<double>* size) {
  if (got.dtype == GD_DTYPE_NONE) return;
  const Case& c = problem_.spec;
  const Tolerance bound = tolerance(quantity, compute, static_cast<gd_dtype>(got.dtype), c);
  auto values = to_doubles(got);
  HeadShape shape = head_shape(got, head_axis);
  std::vector<double> whole;
  int64_t limit = head_limit(shape.heads);
  if (got.rank == 1) {  // the relative error of one number per head is noise: judge the vector
    shape = {1, 1, limit < 0 ? got.shape[0] : limit};
    limit = -1;
    if (size) {
      const std::vector<double> heads(size->begin(), size->begin() + shape.inner);
      whole = {std::sqrt(std::inner_product(heads.begin(), heads.end(), heads.begin(), 0.0))};
      size = &whole;
    }
  }
  result.verdicts.push_back(
      {name_of(quantity), bound, compare(values, storable(truth, got.dtype), shape, bound, limit, size)});
}

// Entry i of the truth is in slot slots[i] of `got`; negative = not to be judged.
void Judge::judge_entries(Judgement& result, Quantity quantity, Compute compute, const gd_tensor& got,
                          const std::vector<double>& truth, const std::vector<int64_t>& slots) {
  const Case& c = problem_.spec;
  const int64_t entry = c.Hv * c.K * c.V;
  std::vector<double> values, expected;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    gd_tensor one = got;
    one.rank = 3;
    std::copy(got.shape + got.rank - 3, got.shape + got.rank, one.shape);
    std::copy(got.stride + got.rank - 3, got.stride + got.rank, one.stride);
    int64_t offset = slots[i] * got.stride[0];
    if (got.rank == 5) offset = slots[i] / got.shape[1] * got.stride[0] + slots[i] % got.shape[1] * got.stride[1];
    one.data = static_cast<char*>(got.data) + offset * element_bytes(got.dtype);
    const auto state = to_doubles(one);
    values.insert(values.end(), state.begin(), state.end());
    expected.insert(expected.end(), truth.begin() + int64_t(i) * entry, truth.begin() + int64_t(i + 1) * entry);
  }
  const Tolerance bound = tolerance(quantity, compute, static_cast<gd_dtype>(got.dtype), c);
  const HeadShape shape{static_cast<int64_t>(values.size()) / entry, c.Hv, c.K * c.V};
  result.verdicts.push_back(
      {name_of(quantity), bound, compare(values, storable(expected, got.dtype), shape, bound, head_limit(c.Hv))});
}

std::vector<int64_t> Judge::final_slots(const gd_tensor& final_state_indices) const {
  std::vector<int64_t> slots(problem_.spec.sequences());
  for (size_t n = 0; n < slots.size(); ++n) {
    slots[n] = final_state_indices.dtype == GD_DTYPE_NONE
                   ? int64_t(n)
                   : slot_at(problem_.forward.in, final_state_indices, int64_t(n));
  }
  return slots;
}

Judgement Judge::forward(const Exec& exec) {
  return forward(chunk_compute(problem_.spec.dtype, exec.isa),
                 [&](const gd_forward_args& args) { return run_forward(args, exec); });
}

Judgement Judge::forward(Compute compute, const std::function<std::string(const gd_forward_args&)>& run) {
  problem_.reset();
  const auto& truth = forward_truth();
  const gd_forward_args& args = problem_.forward;
  Judgement result;
  if (auto error = run(args); !error.empty()) {
    result.problems.push_back(error);
    return result;
  }
  judge(result, Quantity::o, compute, args.out, truth.o, 2);
  if (args.final_state.dtype != GD_DTYPE_NONE) {
    judge_entries(result, Quantity::final_state, compute, args.final_state, truth.final_state,
                  final_slots(args.final_state_indices));
  }
  if (args.checkpoints.dtype != GD_DTYPE_NONE) {
    const auto spans = sequence_spans(args.in);
    std::vector<int64_t> slots;
    for (size_t n = 0; n < spans.size(); ++n) {
      const bool at_offsets = args.checkpoint_offsets.dtype != GD_DTYPE_NONE;
      for (int64_t i = 0; i < (at_offsets ? 1 : spans[n].length / args.checkpoint_every); ++i) {
        const auto entry = static_cast<int64_t>(slots.size());
        const int64_t slot =
            args.checkpoint_indices.dtype == GD_DTYPE_NONE ? entry : slot_at(args.in, args.checkpoint_indices, entry);
        const bool stored = !at_offsets || index_at(args.checkpoint_offsets, int64_t(n)) > 0;
        slots.push_back(is_padding(args, int64_t(n)) || !stored ? -1 : slot);
      }
    }
    judge_entries(result, Quantity::checkpoints, compute, args.checkpoints, truth.checkpoints, slots);
  }
  result.problems = problem_.damage();
  return result;
}

Judgement Judge::backward(const Exec& exec, bool from_saved) {
  return backward(chunk_compute(problem_.spec.dtype, exec.isa), [&](const gd_backward_args& args) {
    Saved saved;
    gd_forward_args training = problem_.forward;  // without write slots, so no sequence is a padded row
    training.final_state = training.final_state_indices = {};
    std::string error = from_saved ? run_forward(training, exec, &saved) : "";
    problem_.reset();
    return error.empty() ? run_backward(args, exec, from_saved ? &saved : nullptr) : error;
  });
}

Judgement Judge::backward(Compute compute, const std::function<std::string(const gd_backward_args&)>& run) {
  problem_.reset();
  const auto& truth = backward_truth();
  const gd_backward_args& args = problem_.backward;
  Judgement result;
  if (const std::string error = run(args); !error.empty()) {
    result.problems.push_back(error);
    return result;
  }
  judge(result, Quantity::dq, compute, args.dq, truth.dq, 2, &truth.sizes.dq);
  judge(result, Quantity::dk, compute, args.dk, truth.dk, 2, &truth.sizes.dk);
  judge(result, Quantity::dv, compute, args.dv, truth.dv, 2);
  judge(result, Quantity::dg, compute, args.dg, truth.dg, 2, &truth.sizes.dg);
  judge(result, Quantity::dbeta, compute, args.dbeta, truth.dbeta, 2, &truth.sizes.dbeta);
  judge(result, Quantity::dA_log, compute, args.dA_log, truth.dA_log, 0, &truth.sizes.dA_log);
  judge(result, Quantity::d_dt_bias, compute, args.d_dt_bias, truth.d_dt_bias, 0, &truth.sizes.d_dt_bias);
  judge(result, Quantity::d_initial_state, compute, args.d_initial_state, truth.d_initial_state, 1);
  result.problems = problem_.damage();
  return result;
}

Judgement Judge::recurrent(const Exec& exec) {
  return recurrent([&](const gd_recurrent_args& args) { return run_recurrent(args, exec); });
}

Judgement Judge::recurrent(const std::function<std::string(const gd_recurrent_args&)>& run) {
  problem_.reset();
  const auto& truth = recurrent_truth();
  const gd_recurrent_args& args = problem_.recurrent;
  constexpr Compute compute = Compute::fp32;
  Judgement result;
  if (auto error = run(args); !error.empty()) {
    result.problems.push_back(error);
    return result;
  }
  judge(result, Quantity::o, compute, args.out, truth.o, 2);
  if (args.final_state.dtype != GD_DTYPE_NONE) {
    judge_entries(result, Quantity::final_state, compute, args.final_state, truth.final_state,
                  final_slots(args.final_state_indices));
  }
  if (args.step_states.dtype != GD_DTYPE_NONE) {  // but for the tokens of padded rows
    const auto spans = sequence_spans(args.in);
    const int64_t T = args.in.q.shape[1];
    std::vector<int64_t> slots(args.in.q.shape[0] * T, -1);
    for (size_t n = 0; n < spans.size(); ++n) {
      if (is_padding(args, int64_t(n))) continue;
      for (int64_t t = 0; t < spans[n].length; ++t) {
        const int64_t token = spans[n].batch * T + spans[n].begin + t;
        slots[token] = args.step_indices.dtype == GD_DTYPE_NONE ? token : step_slot(args, int64_t(n), spans[n], t);
      }
    }
    judge_entries(result, Quantity::step_states, compute, args.step_states, truth.step_states, slots);
  }
  result.problems = problem_.damage();
  return result;
}

std::vector<gd_isa> usable_isas() {
  gd_info info{};
  info.struct_size = sizeof info;
  std::vector<gd_isa> isas;
  if (gd_get_info(&info) != GD_OK) return isas;
  for (int isa = 1; isa < GD_ISA_COUNT; ++isa) {
    if (info.cpu_isa_usable >> isa & 1) isas.push_back(static_cast<gd_isa>(isa));
  }
  return isas;
}

}  // namespace gatedelta::testing
