#include "testing/reference.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "testing/number.hpp"

namespace gatedelta::testing {

namespace {

using Vector = std::vector<double>;

bool is_given(const gd_tensor& t) { return t.dtype != GD_DTYPE_NONE; }

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
double softplus_slope(double x) { return x > 20 ? 1 : sigmoid(x); }

double at(const gd_tensor& t, int64_t b, int64_t i, int64_t h) {
  return load(t.data, t.dtype, b * t.stride[0] + i * t.stride[1] + h * t.stride[2]);
}

double head_value(const gd_tensor& t, int64_t h) {
  return t.dtype == GD_DTYPE_NONE ? 0 : load(t.data, t.dtype, h * t.stride[0]);
}

// One token's inputs to the recurrence: after l2norm, gate and beta transforms.
struct Token {
  Vector q, k, v;
  double alpha, beta;
  double q_scale, k_scale;  // what l2norm multiplied with
};

// One value head of one sequence.
class Stream {
 public:
  Stream(const gd_inputs& in, Span span, int64_t head)
      : in_(in),
        span_(span),
        head_(head),
        key_head_(in.key_head_order == GD_KEY_HEADS_TILED ? head % in.q.shape[2]
                                                          : head / (in.v.shape[2] / in.q.shape[2])),
        K(in.q.shape[3]),
        V(in.v.shape[3]),
        scale(in.has_scale ? in.scale : 1 / std::sqrt(static_cast<double>(K))) {}

  int64_t key_head() const { return key_head_; }
  double raw_gate(int64_t t) const { return at(in_.g, span_.batch, span_.begin + t, head_); }
  double raw_beta(int64_t t) const { return at(in_.beta, span_.batch, span_.begin + t, head_); }
  double gate_input(int64_t t) const { return raw_gate(t) + head_value(in_.dt_bias, head_); }
  double decay_rate() const { return std::exp(head_value(in_.A_log, head_)); }
  double gate(int64_t t) const {
    return in_.gate == GD_GATE_RAW ? -decay_rate() * softplus(gate_input(t)) : raw_gate(t);
  }
  double beta_top() const { return in_.beta_kind == GD_BETA_LOGIT_DOUBLED ? 2 : 1; }
  double beta(int64_t t) const {
    return in_.beta_kind == GD_BETA_VALUE ? raw_beta(t) : beta_top() * sigmoid(raw_beta(t));
  }

  void read(int64_t t, Token& x) const {
    read_row(in_.q, t, key_head_, K, x.q);
    read_row(in_.k, t, key_head_, K, x.k);
    read_row(in_.v, t, head_, V, x.v);
    x.q_scale = x.k_scale = 1;
    if (in_.l2norm) {
      x.q_scale = normalise(x.q);
      x.k_scale = normalise(x.k);
    }
    x.alpha = std::exp(gate(t));
    x.beta = beta(t);
  }

  // S [K x V] becomes the state after token x; o (if given) its output.
  void step(const Token& x, Vector& S, double* o) {
    error_.assign(V, 0);
    for (int64_t i = 0; i < K; ++i) {
      double* row = &S[i * V];
      for (int64_t j = 0; j < V; ++j) {
        row[j] *= x.alpha;
        error_[j] += row[j] * x.k[i];
      }
    }
    for (int64_t j = 0; j < V; ++j) error_[j] = x.v[j] - error_[j];
    if (o) std::fill(o, o + V, 0);
    for (int64_t i = 0; i < K; ++i) {
      double* row = &S[i * V];
      const double write = x.beta * x.k[i], read = scale * x.q[i];
      for (int64_t j = 0; j < V; ++j) row[j] += write * error_[j];
      if (o) {
        for (int64_t j = 0; j < V; ++j) o[j] += read * row[j];
      }
    }
  }
  const Vector& error() const { return error_; }  // e_t of the last step

