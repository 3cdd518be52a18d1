// Gradients of raw gates, one value at a time: the bounds of 16 bits are too wide for the slope of softplus near its
// threshold, and no random case has a gate of -inf.
#pragma once

#include <cmath>
#include <iterator>
#include <string>

#include "testing/contents.hpp"
#include "testing/generator.hpp"

namespace gatedelta::testing {

// Sequences of one token with k = 0, which write nothing: with S = 1, q = 1 and do = 1 the gradient of g is scale * K *
// V * alpha, by numbers that 16 bits hold. dtype: "fp32", "bf16" or "fp16". run(args) and this return "" or what is
// wrong.
template <class Run>
std::string judge_raw_gates(const std::string& dtype, const Run& run) {
  constexpr double kInputs[] = {-3, 5.5, 12, 19.5, 20.5, HUGE_VAL};
  constexpr double kBias = 0.25, kSum = 16;  // scale * K * V
  const double decay = -std::exp(-3.0);
  Problem problem(parse_case("B=6 T=1 K=16 V=16 gate=raw dht=0 scale=0.0625 dtype=" + dtype));
  const gd_backward_args& args = problem.backward;
  for (const gd_tensor& t : {args.in.q, args.do_, args.in.initial_state, args.in.beta})
    fill(t, [](int64_t) { return 1; });
  fill(args.in.k, [](int64_t) { return 0; });
  fill(args.in.g, [&](int64_t i) { return kInputs[i]; });
  fill(args.in.A_log, [](int64_t) { return -3; });
  fill(args.in.dt_bias, [&](int64_t) { return kBias; });
  if (std::string error = run(args); !error.empty()) return error;

  std::string wrong;
  const auto expect = [&](const char* name, const gd_tensor& t, int64_t i, double expected) {
    const double got = to_doubles(t)[static_cast<size_t>(i)];
    if (!(std::fabs(got - expected) <= 1e-4 * std::fabs(expected)))
      wrong += std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(got) + ", must be " +
               std::to_string(expected) + "\n";
  };
  double of_A_log = 0, of_dt_bias = 0;
  for (int64_t i = 0; i < std::ssize(kInputs); ++i) {
    const double x = kInputs[i] + kBias, g = decay * (x > 20 ? x : std::log1p(std::exp(x)));
    const double gradient = kSum * std::exp(g), dg = gradient * decay / (1 + std::exp(-x));
    expect("dg", args.dg, i, dg);
    if (gradient > 0) of_A_log += gradient * g;
    of_dt_bias += dg;
  }
  expect("dA_log", args.dA_log, 0, of_A_log);
  expect("d_dt_bias", args.d_dt_bias, 0, of_dt_bias);
  return wrong;
}

}  // namespace gatedelta::testing
