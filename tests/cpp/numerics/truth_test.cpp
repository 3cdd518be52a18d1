// Who judges the judge: the fp64 truth against finite differences, against the chunk form, and against itself.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "testing/compare.hpp"
#include "testing/generator.hpp"
#include "testing/number.hpp"
#include "testing/reference.hpp"

namespace gatedelta::testing {
namespace {

double inner_product(const std::vector<double>& x, const std::vector<double>& y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}

double largest(const std::vector<double>& x) {
  double top = 0;
  for (double value : x) top = std::max(top, std::fabs(value));
  return top;
}

void expect_close(const std::vector<double>& got, const std::vector<double>& expected, double relative,
                  const char* what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  const double scale = largest(expected) + 1e-300;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_LE(std::fabs(got[i] - expected[i]), relative * scale)
        << what << " element " << i << ": " << got[i] << " against " << expected[i];
  }
}

// ---- finite differences -------------------------------------------------------------------------------------------

// loss = <o, do> + <final state, d final state>, whose gradient is what the backward returns.
double loss(const Problem& p) {
  const auto truth = reference_forward(p.forward);
  std::vector<double> d_o = to_doubles(p.backward.do_);
  for (double& value : d_o) value = std::isnan(value) ? 0 : value;  // rows of no sequence
  return inner_product(truth.o, d_o) + inner_product(truth.final_state, to_doubles(p.backward.dht));
}

// Checks about `samples` elements of the gradient of one input by central differences, extrapolated once.
void check_gradient(const Problem& p, const gd_tensor& input, const std::vector<double>& gradient, int samples,
                    const char* name) {
  const double scale = largest(gradient), noise = 1e-12 * std::fabs(loss(p));  // of a difference of two losses
  ASSERT_GT(scale, 0) << name;
  const int64_t count = element_count(input), stride = std::max<int64_t>(1, count / samples);
  for_each_element(input, [&](int64_t offset, int64_t i) {
    if (i % stride != 0) return;
    const double x = load(input.data, input.dtype, offset);
    if (!std::isfinite(x)) return;
    const auto slope = [&](double step) {
      double ends[2], values[2];
      for (int side = 0; side < 2; ++side) {
        store(input.data, input.dtype, offset, x + (side ? step : -step));
        ends[side] = load(input.data, input.dtype, offset);
        values[side] = loss(p);
      }
      store(input.data, input.dtype, offset, x);
      return (values[1] - values[0]) / (ends[1] - ends[0]);
    };
    constexpr double h = 1.0 / 64;
    const double estimate = (4 * slope(h / 2) - slope(h)) / 3;
    EXPECT_NEAR(gradient[i], estimate, 2e-6 * scale + noise) << name << " element " << i << " of " << describe(p.spec);
  });
}

TEST(Truth, BackwardMatchesFiniteDifferences) {
  for (const char* spec : {
           "lengths=3+0+70+5 pad=2 Hk=2 Hv=4 K=3 V=5 gate=mixed",
           "B=2 T=9 Hk=1 Hv=3 K=4 V=3 gate=weak keys=correlated beta=two layout=vk",
           "T=7 Hk=1 Hv=1 K=6 V=2 gate=strong beta=zeros scale=0.7",
           "T=12 Hk=2 Hv=2 K=5 V=4 l2norm gate=zero keys=loose beta=logit seed=4",
           "lengths=6+3 Hk=1 Hv=6 K=4 V=4 l2norm gate=raw beta=logit2 pool i64 strided",
           "T=66 Hk=1 Hv=1 K=2 V=2 gate=raw dt_bias=0",
       }) {
    const Problem p(parse_case(spec));
    const auto g = reference_backward(p.backward);
    const gd_inputs& in = p.forward.in;
    // Where l2norm meets rows of tiny length the loss is too steep for any step; loose rows are checked by identity
    // below.
    const bool steep = p.spec.l2norm && p.spec.keys == KeyKind::loose;
    if (!steep) check_gradient(p, in.q, g.dq, 12, "dq");
    if (!steep) check_gradient(p, in.k, g.dk, 12, "dk");
    check_gradient(p, in.v, g.dv, 12, "dv");
    check_gradient(p, in.g, g.dg, 12, "dg");
    check_gradient(p, in.beta, g.dbeta, 12, "dbeta");
    if (in.gate == GD_GATE_RAW) {
      check_gradient(p, in.A_log, g.dA_log, 6, "dA_log");
      if (p.spec.dt_bias) check_gradient(p, in.dt_bias, g.d_dt_bias, 6, "d_dt_bias");
    }
    if (!p.spec.pool) check_gradient(p, in.initial_state, g.d_initial_state, 12, "d_initial_state");
  }
}

// A row scaled by c has its l2norm gradient scaled by 1/c (up to the epsilon), and the gradient is orthogonal to the
// row.
TEST(Truth, NormGradientIsOrthogonalToItsRow) {
  const Problem p(parse_case("T=40 Hk=1 Hv=2 K=8 V=4 l2norm"));
  const auto g = reference_backward(p.backward);
  const auto k = to_doubles(p.forward.in.k);
  for (int64_t t = 0; t < 40; ++t) {
    double along = 0, length = 0, slope = 0;
    for (int64_t i = t * 8; i < t * 8 + 8; ++i) {
      along += k[i] * g.dk[i];
      length += k[i] * k[i];
      slope += g.dk[i] * g.dk[i];
    }
    EXPECT_LE(std::fabs(along), 1e-5 * std::sqrt(length * slope)) << t;
  }
}

// ---- the chunk form in fp64, a second derivation of the same thing ------------------------------------------------

struct Matrix {
  int64_t rows, cols;
  std::vector<double> x;
  Matrix(int64_t r, int64_t c) : rows(r), cols(c), x(r * c, 0) {}
  double& operator()(int64_t i, int64_t j) { return x[i * cols + j]; }
  double operator()(int64_t i, int64_t j) const { return x[i * cols + j]; }
};

Matrix transpose(const Matrix& a) {
  Matrix t(a.cols, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) t(j, i) = a(i, j);
  }
  return t;
}
Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t k = 0; k < a.cols; ++k) {
      for (int64_t j = 0; j < b.cols; ++j) c(i, j) += a(i, k) * b(k, j);
    }
  }
  return c;
}
Matrix operator+(Matrix a, const Matrix& b) {
  for (size_t i = 0; i < a.x.size(); ++i) a.x[i] += b.x[i];
  return a;
}
Matrix scale_rows(Matrix a, const std::vector<double>& s, double factor = 1) {
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) a(i, j) *= factor * s[i];
  }
  return a;
}
template <class F>
Matrix elementwise(Matrix a, F&& f) {
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) a(i, j) = f(i, j, a(i, j));
  }
  return a;
}
double row_product(const Matrix& a, const Matrix& b, int64_t i) {
  double sum = 0;
  for (int64_t j = 0; j < a.cols; ++j) sum += a(i, j) * b(i, j);
  return sum;
}