 private:
  void read_row(const gd_tensor& t, int64_t token, int64_t h, int64_t size, Vector& row) const {
    const int64_t offset = span_.batch * t.stride[0] + (span_.begin + token) * t.stride[1] + h * t.stride[2];
    row.resize(size);
    for (int64_t i = 0; i < size; ++i) row[i] = load(t.data, t.dtype, offset + i * t.stride[3]);
  }
  static double normalise(Vector& x) {
    double sum = 1e-6;
    for (double value : x) sum += value * value;
    const double factor = 1 / std::sqrt(sum);
    for (double& value : x) value *= factor;
    return factor;
  }

  const gd_inputs& in_;
  const Span span_;
  const int64_t head_, key_head_;
  Vector error_;

 public:
  const int64_t K, V;
  const double scale;
};

// State matrices: the truth computes on [K x V] and stores in the call's layout.
struct StateShape {
  int64_t heads, K, V;
  gd_state_layout layout;

  explicit StateShape(const gd_inputs& in)
      : heads(in.v.shape[2]),
        K(in.q.shape[3]),
        V(in.v.shape[3]),
        layout(static_cast<gd_state_layout>(in.state_layout)) {}
  int64_t place(int64_t i, int64_t j) const { return layout == GD_STATE_KV ? i * V + j : j * K + i; }
  void put(const Vector& S, Vector& states, int64_t entry, int64_t head) const {
    double* out = &states[(entry * heads + head) * K * V];
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < V; ++j) out[place(i, j)] = S[i * V + j];
    }
  }
  // Entry of a gd_tensor [slots, Hv, ., .]; zeros when it is absent or the slot is negative.
  Vector take(const gd_tensor& t, int64_t slot, int64_t head) const {
    Vector S(K * V, 0);
    if (t.dtype == GD_DTYPE_NONE || slot < 0) return S;
    const int64_t base = slot * t.stride[0] + head * t.stride[1];
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < V; ++j) {
        const int64_t row = layout == GD_STATE_KV ? i : j, column = layout == GD_STATE_KV ? j : i;
        S[i * V + j] = load(t.data, t.dtype, base + row * t.stride[2] + column * t.stride[3]);
      }
    }
    return S;
  }
};

// The value heads that use a key head.
std::vector<int64_t> heads_of(const gd_inputs& in, int64_t key_head) {
  const int64_t Hk = in.q.shape[2], group = in.v.shape[2] / Hk;
  std::vector<int64_t> heads;
  for (int64_t i = 0; i < group; ++i)
    heads.push_back(in.key_head_order == GD_KEY_HEADS_TILED ? i * Hk + key_head : key_head * group + i);
  return heads;
}

// Runs work(n, key head) for every sequence and selected key head.
template <class Work>
void for_each_group(const gd_inputs& in, int64_t sequences, const ReferenceOptions& options, Work&& work) {
  const int64_t heads = options.key_heads > 0 ? std::min(options.key_heads, in.q.shape[2]) : in.q.shape[2];
  std::atomic<int64_t> next{0};
  auto drain = [&] {
    for (int64_t i; (i = next++) < sequences * heads;) work(i / heads, i % heads);
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < options.threads; ++i) helpers.emplace_back(drain);
  drain();
  for (auto& helper : helpers) helper.join();
}

}  // namespace

