// What the generator fills the tensors of a case with.
#include "testing/contents.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "testing/generator.hpp"

namespace gatedelta::testing {

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

void normalise(std::vector<double>& x, double length) {
  double sum = 0;
  for (double value : x) sum += value * value;
  for (double& value : x) value *= length / std::sqrt(sum);
}

// Tokens where the hostile gates strike: chunk borders, a run inside a chunk, and every eleventh.
bool strikes(int64_t t) { return t % 11 == 5 || t % 64 == 0 || t % 64 == 63 || (t % 128 >= 96 && t % 128 < 104); }

double mixed_gate(double x, int64_t head) { return head % 4 == 3 ? 0 : -std::log1p(std::exp(-x)) / 16; }

// Heads of gate=raw that forget little or nothing, so that large inputs of softplus leave a state that is not 0.
bool slow_head(int64_t head) { return head % 8 == 5 || head % 8 == 7; }

double gate_value(const Case& c, int64_t t, int64_t head, uint64_t i) {
  const double x = normal(c.seed, sG, i), u = uniform(c.seed, sG, i);
  switch (c.gate) {
    case GateKind::zero: return 0;
    case GateKind::weak: return -0.02 * u;
    case GateKind::strong: return -10 - 20 * u;
    case GateKind::spiky: {
      const double A = c.Hv > 1 ? 16.0 * double(head) / double(c.Hv - 1) : 16;
      return -A * std::log1p(std::exp(12 * u - 9));
    }
    case GateKind::mixed: return mixed_gate(x, head);
    case GateKind::infinite: return strikes(t) ? -HUGE_VAL : mixed_gate(x, head);
    case GateKind::very_negative: {
      constexpr double depths[] = {-81, -104, -1e3, -1e4, -1e6, -1e9, -1e20, -3e38};
      if (!strikes(t)) return mixed_gate(x, head);
      const double depth = depths[bits_at(c.seed, sG, i) % 8];
      return c.gdtype == GD_F16 ? std::max(depth, -6e4) : depth;
    }
    case GateKind::raw: return t % 5 == 2 && slow_head(head) ? 45 * u - 5 : x - (c.dt_bias ? 0 : 4);
  }
  return 0;
}

double beta_value(const Case& c, int64_t t, uint64_t i) {
  const double x = normal(c.seed, sBeta, i);
  switch (c.beta) {
    case BetaKind::unit: return sigmoid(x);
    case BetaKind::zeros: return t % 3 == 1 ? 0 : sigmoid(x);
    case BetaKind::two: return t % 3 == 1 ? 2 : 2 * sigmoid(2 * x);
    case BetaKind::logit:
    case BetaKind::logit_doubled: return 2 * x;
    case BetaKind::constant_one: return 1;
  }
  return 0;
}

std::vector<double> random_row(uint64_t seed, uint64_t stream, uint64_t row, int64_t size) {
  std::vector<double> x(size);
  for (int64_t i = 0; i < size; ++i) x[i] = normal(seed, stream, row * uint64_t(size) + uint64_t(i));
  return x;
}

// A row of q or k. Unit length, or with l2norm in the call a length that the call must take out.
std::vector<double> key_row(const Case& c, Stream stream, int64_t b, int64_t t, int64_t h) {
  const int64_t T = c.total_tokens();
  const bool is_key = stream == sK;
  const int64_t source = is_key && c.keys == KeyKind::repeated ? t / 40 * 40 : t;
  auto x = random_row(c.seed, stream, uint64_t((b * T + source) * c.Hk + h), c.K);
  normalise(x, 1);
  if (is_key && (c.keys == KeyKind::correlated || c.keys == KeyKind::similar)) {
    const bool correlated = c.keys == KeyKind::correlated;
    auto common = random_row(c.seed, sCommon, uint64_t(h), c.K);
    normalise(common, correlated ? 0.8 : 1);
    const double own = correlated ? 0.6 : 0.05 * std::pow(6, uniform(c.seed, sCommon, uint64_t(h)));
    for (int64_t i = 0; i < c.K; ++i) x[i] = own * x[i] + common[i];
    normalise(x, 1);
  }
  const double u = uniform(c.seed, sLength, uint64_t(((b * T + t) * c.Hk + h) * 2 + is_key));
  if (c.keys != KeyKind::loose) {
    if (c.l2norm) normalise(x, std::sqrt(double(c.K)) * (0.5 + u));
  } else if (!c.l2norm) {
    normalise(x, 0.2 + 1.1 * u);
  } else if (t % 13 == 7) {
    std::fill(x.begin(), x.end(), 0);
  } else {
    normalise(x, std::pow(10, 5 * u - 3));
  }
  return x;
}

}  // namespace

