#include "testing/truth.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <thread>

#include "testing/compare.hpp"
#include "testing/generator.hpp"
#include "testing/number.hpp"
#include "testing/reference.hpp"
#include "testing/tolerance.hpp"

using namespace gatedelta::testing;

struct gdt_problem {
  explicit gdt_problem(const Case& c) : problem(c), spec(describe(c)) {}
  Problem problem;
  std::string spec;
  mutable std::string damage;
};

namespace {

thread_local std::string last_error;

// Runs body; any exception becomes a message and `failed`.
template <class Result, class Body>
Result guarded(Result failed, Body&& body) {
  try {
    return body();
  } catch (const std::exception& e) {
    last_error = e.what();
  } catch (...) {
    last_error = "unknown error";
  }
  return failed;
}

void hand_out(const std::vector<double>& values, double* out) {
  if (out) std::copy(values.begin(), values.end(), out);
}

ReferenceOptions all_threads() {
  return {.key_heads = 0, .threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))};
}

}  // namespace

extern "C" {

const char* gdt_error(void) { return last_error.c_str(); }

const char* gdt_case_help(void) {
  static const std::string text = [] {
    std::string lines;
    for (const auto& [name, help] : case_keys()) lines += std::string(name) + "  " + help + "\n";
    return lines;
  }();
  return text.c_str();
}

gdt_problem* gdt_create(const char* spec) {
  return guarded<gdt_problem*>(nullptr, [&] { return std::make_unique<gdt_problem>(parse_case(spec)).release(); });
}
void gdt_destroy(gdt_problem* problem) { delete problem; }
const char* gdt_spec(const gdt_problem* problem) { return problem->spec.c_str(); }
gd_forward_args* gdt_forward_args(gdt_problem* problem) { return &problem->problem.forward; }
gd_backward_args* gdt_backward_args(gdt_problem* problem) { return &problem->problem.backward; }
gd_recurrent_args* gdt_recurrent_args(gdt_problem* problem) { return &problem->problem.recurrent; }
void gdt_reset(gdt_problem* problem) { problem->problem.reset(); }

const char* gdt_damage(const gdt_problem* problem) {
  problem->damage.clear();
  for (const std::string& line : problem->problem.damage()) problem->damage += line + "\n";
  return problem->damage.c_str();
}

int gdt_reference_forward(const gd_forward_args* args, double* o, double* final_state, double* checkpoints) {
  return guarded(-1, [&] {
    const auto truth = reference_forward(*args, all_threads());
    hand_out(truth.o, o);
    hand_out(truth.final_state, final_state);
    hand_out(truth.checkpoints, checkpoints);
    return 0;
  });
}

int gdt_reference_backward(const gd_backward_args* args, double* dq, double* dk, double* dv, double* dg, double* dbeta,
                           double* dA_log, double* d_dt_bias, double* d_initial_state) {
  return guarded(-1, [&] {
    const auto truth = reference_backward(*args, all_threads());
    hand_out(truth.dq, dq);
    hand_out(truth.dk, dk);
    hand_out(truth.dv, dv);
    hand_out(truth.dg, dg);
    hand_out(truth.dbeta, dbeta);
    hand_out(truth.dA_log, dA_log);
    hand_out(truth.d_dt_bias, d_dt_bias);
    hand_out(truth.d_initial_state, d_initial_state);
    return 0;
  });
}

int gdt_reference_recurrent(const gd_recurrent_args* args, double* o, double* final_state, double* step_states) {
  return guarded(-1, [&] {
    const auto truth = reference_recurrent(*args, all_threads());
    hand_out(truth.o, o);
    hand_out(truth.final_state, final_state);
    hand_out(truth.step_states, step_states);
    return 0;
  });
}

int gdt_tolerance(const char* quantity, int32_t dtype, int32_t isa, int32_t stored, const char* spec, double* relative,
                  double* absolute) {
  return guarded(-1, [&] {
    Quantity which;
    if (!quantity_from(quantity, which)) {
      last_error = std::string("no quantity is called ") + quantity;
      return -1;
    }
    const auto inputs = static_cast<gd_dtype>(dtype);
    const auto compute = isa == GDT_CUDA ? cuda_compute(inputs) : chunk_compute(inputs, static_cast<gd_isa>(isa));
    const auto bound = tolerance(which, compute, static_cast<gd_dtype>(stored), parse_case(spec));
    *relative = bound.relative;
    *absolute = bound.absolute;
    return 0;
  });
}

int gdt_compare(const gd_tensor* got, const double* truth, int32_t head_axis, double relative, double absolute,
                gdt_comparison* result) {
  return guarded(-1, [&] {
    if (head_axis >= got->rank) {
      last_error = "head_axis is beyond the tensor's rank";
      return -1;
    }
    const auto values = to_doubles(*got);
    const HeadShape shape =
        head_axis < 0 ? HeadShape{1, 1, static_cast<int64_t>(values.size())} : head_shape(*got, head_axis);
    const auto c = compare(values, {truth, truth + values.size()}, shape, {relative, absolute});
    *result = {c.error, c.margin, c.head, c.max_abs, c.non_finite, c.ok, 0};
    return 0;
  });
}

}  // extern "C"