ForwardTruth reference_forward(const gd_forward_args& args, const ReferenceOptions& options) {
  const gd_inputs& in = args.in;
  const auto spans = sequence_spans(in);
  const StateShape shape(in);
  const int64_t T = in.q.shape[1], H = shape.heads, V = shape.V, matrix = shape.K * V;
  const bool at_offsets = is_given(args.checkpoint_offsets), keep = is_given(args.checkpoints) && !at_offsets;

  std::vector<int64_t> first_checkpoint(spans.size() + 1, 0);
  for (size_t n = 0; n < spans.size(); ++n) {
    first_checkpoint[n + 1] = first_checkpoint[n] + (at_offsets ? 1
                                                     : keep     ? spans[n].length / args.checkpoint_every
                                                                : 0);
  }
  ForwardTruth truth;
  truth.o.assign(in.q.shape[0] * T * H * V, 0);
  truth.final_state.assign(spans.size() * H * matrix, 0);
  truth.checkpoints.assign(first_checkpoint.back() * H * matrix, 0);

  for_each_group(in, static_cast<int64_t>(spans.size()), options, [&](int64_t n, int64_t key_head) {
    if (is_padding(args, n)) return;
    const Span span = spans[n];
    Token x;
    for (const int64_t h : heads_of(in, key_head)) {
      Stream stream(in, span, h);
      Vector S = shape.take(in.initial_state, read_slot(in, n), h);
      for (int64_t t = 0; t < span.length; ++t) {
        stream.read(t, x);
        stream.step(x, S, &truth.o[((span.batch * T + span.begin + t) * H + h) * V]);
        if (keep && (t + 1) % args.checkpoint_every == 0) {
          shape.put(S, truth.checkpoints, first_checkpoint[n] + (t + 1) / args.checkpoint_every - 1, h);
        }
        if (at_offsets && t + 1 == index_at(args.checkpoint_offsets, n)) shape.put(S, truth.checkpoints, n, h);
      }
      shape.put(S, truth.final_state, n, h);
    }
  });
  return truth;
}

namespace {

// [n ...] entries of per-sequence doubles.
Vector entries_of(const Vector& all, int64_t sequences, int64_t first, int64_t count) {
  const int64_t size = sequences ? static_cast<int64_t>(all.size()) / sequences : 0;
  const int64_t end = count ? first + count : sequences;
  return {all.begin() + first * size, all.begin() + end * size};
}

}  // namespace

SummaryTruth reference_summary(const gd_summary_args& args) {
  gd_forward_args forward{};
  forward.in = args.in;
  forward.in.q = args.in.k;
  forward.in.initial_state = {};
  const int64_t sequences = static_cast<int64_t>(sequence_spans(forward.in).size());
  const auto kept = [&](const Vector& all) {
    return entries_of(all, sequences, args.first_sequence, args.sequence_count);
  };
  SummaryTruth truth;
  truth.local_state = kept(reference_forward(forward).final_state);
  // M: what becomes of the identity where no value is written.
  const int64_t Hv = args.in.v.shape[2], K = args.in.k.shape[3];
  std::vector<float> eye(K * K, 0), zero(1, 0);
  for (int64_t i = 0; i < K; ++i) eye[i * K + i] = 1;
  forward.in.v = {zero.data(), GD_F32, 4, {args.in.v.shape[0], args.in.v.shape[1], Hv, K}, {}};
  forward.in.initial_state = {eye.data(), GD_F32, 4, {sequences, Hv, K, K}, {0, 0, K, 1}};
  forward.in.state_layout = GD_STATE_KV;
  truth.transition = kept(reference_forward(forward).final_state);
  return truth;
}

std::vector<double> reference_backward_summary(const gd_backward_summary_args& args) {
  gd_backward_args backward{};
  backward.in = args.in;
  backward.in.initial_state = {};
  backward.do_ = args.do_;
  const float zero = 0;
  backward.in.v = args.do_;  // its values do not matter
  backward.in.v.data = const_cast<float*>(&zero);
  backward.in.v.dtype = GD_F32;
  for (int64_t& stride : backward.in.v.stride) stride = 0;
  const int64_t sequences = static_cast<int64_t>(sequence_spans(backward.in).size());
  return entries_of(reference_backward(backward).d_initial_state, sequences, args.first_sequence, args.sequence_count);
}

