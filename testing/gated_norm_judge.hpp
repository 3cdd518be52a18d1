// Runs the gated RMSNorm on a case and judges every output against the truth.
#pragma once

#include <functional>
#include <string>

#include "testing/gated_norm.hpp"
#include "testing/judge.hpp"

namespace gatedelta::testing {

// Calls the library with a workspace of exactly the size it asks for, full of NaN. Returns "" or what went wrong.
std::string run_gated_norm(gd_gated_norm_args args, const Exec& exec);
std::string run_gated_norm_backward(gd_gated_norm_backward_args args, const Exec& exec);

// `run` fills the outputs of these arguments and returns "" or what went wrong.
Judgement judge_gated_norm(NormProblem& problem, const std::function<std::string(const gd_gated_norm_args&)>& run);
Judgement judge_gated_norm_backward(NormProblem& problem,
                                    const std::function<std::string(const gd_gated_norm_backward_args&)>& run);

}  // namespace gatedelta::testing
