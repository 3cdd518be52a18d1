// The gate from raw `a`, one value at a time.
#include <cmath>
#include <vector>

#include "gatedelta/gatedelta.hpp"
#include "tests/cpp/ops/engine.hpp"

namespace gatedelta::testing {
namespace {

// One token with k = 0 writes nothing, so o = scale * alpha * S^T q. With S = 1, q = 1 and scale = 1 / K, o is alpha.
// In the chunked operations a gradient of 1 for every o makes dg = d alpha / d a, summed over the V columns.
class RawGate {
 public:
  static constexpr int64_t K = 16, V = 16;

  RawGate(float a, float A_log) : a_(a), A_log_(A_log) {}

  template <class Args>
  void set_inputs(Args& args, gd_isa isa) {
    args.exec.isa = isa;
    args.in.q = tensor(ones_.data(), {1, 1, 1, K});
    args.in.k = tensor(zeros_.data(), {1, 1, 1, K});
    args.in.v = tensor(zeros_.data(), {1, 1, 1, V});
    args.in.g = tensor(&a_, {1, 1, 1});
    args.in.beta = tensor(ones_.data(), {1, 1, 1});
    args.in.A_log = tensor(&A_log_, {1});
    args.in.initial_state = tensor(ones_.data(), {1, 1, K, V});
    args.in.gate = GD_GATE_RAW;
    args.in.has_scale = 1;
    args.in.scale = 1.0f / K;
  }
  float forward(gd_isa isa) { return output<ForwardArgs>(isa, gatedelta::forward); }
  float recurrent(gd_isa isa) { return output<RecurrentArgs>(isa, gatedelta::recurrent); }
  float gradient(gd_isa isa) {
    BackwardArgs args;
    set_inputs(args, isa);
    float dg = NAN;
    args.do_ = tensor(ones_.data(), {1, 1, 1, V});
    args.dg = tensor(&dg, {1, 1, 1});
    Workspace workspace;
    gatedelta::backward(args, workspace);
    return dg / V;
  }

 private:
  template <class Args, class C>
  float output(gd_isa isa, void (*run)(C&, Workspace&)) {
    Args args;
    set_inputs(args, isa);
    std::vector<float> o(V, NAN);
    args.out = tensor(o.data(), {1, 1, 1, V});
    Workspace workspace;
    run(args, workspace);
    for (const float x : o) EXPECT_EQ(x, o[0]);
    return o[0];
  }

  float a_, A_log_;
  const std::vector<float> ones_ = std::vector<float>(K * V, 1.0f), zeros_ = std::vector<float>(K, 0.0f);
};

// e^x overflows fp32 above 88.7; softplus(x) does not. A_log makes the decay about 1 everywhere.
TEST(RawGate, SoftplusOfAnyInput) {
  for (const float a : {-30.0f, -1.0f, 0.0f, 1.0f, 19.5f, 20.5f, 87.0f, 88.5f, 89.0f, 100.0f, 1000.0f, 1e30f}) {
    const double softplus = a > 20 ? double{a} : std::log1p(std::exp(double{a}));
    const auto A_log = static_cast<float>(-std::log(softplus));
    const double rate = std::exp(double{A_log}), alpha = std::exp(-rate * softplus);
    const double slope = -alpha * rate / (1 + std::exp(-double{a}));
    for (const gd_isa isa : usable_isas()) {
      RawGate gate(a, A_log);
      EXPECT_NEAR(gate.forward(isa), alpha, 1e-5) << a << " " << gd_isa_name(isa);
      EXPECT_NEAR(gate.recurrent(isa), alpha, 1e-5) << a << " " << gd_isa_name(isa);
      EXPECT_NEAR(gate.gradient(isa), slope, 1e-5 * std::fabs(slope)) << a << " " << gd_isa_name(isa);
    }
  }
}

// A decay of e^-80 shows an error of g 80 times as large: ln(1 + e^x) is not yet x at x = 10.
TEST(RawGate, SoftplusUpToItsThreshold) {
  for (const float a : {-3.0f, 1.0f, 5.0f, 9.0f, 10.5f, 12.0f, 19.5f, 20.5f}) {
    const auto A_log = static_cast<float>(std::log(80 / std::log1p(std::exp(double{a}))));
    const double alpha = std::exp(-std::exp(double{A_log}) * std::log1p(std::exp(double{a})));
    for (const gd_isa isa : usable_isas()) {
      RawGate gate(a, A_log);
      EXPECT_NEAR(gate.forward(isa) / alpha, 1, 3e-5) << a << " " << gd_isa_name(isa);
      EXPECT_NEAR(gate.recurrent(isa) / alpha, 1, 3e-5) << a << " " << gd_isa_name(isa);
    }
  }
}

}  // namespace
}  // namespace gatedelta::testing