std::vector<double> reference_merge(const gd_merge_args& args) {
  const bool kv = args.state_layout == GD_STATE_KV;
  const int64_t R = args.state.shape[0], H = args.state.shape[1];
  const int64_t K = args.state.shape[kv ? 2 : 3], V = args.state.shape[kv ? 3 : 2], size = K * V;
  const Vector values = to_doubles(args.values), transitions = to_doubles(args.transitions);
  Vector result(R * H * size, 0);
  for (int64_t r = 0; r < R; ++r) {
    for (int64_t h = 0; h < H; ++h) {
      Vector S(size, 0);
      const int64_t first = index_at(args.first, r), count = index_at(args.count, r);
      for (int64_t step = 0; step < count; ++step) {
        const int64_t i = args.transposed ? first + count - 1 - step : first + step;
        const double *M = &transitions[(i * H + h) * K * K], *value = &values[(i * H + h) * size];
        Vector next(size);
        for (int64_t a = 0; a < K; ++a) {
          for (int64_t v = 0; v < V; ++v) {
            double sum = value[kv ? a * V + v : v * K + a];
            for (int64_t b = 0; b < K; ++b) sum += (args.transposed ? M[b * K + a] : M[a * K + b]) * S[b * V + v];
            next[a * V + v] = sum;
          }
        }
        S = next;
      }
      for (int64_t a = 0; a < K; ++a)
        for (int64_t v = 0; v < V; ++v) result[(r * H + h) * size + (kv ? a * V + v : v * K + a)] = S[a * V + v];
    }
  }
  return result;
}

RecurrentTruth reference_recurrent(const gd_recurrent_args& args, const ReferenceOptions& options) {
  const gd_inputs& in = args.in;
  const auto spans = sequence_spans(in);
  const StateShape shape(in);
  const int64_t T = in.q.shape[1], H = shape.heads, V = shape.V, matrix = shape.K * V;
  const bool steps = args.step_states.dtype != GD_DTYPE_NONE;

  RecurrentTruth truth;
  truth.o.assign(in.q.shape[0] * T * H * V, 0);
  truth.final_state.assign(spans.size() * H * matrix, 0);
  truth.step_states.assign(steps ? in.q.shape[0] * T * H * matrix : 0, 0);

  for_each_group(in, static_cast<int64_t>(spans.size()), options, [&](int64_t n, int64_t key_head) {
    if (is_padding(args, n)) return;
    const Span span = spans[n];
    const int64_t accept = args.accept_lengths.dtype == GD_DTYPE_NONE ? span.length : index_at(args.accept_lengths, n);
    Token x;
    for (const int64_t h : heads_of(in, key_head)) {
      Stream stream(in, span, h);
      Vector S = shape.take(in.initial_state, read_slot(args, n), h);
      if (accept == 0) shape.put(S, truth.final_state, n, h);
      for (int64_t t = 0; t < span.length; ++t) {
        const int64_t token = span.batch * T + span.begin + t;
        stream.read(t, x);
        stream.step(x, S, &truth.o[(token * H + h) * V]);
        if (steps) shape.put(S, truth.step_states, token, h);
        if (t + 1 == accept) shape.put(S, truth.final_state, n, h);
      }
    }
  });
  return truth;
}

namespace {

// The adjoint of one value head of one sequence. States are replayed block by block from checkpoints, so memory is
// one state per block and per token of one block.
struct Adjoint {
  static constexpr int64_t kBlock = 64;
  const gd_inputs& in;
  const gd_tensor& d_o;
  BackwardTruth& out;
  int64_t T, Hk, Hv, K, V;

  struct Sum {
    double value = 0, size = 0;  // size: of the terms' absolute values
    void add(double term) { value += term, size += std::fabs(term); }
  };
  struct HeadSums {
    Sum dA_log, d_dt_bias;
  };

