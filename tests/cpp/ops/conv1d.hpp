// The convolution's cases on the engine of the program.
#pragma once

#include <string>

#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {

inline void check_conv1d_forward(const Specs& specs, gd_thread_pool* pool = nullptr) {
  for (const std::string& spec : selected(specs)) {
    ConvProblem problem(parse_conv_case(spec));
    for (const gd_isa isa : engine_isas())
      EXPECT_EQ(problem.judge_forward([&](const gd_conv1d_args& args) { return run(args, isa, pool); }), "")
          << gd_isa_name(isa) << ": " << spec;
  }
}
inline void check_conv1d_backward(const Specs& specs, gd_thread_pool* pool = nullptr) {
  for (const std::string& spec : selected(specs)) {
    ConvProblem problem(parse_conv_case(spec));
    for (const gd_isa isa : engine_isas())
      EXPECT_EQ(problem.judge_backward([&](const gd_conv1d_backward_args& args) { return run(args, isa, pool); }), "")
          << gd_isa_name(isa) << ": " << spec;
  }
}
inline void check_conv1d(const Specs& specs) {
  check_conv1d_forward(specs);
  check_conv1d_backward(specs);
}

}  // namespace gatedelta::testing
