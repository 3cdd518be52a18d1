#include "testing/gated_norm_judge.hpp"

#include "testing/number.hpp"

namespace gatedelta::testing {

namespace {

template <class Args>
std::string run(const char* name, Args& args, const Exec& exec, gd_status (*workspace)(const Args*, size_t*),
                gd_status (*call)(const Args*)) {
  const auto failure = [&] { return std::string(name) + ": " + gd_last_error(); };
  args.exec.isa = exec.isa;
  args.exec.num_threads = exec.threads;
  if (exec.pool) {
    args.exec.parallel_for = gd_thread_pool_parallel_for;
    args.exec.parallel_for_context = exec.pool;
    if (exec.threads == 0) args.exec.num_threads = gd_thread_pool_size(exec.pool);
  }
  size_t bytes = 0;
  if (workspace(&args, &bytes) != GD_OK) return failure() + " (workspace query)";
  const Buffer scratch(bytes);
  args.exec.workspace = scratch.data();
  args.exec.workspace_bytes = bytes;
  if (call(&args) != GD_OK) return failure();
  return scratch.guards_intact() ? "" : std::string(name) + " wrote outside of its workspace";
}

void judge(Judgement& result, const NormCase& c, const char* name, const gd_tensor& got,
           const std::vector<double>& truth) {
  if (got.dtype == GD_DTYPE_NONE) return;
  const Tolerance bound = norm_tolerance(c, static_cast<gd_dtype>(got.dtype));
  const HeadShape shape = got.rank == 1 ? HeadShape{1, 1, got.shape[0]} : head_shape(got, 2);
  result.verdicts.push_back({name, bound, compare(to_doubles(got), truth, shape, bound)});
}

}  // namespace

std::string run_gated_norm(gd_gated_norm_args args, const Exec& exec) {
  return run("gd_gated_norm", args, exec, gd_gated_norm_workspace, gd_gated_norm);
}
std::string run_gated_norm_backward(gd_gated_norm_backward_args args, const Exec& exec) {
  return run("gd_gated_norm_backward", args, exec, gd_gated_norm_backward_workspace, gd_gated_norm_backward);
}

Judgement judge_gated_norm(NormProblem& problem, const std::function<std::string(const gd_gated_norm_args&)>& run) {
  problem.reset();
  Judgement result;
  if (const std::string error = run(problem.forward); !error.empty()) {
    result.problems.push_back(error);
    return result;
  }
  judge(result, problem.spec, "y", problem.forward.out, reference_gated_norm(problem.forward));
  result.problems = problem.damage();
  return result;
}

Judgement judge_gated_norm_backward(NormProblem& problem,
                                    const std::function<std::string(const gd_gated_norm_backward_args&)>& run) {
  problem.reset();
  Judgement result;
  const gd_gated_norm_backward_args& args = problem.backward;
  if (const std::string error = run(args); !error.empty()) {
    result.problems.push_back(error);
    return result;
  }
  const NormGradients truth = reference_gated_norm_backward(args);
  judge(result, problem.spec, "dx", args.dx, truth.dx);
  judge(result, problem.spec, "dz", args.dgate, truth.dz);
  judge(result, problem.spec, "dweight", args.dweight, truth.dweight);
  result.problems = problem.damage();
  return result;
}

}  // namespace gatedelta::testing