  // dS enters as the gradient of the final state and leaves as that of the initial state.
  void run(Span span, int64_t head, Vector S, Vector& dS, HeadSums& sums) {
    Stream stream(in, span, head);
    Token x;
    std::vector<Vector> block_start;
    for (int64_t t = 0; t < span.length; ++t) {
      if (t % kBlock == 0) block_start.push_back(S);
      stream.read(t, x);
      stream.step(x, S, nullptr);
    }
    std::vector<Vector> states(kBlock + 1), errors(kBlock);  // states[i]: before token i of the block
    for (int64_t block = static_cast<int64_t>(block_start.size()) - 1; block >= 0; --block) {
      const int64_t begin = block * kBlock, size = std::min(kBlock, span.length - begin);
      states[0] = block_start[block];
      for (int64_t i = 0; i < size; ++i) {
        stream.read(begin + i, x);
        states[i + 1] = states[i];
        stream.step(x, states[i + 1], nullptr);
        errors[i] = stream.error();
      }
      for (int64_t i = size - 1; i >= 0; --i) {
        token(stream, span, head, begin + i, states[i], errors[i], states[i + 1], dS, sums);
      }
    }
  }

  // before, after: S_{t-1}, S_t. dS: gradient of S_t on entry, of S_{t-1} on return.
  void token(const Stream& stream, Span span, int64_t head, int64_t t, const Vector& before, const Vector& e,
             const Vector& after, Vector& dS, HeadSums& sums) {
    Token x;
    stream.read(t, x);
    const int64_t position = span.batch * T + span.begin + t, key_head = stream.key_head();
    Vector d_out(V), dS_k(V, 0), dq(K), dk(K), after_square(V, 0), dS_square(V, 0), decayed_square(V, 0);
    const int64_t d_o_row = span.batch * d_o.stride[0] + (span.begin + t) * d_o.stride[1] + head * d_o.stride[2];
    for (int64_t j = 0; j < V; ++j) {
      d_out[j] = stream.scale * load(d_o.data, d_o.dtype, d_o_row + j * d_o.stride[3]);
    }
    double d_beta = 0, d_gate = 0, dg_size = 0;
    for (int64_t i = 0; i < K; ++i) {
      double S_do = 0, dS_e = 0;
      for (int64_t j = 0; j < V; ++j) {
        const int64_t ij = i * V + j;
        S_do += after[ij] * d_out[j];  // o = scale S_t^T q
        after_square[j] += after[ij] * after[ij];
        dS[ij] += x.q[i] * d_out[j];
        dS_e += dS[ij] * e[j];  // S_t = S' + beta k e^T
        dS_square[j] += dS[ij] * dS[ij];
        dS_k[j] += dS[ij] * x.k[i];
      }
      dq[i] = S_do;
      d_beta += x.k[i] * dS_e;
      dk[i] = x.beta * dS_e;
    }
    double* dv = &out.dv[(position * Hv + head) * V];
    for (int64_t j = 0; j < V; ++j) dv[j] = x.beta * dS_k[j];
    for (int64_t i = 0; i < K; ++i) {
      double S_dv = 0;
      for (int64_t j = 0; j < V; ++j) {
        const int64_t ij = i * V + j;
        const double decayed = x.alpha * before[ij];
        S_dv += decayed * dv[j];  // e = v - S'^T k
        decayed_square[j] += decayed * decayed;
        dS[ij] -= x.k[i] * dv[j];
        d_gate += dS[ij] * decayed;  // S' = exp(g) S_{t-1}
        dg_size += dS[ij] * dS[ij] * decayed * decayed;
        dS[ij] *= x.alpha;
      }
      dk[i] -= S_dv;
    }
    add_key_gradient(&out.dq[(position * Hk + key_head) * K], dq, x.q, x.q_scale);
    add_key_gradient(&out.dk[(position * Hk + key_head) * K], dk, x.k, x.k_scale);
    double dq_size = 0, dk_size = 0, dbeta_size = 0;  // squares, of the terms of value column j
    const auto square = [](double y) { return y * y; };
    for (int64_t j = 0; j < V; ++j) {
      dq_size += square(d_out[j]) * after_square[j];
      dk_size += square(x.beta * e[j]) * dS_square[j] + square(dv[j]) * decayed_square[j];
      dbeta_size += square(dS_k[j] * e[j]);
    }
    out.sizes.dq[position * Hk + key_head] += square(x.q_scale) * dq_size;
    out.sizes.dk[position * Hk + key_head] += square(x.k_scale) * dk_size;

    if (in.gate == GD_GATE_RAW) {
      const double d_input = -stream.decay_rate() * softplus_slope(stream.gate_input(t)) * d_gate;
      sums.dA_log.add(stream.gate(t) * d_gate);
      sums.d_dt_bias.add(d_input);
      dg_size *= square(stream.decay_rate() * softplus_slope(stream.gate_input(t)));
      d_gate = d_input;
    }
    if (in.beta_kind != GD_BETA_VALUE) {
      const double s = sigmoid(stream.raw_beta(t));
      d_beta *= stream.beta_top() * s * (1 - s);
      dbeta_size *= square(stream.beta_top() * s * (1 - s));
    }
    out.dg[position * Hv + head] = d_gate;
    out.sizes.dg[position * Hv + head] = dg_size;
    out.dbeta[position * Hv + head] = d_beta;
    out.sizes.dbeta[position * Hv + head] = dbeta_size;
  }