// One chunk of one head: q, k, v, cumulated gate b, beta.
struct Chunk {
  Matrix Q, K, V;
  std::vector<double> b, beta, gamma, delta;
  int64_t n;
  double s;
  Matrix Gamma, U;

  Chunk(const gd_inputs& in, int64_t begin, int64_t rows, int64_t head, double scale)
      : Q(rows, in.q.shape[3]),
        K(rows, in.q.shape[3]),
        V(rows, in.v.shape[3]),
        n(rows),
        s(scale),
        Gamma(rows, rows),
        U(rows, in.v.shape[3]) {
    const auto row = [&](const gd_tensor& t, Matrix& m, int64_t h) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < m.cols; ++j) {
          m(i, j) = load(t.data, t.dtype, (begin + i) * t.stride[1] + h * t.stride[2] + j);
        }
      }
    };
    const int64_t group = in.v.shape[2] / in.q.shape[2];
    row(in.q, Q, head / group);
    row(in.k, K, head / group);
    row(in.v, V, head);
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = (begin + i) * in.g.stride[1] + head * in.g.stride[2];
      sum += load(in.g.data, in.g.dtype, at);
      b.push_back(sum);
      beta.push_back(load(in.beta.data, in.beta.dtype, at));
    }
    for (double value : b) {
      gamma.push_back(std::exp(value));
      delta.push_back(std::exp(b.back() - value));
    }
    Gamma = elementwise(Gamma, [&](int64_t i, int64_t j, double) { return i >= j ? std::exp(b[i] - b[j]) : 0; });
  }
  Matrix gated_lower(const Matrix& a, bool diagonal) const {
    return elementwise(
        a, [&](int64_t i, int64_t j, double x) { return i > j || (diagonal && i == j) ? x * Gamma(i, j) : 0; });
  }
  // (I + stril(beta o KK^T o Gamma)) U = rhs by forward substitution; transposed: by backward substitution.
  Matrix solve(Matrix rhs, bool transposed) const {
    const Matrix L = scale_rows(gated_lower(K * transpose(K), false), beta);
    for (int64_t step = 0; step < n; ++step) {
      const int64_t i = transposed ? n - 1 - step : step;
      for (int64_t j = 0; j < n; ++j) {
        const double factor = transposed ? L(j, i) : L(i, j);
        if (factor == 0) continue;
        for (int64_t c = 0; c < rhs.cols; ++c) rhs(i, c) -= factor * rhs(j, c);
      }
    }
    return rhs;
  }
  Matrix residual(const Matrix& S) const {  // W = V - gamma o (K S)
    return V + scale_rows(K * S, gamma, -1);
  }
  // Returns the outputs; S becomes the state after the chunk.
  Matrix forward(Matrix& S) {
    U = solve(scale_rows(residual(S), beta), false);
    const Matrix O = elementwise(scale_rows(Q * S, gamma) + gated_lower(Q * transpose(K), true) * U,
                                 [&](int64_t, int64_t, double x) { return s * x; });
    const double last = gamma.back();
    S = elementwise(S, [&](int64_t, int64_t, double x) { return last * x; }) + transpose(K) * scale_rows(U, delta);
    return O;
  }
  struct Gradients {
    Matrix dq, dk, dv, dS;
    std::vector<double> dg, dbeta;
  };
  // S: state before the chunk, G: gradient of the state after it. forward() must have run.
  Gradients backward(const Matrix& S, const Matrix& G, const Matrix& dO) const {
    const Matrix P =
        elementwise(gated_lower(Q * transpose(K), true), [&](int64_t, int64_t, double x) { return s * x; });
    const Matrix KG = scale_rows(K * G, delta);
    const Matrix Z = solve(transpose(P) * dO + KG, true);
    const Matrix dV = scale_rows(Z, beta), Y = scale_rows(dV, gamma, -1), sdO = scale_rows(dO, gamma, s);
    const double last = gamma.back();
    Matrix dS =
        elementwise(G, [&](int64_t, int64_t, double x) { return last * x; }) + transpose(K) * Y + transpose(Q) * sdO;
    const Matrix F =
        elementwise(gated_lower(dO * transpose(U), true), [&](int64_t, int64_t, double x) { return s * x; });
    const Matrix E = elementwise(gated_lower(dV * transpose(U), false), [](int64_t, int64_t, double x) { return -x; });
    const Matrix dQ = sdO * transpose(S) + F * K;
    const Matrix read = Y * transpose(S) + E * K, carried = scale_rows(U * transpose(G), delta);
    const Matrix rest = transpose(F) * Q + transpose(E) * K;

    std::vector<double> dbeta(n), dg(n), rho(n), kappa(n);
    const Matrix W = residual(S), KK = gated_lower(K * transpose(K), false), ZU = Z * transpose(U);
    for (int64_t i = 0; i < n; ++i) {
      dbeta[i] = row_product(Z, W, i);
      for (int64_t j = 0; j < i; ++j) dbeta[i] -= ZU(i, j) * KK(i, j);
      rho[i] = row_product(Q, dQ, i) + row_product(K, read, i) - row_product(K, rest, i);
      kappa[i] = row_product(K, carried, i);
    }
    double state_term = 0;
    for (int64_t i = 0; i < S.rows; ++i) state_term += last * row_product(G, S, i);
    for (int64_t t = 0; t < n; ++t) {
      dg[t] = state_term;
      for (int64_t j = 0; j < t; ++j) dg[t] += kappa[j];
      for (int64_t i = t; i < n; ++i) dg[t] += rho[i];
    }
    return {dQ, read + carried + rest, dV, dS, dg, dbeta};
  }
};

