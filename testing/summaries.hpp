// Summaries of a problem's sequences, and their bounds against the fp64 truth.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>

#include "testing/generator.hpp"
#include "testing/judge.hpp"
#include "testing/number.hpp"
#include "testing/reference.hpp"

namespace gatedelta::testing {

// fp32 memory between guards, NaN at first.
struct Floats {
  Buffer buffer;
  gd_tensor tensor;

  explicit Floats(std::vector<int64_t> shape)
      : buffer(sizeof(float) * std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>())) {
    tensor = {buffer.data(), GD_F32, static_cast<int32_t>(shape.size()), {}, {}};
    int64_t stride = 1;
    for (int d = tensor.rank - 1; d >= 0; --d) {
      tensor.shape[d] = shape[d];
      tensor.stride[d] = stride;
      stride *= shape[d];
    }
  }
  float* data() const { return reinterpret_cast<float*>(buffer.data()); }
};

inline std::vector<int64_t> state_shape(const gd_inputs& in, int64_t n) {
  const int64_t K = in.k.shape[3], V = in.v.shape[3];
  const bool kv = in.state_layout == GD_STATE_KV;
  return {n, in.v.shape[2], kv ? K : V, kv ? V : K};
}

inline gd_inputs without_state(gd_inputs in) {
  in.initial_state = {};
  in.initial_state_indices = {};
  in.first_slot = 0;
  return in;
}

// M of a head that forgets is small against the identity it began with: `scale` is what counts as small.
inline void expect_close(const std::vector<double>& got, const std::vector<double>& truth, Quantity quantity,
                         const Case& c, Compute compute, const std::string& what, double scale = 0) {
  ASSERT_EQ(got.size(), truth.size());
  if (truth.empty()) return;
  Tolerance bound = tolerance(quantity, compute, GD_F32, c);
  bound.absolute += bound.relative * scale;
  const Comparison result = compare(got, truth, {1, 1, static_cast<int64_t>(got.size())}, bound);
  EXPECT_TRUE(result.ok) << what << ": " << result.text() << " of " << describe(c);
}

struct Summary {
  Floats local, transition, fade;
  gd_summary_args args{};

  Summary(const gd_inputs& in, int64_t first, int64_t count)
      : local(state_shape(in, count)),
        transition({count, in.v.shape[2], in.k.shape[3], in.k.shape[3]}),
        fade({count, in.v.shape[2]}) {
    args.struct_size = sizeof args;
    args.in = without_state(in);
    args.in.q = {};
    args.in.has_scale = 0;
    args.in.scale = 0;
    args.local_state = local.tensor;
    args.transition = transition.tensor;
    args.fade = fade.tensor;
    args.first_sequence = first;
    args.sequence_count = count;
  }
};

inline int64_t sequences_of(const gd_inputs& in) { return static_cast<int64_t>(sequence_spans(in).size()); }

// Spectral norm by power iteration.
inline double norm_of(const double* M, int64_t K) {
  std::vector<double> x(K), y(K);
  for (int64_t i = 0; i < K; ++i) x[i] = 1 + 0.37 * std::sin(static_cast<double>(3 * i + 1));
  double norm = 0;
  for (int step = 0; step < 30; ++step) {
    double length = 0;
    for (const double v : x) length += v * v;
    if (length == 0) return 0;
    for (double& v : x) v /= std::sqrt(length);
    std::fill(y.begin(), y.end(), 0.0);
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j < K; ++j) y[i] += M[i * K + j] * x[j];
    norm = 0;
    for (const double v : y) norm += v * v;
    norm = std::sqrt(norm);
    for (int64_t j = 0; j < K; ++j) {
      x[j] = 0;
      for (int64_t i = 0; i < K; ++i) x[j] += M[i * K + j] * y[i];
    }
  }
  return norm;
}

inline SummaryTruth truth_of_summary(const Problem& problem) {
  return reference_summary(Summary(problem.forward.in, 0, sequences_of(problem.forward.in)).args);
}
// run: calls gd_summary, or what stands for it; returns "" or what went wrong.
template <class Run>
void check_summary(const Problem& problem, const SummaryTruth& truth, Compute compute, const std::string& what,
                   const Run& run) {
  const gd_inputs& in = problem.forward.in;
  const std::string spec = describe(problem.spec);
  const int64_t count = sequences_of(in), heads = in.v.shape[2], K = in.k.shape[3];
  for (const bool skip : {false, true}) {
    Summary summary(in, 0, count);
    summary.args.skip_faded = skip;
    ASSERT_EQ(run(summary.args), "") << spec;
    const std::string how = what + (skip ? ", skipping" : "");
    expect_close(to_doubles(summary.local.tensor), truth.local_state, Quantity::final_state, problem.spec, compute,
                 "S_loc " + how);
    expect_close(to_doubles(summary.transition.tensor), truth.transition, Quantity::transition, problem.spec, compute,
                 "M " + how, 1e-3);
    for (int64_t i = 0; i < count * heads; ++i) {
      const double bound = summary.fade.data()[i], norm = norm_of(&truth.transition[i * K * K], K);
      if (skip && std::isinf(bound)) {
        EXPECT_LT(norm, std::exp2(-47.9)) << spec;
        for (int64_t j = 0; j < K * K; ++j) ASSERT_EQ(summary.transition.data()[i * K * K + j], 0.0f) << spec;
      } else {
        EXPECT_LE(norm, std::exp2(bound) * 1.001) << spec << " " << i;
      }
    }
    EXPECT_TRUE(summary.local.buffer.guards_intact() && summary.transition.buffer.guards_intact() &&
                summary.fade.buffer.guards_intact());
    EXPECT_TRUE(problem.damage().empty());
  }
}

inline gd_backward_summary_args backward_summary_of(const Problem& problem) {
  gd_backward_summary_args args{};
  args.struct_size = sizeof args;
  args.in = without_state(problem.backward.in);
  args.in.v = {};
  args.do_ = problem.backward.do_;
  return args;
}
template <class Run>
void check_backward_summary(const Problem& problem, const std::vector<double>& truth, Compute compute,
                            const std::string& what, const Run& run) {
  const gd_inputs& in = problem.backward.in;
  const int64_t count = sequences_of(in);
  gd_backward_summary_args args = backward_summary_of(problem);
  for (const bool skip : {false, true}) {
    Floats d_local(state_shape(in, count));
    args.d_local = d_local.tensor;
    args.skip_faded = skip;
    ASSERT_EQ(run(args), "") << describe(problem.spec);
    expect_close(to_doubles(d_local.tensor), truth, Quantity::d_initial_state, problem.spec, compute,
                 "G_loc " + what + (skip ? ", skipping" : ""));
    EXPECT_TRUE(d_local.buffer.guards_intact());
  }
}

}  // namespace gatedelta::testing