void Problem::fill_inputs(const gd_inputs& in) {
  const Case& c = spec;
  const int64_t T = c.total_tokens();
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t t = 0; t < T - c.pad; ++t) {
      for (int64_t h = 0; h < c.Hk; ++h) {
        for (const gd_tensor* x : {&in.q, &in.k}) {
          const auto row = key_row(c, x == &in.q ? sQ : sK, b, t, h);
          const int64_t offset = b * x->stride[0] + t * x->stride[1] + h * x->stride[2];
          for (int64_t i = 0; i < c.K; ++i) store(x->data, x->dtype, offset + i, row[i]);
        }
      }
    }
  }
  fill(in.v, [&](int64_t i) { return normal(c.seed, sV, uint64_t(i)); });
  fill(in.g, [&](int64_t i) { return gate_value(c, i / c.Hv % T, i % c.Hv, uint64_t(i)); });
  fill(in.beta, [&](int64_t i) { return beta_value(c, i / c.Hv % T, uint64_t(i)); });
  if (in.A_log.dtype != GD_DTYPE_NONE) {
    // As layers are initialised: A uniform in [0, 16], softplus(dt_bias) log-uniform in [0.001, 0.1].
    fill(in.A_log, [&](int64_t h) {
      const double top = h % 8 == 7 ? 0 : slow_head(h) ? 0.01 : 16;
      return std::log(top * uniform(c.seed, sA, uint64_t(h)));
    });
    if (c.dt_bias) {
      fill(in.dt_bias,
           [&](int64_t h) { return std::log(std::expm1(std::pow(10, -3 + 2 * uniform(c.seed, sBias, uint64_t(h))))); });
    }
  }
}

// Values depend on the sequence and the place in the [K, V] matrix, not on slot, layout or strides.
void Problem::fill_states(const gd_tensor& t, uint64_t stream, const std::vector<int64_t>& slots) {
  const Case& c = spec;
  for (size_t n = 0; n < slots.size(); ++n) {
    if (slots[n] < 0) continue;
    for (int64_t h = 0; h < c.Hv; ++h) {
      for (int64_t i = 0; i < c.K; ++i) {
        for (int64_t j = 0; j < c.V; ++j) {
          const int64_t place = c.layout == GD_STATE_KV ? i * c.V + j : j * c.K + i;
          const auto counter = uint64_t(((int64_t(n) * c.Hv + h) * c.K + i) * c.V + j);
          store(t.data, t.dtype, slots[n] * t.stride[0] + h * t.stride[1] + place, normal(c.seed, stream, counter));
        }
      }
    }
  }
}

void Problem::poison_tail(const gd_tensor& t, int64_t first) {
  const int64_t row = element_count(t) / std::max<int64_t>(t.shape[0] * t.shape[1], 1);
  for_each_element(t, [&](int64_t offset, int64_t i) {
    if (i / row % t.shape[1] >= first) {
      std::memset(static_cast<char*>(t.data) + offset * element_bytes(t.dtype), kPoison, element_bytes(t.dtype));
    }
  });
}

}  // namespace gatedelta::testing
