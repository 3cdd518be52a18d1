// Prefill of two packed prompts and the backward pass of a training step, through the C++ face.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "gatedelta/gatedelta.hpp"

namespace {

constexpr std::int64_t kTokens = 300, kKeyHeads = 2, kValueHeads = 4, kKeyDim = 64, kValueDim = 64;

std::vector<float> normal(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = distribution(random);
  return values;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

}  // namespace

int main() try {
  using gatedelta::tensor;
  std::mt19937 random(1);
  const auto q = normal(kTokens * kKeyHeads * kKeyDim, random), k = normal(kTokens * kKeyHeads * kKeyDim, random);
  auto v = normal(kTokens * kValueHeads * kValueDim, random);
  const auto beta = normal(kTokens * kValueHeads, random), weight = normal(kTokens * kValueHeads * kValueDim, random);
  auto g = normal(kTokens * kValueHeads, random);
  for (float& gate : g) gate = -std::fabs(gate) / 16;
  const std::vector<std::int32_t> offsets = {0, 170, kTokens};  // two prompts, packed

  const gatedelta::ThreadPool pool;
  gatedelta::Workspace workspace;  // grows to what the largest call needs

  gatedelta::ForwardArgs forward;
  pool.apply(forward.exec);
  forward.in.q = tensor(q.data(), {1, kTokens, kKeyHeads, kKeyDim});
  forward.in.k = tensor(k.data(), {1, kTokens, kKeyHeads, kKeyDim});
  forward.in.v = tensor(v.data(), {1, kTokens, kValueHeads, kValueDim});
  forward.in.g = tensor(g.data(), {1, kTokens, kValueHeads});
  forward.in.beta = tensor(beta.data(), {1, kTokens, kValueHeads});
  forward.in.beta_kind = GD_BETA_LOGIT;
  forward.in.l2norm = 1;
  forward.in.cu_seqlens = tensor(offsets.data(), {3});

  std::vector<float> o(v.size()), states(2 * kValueHeads * kKeyDim * kValueDim);
  forward.out = tensor(o.data(), {1, kTokens, kValueHeads, kValueDim});
  forward.final_state = tensor(states.data(), {2, kValueHeads, kKeyDim, kValueDim});
  const gatedelta::Workspace saved(gatedelta::saved_size(forward));  // spares the backward some recomputation
  forward.saved = saved.data();
  forward.saved_bytes = saved.size();
  gatedelta::forward(forward, workspace);
  const double loss = dot(o, weight);

  std::vector<float> dq(q.size()), dk(k.size()), dv(v.size()), dg(g.size()), dbeta(beta.size());
  gatedelta::BackwardArgs backward;
  backward.exec = forward.exec;
  backward.in = forward.in;
  backward.saved = saved.data();
  backward.saved_bytes = saved.size();
  backward.saved_call = gatedelta::saved_call(forward);  // the backward refuses what another call saved
  backward.do_ = tensor(weight.data(), {1, kTokens, kValueHeads, kValueDim});  // the gradient of loss = <o, weight>
  backward.dq = tensor(dq.data(), {1, kTokens, kKeyHeads, kKeyDim});
  backward.dk = tensor(dk.data(), {1, kTokens, kKeyHeads, kKeyDim});
  backward.dv = tensor(dv.data(), {1, kTokens, kValueHeads, kValueDim});
  backward.dg = tensor(dg.data(), {1, kTokens, kValueHeads});
  backward.dbeta = tensor(dbeta.data(), {1, kTokens, kValueHeads});
  gatedelta::backward(backward, workspace);

  // The layer is linear in v: a step along any direction changes the loss by exactly <dv, direction>.
  const auto direction = normal(kTokens * kValueHeads * kValueDim, random);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] += direction[i];
  forward.saved = nullptr;
  forward.saved_bytes = 0;
  gatedelta::forward(forward, workspace);
  const double change = dot(o, weight) - loss, predicted = dot(dv, direction);
  const double error = std::fabs(change - predicted) / std::fabs(predicted);
  std::printf("%ld tokens on %d threads: loss %.6f; a step in v changes it by %.6f, its gradient says %.6f\n",
              static_cast<long>(kTokens), pool.size(), loss, change, predicted);
  return error < 1e-3 ? 0 : 1;
} catch (const gatedelta::Error& error) {
  std::fprintf(stderr, "%s: %s\n", gd_status_name(error.status()), error.what());
  return 1;
}