void check_chunk_form(const std::string& spec) {
  SCOPED_TRACE(spec);
  const Problem p(parse_case(spec));
  const gd_inputs& in = p.forward.in;
  const int64_t T = in.q.shape[1], Hk = in.q.shape[2], H = in.v.shape[2], K = in.q.shape[3], V = in.v.shape[3];
  const double s = 1 / std::sqrt(static_cast<double>(K));
  std::vector<double> o(T * H * V), ht(H * K * V), dq(T * Hk * K, 0), dk(T * Hk * K, 0), dv(T * H * V), dg(T * H),
      dbeta(T * H), dh0(H * K * V);
  const auto d_o = to_doubles(p.backward.do_), h0 = to_doubles(in.initial_state), dht = to_doubles(p.backward.dht);
  for (int64_t h = 0; h < H; ++h) {
    Matrix S(K, V), G(K, V);
    std::copy_n(h0.begin() + h * K * V, K * V, S.x.begin());
    std::copy_n(dht.begin() + h * K * V, K * V, G.x.begin());
    std::vector<Chunk> chunks;
    std::vector<Matrix> before;
    for (int64_t begin = 0; begin < T; begin += 64) {
      chunks.emplace_back(in, begin, std::min<int64_t>(64, T - begin), h, s);
      before.push_back(S);
      const Matrix O = chunks.back().forward(S);
      for (int64_t i = 0; i < O.rows; ++i) {
        for (int64_t j = 0; j < V; ++j) o[((begin + i) * H + h) * V + j] = O(i, j);
      }
    }
    std::copy(S.x.begin(), S.x.end(), ht.begin() + h * K * V);
    for (int64_t c = static_cast<int64_t>(chunks.size()) - 1; c >= 0; --c) {
      const int64_t begin = c * 64, key_head = h / (H / Hk);
      Matrix dO(chunks[c].n, V);
      for (int64_t i = 0; i < dO.rows; ++i) {
        for (int64_t j = 0; j < V; ++j) dO(i, j) = d_o[((begin + i) * H + h) * V + j];
      }
      const auto grad = chunks[c].backward(before[c], G, dO);
      for (int64_t i = 0; i < dO.rows; ++i) {
        for (int64_t j = 0; j < K; ++j) {
          dq[((begin + i) * Hk + key_head) * K + j] += grad.dq(i, j);
          dk[((begin + i) * Hk + key_head) * K + j] += grad.dk(i, j);
        }
        for (int64_t j = 0; j < V; ++j) dv[((begin + i) * H + h) * V + j] = grad.dv(i, j);
        dg[(begin + i) * H + h] = grad.dg[i];
        dbeta[(begin + i) * H + h] = grad.dbeta[i];
      }
      G = grad.dS;
    }
    std::copy(G.x.begin(), G.x.end(), dh0.begin() + h * K * V);
  }
  const auto forward = reference_forward(p.forward);
  expect_close(o, forward.o, 1e-11, "o");
  expect_close(ht, forward.final_state, 1e-11, "final_state");
  const auto backward = reference_backward(p.backward, {.key_heads = 0, .threads = 3});
  expect_close(dq, backward.dq, 1e-10, "dq");
  expect_close(dk, backward.dk, 1e-10, "dk");
  expect_close(dv, backward.dv, 1e-10, "dv");
  expect_close(dg, backward.dg, 1e-9, "dg");  // the chunk form takes differences of sums
  expect_close(dbeta, backward.dbeta, 1e-10, "dbeta");
  expect_close(dh0, backward.d_initial_state, 1e-10, "d_initial_state");
}

