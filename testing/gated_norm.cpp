#include "testing/gated_norm.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "testing/number.hpp"

namespace gatedelta::testing {

namespace {

enum Stream : uint64_t { sX = 100, sZ, sWeight, sDy };

const char* name_of_type(gd_dtype dtype) {
  return dtype == GD_F32 ? "fp32" : dtype == GD_BF16 ? "bf16" : dtype == GD_F16 ? "fp16" : "same";
}

gd_dtype or_else(gd_dtype dtype, gd_dtype other) { return dtype == GD_DTYPE_NONE ? other : dtype; }

void fill(const gd_tensor& t, uint64_t seed, uint64_t stream, double mean, double scale) {
  for_each_element(t, [&](int64_t offset, int64_t i) {
    store(t.data, t.dtype, offset, mean + scale * normal(seed, stream, static_cast<uint64_t>(i)));
  });
}

double rounded(double x, int32_t dtype) {
  return dtype == GD_BF16 ? decode_bf16(encode_bf16(x)) : dtype == GD_F16 ? decode_f16(encode_f16(x)) : x;
}

struct Gate {
  double value, slope;
};
Gate gate_at(double z, int32_t activation) {
  const double sigmoid = 1 / (1 + std::exp(-z)), rest = 1 / (1 + std::exp(z));
  if (activation == GD_NORM_SIGMOID) return {sigmoid, sigmoid * rest};
  return {z * sigmoid, sigmoid + z * sigmoid * rest};
}

// One row in the symbols of the C header: n, its rounded form, w, a = w n, and the gate.
struct Row {
  double r = 0;
  std::vector<double> n, factor, w, a;
  std::vector<Gate> gate;
};

template <class Args>
Row row_of(const Args& args, const double* x, const double* z, const std::vector<double>& weight) {
  const auto D = static_cast<size_t>(args.x.shape[3]);
  double squares = 0;
  for (size_t i = 0; i < D; ++i) squares += x[i] * x[i];
  Row row;
  row.r = 1 / std::sqrt(squares / static_cast<double>(D) + (args.has_eps ? static_cast<double>(args.eps) : 1e-6));
  const bool rounds_product = args.round_before_gate && args.weight.dtype == args.x.dtype;
  for (size_t i = 0; i < D; ++i) {
    row.n.push_back(row.r * x[i]);
    row.factor.push_back(args.round_before_gate ? rounded(row.n[i], args.x.dtype) : row.n[i]);
    row.w.push_back(weight.empty() ? 1 : weight[i]);
    const double a = row.w[i] * row.factor[i];
    row.a.push_back(rounds_product ? rounded(a, args.x.dtype) : a);
    row.gate.push_back(z ? gate_at(z[i], args.activation) : Gate{1, 0});
  }
  return row;
}

// Calls use(row, index of its first element) for every row.
template <class Args, class Use>
void for_each_row(const Args& args, const Use& use) {
  const auto x = to_doubles(args.x), z = to_doubles(args.gate), weight = to_doubles(args.weight);
  const auto D = static_cast<size_t>(args.x.shape[3]);
  for (size_t begin = 0; begin < x.size(); begin += D)
    use(row_of(args, &x[begin], z.empty() ? nullptr : &z[begin], weight), begin);
}

}  // namespace

std::string NormCase::text() const {
  constexpr const char* kGates[] = {"none", "silu", "sigmoid"};
  constexpr const char* kLayouts[] = {"dense", "gaps", "odd", "heads_first"};
  std::string line = "B=" + std::to_string(B) + " T=" + std::to_string(T) + " H=" + std::to_string(H) +
                     " D=" + std::to_string(D) + " x=" + name_of_type(x) + " z=" + name_of_type(z) +
                     " weight=" + (has_weight ? name_of_type(weight) : "none") + " y=" + name_of_type(y) +
                     " gate=" + kGates[static_cast<int>(gate)] + " layout=" + kLayouts[static_cast<int>(layout)] +
                     " round=" + std::to_string(round) + " x_scale=" + std::to_string(x_scale) +
                     " z_scale=" + std::to_string(z_scale) + " seed=" + std::to_string(seed);
  if (eps) line += " eps=" + std::to_string(*eps);
  return line;
}

gd_tensor NormProblem::make(const std::string& name, bool output, gd_dtype dtype, const std::vector<int64_t>& shape) {
  gd_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  int64_t elements = shape[0];
  t.stride[0] = 1;
  if (t.rank == 4) {
    const int64_t T = shape[1], H = shape[2], D = shape[3], gap = spec.layout == NormLayout::gaps ? 16 : 3;
    t.stride[3] = 1;
    t.stride[2] = spec.layout == NormLayout::heads_first ? T * D : D;
    t.stride[1] = spec.layout == NormLayout::heads_first ? D : H * D;
    t.stride[0] = T * H * D;
    if (spec.layout == NormLayout::gaps || spec.layout == NormLayout::odd) {
      t.stride[2] = D + gap;
      t.stride[1] = H * t.stride[2] + 2 * gap;
      t.stride[0] = T * t.stride[1] + 4 * gap;
    }
    elements = shape[0] * t.stride[0];
  }
  const auto size = static_cast<size_t>(element_bytes(dtype));
  const size_t misalign = spec.layout == NormLayout::odd ? size : 0;
  Entry& entry =
      entries_.emplace_back(Entry{name, t, output, Buffer(static_cast<size_t>(elements) * size, misalign), {}});
  entry.tensor.data = entry.buffer.data();
  return entry.tensor;
}

NormProblem::NormProblem(const NormCase& c) : spec(c) {
  const std::vector<int64_t> rows = {c.B, c.T, c.H, c.D};
  const gd_dtype of_z = or_else(c.z, c.x), of_weight = or_else(c.weight, c.x);
  forward.struct_size = sizeof forward;
  backward.struct_size = sizeof backward;
  forward.x = make("x", false, c.x, rows);
  fill(forward.x, c.seed, sX, 0, c.x_scale);
  if (c.gate != NormGateKind::none) {
    forward.gate = make("z", false, of_z, rows);
    fill(forward.gate, c.seed, sZ, 0, c.z_scale);
  }
  if (c.has_weight) {
    forward.weight = make("weight", false, of_weight, {c.D});
    fill(forward.weight, c.seed, sWeight, 1, 0.25);
  }
  forward.out = make("y", true, or_else(c.y, c.x), rows);
  forward.activation = c.gate == NormGateKind::sigmoid ? GD_NORM_SIGMOID : GD_NORM_SILU;
  forward.round_before_gate = c.round;
  forward.has_eps = c.eps.has_value();
  forward.eps = c.eps.value_or(0);

  backward.x = forward.x;
  backward.gate = forward.gate;
  backward.weight = forward.weight;
  backward.activation = forward.activation;
  backward.round_before_gate = forward.round_before_gate;
  backward.has_eps = forward.has_eps;
  backward.eps = forward.eps;
  backward.dy = make("d_y", false, or_else(c.y, c.x), rows);
  fill(backward.dy, c.seed, sDy, 0, 1);
  backward.dx = make("dx", true, c.x, rows);
  if (c.gate != NormGateKind::none) backward.dgate = make("dz", true, of_z, rows);
  if (c.has_weight) backward.dweight = make("dweight", true, of_weight, {c.D});
  for (Entry& entry : entries_) entry.before.assign(entry.buffer.data(), entry.buffer.data() + entry.buffer.size());
}

void NormProblem::reset() {
  for (Entry& entry : entries_)
    if (entry.output) entry.buffer.poison();
}

std::vector<std::string> NormProblem::damage() const {
  std::vector<std::string> found;
  for (const Entry& entry : entries_) {
    if (!entry.buffer.guards_intact()) found.push_back(entry.name + ": written outside of the tensor");
    std::vector<char> now(entry.buffer.data(), entry.buffer.data() + entry.buffer.size());
    if (entry.output) {  // the elements themselves may change
      const int64_t size = element_bytes(entry.tensor.dtype);
      for_each_element(entry.tensor, [&](int64_t offset, int64_t) {
        std::memcpy(&now[static_cast<size_t>(offset * size)], &entry.before[static_cast<size_t>(offset * size)],
                    static_cast<size_t>(size));
      });
    }
    if (now != entry.before) found.push_back(entry.name + (entry.output ? ": a gap was written" : ": was written"));
  }
  return found;
}

std::vector<double> reference_gated_norm(const gd_gated_norm_args& args) {
  std::vector<double> y(static_cast<size_t>(element_count(args.x)));
  for_each_row(args, [&](const Row& row, size_t begin) {
    for (size_t i = 0; i < row.a.size(); ++i) y[begin + i] = row.a[i] * row.gate[i].value;
  });
  return y;
}

NormGradients reference_gated_norm_backward(const gd_gated_norm_backward_args& args) {
  const auto d_y = to_doubles(args.dy);
  const auto D = static_cast<size_t>(args.x.shape[3]);
  NormGradients result;
  result.dx.resize(d_y.size());
  if (args.gate.dtype != GD_DTYPE_NONE) result.dz.resize(d_y.size());
  if (args.weight.dtype != GD_DTYPE_NONE) result.dweight.resize(D);
  for_each_row(args, [&](const Row& row, size_t begin) {
    std::vector<double> dn(D);
    double mean = 0;
    for (size_t i = 0; i < D; ++i) {
      const double dy = d_y[begin + i], da = args.gate.dtype == GD_DTYPE_NONE ? dy : dy * row.gate[i].value;
      if (!result.dz.empty()) result.dz[begin + i] = dy * row.a[i] * row.gate[i].slope;
      if (!result.dweight.empty()) result.dweight[i] += da * row.factor[i];
      dn[i] = da * row.w[i];
      mean += dn[i] * row.n[i] / static_cast<double>(D);
    }
    for (size_t i = 0; i < D; ++i) result.dx[begin + i] = row.r * (dn[i] - mean * row.n[i]);
  });
  return result;
}

Tolerance norm_tolerance(const NormCase& c, gd_dtype stored) {
  Tolerance bound = fp32_tolerance(stored);
  // A number within fp32's error of a tie may be rounded the other way: one of 2^15 in bf16, one of 2^12 in fp16. In a
  // head of few numbers a single one counts.
  if (c.round && c.x != GD_F32) bound.relative = std::hypot(bound.relative, c.x == GD_BF16 ? 1e-3 : 2e-4);
  if (stored == GD_F16) bound.absolute = 6e-8;  // half the distance of fp16's smallest numbers, and a little
  return bound;
}

}  // namespace gatedelta::testing