  // Adds the gradient of a q or k row, through y = x * factor if l2norm is on: dx = factor (dy - (dy.y) y).
  void add_key_gradient(double* sum, const Vector& dy, const Vector& y, double factor) const {
    double along = 0;
    if (in.l2norm) {
      for (int64_t i = 0; i < K; ++i) along += dy[i] * y[i];
    }
    for (int64_t i = 0; i < K; ++i) sum[i] += factor * (dy[i] - along * y[i]);
  }
};

}  // namespace

BackwardTruth reference_backward(const gd_backward_args& args, const ReferenceOptions& options) {
  const gd_inputs& in = args.in;
  const auto spans = sequence_spans(in);
  const StateShape shape(in);
  const int64_t B = in.q.shape[0], T = in.q.shape[1], Hk = in.q.shape[2], H = shape.heads, K = shape.K, V = shape.V;
  const int64_t count = static_cast<int64_t>(spans.size());

  BackwardTruth truth;
  truth.dq.assign(B * T * Hk * K, 0);
  truth.dk = truth.dq;
  truth.dv.assign(B * T * H * V, 0);
  truth.dg.assign(B * T * H, 0);
  truth.dbeta = truth.sizes.dg = truth.sizes.dbeta = truth.dg;
  truth.sizes.dq.assign(B * T * Hk, 0);
  truth.sizes.dk = truth.sizes.dq;
  truth.d_initial_state.assign(count * H * K * V, 0);
  std::vector<Adjoint::HeadSums> sums(count * H);  // per sequence, summed in a fixed order below

  for_each_group(in, count, options, [&](int64_t n, int64_t key_head) {
    for (const int64_t h : heads_of(in, key_head)) {
      Adjoint adjoint{in, args.do_, truth, T, Hk, H, K, V};
      const int64_t row = is_given(args.dht_indices) ? slot_at(in, args.dht_indices, n) : n;
      Vector dS = shape.take(args.dht, row, h);
      adjoint.run(spans[n], h, shape.take(in.initial_state, read_slot(in, n), h), dS, sums[n * H + h]);
      shape.put(dS, truth.d_initial_state, n, h);
    }
  });
  for (Vector* squares : {&truth.sizes.dq, &truth.sizes.dk, &truth.sizes.dg, &truth.sizes.dbeta})
    for (double& x : *squares) x = std::sqrt(x);
  if (in.gate == GD_GATE_RAW) {
    for (Vector* of_heads : {&truth.dA_log, &truth.d_dt_bias, &truth.sizes.dA_log, &truth.sizes.d_dt_bias})
      of_heads->assign(H, 0);
    for (int64_t i = 0; i < count * H; ++i) {
      truth.dA_log[i % H] += sums[i].dA_log.value, truth.sizes.dA_log[i % H] += sums[i].dA_log.size;
      truth.d_dt_bias[i % H] += sums[i].d_dt_bias.value, truth.sizes.d_dt_bias[i % H] += sums[i].d_dt_bias.size;
    }
  }
  return truth;
}

}  // namespace gatedelta::testing