TEST(Truth, MatchesTheChunkForm) {
  for (const char* gate : {"zero", "weak", "mixed", "strong", "spiky"}) {
    check_chunk_form(std::string("T=150 Hk=2 Hv=4 K=6 V=10 gate=") + gate);
  }
  check_chunk_form("T=64 Hk=1 Hv=3 K=8 V=4 keys=correlated beta=two");
  check_chunk_form("T=65 Hk=1 Hv=1 K=8 V=4 keys=repeated beta=zeros");
  check_chunk_form("T=1 Hk=1 Hv=2 K=5 V=3");
}

// ---- the truth against itself -------------------------------------------------------------------------------------

TEST(Truth, ThreadsAndLayoutDoNotMatter) {
  const std::string spec = "lengths=70+0+1+64 pad=3 Hk=2 Hv=4 K=6 V=5 every=64";
  const Problem kv(parse_case(spec)), vk(parse_case(spec + " layout=vk"));
  const auto a = reference_forward(kv.forward), b = reference_forward(kv.forward, {.key_heads = 0, .threads = 4});
  EXPECT_EQ(a.o, b.o);
  EXPECT_EQ(a.final_state, b.final_state);
  const auto c = reference_forward(vk.forward);
  EXPECT_EQ(a.o, c.o);
  ASSERT_EQ(a.checkpoints.size(), 2u * 4 * 6 * 5);  // sequences of 70 and of 64 tokens
  for (int64_t m = 0; m < 4 * 4; ++m) {
    for (int64_t i = 0; i < 6; ++i) {
      for (int64_t j = 0; j < 5; ++j) EXPECT_EQ(a.final_state[m * 30 + i * 5 + j], c.final_state[m * 30 + j * 6 + i]);
    }
  }
  // Rows of no sequence are zero, a sequence without tokens keeps its state, a checkpoint at the end is the final
  // state.
  for (size_t i = 135 * 4 * 5; i < a.o.size(); ++i) EXPECT_EQ(a.o[i], 0);
  const auto h0 = to_doubles(kv.forward.in.initial_state);
  for (int64_t i = 120; i < 240; ++i) EXPECT_EQ(a.final_state[i], h0[i]);
  for (int64_t i = 0; i < 120; ++i) EXPECT_EQ(a.checkpoints[120 + i], a.final_state[360 + i]);
}

TEST(Truth, AcceptedPrefixIsAForwardOfThePrefix) {
  const Problem p(parse_case("B=5 T=4 Hk=1 Hv=2 K=4 V=3 accept steps=dense"));
  const auto truth = reference_recurrent(p.recurrent);
  const int64_t matrix = 12, heads = 2, T = 4;
  for (int64_t n = 0; n < 5; ++n) {
    const int64_t accept = n % (T + 1);
    ASSERT_EQ(index_at(p.recurrent.accept_lengths, n), accept);
    gd_forward_args prefix = p.forward;
    for (gd_tensor* t : {&prefix.in.q, &prefix.in.k, &prefix.in.v, &prefix.in.g, &prefix.in.beta}) t->shape[1] = accept;
    const auto expected = reference_forward(prefix);
    for (int64_t i = n * heads * matrix; i < (n + 1) * heads * matrix; ++i) {
      EXPECT_EQ(truth.final_state[i], expected.final_state[i]);
      if (accept) {
        EXPECT_EQ(truth.step_states[(n * T + accept - 1) * heads * matrix + i - n * heads * matrix],
                  expected.final_state[i]);
      }
    }
  }
  EXPECT_EQ(truth.o, reference_forward(p.forward).o);
}

TEST(Truth, MinusInfinityForgetsEverything) {
  Problem p(parse_case("T=10 Hk=1 Hv=1 K=4 V=4 gate=zero"));
  store(p.forward.in.g.data, GD_F32, 6, -HUGE_VAL);
  const auto whole = reference_forward(p.forward);
  gd_forward_args tail = p.forward;
  tail.in.initial_state = {};
  for (gd_tensor* t : {&tail.in.q, &tail.in.k, &tail.in.v, &tail.in.g, &tail.in.beta}) {
    t->data = static_cast<char*>(t->data) + 6 * t->stride[1] * element_bytes(t->dtype);
    t->shape[1] = 4;
  }
  const auto after = reference_forward(tail);
  EXPECT_EQ(whole.final_state, after.final_state);
  const auto g = reference_backward(p.backward);
  EXPECT_EQ(g.dg[6], 0);
  EXPECT_EQ(largest(g.d_initial_state) > 0, true);  // tokens before the reset still read the initial state
  for (const auto* values : {&g.dq, &g.dk, &g.dv, &g.dg, &g.dbeta, &g.d_initial_state}) {
    for (double value : *values) EXPECT_TRUE(std::isfinite(value));
  }
}

}  // namespace
}  // namespace gatedelta::testing
